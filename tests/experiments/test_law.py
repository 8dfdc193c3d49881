"""The law: its grids, its summary, its figures, its page, and the command that makes them."""

import csv
import io
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from exhume import sweep
from exhume.cli import law as command
from exhume.errors import InputError
from exhume.experiments import Attack, LabelFit, page
from exhume.experiments.law import (
    Law,
    LawCurve,
    Place,
    Setting,
    Summary,
    sentences,
    summarise,
    widths,
)
from exhume.experiments.phases import draw
from exhume.report import plots
from exhume.sweep import Record

TINY: dict[str, Any] = {
    "dim": "8",
    "samples": "3",
    "ratios": "0.5:5:2",
    "seeds": 2,
    "products": 400,
}
SMALL = Law(dims=(8,), samples=(3,), ratios=(0.5, 1.5, 4.0), seeds=2, products=400)
SETTING = Setting("random_features", "relu", "squared", 60, 12, None, 1)
TOLD = "tansley2026, subspace told"


def here(cells: Sequence[Any], **_: Any) -> list[Record]:
    """What a sweep gives, in this process."""
    return [Record(cell, cell.run("cpu"), None, 0.5) for cell in cells]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run", here)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the command, through the engine and the command line."""
    out = tmp_path_factory.mktemp("law") / "new"
    again(out)
    return out


def again(out: Path) -> None:
    words = [f"--{key}={value}" for key, value in TINY.items()]
    arguments = ["law", *words, "--workers", "1", "--out", str(out)]
    jsonargparse.auto_cli({"law": command.law}, args=arguments)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return here(SMALL.cells())


# The grid


def test_a_grid_is_every_combination() -> None:
    plan = Law(
        dims=(8, 9), samples=(3,), ranks=(None, 2), ratios=(1.0, 2.0), seeds=3,
        activations=("relu", "gelu"), losses=("squared", "logistic"),
    )  # fmt: skip
    cells = plan.cells()
    attacks = [cell for cell in cells if isinstance(cell, Attack)]
    fits = [cell for cell in cells if isinstance(cell, LabelFit)]
    assert len(attacks) == 2 * 2 * 2 * 3 * 2 * 2 * 2 and len(set(cells)) == len(cells)
    assert {(a.dim, a.rank, a.seed) for a in attacks} == {(f.dim, f.rank, f.seed) for f in fits}
    assert {fit.width for fit in fits if fit.dim == 8} == set(widths(3, 2 * 24))
    networks = replace(SMALL, architectures=("two_layer",)).cells()
    assert not any(isinstance(cell, LabelFit) for cell in networks)


@given(samples=st.integers(1, 500), ratio=st.floats(0.01, 100), dim=st.integers(1, 100))
def test_widths_go_from_a_quarter_to_the_largest(samples: int, ratio: float, dim: int) -> None:
    largest = ratio * dim * samples
    found = widths(samples, largest)
    assert found == sorted(set(found)) and samples in found
    assert found[0] == math.ceil(samples / 4)
    assert found[-1] == max(2 * samples, math.ceil(largest - 1e-9))


