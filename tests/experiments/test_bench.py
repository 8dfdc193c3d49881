"""The measurements run at a tiny size and print what they measured."""

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import exhume
from exhume import data, victims
from exhume.cli.main import main
from exhume.evaluate import Score, score
from exhume.experiments.benchmarks import COMMANDS, common, images
from exhume.experiments.benchmarks.common import momentum_until
from exhume.methods.iurada2025 import Iurada2025
from exhume.methods.progress import Progress


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all columns of a table."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of data with pictures of 5 by 5 pixels in place of CIFAR-10."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 5, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "cifar10.npz", x=noise, y=np.arange(60) % 10)
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))


def bench(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main(["bench", *map(str, words)])
    said = capsys.readouterr()
    assert said.err == ""
    assert f"torch {torch.__version__}; exhume {exhume.__version__}; 20" in said.out
    return said.out


def row(said: str, first: str) -> list[str]:
    """The cells of the row of a table that begins so."""
    for line in said.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if line.startswith("│") and cells[0] == first:
            return cells
    raise AssertionError(f"no row {first} in\n{said}")


def test_all_measurements_are_tested_here() -> None:
    assert set(COMMANDS) == {
        "solvers",
        "threshold",
        "count",
        "streaming",
        "images",
        "networks",
        "identifiability",
        "kkt",
        "splitting",
    }


def test_count(capsys: pytest.CaptureFixture[str]) -> None:
    said = bench(capsys, "count", "--dim", 20, "--samples", 3, "--seeds", 2)
    assert "within 1 of 3: 2 of 2 seeds" in said


def test_solvers(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--dim", 20, "--samples", 3, "--seeds", 2, "--factor", 2)
    said = bench(capsys, "solvers", *sizes)
    assert "sphere d=20 n=3 p=10dn, seeds 0 to 1" in said
    for seed in ("0", "1"):
        cells = row(said, seed)
        assert len(cells) == 6
        assert cells[2] == "100%" and float(cells[3]) < 1e-4
    assert "ours: 2 of 2 seeds wholly exact." in said
    assert "of 2 runs were stopped at 2 times our time" in said


def test_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--dim", 20, "--samples", 3, "--seeds", 1, "--limit", 5)
    said = bench(capsys, "threshold", *sizes, "--ratios", "[4]", "--momentum-limit", 0.05)
    cells = row(said, "4")
    assert cells[1:4] == ["1 of 1", "1 of 1", "100%"]
    assert cells[6] in ("0 of 1", "1 of 1") and cells[7].endswith("%")


def test_threshold_without_momentum(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--dim", 20, "--samples", 3, "--seeds", 1, "--limit", 5)
    said = bench(capsys, "threshold", *sizes, "--ratios", "[4,5.5]", "--momentum_limit", 0)
    for ratio in ("4", "5.5"):
        assert row(said, ratio)[1] == "1 of 1"
        assert row(said, ratio)[6:] == ["–", "–"]


def test_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    said = bench(capsys, "streaming", "--dim", 20, "--samples", 3, "--width", 5000)
    assert "n=3 d=20 p=5,000" in said
    assert "objective 0.99" in said and "gradient of norm" in said and "GiB" in said


@pytest.mark.usefixtures("pixels")
def test_images(capsys: pytest.CaptureFixture[str]) -> None:
    cases = "[4x4, 2x5.5]"
    said = bench(capsys, "images", "--cases", cases, "--device", "cpu", "--limit", 20)
    assert "images: cifar10" in said
    assert row(said, "4")[1:3] == ["1,200", "4"]
    assert row(said, "2")[1:3] == ["825", "5.5"]
    for first in ("4", "2"):
        cells = row(said, first)
        assert len(cells) == 12 and cells[6:8] == ["100%", "100%"]
        assert cells[5] != "–" and float(cells[8]) < 1e-3


@pytest.mark.usefixtures("pixels")
def test_images_that_are_not_found_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    images(("4x1.02",), limit=0.2, device="cpu")
    cells = row(capsys.readouterr().out, "4")
    assert cells[5] == "–" and cells[6] != "100%" and int(cells[10]) > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["threshold", "--dim", 20, "--samples", 3, "--ratios", "[0.01]"], "width"),
        (["solvers", "--dim", 0], "dim"),
        (["images", "--device", "cpu", "--name", "imagenet"], "imagenet"),
        (["images", "--device", "cpu"], "EXHUME_DATA"),
        (["solvers", "--seeds", 0], "seeds"),
        (["threshold", "--seeds", 0], "seeds"),
        (["images", "--cases", "[axb]", "--device", "cpu"], "axb"),
        (["images", "--device", "abacus"], "abacus"),
    ],
    ids=str,
)
def test_a_measurement_that_cannot_be(
    words: list[object],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EXHUME_DATA", raising=False)
    with pytest.raises(SystemExit) as ending:
        main(["bench", *map(str, words)])
    said = capsys.readouterr().err
    assert ending.value.code == 2
    assert said.startswith("exhume: ") and named in said


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.steps, self.looks = 0.0, 0, 0
        advance = Iurada2025.advance

        def step(*arguments: Any) -> Progress:
            self.now, self.steps = self.now + 1, self.steps + 1
            return advance(*arguments)

        def look(*arguments: Any) -> Score:
            self.now, self.looks = self.now + 1000, self.looks + 1
            return score(*arguments)

        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr(Iurada2025, "advance", step)
        monkeypatch.setattr("exhume.experiments.benchmarks.common.score", look)


def test_looking_at_the_truth_costs_momentum_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = victims.random_features(data.sphere(20, 10), 240)
    clock = Clock(monkeypatch)
    used, recovered = momentum_until(victim, 2.0, limit=30.0, seed=0, every=4)
    assert (used, clock.steps, clock.looks) == (30.0, 30, 8)
    assert 0 <= recovered <= 1


def test_momentum_ends_when_enough_is_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = victims.random_features(data.sphere(20, 10), 240)
    clock = Clock(monkeypatch)
    used, _ = momentum_until(victim, 0.0, limit=30.0, seed=0, every=4)
    assert (used, clock.steps, clock.looks) == (4.0, 4, 1)
    assert momentum_until(victim, 1.0, limit=0.0, seed=0)[0] == 0


def test_networks(capsys: pytest.CaptureFixture[str]) -> None:
    said = bench(capsys, "networks", "--cases", "[blocks]", "--seeds", 1, "--limit", 0.5)
    assert "last parameters: recovered 0%" in said
    cells = row(said, "width 60, gelu")
    assert cells[1:4] == ["0", "5", "0.60"] and cells[6] == "last"
    assert float(cells[12]) < 1e-6  # 60 numbers are explained by any five samples


def test_networks_refuses_an_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "networks", "--cases", "[digit]"])
    assert stopped.value.code == 2
    assert "case 'digit': expected some of digits" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["margin", "classes", "change", "projection"])
