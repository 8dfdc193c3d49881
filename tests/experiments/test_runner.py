"""`exhume reproduce`: results that are written, a page that follows from them."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonargparse
import pytest

from exhume.cli.reproduce import reproduce
from exhume.errors import InputError
from exhume.experiments import runner
from exhume.experiments.cells.identifiability import Rank, TensorTerms
from exhume.experiments.claims import CLAIMS
from exhume.experiments.claims.claim import Claim, Finding
from exhume.experiments.runner import document, missing, perform, publish, stored
from exhume.experiments.table import Table
from exhume.report import plots
from exhume.sweep import Record

DOCS = Path(__file__).parents[2] / "docs"
Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Half:
    seed: int
    data: str = "sphere"


HALVES = (Half(1), Half(2))


def judge(found: Any) -> Finding:
    total = sum(row["half"] for row in Table.of(found, Half))
    return Finding(f"{total:g} in all", "holds" if total > 1 else "does not hold", "A | note.")


def draw(found: Any) -> Any:
    halves = Table.of(found, Half).curve("half", "seed")
    return plots.sheet(plots.lines("Halves", {"half": halves}, "seed", "half"))


def tiny(name: str = "sphere-thresholds", cells: Any = HALVES) -> Claim:
    return Claim(name, "A source", "A claim.", (1, 1), lambda scale: [*cells], draw, judge)


@pytest.fixture
def here(monkeypatch: Patch) -> None:
    """Run cells in this process: workers could not import those of a test."""

    def one(cell: Half) -> Record:
        if cell.seed == 9:
            return Record(cell, None, "ValueError: nine", 0.5)
        return Record(cell, {"half": cell.seed / 2, "picture": "long"}, None, 0.5)

    monkeypatch.setattr(runner.sweep, "run", lambda cells, **_: [one(cell) for cell in cells])


def test_a_result_holds_what_it_takes_to_find_it_again(here: None, tmp_path: Path) -> None:
    folder = tmp_path / "sphere-thresholds-small"
    result = perform(tiny(cells=[Half(seed) for seed in range(1, 22)]), "small", folder)
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["figure"] == "111 in all" and result["verdict"] == "holds"
    assert result["command"] == "exhume reproduce sphere-thresholds --scale small"
    assert (result["cells"], result["failed"], result["seconds"]) == (21, 1, 10.5)
    assert set(result) >= {"claim", "source", "note", "hardware", "torch", "exhume", "date"}
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figure.svg").read_text()
    table = (folder / "table.csv").read_text()
    assert "ValueError: nine" in table and "0.5" in table and "long" not in table
    many = perform(tiny(cells=[Half(1), Half(2), Half(9)]), "small", tmp_path / "out")
    assert many["verdict"] == "not decided" and "ValueError: nine" in many["note"]


def test_documents_keep_what_is_not_among_the_new(here: None, tmp_path: Path) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    known = {name: tiny(name) for name in ("sphere-thresholds", "signs")}
    with pytest.raises(InputError, match="no results in"):
        publish(tmp_path / "nothing", docs, known)
    assert not docs.exists()
    perform(known["signs"], "small", out / "signs-small")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: expected a folder"):
        reproduce(out=out, document=tmp_path / "file")
    (out / "else").mkdir()
    (out / "else" / "result.json").write_text(json.dumps({"name": "else", "scale": "small"}))
    assert publish(out, docs, known) == [("signs-small", None)]
    perform(known["sphere-thresholds"], "full", tmp_path / "new" / "sphere-thresholds-full")
    publish(tmp_path / "new", docs, known)
    assert [result["name"] for result in stored(docs)] == ["signs", "sphere-thresholds"]
    page = (docs / "reproduction.md").read_text()
    assert page == document(stored(docs), list(known))
    assert page.index("## sphere-thresholds") < page.index("## signs")
    assert "| [signs](#signs) | A claim. | 1.5 in all | holds | small |" in page
    assert "![signs, small](reproduction/signs-small.svg)" in page
    assert (docs / "reproduction" / "signs-small.svg").exists()
    (out / "signs-small" / "figure.svg").write_text("x" * 200_001)
    ((_, why),) = publish(out, tmp_path / "other", known)
    assert "200,001" in why and not stored(tmp_path / "other")[0]["drawn"]
    assert "signs-small.svg" not in (tmp_path / "other" / "reproduction.md").read_text()


@pytest.mark.usefixtures("here")
def test_all_leaves_out_what_cannot_be(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path / "nothing"))
    assert missing(CLAIMS["two-layer"], "small") is None
    assert CLAIMS["two-layer"].data("full") == ["cifar10"]
    known = {"sphere-thresholds": tiny(), "signs": tiny("signs", [Half(1, "cifar10")])}
    monkeypatch.setattr("exhume.experiments.claims.CLAIMS", known)
    reproduce("all", out=tmp_path / "out", device="cpu")
    said = capsys.readouterr().out
    assert "signs left out" in said and "verdict: holds" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sphere-thresholds-small"]
    with pytest.raises(InputError, match="cifar10"):
        reproduce("signs", out=tmp_path / "out", device="cpu")
    reproduce(out=tmp_path / "out", document=tmp_path / "docs")
    assert "sphere-thresholds" in (tmp_path / "docs" / "reproduction.md").read_text()


def test_list_names_every_claim(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    jsonargparse.auto_cli(reproduce, args=["--list=true"])
    said = capsys.readouterr().out
    assert len(CLAIMS) == 18 and all(name in said for name in CLAIMS)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({}, "--list"), ({"name": "nothing"}, "sphere-thresholds"),
     ({"name": "all", "scale": "full"}, "one by one"), ({"name": "signs", "workers": 0}, "workers"),
     ({"name": "signs", "device": "abacus"}, "abacus")],
)  # fmt: skip
def test_bad_requests(arguments: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=word):
        reproduce(**arguments, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_claim_through_the_engine(tmp_path: Path) -> None:
    cells = [Rank(3, 3), TensorTerms(3, 2, 2)]
    claim = replace(CLAIMS["identifiability"], cells=lambda scale: cells)
    first = perform(claim, "small", tmp_path / "out", workers=1)
    assert first["failed"] == 0 and first["verdict"] == "not decided"
    assert perform(claim, "small", tmp_path / "out", workers=1) == first


def test_the_page_follows_from_the_stored_results() -> None:
    results = stored(DOCS)
    page = (DOCS / "reproduction.md").read_text()
    assert page == document(results, list(CLAIMS))
    assert "0.7 to 3 equations for each unknown" in " ".join(page.split())
    for result in results:
        assert result["verdict"] in {"holds", "holds in part", "does not hold", "not decided"}
        assert result["claim"] == CLAIMS[result["name"]].sentence
        name = f"{result['name']}-{result['scale']}"
        assert (DOCS / "reproduction" / f"{name}.svg").exists() == result["drawn"]
    there = {(result["name"], result["scale"]) for result in results}
    images = {(name, "full") for name in ("cifar10-thresholds", "tiny-imagenet")}
    assert there >= {(name, "small") for name in CLAIMS} | images
