"""Every benchmark at a tiny size, on budgets of products and steps, prints what it measured."""

import itertools
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import exhume
from exhume import data, victims
from exhume.auditing.judgement import SIGNS, probabilities
from exhume.cli.main import main
from exhume.evaluate import Score, score
from exhume.experiments.benchmarks import (
    calibration,
    common,
    controls,
    finetuned,
    margin,
    random_features,
    reach,
    speed,
)
from exhume.experiments.benchmarks.common import momentum_until
from exhume.experiments.cells.attack import Attack
from exhume.experiments.cells.margin import Case
from exhume.experiments.cells.splitting import RULES
from exhume.methods import presets, reconstruct
from exhume.methods.iurada2025 import Iurada2025
from exhume.methods.progress import Progress

Bench = Callable[..., str]
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
SPHERE = ("--dim", 20, "--samples", 3)


def budgeted(products: int) -> Any:
    """The same attack on a budget of products in place of seconds."""
    limits = {"time_limit": None, "product_limit": products}
    return lambda *arguments, **options: reconstruct(*arguments, **{**options, **limits})


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: Patch) -> None:
    """Attacks end after products, not seconds; all columns of a table have room."""
    monkeypatch.setattr("exhume.experiments.cells.attack.reconstruct", budgeted(800))
    monkeypatch.setattr(common, "console", Console(highlight=False, width=300))


@pytest.fixture
def bench(capsys: Capture) -> Bench:
    def run(*words: object) -> str:
        main(["bench", *map(str, words)])
        said = capsys.readouterr()
        assert said.err == ""
        assert f"torch {torch.__version__}; exhume {exhume.__version__}; 20" in said.out
        return said.out

    return run


def table(said: str) -> list[list[str]]:
    lines = [line for line in said.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def row(said: str, first: str) -> list[str]:
    return next(cells for cells in table(said) if cells[0] == first)


def test_controls(bench: Bench, monkeypatch: Patch) -> None:
    some = {"control": (0, 3), "adversarial": (1, 3), "true recovery": (0, 2)}

    def first(kind: str, seed: int) -> Any:
        return islice(kinds[kind](seed), *some[kind])

    kinds = dict(controls.KINDS)
    monkeypatch.setattr(controls, "KINDS", {kind: partial(first, kind) for kind in some})
    said = bench("controls", "--seeds", 1, "--products", 150)
    rows = table(said)
    assert [cells[2] for cells in rows] == ["1"] * 7 and {cells[-1] for cells in rows} == {"0"}
    assert [cells[4] for cells in rows] == ["0"] * 5 + ["1"] * 2  # strongly claimed
    assert row(said, "control")[1] == "target permuted: ratio 1.3"
    assert "adversarial: 2 runs, 0 strongly claimed, 0 wholly recovered" in said
    assert "true recovery: 2 runs, 2 strongly claimed, 2 wholly recovered" in said


def test_calibration(bench: Bench, monkeypatch: Patch, tmp_path: Path) -> None:
    every, out, figure = calibration.problems, tmp_path / "out.json", tmp_path / "out.svg"
    monkeypatch.setattr(calibration, "problems", lambda seed: islice(every(seed), 2, 7, 2))
    told = ("--seeds", 2, "--products", 300, "--out", out, "--figure", figure)
    said = bench("calibration", *told)
    learnt = json.loads(out.read_text())
    assert tuple(learnt["weights"]) == SIGNS and learnt["weights"]["again"] > 0
    assert learnt["tested on"]["candidates"] == 12 and "svg" in figure.read_text()
    assert row(said, "none")[2] == str(learnt["tested on"]["signs"][-1]["sure"])


@pytest.mark.parametrize(("sign", "side"), [("again", 1.0), ("outside", -1.0)])
def test_signs_that_are_not_always_known_are_weighed_by_their_odds(sign: str, side: float) -> None:
    model = {"intercept": 0.0, "weights": dict.fromkeys(SIGNS, 0.0)}
    rows = torch.zeros(9, len(SIGNS)).double()
    rows[:, SIGNS.index(sign)] = side * torch.tensor([1, 1, 1, 1, -1, -1, -1, -1, 0])
    true = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1, 1]).bool()
    chances = probabilities(rows, calibration.with_more(model, rows, true))
    torch.testing.assert_close(chances[[0, 4, 8]], torch.tensor([0.75, 0.25, 0.5]).double(),
                               atol=1e-4, rtol=0)  # fmt: skip