def test_splitting(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("exhume.experiments.cells.splitting")
    monkeypatch.setattr(module, "TRIALS", 1)
    monkeypatch.setattr(module, "PROBE", 5)
    sizes = ("--samples", 3, "--width", 10, "--seeds", 1, "--limit", 1)
    said = bench(capsys, "splitting", "--cases", f"[{case}]", *sizes)
    count = 3 if case == "projection" else 6
    assert row(said, "base")[1] == f"{count}"
    for rule in ("published", "adaptive"):
        split, control = row(said, f"split, {rule}"), row(said, f"count of {rule}")
        assert split[1] == control[1] and int(split[1]) >= count
    (ratio,) = re.findall(r"by seed: (\S+)", said)
    assert float(ratio) == pytest.approx(1, abs=1e-3)
    assert "split, adaptive, of 1 seeds" in said


def test_splitting_refuses_an_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "splitting", "--cases", "[margins]"])
    assert stopped.value.code == 2
    assert "case 'margins': expected some of margin" in capsys.readouterr().err


@pytest.fixture
def tiny_kkt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 20 neurons and 4 digits, and one of three classes, in place of the cases."""
    module = importlib.import_module("exhume.experiments.benchmarks.kkt")

    def digits(classes: Any, samples: int) -> Any:
        return lambda seed: data.load("digits", samples, seed, classes=classes, centre="pixels")

    cases = {
        "tiny": module.Case(digits("parity", 4), (20,), "haim2022", 100),
        "classes": module.Case(digits((1, 4, 7), 6), (20,), "buzaglo2023", 100),
    }
    monkeypatch.setattr(module, "CASES", cases)
    monkeypatch.setattr(common, "console", Console(highlight=False, width=300))


def attacks(said: str) -> list[list[str]]:
    """Cells of the rows of the table of bench kkt."""
    lines = [line for line in said.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


@pytest.mark.usefixtures("tiny_kkt")
def test_kkt(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cases", "[tiny]", "--limit", 0.3, "--first-seed", 3, "--device", "cpu")
    said = bench(capsys, "kkt", *words)
    rows = attacks(said)
    assert [(cells[1], cells[2]) for cells in rows] == [
        ("—", "rows of W₁"),
        ("—", "blank, noise of 0.001"),
        *[(box, name) for box in ("wide", "pixels") for name in ("exhume", "haim2022", "shen2026")],
        ("[−1, 1] + 2", "exhume"),
        ("pixels", "trained on the held-out, exhume"),
    ]
    for cells in rows:
        assert len(cells) == 14 and cells[0] == "3"
        recovered, close, closer, good = cells[7], *map(int, cells[8:11])
        assert recovered.endswith("%") and 0 <= float(recovered[:-1]) <= 100
        assert 0 <= closer <= close <= 4 and 0 <= good <= 4
        assert re.fullmatch(r"AUC [01]\.\d\d, p \de[+-]\d\d", cells[13])
    assert [cells[4] for cells in rows[:2]] == ["20", "8"]
    assert all(cells[3] == cells[5] == cells[6] == "–" for cells in rows[:2])
    for cells in rows[2:]:
        assert 1 <= int(cells[4]) <= 8 and cells[5].isdigit() and 0 <= float(cells[6]) < 10
    wrong = next(cells for cells in rows if cells[1].startswith("[−1, 1] +"))
    assert wrong[7:10] == ["0.0%", "0", "0"]  # where no sample can lie
    assert said.count("samples active") == 2  # the network and that of the held-out
    assert "twice as many held-out images" in said and "of 4" in said


@pytest.mark.usefixtures("tiny_kkt")
def test_kkt_of_several_classes_without_controls(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cases", "[classes]", "--limit", 0.3, "--boxes", "[pixels]", "--controls", "False")
    rows = attacks(bench(capsys, "kkt", *words, "--device", "cpu"))
    assert [cells[2] for cells in rows[2:]] == ["exhume", "buzaglo2023", "shen2026"]
    assert all(cells[1] == "pixels" for cells in rows[2:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cases", "[digit]"], "case 'digit': expected some of digits"),
        (["--boxes", "[wide,pixel]"], "box 'pixel': expected some of wide, pixels"),
        (["--seeds", 0], "seeds"),
        (["--device", "abacus"], "abacus"),
    ],
    ids=str,
)
def test_kkt_refuses_what_it_does_not_know(
    words: list[object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "kkt", *map(str, words)])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
