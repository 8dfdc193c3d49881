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
from rich.console import Console
from rich.table import Table

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
from exhume.experiments.table import start
from exhume.report import plots
from exhume.sweep import Record

TINY: dict[str, Any] = {
    "dim": "8",
    "samples": "3",
    "ratios": "0.5:5:4",
    "seeds": 2,
    "products": 400,
}


def here(cells: Sequence[Any]) -> list[Record]:
    """What a sweep gives, in this process."""
    return [Record(cell, cell.run("cpu"), None, 0.5) for cell in cells]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cells: Sequence[Any], **_: Any) -> list[Record]:
        return here(cells)

    monkeypatch.setattr(sweep, "run", run)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the command, through the engine and the command line."""
    out = tmp_path_factory.mktemp("law") / "new"
    again(out)
    return out


def again(out: Path) -> None:
    words = [f"--{key}={value}" for key, value in TINY.items()]
    arguments = ["law", *words, "--workers", "2", "--out", str(out)]
    jsonargparse.auto_cli({"law": command.law}, args=arguments)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    plan = Law(dims=(8,), samples=(3,), ratios=(0.5, 1.5, 4.0), seeds=2, products=400)
    return here(plan.cells())


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


def test_networks_have_no_separate_fits() -> None:
    plan = Law(dims=(8,), samples=(3,), architectures=("two_layer",), seeds=1)
    assert not any(isinstance(cell, LabelFit) for cell in plan.cells())


@given(samples=st.integers(1, 500), ratio=st.floats(0.01, 100), dim=st.integers(1, 100))
def test_widths_go_from_a_quarter_to_the_largest(samples: int, ratio: float, dim: int) -> None:
    largest = ratio * dim * samples
    found = widths(samples, largest)
    assert found == sorted(set(found)) and samples in found
    assert found[0] == math.ceil(samples / 4)
    assert found[-1] == max(2 * samples, math.ceil(largest - 1e-9))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratios": ""}, "ratios: expected numbers above 0"),
        ({"ratios": "0:10"}, "ratios: expected numbers above 0"),
        ({"ratios": "0"}, "ratios: expected numbers above 0"),
        ({"ratios": "-1,2"}, "ratios: expected numbers above 0"),
        ({"ratios": "nan"}, "ratios: expected numbers above 0"),
        ({"ratios": "1:inf"}, "ratios: expected numbers above 0"),
        ({"ratios": "5:1"}, "the first below the second"),
        ({"ratios": "1:5:1"}, "the first below the second and 2 or more"),
        ({"ratios": "1:5:2:2"}, "ratios: expected"),
        ({"ratios": "one"}, "ratios: expected"),
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
        ({"data": "digits", "dim": None, "size": 3}, "size=3"),
        ({"data": "faces", "dim": None, "samples": "1000"}, "only 100"),
        ({"engine": "slurm"}, "slurm"),
        ({"workers": 0}, "workers"),
        ({"dim": "100000000", "samples": "100000", "ratios": "9999"}, "dim · samples: expected at"),
        ({"data": "digits", "dim": None, "samples": "500", "ratios": "1,9999"}, "319,968,000"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        command.law(**{**TINY, **options}, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_missing_data_set_is_named_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    with pytest.raises(InputError, match="cifar10 is not in"):
        command.law(data="cifar10", out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


# The summary


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_recovery_starts_where_it_stays(shares: list[float]) -> None:
    places = [2.0**k for k in range(len(shares))]
    found = start(places, shares)
    if shares[-1] < 0.5:
        assert found is None
        return
    assert found is not None
    after = [share for place, share in zip(places, shares, strict=True) if place >= found]
    assert all(share >= 0.5 for share in after)
    before = [share for place, share in zip(places, shares, strict=True) if place < found]
    assert not before or before[-1] < 0.5


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


def test_counted_thresholds() -> None:
    setting = Setting("random_features", "relu", "squared", 60, 12, None, 1)
    assert (setting.labels_fit, setting.determined) == (12, 720)
    inside = replace(setting, rank=4)
    counted = [LawCurve(inside, method, ()).counted for method in ("exhume", "tansley2026")]
    assert counted == [720, 48]


def test_failed_cells_are_listed_and_left_out(records: list[Record]) -> None:
    broken = [
        replace(r, values=None, error="ValueError: no") if getattr(r.cell, "seed", 0) == 1 else r
        for r in records
    ]
    summary = summarise(broken)
    assert len(summary.failed) == sum(r.error is not None for r in broken) > 0
    assert {point.seeds for curve in summary.attacks for point in curve.places} == {1}


def test_sentences_say_where(records: list[Record]) -> None:
    first, second = sentences(summarise(records))
    assert first.startswith("Labels fit from p = ") and "with exhume the data come back" in first
    assert "p ≈ " in first and " dn." in first
    assert second.startswith("With published momentum the data")


def test_undetermined_points_recover_nothing() -> None:
    plan = Law(dims=(8,), samples=(3,), ratios=(0.1, 4.0), seeds=1, methods=("exhume",))
    (curve,) = summarise(here(plan.cells())).attacks
    assert curve.places[0].error is None and curve.places[0].recovered == 0.0
    assert curve.start is not None and curve.start > 0.1


# Figures


def text_of(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def check_figure(summary: Summary, words: Sequence[str]) -> None:
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
    summary = summarise(records)
    check_figure(
        summary,
        ("p = n = 3", "p = dn = 24", "labels fit", "data determined", "label error",
         "published momentum", "random guess"),
    )  # fmt: skip


def test_several_sizes_fall_on_one_another(records: list[Record]) -> None:
    other = Law(dims=(12,), samples=(3,), ratios=(0.5, 4.0), seeds=1, products=400)
    summary = summarise([*records, *here(other.cells())])
    check_figure(summary, ("p / (dn)", "d = 8, n = 3", "d = 12, n = 3"))


def test_ranks_are_drawn_against_both_counts() -> None:
    plan = Law(
        dims=(12,), samples=(3,), ranks=(2, 6), ratios=(0.5, 4.0), seeds=1, products=400,
        methods=("exhume", "tansley2026"),
    )  # fmt: skip
    summary = summarise(here(plan.cells()))
    told = "tansley2026, subspace told"
    check_figure(summary, ("p / (rn)", "p / (dn)", "r = 2", "r = 6", told))
    first, second = sentences(summary)
    assert f"; with {told}, the data come back" in first and " rn (" in first
    assert second.startswith("With exhume the data")
    assert text_of(command._starts(summary)).count(told) == 2
    shown = page.render(summary, [], draw(summary), "exhume law")
    assert shown.count(f"<td>{told}</td>") == 2 + 4


def test_who_estimates_the_subspace_is_not_said_to_be_told() -> None:
    inside = Setting("random_features", "relu", "squared", 12, 3, 2, 1)
    network, everywhere = replace(inside, architecture="two_layer"), replace(inside, rank=None)
    names = [LawCurve(setting, "tansley2026", ()).name for setting in (inside, network, everywhere)]
    assert [name.rpartition(" ")[2] for name in names] == ["told", "estimated", "estimated"]
    points = (Place(36, 1.0, 0.9, 0.9, 0.9, 0.0), Place(144, 4.0, 0.0, 0.0, 0.0, 1.0))
    curves = [LawCurve(setting, "tansley2026", points) for setting in (inside, network)]
    said = sentences(Summary((), tuple(curves)))
    assert [sentence.split(" the data")[0] for sentence in said] == [
        f"With {n}," for n in names[:2]
    ]
    check_figure(Summary((), tuple(curves)), names[:2])


def at_first(*ratios: float, dim: int = 60) -> LawCurve:
    """A curve that is up from the first of these ratios on, and not at 0.1."""
    setting = Setting("random_features", "relu", "squared", dim, 12, None, 1)
    shares = [(0.0 if ratio == 0.1 else 1.0, ratio) for ratio in ratios]
    unknowns = dim * 12
    points = [Place(r * unknowns, r, 1 - share, None, None, share) for share, r in shares]
    return LawCurve(setting, "exhume", tuple(points))


def test_a_start_at_the_smallest_ratio_is_a_bound() -> None:
    there, rises = at_first(2.0, 4.0), at_first(0.1, 0.4)
    assert there.start == 2.0 and there.at_or_below and not rises.at_or_below
    assert not at_first(2.0, 0.1).at_or_below
    (said,) = sentences(Summary((), (there,)))
    assert said == (
        "With exhume the data come back at or below p ≈ 1,440 = 2.0 dn, the smallest tried."
    )
    (said,) = sentences(Summary((), (there, at_first(3.0, dim=30))))
    assert "come back at or below p ≈ 2.0 to 3.0 dn, the smallest tried." in said
    (said,) = sentences(Summary((), (there, replace(rises, setting=at_first(dim=30).setting))))
    assert said.endswith("to 2.0 dn, in 1 of 2 settings at or below the smallest tried.")
    (said,) = sentences(Summary((), (rises,)))
    assert "come back from p ≈ 144 = 0.20 dn." in said


def test_tables_show_a_bound_as_one() -> None:
    inside = replace(at_first(2.0, 4.0), setting=replace(at_first().setting, rank=6))
    for curve, count in ((inside, 3), (at_first(2.0, 4.0), 2), (at_first(0.1, 0.4), 0)):
        summary = Summary((), (curve,))
        assert text_of(command._starts(summary)).count("≤ ") == count
        shown = page.render(summary, [], draw(summary), "exhume law")
        assert shown.count("<td>≤ ") == count


def test_labels_that_fit_at_the_smallest_width_may_fit_below() -> None:
    setting = at_first().setting
    for width, words in (
        (3, "Labels fit at or below p = 3 = 0.25 n"),
        (1, "Labels fit from p = 1"),
    ):
        fit = LawCurve(setting, None, (Place(width, 0.1, 0.0, None, None),))
        assert sentences(Summary((fit,), (at_first(0.1, 0.4),)))[0].startswith(words)


def test_each_kind_of_model_has_a_panel(records: list[Record]) -> None:
    other = Law(
        dims=(8,), samples=(3,), ratios=(4.0,), seeds=1, products=50, activations=("relu+tanh",),
        losses=("logistic",), methods=("exhume",),
    )  # fmt: skip
    summary = summarise([*records, *here(other.cells())])
    check_figure(summary, ("ReLU + tanh, logistic loss", "training loss", "ReLU, squared loss"))


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
    assert len(attacks) == 4 * 2 * 2
    ours = [row for row in attacks if (row["method"], row["ratio"]) == ("exhume", "5.0")]
    assert [float(row["recovered"]) for row in ours] == [1.0, 1.0]
    text = (finished / "law.html").read_text()
    assert text.index("Labels fit from") < text.index("<svg")
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert "exhume law --data sphere --dim 8 --samples 3 --ratios 0.5:5:4 --seeds 2" in text


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
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"holds something else \(thesis\.tex\)"):
        command.law(**TINY, out=tmp_path)
    with pytest.raises(InputError, match="is a file"):
        command.law(**TINY, out=tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_a_killed_write_left_is_no_obstacle(tmp_path: Path) -> None:
    for name in (*command.FILES, ".law.html.abc", ".table.csv.x_1", ".sweep.json.0"):
        (tmp_path / name).touch()
    command.check_folder(tmp_path)
    (tmp_path / ".thesis.tex.abc").touch()
    with pytest.raises(InputError, match=r"holds something else \(\.thesis\.tex\.abc\)"):
        command.check_folder(tmp_path)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("redact", [False, True])
def test_pictures_are_shown_unless_redacted(redact: bool, tmp_path: Path) -> None:
    command.law(
        data="digits", size=4, classes="parity", samples="3", ratios="4", seeds=1, products=300,
        methods="exhume", out=tmp_path, redact=redact,
    )  # fmt: skip
    text = (tmp_path / "law.html").read_text()
    assert ("data:image/png;base64," in text) is not redact
    assert ("Redacted" in text) is redact
    assert "picture" not in (tmp_path / "table.csv").read_text()


def test_redacted_cells_keep_no_picture() -> None:
    given = {
        **{"data": "digits", "dim": None, "samples": "3", "ratios": "2,4", "seeds": 2},
        **{"methods": None, "activations": "relu", "architectures": "random_features"},
        **{"losses": "squared", "ranks": None, "size": 4, "classes": "parity", "products": 10},
    }
    for redact, kept in ((False, 2), (True, 0)):
        cells = command.planned(given | {"redact": redact}).cells()
        assert sum(getattr(cell, "keep", 0) > 0 for cell in cells) == kept


def test_all_cells_failing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(cells: Sequence[Any], **_: Any) -> list[Record]:
        return [Record(cell, None, "MemoryError: no", 0.0) for cell in cells]

    monkeypatch.setattr(sweep, "run", run)
    with pytest.raises(InputError, match=r"all .* cells failed, the first one with MemoryError"):
        command.law(**TINY, out=tmp_path)


def test_the_page_says_what_failed(records: list[Record]) -> None:
    failed = [*records, Record(Attack(dim=8, samples=3), None, "ValueError: <b>", 0.0)]
    summary = summarise(failed)
    text = page.render(summary, failed, draw(summary), "exhume law")
    assert "1 cell failed" in text and "ValueError: &lt;b&gt;" in text and "<b>." not in text


@pytest.mark.parametrize("parse", [command.whole_numbers, command.words, command.spaced])
def test_parsers_name_the_option(parse: Callable[[str, str], Any]) -> None:
    with pytest.raises(InputError, match=r"^here: expected"):
        parse("here", " , ")