IMAGES = {"data": "digits", "dim": None}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"ratios": r}, "ratios: expected numbers above 0") for r in ("", "0:10", "0", "-1,2")],
        *[({"ratios": r}, "ratios: expected numbers above 0") for r in ("nan", "1:inf", "one")],
        ({"ratios": "5:1"}, "the first below the second"),
        ({"ratios": "1:5:1"}, "the first below the second and 2 or more"),
        ({"ratios": "1:5:2:2"}, "ratios: expected"),
        ({"ratios": "0.2:10:1000000000"}, "1,000,000,000 of them are more than the 100,000"),
        ({"ratios": "1e9"}, "at most 10,000"),
        ({"ratios": "1,1"}, "ratios: expected different values"),
        ({"seeds": 0}, "seeds: expected a whole number of at least 1, got 0"),
        ({"seeds": 10**9}, "4,000,000,000 attacks|8,000,000,000 attacks"),
        ({"seeds": 10**30}, "attacks; expected at most 100,000"),
        ({"activations": "rely"}, "rely"),
        ({"activations": ""}, "activations: expected words"),
        ({"methods": "exhume,,iurada2025"}, "methods: expected words"),
        ({"methods": "magic"}, "method: expected one of exhume"),
        ({"architectures": "transformer"}, "architecture: expected one of"),
        ({"architectures": "resnet"}, "resnet takes images"),
        ({"losses": "hinge"}, "loss: expected one of"),
        ({"losses": "cross_entropy"}, "squared or logistic"),
        ({"samples": "0"}, "samples: expected a whole number of at least 1"),
        ({"samples": "three"}, "samples: expected whole numbers with commas"),
        ({"dim": None}, "dim: sphere data needs a dimension"),
        ({"dim": ""}, "dim: expected whole numbers"),
        ({"ranks": "4,9"}, "rank: expected at most the dimension, 8"),
        ({"products": 0}, "products: expected a whole number of at least 1"),
        ({"data": "cats", "dim": None}, "data: expected one of sphere"),
        ({"data": "cifar10", "dim": None}, "cifar10 is not in"),
        ({"data": "faces", "dim": None, "samples": "1000"}, "only 100"),
        ({**IMAGES, "size": 3}, "size=3"),
        ({**IMAGES, "samples": "500", "ratios": "1,9999"}, "319,968,000"),
        ({"engine": "slurm"}, "slurm"),
        ({"workers": 0}, "workers"),
        ({"dim": "100000000", "samples": "100000", "ratios": "9999"}, "dim · samples: expected at"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    with pytest.raises(InputError, match=words):
        command.law(**{**TINY, **options}, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("parse", [command.whole_numbers, command.words, command.spaced])
def test_parsers_name_the_option(parse: Callable[[str, str], Any]) -> None:
    with pytest.raises(InputError, match=r"^here: expected"):
        parse("here", " , ")


# The summary


def test_a_summary_is_over_the_seeds(records: list[Record]) -> None:
    summary = summarise(records)
    ours = next(curve for curve in summary.attacks if curve.method == "exhume")
    rows = [
        record.values["error"]
        for record in records
        if isinstance(record.cell, Attack) and record.values
        if (record.cell.method, record.cell.ratio) == ("exhume", 4.0)
    ]
    last = ours.places[-1]
    assert (last.ratio, last.width, last.seeds) == (4.0, 96, 2) and len(rows) == 2
    assert last.error == pytest.approx(sum(rows) / 2)
    assert min(rows) <= last.low <= last.error <= last.high <= max(rows)  # type: ignore[operator]
    assert last.recovered == 1.0 and ours.places[0].recovered == 0.0
    assert ours.start is not None and 0.5 < ours.start < 4.0
    assert ours.starting_width == pytest.approx(24 * ours.start)
    first, second = sentences(summary)
    assert first.startswith("Labels fit from p = ") and "with exhume the data come back" in first
    assert "p ≈ " in first and " dn." in first
    assert second.startswith("With published momentum the data")


def test_counted_thresholds() -> None:
    assert (SETTING.labels_fit, SETTING.determined) == (12, 720)
    inside = replace(SETTING, rank=4)
    counted = [LawCurve(inside, method, ()).counted for method in ("exhume", "tansley2026")]
    assert counted == [720, 48]


def test_failed_cells_are_listed_and_left_out(records: list[Record]) -> None:
    broken = [
        replace(r, values=None, error="ValueError: <b>") if getattr(r.cell, "seed", 0) == 1 else r
        for r in records
    ]
    summary = summarise(broken)
    assert len(summary.failed) == sum(r.error is not None for r in broken) > 0
    assert {place.seeds for curve in summary.attacks for place in curve.places} == {1}
    text = page.render(summary, broken, draw(summary), "exhume law")
    assert f"{len(summary.failed)} cells failed" in text
    assert "ValueError: &lt;b&gt;" in text and "<b>." not in text


def test_undetermined_places_recover_nothing() -> None:
    plan = replace(SMALL, ratios=(0.1, 4.0), seeds=1, methods=("exhume",))
    (curve,) = summarise(here(plan.cells())).attacks
    assert curve.places[0].error is None and curve.places[0].recovered == 0.0
    assert curve.start is not None and curve.start > 0.1


def at_first(*ratios: float, dim: int = 60) -> LawCurve:
    """A curve that is up from the first of these ratios on, and not at 0.1."""
    shares = [(0.0 if ratio == 0.1 else 1.0, ratio) for ratio in ratios]
    places = [Place(r * dim * 12, r, 1 - share, None, None, share) for share, r in shares]
    return LawCurve(replace(SETTING, dim=dim), "exhume", tuple(places))


def test_a_start_at_the_smallest_ratio_is_a_bound() -> None:
    there, rises = at_first(2.0, 4.0), at_first(0.1, 0.4)
    assert there.start == 2.0 and there.at_or_below and not rises.at_or_below
    assert not at_first(2.0, 0.1).at_or_below
    other = replace(rises, setting=at_first(dim=30).setting)
    for curves, words in (
        ((there,), "come back at or below p ≈ 1,440 = 2.0 dn, the smallest tried."),
        ((there, at_first(3.0, dim=30)), "at or below p ≈ 2.0 to 3.0 dn, the smallest tried."),
        ((there, other), "to 2.0 dn, in 1 of 2 settings at or below the smallest tried."),
        ((rises,), "come back from p ≈ 144 = 0.20 dn."),
        ((at_first(2.0, 0.1),), "With exhume the data do not come back."),
    ):
        (said,) = sentences(Summary((), curves))
        assert said.endswith(words)
    inside = replace(there, setting=replace(SETTING, rank=6))
    for curve, count in ((inside, 3), (there, 2), (rises, 0)):
        summary = Summary((), (curve,))
        assert str(page.starts(summary)).count("≤ ") == count
        assert page.render(summary, [], draw(summary), "exhume law").count("<td>≤ ") == count


@pytest.mark.parametrize(
    ("width", "words"), [(3, "fit at or below p = 3 = 0.25 n"), (1, "fit from p = 1")]
)
def test_labels_that_fit_at_the_smallest_width_may_fit_below(width: int, words: str) -> None:
    fit = LawCurve(SETTING, None, (Place(width, 0.1, 0.0, None, None),))
    assert sentences(Summary((fit,), (at_first(0.1, 0.4),)))[0].startswith(f"Labels {words}")


# Figures


def check_figure(summary: Summary, *words: str) -> None:
    drawn = draw(summary)
    text = plots.svg(drawn)
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert text == plots.svg(draw(summary))
    for word in words:
        assert word in text
    picture = Image.open(io.BytesIO(plots.png(drawn)))
    assert picture.format == "PNG" and picture.width >= 1200
    inline = plots.inline(drawn)
    assert inline.startswith("<svg") and "var(--accent)" in inline and plots.ACCENT not in inline


def test_the_phase_diagram_marks_both_thresholds(records: list[Record]) -> None:
    named = ("labels fit", "data determined", "label error", "published momentum", "random guess")
    check_figure(summarise(records), "p = n = 3", "p = dn = 24", *named)


def test_several_sizes_fall_on_one_another(records: list[Record]) -> None:
    other = replace(SMALL, dims=(12,), ratios=(0.5, 4.0), seeds=1)
    summary = summarise([*records, *here(other.cells())])
    check_figure(summary, "p / (dn)", "d = 8, n = 3", "d = 12, n = 3")


def test_each_kind_of_model_has_a_panel(records: list[Record]) -> None:
    other = replace(SMALL, ratios=(4.0,), seeds=1, products=50, methods=("exhume",))
    other = replace(other, activations=("relu+tanh",), losses=("logistic",))
    summary = summarise([*records, *here(other.cells())])
    check_figure(summary, "ReLU + tanh, logistic loss", "training loss", "ReLU, squared loss")


def test_ranks_are_drawn_against_both_counts() -> None:
    plan = replace(SMALL, dims=(12,), ranks=(2, 6), ratios=(0.5, 4.0), seeds=1)
    summary = summarise(here(replace(plan, methods=("exhume", "tansley2026")).cells()))
    check_figure(summary, "p / (rn)", "p / (dn)", "r = 2", "r = 6", TOLD)
    first, second = sentences(summary)
    assert f"; with {TOLD}, the data come back" in first and " rn (" in first
    assert second.startswith("With exhume the data")
    assert str(page.starts(summary)).count(TOLD) == 2
    shown = page.render(summary, [], draw(summary), "exhume law")
    assert shown.count(f"<td>{TOLD}</td>") == 2 + 4


def test_who_estimates_the_subspace_is_not_said_to_be_told() -> None:
    inside = replace(SETTING, dim=12, samples=3, rank=2)
    network, everywhere = replace(inside, architecture="two_layer"), replace(inside, rank=None)
    names = [LawCurve(own, "tansley2026", ()).name for own in (inside, network, everywhere)]
    assert [name.rpartition(" ")[2] for name in names] == ["told", "estimated", "estimated"]
    places = (Place(36, 1.0, 0.9, 0.9, 0.9, 0.0), Place(144, 4.0, 0.0, 0.0, 0.0, 1.0))
    summary = Summary((), tuple(LawCurve(o, "tansley2026", places) for o in (inside, network)))
    said = [sentence.split(" the data")[0] for sentence in sentences(summary)]
    assert said == [f"With {name}," for name in names[:2]]
    check_figure(summary, *names[:2])


# The command


def test_the_command_writes_everything(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} <= set(command.FILES)
    assert all(path.stat().st_mode & 0o077 == 0 for path in finished.iterdir())
    ElementTree.parse(finished / "law.svg")
    with Image.open(finished / "law.png") as picture:
        assert picture.width >= 1200
    with open(finished / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    attacks = [row for row in rows if row["method"]]
    assert len(attacks) == 2 * 2 * 2
    ours = [row for row in attacks if (row["method"], row["ratio"]) == ("exhume", "5.0")]
    assert [float(row["recovered"]) for row in ours] == [1.0, 1.0]
    text = (finished / "law.html").read_text()
    assert text.index("Labels fit from") < text.index("<svg")
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert "exhume law --data sphere --dim 8 --samples 3 --ratios 0.5:5:2 --seeds 2" in text


def test_the_same_command_goes_on(finished: Path) -> None:
    cells = {path: path.stat().st_mtime_ns for path in (finished / "cells").iterdir()}
    before = {name: (finished / name).read_bytes() for name in ("law.svg", "law.png", "table.csv")}
    next(iter(cells)).unlink()  # as if it had been stopped
    again(finished)
    after = {path: path.stat().st_mtime_ns for path in (finished / "cells").iterdir()}
    assert sum(cells[path] != after[path] for path in cells) == 1 and len(after) == len(cells)
    assert before == {name: (finished / name).read_bytes() for name in before}


@pytest.mark.usefixtures("in_process")
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    for name in (*command.FILES, ".law.html.abc", ".table.csv.x_1", ".sweep.json.0"):
        (tmp_path / name).touch()
    command.check_folder(tmp_path)  # what a killed write left is no obstacle
    there = {path.name for path in tmp_path.iterdir()}
    (tmp_path / ".thesis.tex.abc").write_text("mine")
    with pytest.raises(InputError, match=r"holds something else \(\.thesis\.tex\.abc\)"):
        command.law(**TINY, out=tmp_path)
    with pytest.raises(InputError, match="is a file"):
        command.law(**TINY, out=tmp_path / ".thesis.tex.abc")
    assert {path.name for path in tmp_path.iterdir()} == there | {".thesis.tex.abc"}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("redact", [False, True])
def test_pictures_are_shown_unless_redacted(
    redact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = command.planned
    kept: list[bool] = []

    def plan(given: dict[str, Any]) -> Law:
        kept.extend(getattr(cell, "keep", 0) > 0 for cell in planned(given).cells())
        return planned(given)

    monkeypatch.setattr(command, "planned", plan)
    command.law(
        data="digits", size=4, classes="parity", samples="3", ratios="4", seeds=2, products=300,
        out=tmp_path, redact=redact,
    )  # fmt: skip
    assert sum(kept) == (0 if redact else 1)  # of the first seed and method
    text = (tmp_path / "law.html").read_text()
    assert ("data:image/png;base64," in text) is not redact
    assert ("Redacted" in text) is redact
    assert "picture" not in (tmp_path / "table.csv").read_text()


def test_all_cells_failing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(cells: Sequence[Any], **_: Any) -> list[Record]:
        return [Record(cell, None, "MemoryError: no", 0.0) for cell in cells]

    monkeypatch.setattr(sweep, "run", run)
    with pytest.raises(InputError, match=r"all .* cells failed, the first one with MemoryError"):
        command.law(**TINY, out=tmp_path)
