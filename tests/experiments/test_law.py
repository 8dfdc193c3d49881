"""The law: its grids, its summary, its figures, its page, and the command that makes them."""

import csv
import io
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import auto_cli
from PIL import Image

from exhume import sweep
from exhume.cli import law as command
from exhume.errors import InputError
from exhume.experiments import Attack, LabelFit, page
from exhume.experiments.law import Law, LawCurve, Place, draw, summarise, widths
from exhume.experiments.table import Table
from exhume.report import plots
from exhume.sweep import Record

Patch = pytest.MonkeyPatch
TINY: Any = {"dim": "8", "samples": "3", "ratios": "0.5:5:2", "seeds": 1, "products": 100}
BAD_RATIOS = ("", "0:10", "-1,2", "nan", "1:inf", "one", "5:1", "1:5:1", "1:5:2:2", ":5", "1:2:")
IMAGES = {"data": "digits", "dim": None}
SMALL = Law(dims=(8,), samples=(3,), ratios=(0.1, 0.5, 4.0), seeds=2, products=500)
TOLD, ESTIMATED = "tansley2026, subspace told", "tansley2026, subspace estimated"


def here(cells: Sequence[Any], **_: Any) -> list[Record]:
    return [Record(cell, cell.run("cpu"), None, 0.5) for cell in cells]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return here(SMALL.cells())