def test_count(bench: Bench) -> None:
    said = bench("count", *SPHERE, "--seeds", 2)
    assert "within 1 of 3: 2 of 2 seeds" in said
    assert [cells[2] for cells in table(said)] == ["100%", "100%"]


def test_solvers(bench: Bench, monkeypatch: Patch) -> None:
    ends = iter(((1e9, 0.5, 9), (0.0, 1.0, 9)))  # seconds, share and steps of momentum
    monkeypatch.setattr(random_features, "momentum_until", lambda *_: next(ends))
    said = bench("solvers", *SPHERE, "--seeds", 2, "--factor", 2)
    assert "sphere d=20 n=3 p=10dn, seeds 0 to 1" in said
    late, early = table(said)
    for cells in (late, early):
        assert len(cells) == 6 and cells[2] == "100%" and float(cells[3]) < 1e-4
    assert late[4] == "1000000000.0, ended at 50%" and late[5].startswith("> ")
    assert early[4:] == ["0.0", "0"]
    assert "ours: 2 of 2 seeds wholly exact. Momentum takes 0 times as long or more" in said
    assert "1 of 2 runs were stopped at 2 times our time" in said


def test_threshold(bench: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr(random_features, "momentum_until", lambda *_: (1.0, 0.25, 9))
    for limit, slow in ((0, ["–", "–"]), (1, ["0 of 1", "25%"])):
        words = ("--seeds", 1, "--ratios", "[4,5.5]", "--momentum-limit", limit)
        said = bench("threshold", *SPHERE, *words)
        for ratio in ("4", "5.5"):
            assert row(said, ratio)[1:4] == ["1 of 1", "1 of 1", "100%"]
            assert row(said, ratio)[6:] == slow


def test_streaming(bench: Bench) -> None:
    said = bench("streaming", *SPHERE, "--width", 5000, "--beside", 4000, "--device", "cpu")
    assert "n=3 d=20 p=5,000" in said and "GiB" in said
    for width in ("5,000", "4,000"):
        assert f"p={width}: objective 0.99" in said
    assert said.count("gradient of norm") == 2 and "times that with V in memory" in said


def test_speed(bench: Bench, monkeypatch: Patch) -> None:
    for name, size in (("LEAST", 0), ("COPIED", {"cpu": 64}), ("SIDE", {"cpu": 4})):
        monkeypatch.setattr(speed, name, size)
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    sizes = ("--samples", 4, "--dim", 8, "--width", 512, "--channels", 2, "--neurons", 8)
    said = bench("speed", *sizes, "--device", "cpu")
    assert row(said, speed.OURS)[2] == "1.00"
    for what in ("V drawn", "the same, V drawn on the way", "a step of iurada2025, V made again"):
        assert float(row(said, what)[1]) > 0
    assert "reads V twice (0.00 GB, 0.000 TFLOP)" in said and "of that limit" in said
    for size in ("samples, 1 to 4", "dim, 2 to 8", "width, 128 to 512", "ranks, 1 to 2"):
        assert len(row(said, size)) == 3
    assert row(said, "resnet, last")[1:3] == ["98", "4"]  # 2 channels of 7×7
    assert row(said, "mlp, all")[1:3] == ["136", "4"]


def test_images(bench: Bench, tmp_path: Path, monkeypatch: Patch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (60, 5, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "cifar10.npz", x=noise, y=np.arange(60) % 10)
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    said = bench("images", "--cases", "[4x4, 2x5.5, 3x1.02]", "--device", "cpu")
    assert "images: cifar10" in said
    *whole, short = table(said)
    assert [cells[:4] for cells in whole] == [["4", "1,200", "4", "0"], ["2", "825", "5.5", "0"]]
    for cells in whole:
        assert len(cells) == 13 and cells[7:9] == ["100%", "100%"]
        assert cells[6] != "–" and float(cells[9]) < 1e-3
    assert short[6] == "–" and short[7] != "100%" and int(short[11]) > 0
    ticks = itertools.count()  # a clock that goes on by one whenever it is looked at
    monkeypatch.setattr(common.time, "perf_counter", lambda: float(next(ticks)))
    asked = "--cases", "[2x6]", "--seeds", 2, "--momentum", 60, "--device", "cpu"
    *ours, first, second = table(bench("images", *asked))
    assert [cells[3] for cells in ours] == [first[2], second[2]] == ["0", "1"]
    assert ours[0][9] != ours[1][9]  # other images, in other features
    for steps, found, *_, times in (cells[3:] for cells in (first, second)):
        assert 50 <= int(steps) <= 60 and (float(found[:-1]) >= 90 or times.startswith(">"))


def test_networks(bench: Bench) -> None:
    said = bench("networks", "--cases", "[blocks]", "--seeds", 1)
    assert "last parameters: recovered 0%" in said
    last, every = table(said)
    assert last[1:4] == ["0", "5", "0.60"] and last[6] == "last parameters"
    assert every[3] == "12.60" and every[4:6] == last[4:6]  # the same network
    assert float(last[12]) < 1e-6  # 60 numbers are explained by any five samples


def test_identifiability(bench: Bench) -> None:
    said = bench("identifiability", "--dim", 8, "--samples", 3, "--seeds", 1)
    enough, too_few = table(said)
    assert (enough[2], too_few[2]) == ("holds", "fails") and enough[7] == "3 of 3"
    assert "1 of 1 seeds wholly recovered to 0.0001; with too few neurons it fails in 1" in said


def test_kkt(bench: Bench, monkeypatch: Patch, tmp_path: Path) -> None:
    few = partial(data.load, "digits", 4, classes="parity", centre="pixels")
    monkeypatch.setattr(margin, "CASES", {"tiny": Case(few, (20,), "haim2022", "rbij", 100)})
    monkeypatch.setattr(margin, "reconstruct", budgeted(60))
    asked = ("--cases", "[tiny]", "--first-seed", 3, "--device", "cpu")
    said = bench("kkt", *asked, "--boxes", "[wide,pixels]", "--pictures", tmp_path / "seen")
    rows = table(said)
    without = ("held-out images", "rows of W₁", "blank, noise of 0.001")
    baselines = [["—", "—", word] for word in without]
    splits = [f"{word} {rule}" for rule in RULES for word in ("shen2026,", "count of")]
    methods = ("exhume", "haim2022, rbij", *splits)
    ways = [(box, target) for box in ("wide", "pixels") for target in ("θ", "θ − θ₀")]
    attacks = [[*way, method] for way in ways for method in methods]
    assert [cells[1:4] for cells in rows] == [*baselines, *attacks]
    drawn = [path.name for path in (tmp_path / "seen" / "tiny-3").iterdir()]
    assert len(drawn) == len(attacks) and "haim2022-rbij-pixels-change.png" in drawn
    for cells in rows:
        assert len(cells) == 14 and cells[0] == "3" and cells[13].endswith("%")
        counted = [re.fullmatch(r"(\d) \((\d)\)", cell).groups() for cell in cells[8:11]]
        assert all(0 <= int(count) <= 4 for pair in counted for count in pair)
    assert [cells[5] for cells in rows[:3]] == ["8", "20", "8"]
    assert all(cells[4] == cells[6] == cells[7] == "–" for cells in rows[:3])
    assert "samples active" in said and "0.90 to 0.94" in said and "a flow time of" in said
    for one, other in zip(rows[5::6], rows[6::6], strict=True):
        assert one[5] == other[5] and int(one[5]) >= 6
    often = bench(
        "kkt", *asked, "--targets", "[weights]", "--attacks", "[runs,splitting]", "--every", 9
    )
    rows = table(often)[3:]
    assert [cells[3] for cells in rows] == ["haim2022, rbij, 10 runs", *splits[:2]]
    assert rows[0][5] == "8" and int(rows[1][5]) >= 6  # as many as one run has
    assert re.search(r"side by side takes [\d.]+ ms for 1, [\d.]+ ms for 10", often)
    asked += ("--training", "rest", "--targets", "[weights]", "--preset", "tuned", "--seeds", 2)
    rest = bench("kkt", *asked, "--attacks", "[presets,tuned,splitting]")
    kinds = [f"haim2022, {word}" for word in (*presets("haim2022"), "tuned")]
    expected, rows = [*without, *kinds, *splits], table(rest)
    assert [cells[3] for cells in rows if len(cells) == 14] == 2 * expected
    assert [cells[2] for cells in rows if len(cells) == 8] == expected
    assert "flow time" not in rest and "1.weight: " in rest and "published rule: " in rest


def test_finetuned(bench: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr(finetuned, "reconstruct", budgeted(3))
    cases = ("--cases", "[sgd20,adam-alone]", "--samples", 1, "--device", "cpu")
    said = bench("finetuned", *cases, "--seeds", 1, "--first-seed", 3, "--labels", "false")
    rows = table(said)
    attacks = ["exhume, replay", "exhume, lazy", "simudy2025"]
    assert [cells[:2] for cells in rows] == [
        [case, attack] for case in ("sgd20", "adam-alone") for attack in attacks
    ]
    for cells in rows:
        assert len(cells) == 11 and cells[2].endswith(" of 1") and cells[4].endswith("%")
        assert float(cells[6]) > 1e-9 and float(cells[7]) < 1 and 0 < float(cells[8]) < 1
    assert "sgd20 seed 3: rate 0.2, loss" in said and said.count("products, ") == 6


def test_misinformed(bench: Bench, monkeypatch: Patch) -> None:
    name = "SGD for Adam"
    monkeypatch.setattr(finetuned, "WRONGS", {name: finetuned.WRONGS[name]})
    said = bench("misinformed", "--seeds", 1, "--limit", 10)
    assert re.search(rf"{name} *│ 0 of 1 *│ 1 of 1", said)


def test_reach(bench: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr(reach, "reconstruct", budgeted(10))
    monkeypatch.setattr(reach, "STEPS", 40)
    words = ("--networks", "[tabular MLP, CNN]", "--ways", "[lazy, head only, margin]")
    said = bench("reach", *words, "--first-seed", 3, "--workers", 1)
    dense, other, *methods = table(said)
    assert [dense[0], other[0]] == [cells[0] for cells in methods] == ["tabular MLP", "CNN"]
    assert all(cell.endswith("%") for cell in dense[1:] + other[1:])
    assert all(cells[1] in ("lazy", "–") for cells in methods)
    assert "of 6 cells at 90% or more" in said and "tabular MLP, margin, seed 3: exhume" in said


REFUSED = {
    "finetuned --cases [sgd]": "case: expected one of sgd20",
    "finetuned --methods [haim]": "method: expected one of replay",
    "reach --ways [sdg]": "way: expected one of lazy",
    "threshold --dim 20 --samples 3 --ratios [0.01]": "width", "solvers --seeds 0": "seeds",
    "identifiability --samples 2": "expected 3 samples or more",
    "images --device cpu --name imagenet": "imagenet", "images --device cpu": "EXHUME_DATA",
    "images --cases [axb] --device cpu": "axb",
    "kkt --cases [digit]": "case: expected one of faces, digits",
    "kkt --targets [weight]": "target: expected one of weights, change",
    "kkt --attacks [ours]": "attack: expected one of exhume, recipe",
    "kkt --every 0": "every: expected",
    "kkt --training adam": "training: expected one of flow, rest",
    "kkt --boxes [wide,pixel]": "box: expected one of wide, pixels",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_a_benchmark_that_cannot_be(words: str, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.delenv("EXHUME_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["bench", *words.split()])
    said = capsys.readouterr().err
    assert said.startswith("exhume: ") and REFUSED[words] in said


@pytest.mark.parametrize(("share", "used", "looks"), [(2.0, 30.0, 8), (0.0, 4.0, 1)])
def test_looking_costs_no_time(share: float, used: float, looks: int, monkeypatch: Patch) -> None:
    now, seen, advance = [0.0], [0], Iurada2025.advance

    def step(*arguments: Any) -> Progress:
        now[0] += 1
        return advance(*arguments)

    def look(*arguments: Any) -> Score:
        now[0], seen[0] = now[0] + 1000, seen[0] + 1
        return score(*arguments)

    victim = victims.random_features(data.sphere(20, 10), 240)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Iurada2025, "advance", step)
    monkeypatch.setattr(common, "score", look)
    spent, recovered, _ = momentum_until(victim, share, limit=30.0, seed=0, every=4)
    assert (spent, seen[0]) == (used, looks) and 0 <= recovered <= 1


def test_a_row_is_what_the_cell_gives() -> None:
    cell = Attack(dim=8, samples=3, ratio=4.0, products=None)
    row = common.attacked(cell, common.trained(cell))
    assert row == row | cell.run("cpu") | {"equations": 4.0, "seed": 0}