def test_a_grid_is_every_combination() -> None:
    models = {"activations": ("relu", "gelu"), "losses": ("squared", "logistic")}
    sizes = {"dims": (8, 9), "samples": (3,), "ranks": (None, 2), "ratios": (1.0, 2.0)}
    cells = Law(**sizes, seeds=3, **models).cells()
    attacks, fits = ([c for c in cells if isinstance(c, kind)] for kind in (Attack, LabelFit))
    assert len(attacks) == 2 * 2 * 2 * 3 * 2 * 2 * 2 and len(set(cells)) == len(cells)
    assert {(a.dim, a.rank, a.seed) for a in attacks} == {(f.dim, f.rank, f.seed) for f in fits}
    assert {fit.width for fit in fits if fit.dim == 8} == set(widths(3, 2 * 24))
    networks = replace(SMALL, architectures=("two_layer",)).cells()
    assert {type(cell) for cell in networks} == {Attack}


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
        *[({"ratios": ratios}, "ratios: expected numbers above 0") for ratios in BAD_RATIOS],
        ({"ratios": "0.2:10:1000000000"}, "1,000,000,000 of them are more than the 100,000"),
        ({"ratios": "1,1"}, "ratios: expected different values"),
        ({"seeds": 0}, "seeds: .* at least 1, got 0"), ({"seeds": 10**9}, "4,000,000,000 attacks"),
        ({"activations": ""}, "activations: expected words"), ({"engine": "slurm"}, "slurm"),
        ({"samples": "three"}, "samples: expected whole numbers with commas"),
        ({"ranks": "4,9"}, "rank: expected at most the dimension, 8"),
        ({**IMAGES, "data": "cifar10"}, "cifar10 is not in"), ({**IMAGES, "size": 3}, "size=3"),
        ({**IMAGES, "data": "faces", "samples": "1000"}, "100"), ({"workers": 0}, "workers"),
        ({**IMAGES, "samples": "500", "ratios": "1,9999"}, "319,968,000"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(options: Any, words: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    with pytest.raises(InputError, match=words):
        command.law(**{**TINY, **options}, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_summary_is_over_the_seeds(records: list[Record]) -> None:
    summary = summarise(records)
    ours = next(curve for curve in summary.attacks if curve.method == "exhume")
    rows = Table.of(records, Attack).where(method="exhume", ratio=4.0).present("error")
    first, _, last = ours.places
    assert (last.width, last.seeds) == (96, 2) and len(rows) == 2
    assert last.error == pytest.approx(sum(rows) / 2)
    assert min(rows) <= last.low <= last.error <= last.high <= max(rows)
    assert [place.recovered for place in ours.places] == [0.0, 0.0, 1.0]
    assert first.error is None and 12 < ours.start < 96  # the first is undetermined
    (fit,) = summary.fits
    assert fit.counted == 3 <= fit.start <= 6  # a sample may be where no ReLU of three is on
    assert fit.sentence.endswith(f"n = 3: labels fit from p = {fit.start:.0f} on (counted: 3).")


def curve(*recovered: float, **setting: Any) -> LawCurve:
    """A curve of shares that come back at p = 720, 1,440, …"""
    places = (Place(720.0 * 2**k, 1 - y, recovered=y) for k, y in enumerate(recovered))
    own = LawCurve("random_features", "relu", "squared", 60, 12, None, 1, "exhume", (*places,))
    return replace(own, **setting)


@pytest.mark.parametrize(
    ("own", "name", "counted", "measured", "ratio"),
    [
        (curve(0.0, 1.0), "exhume", "720", "1,018", "1.41"),
        (curve(1.0, 1.0), "exhume", "720", "≤ 720", "≤ 1"),
        (curve(1.0, 0.0), "exhume", "720", "never", "–"),
        (curve(0.0, 1.0, rank=4), "exhume", "720", "1,018", "1.41"),
        (curve(0.0, 1.0, rank=4, method="tansley2026"), TOLD, "48", "1,018", "21.2"),
        (curve(method="tansley2026"), ESTIMATED, "720", "never", "–"),
        (curve(rank=2, architecture="vit", method="tansley2026"), ESTIMATED, "24", "never", "–"),
        (curve(1.0, method="iurada2025"), "published momentum", "720", "≤ 720", "≤ 1"),
        (curve(1.0, method=None), "labels", "12", "≤ 720", "≤ 60"),
        (curve(0.0, 1.0, outputs=10), "exhume", "83", "1,018", "12.3"),
    ],
)
def test_thresholds(own: LawCurve, name: str, counted: str, measured: str, ratio: str) -> None:
    assert own.row[4:] == [name, counted, measured, ratio]
    assert ("at no p tried" if measured == "never" else f"from p = {measured} on") in own.sentence


def test_failed_cells_are_listed_and_left_out(records: list[Record]) -> None:
    error: Any = {"values": None, "error": "ValueError: <b>"}
    broken = [replace(r, **error) if getattr(r.cell, "seed", 0) == 1 else r for r in records]
    summary = summarise(broken)
    assert len(summary.failed) == sum(r.error is not None for r in broken) > 0
    assert {place.seeds for curve in summary.attacks for place in curve.places} == {1}
    text = page.render(summary, broken, draw(summary), "exhume law")
    assert f"{len(summary.failed)} cells failed" in text
    assert "ValueError: &lt;b&gt;" in text and "<b>." not in text


def test_the_phase_diagram_marks_thresholds_sizes_models_and_methods(records: list[Record]) -> None:
    ranks = replace(SMALL, dims=(12,), ranks=(2, 6), ratios=(0.5, 4.0), seeds=1, products=20)
    ranks = replace(ranks, methods=("exhume", "tansley2026"))
    one, two = ("p = n = 3", "p = dn = 24", "labels fit", "random guess"), ("label error",)
    three = (*two, "d = 8, n = 3", "d = 12, n = 3, r = 2", "n = 3, r = 6", TOLD)
    alone = (*one, *two, "data determined", "published momentum")
    for more, words in (([], alone), (ranks.cells(), three)):
        summary = summarise([*records, *here(more)])
        drawn = draw(summary)
        text = plots.svg(drawn)
        assert ElementTree.fromstring(text).tag.endswith("svg") and text == plots.svg(draw(summary))
        assert not [word for word in words if word not in text]
        with Image.open(io.BytesIO(plots.png(drawn))) as picture:
            assert picture.format == "PNG" and picture.width >= 1200
        inline = plots.inline(drawn)
        assert inline.startswith("<svg") and "var(--accent)" in inline
        assert plots.ACCENT not in inline


def test_the_command_writes_everything_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    finished = tmp_path / "new"
    words = ["law", *(f"--{key}={value}" for key, value in TINY.items()), "--workers=1"]
    run = partial(auto_cli, {"law": command.law}, args=[*words, f"--out={finished}"])
    run()
    assert {path.name for path in finished.iterdir()} <= set(command.FILES)
    assert all(path.stat().st_mode & 0o077 == 0 for path in finished.iterdir())
    with open(finished / "table.csv", newline="") as file:
        attacks = [row for row in csv.DictReader(file) if row["method"]]
    assert len(attacks) == 2 * 2
    ours = [row for row in attacks if (row["method"], row["ratio"]) == ("exhume", "5.0")]
    assert [float(row["recovered"]) for row in ours] == [1.0]
    text = (finished / "law.html").read_text()
    assert text.index("labels fit from") < text.index("<svg")
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert "exhume law --data sphere --dim 8 --samples 3 --ratios 0.5:5:2 --seeds 1" in text
    cells = {(path, path.stat().st_mtime_ns) for path in (finished / "cells").iterdir()}
    before = {name: (finished / name).read_bytes() for name in ("law.svg", "law.png", "table.csv")}
    min(cells)[0].unlink()  # as if it had been stopped
    run()
    after = {(path, path.stat().st_mtime_ns) for path in (finished / "cells").iterdir()}
    assert len(cells - after) == 1 and len(after) == len(cells)
    assert before == {name: (finished / name).read_bytes() for name in before}


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    for name in (*command.FILES, ".law.html.abc", ".table.csv.x_1", ".sweep.json.0", ".lock"):
        (tmp_path / name).touch()
    command.check_folder(tmp_path)  # what a killed write left is no obstacle
    there = {path.name for path in tmp_path.iterdir()}
    (tmp_path / ".thesis.tex.abc").write_text("mine")
    for out, words in ((tmp_path, r"else \(\.thesis"), (tmp_path / ".thesis.tex.abc", "is a file")):
        with pytest.raises(InputError, match=words):
            command.law(**TINY, out=out)
    assert {path.name for path in tmp_path.iterdir()} == there | {".thesis.tex.abc"}


@pytest.mark.parametrize("redact", [False, True])
def test_pictures_are_shown_or_redacted(redact: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(sweep, "run", lambda cells, **_: ran.extend(cells) or here(cells))
    images = {"data": "digits", "size": 4, "classes": "parity", "samples": "3", "ratios": "4"}
    command.law(**images, seeds=2, products=50, out=tmp_path, redact=redact)
    assert sum(getattr(cell, "keep", 0) > 0 for cell in ran) == (not redact)
    text = (tmp_path / "law.html").read_text()
    assert text.count("data:image/png;base64,") == (not redact)  # first seed and method
    assert ("Redacted" in text) is redact
    assert "picture" not in (tmp_path / "table.csv").read_text()


def test_all_cells_failing_is_an_error(monkeypatch: Patch, tmp_path: Path) -> None:
    failed = partial(Record, values=None, error="MemoryError: no", seconds=0.0)
    monkeypatch.setattr(sweep, "run", lambda cells, **_: [failed(cell) for cell in cells])
    with pytest.raises(InputError, match=r"all .* cells failed, the first one with MemoryError"):
        command.law(**TINY, out=tmp_path)
