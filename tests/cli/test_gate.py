"""The gate: three exit codes, for a run that was scored, and as an option of audit and score."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from commands import exhume_
from exhume import data
from exhume.auditing.folder import RESULT, SCORE
from exhume.models.folder import TRUTH
from runs import make_run, result_of

Capture = pytest.CaptureFixture[str]
ALL, NONE = "recognisable=1,exact=1", "recognisable=0.5,exact=1"


def code(*words: object) -> int:
    """The exit code of a command."""
    try:
        exhume_(*words)
    except SystemExit as end:
        return int(str(end.code))
    return 0


@pytest.fixture
def scored(workshop: Path, tmp_path: Path) -> Path:
    """A run in which everything came back, with its score."""
    shutil.copytree(workshop / "run", tmp_path / "run")
    exhume_("score", tmp_path / "run", "--truth", workshop / "model" / TRUTH)
    return tmp_path / "run"


def changed(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_three_exit_codes(scored: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scored.parent)  # a run is called run unless another name is given
    assert code("gate", "--fail-over", ALL) == 0
    assert "4 of 4 training samples came back exact" in (said := capsys.readouterr().out)
    assert "gate: within the limit" in said
    assert code("gate", scored, f"--fail-over={NONE}") == 1
    assert "over the limit of 50" in (said := capsys.readouterr().out) and "gate: over" in said
    (scored / SCORE).unlink()
    assert code("gate", scored, "--fail-over", ALL) == 2
    assert "exhume score RUN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--fail-over recognisable=0.05"),
        (("--fail-over", "recovered"), "expected a grade and a share"),
        (("--fail-over", "recovered=2"), "expected a grade and a share"),
        (("--fail-over", "recovered=nan"), "expected a grade and a share"),
        (("--fail-over", "leaked=0.1"), "expected one of exact, recovered, recognisable"),
    ],
)
def test_what_the_gate_cannot_be_asked(
    words: tuple[str, ...], said: str, scored: Path, capsys: Capture
) -> None:
    assert code("gate", scored, *words) == 2
    assert said in capsys.readouterr().err


def test_a_search_that_was_cut_off_does_not_pass(scored: Path, capsys: Capture) -> None:
    record = json.loads((scored / SCORE).read_text())
    changed(scored / SCORE, score=record["score"] | {"recovered": 0.0, "exact": 0.0})
    changed(scored / RESULT, outcome="budget")
    assert code("gate", scored, "--fail-over", "recovered=0.1") == 2
    assert "shows nothing" in capsys.readouterr().err.replace("\n", " ")
    assert code("gate", scored, "--fail-over", "recovered=0.1", "--anyway") == 0
    assert "caution: The search did not converge" in capsys.readouterr().out


def test_a_search_that_failed_does_not_pass(scored: Path) -> None:
    record = json.loads((scored / SCORE).read_text())
    nothing = record["score"] | {"recovered": 0.0, "exact": 0.0}
    changed(scored / SCORE, score=nothing, residual_at_truth=1e-12)
    for outcome, residual, ends in (("stalled", 0.7, 2), ("stalled", 1e-9, 0), ("settled", 0.7, 0)):
        changed(scored / RESULT, outcome=outcome, residual=residual)
        assert code("gate", scored, "--fail-over", "recovered=0.1") == ends
    changed(scored / RESULT, outcome="stalled", residual=0.7)
    assert code("gate", scored, "--fail-over", "recovered=0.1", "--anyway") == 0


def test_a_score_of_another_run_is_none(scored: Path, capsys: Capture) -> None:
    record = json.loads((scored / SCORE).read_text())
    for entry in record["inputs"]:
        entry["sha256"] = "0" * 64
    changed(scored / SCORE, inputs=record["inputs"])
    assert code("gate", scored, "--fail-over", ALL) == 2
    assert "other candidates" in capsys.readouterr().err


def digits(folder: Path, samples: int = 20) -> tuple[Path, Path]:
    """A run in which digits of one's own are as plain as can be, and of another size; its truth."""
    known = replace(data.load("digits", samples, centre="pixels"), name="own")
    data.save(known, folder / "truth")
    result = result_of(samples, (8, 8), premise="margin")
    return make_run(folder / "run", 2 * known.inputs, {"model": None}, result), folder / "truth"


def test_pictures_without_a_control_do_not_pass(tmp_path: Path, capsys: Capture) -> None:
    run, truth = digits(tmp_path)
    asked = ("score", run, "--truth", truth, "--fail-over")
    assert code(*asked, "recognisable=0.05") == 2
    said = capsys.readouterr()
    assert "Not measured: 20 of 20" in said.out.replace("\n", " ") and "within" not in said.out
    assert "0 of 20 training samples came back recognisable" in said.out
    assert "gate: it cannot be said" in said.out
    assert "and 20 more were not measured" in said.out
    assert "--held-out" in said.err
    text = (run / "report.html").read_text()
    assert "at least; 20 more were not measured" in text
    assert 'aria-label="20 not measured"' in text  # the bar does not say: not found
    assert code("gate", run, "--fail-over", "recognisable=0.95") == 2
    assert code("gate", run, "--fail-over", "recovered=0,recognisable=1") == 0  # either way
    assert code(*asked, "recognisable=0.05", "--held-out", truth) == 2
    said = capsys.readouterr().err.replace("\n", "")
    assert f"{truth}: 20 of 20 held-out images are training images" in said
    others = data.held_out(data.load("digits", 20, centre="pixels"))
    data.save(others, tmp_path / "others")
    assert code(*asked, "recognisable=0.05", "--held-out", tmp_path / "others") == 1


@pytest.mark.parametrize("count", [3, 11])
def test_a_few_pictures_take_more_held_out_ones(count: int, tmp_path: Path) -> None:
    run, truth = digits(tmp_path, samples=3)
    data.save(data.held_out(data.load("digits", 3, centre="pixels"), count), tmp_path / "others")
    asked = ("score", run, "--truth", truth, "--held-out", tmp_path / "others", "--fail-over")
    assert (code(*asked, "recognisable=0.05") == 2) == (count == 3)


def test_a_defect_is_not_a_leak(scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("exhume.cli.gate.judge", broken)
    assert code("gate", scored, "--fail-over", ALL) == 2


def test_the_gate_of_score(workshop: Path, scored: Path) -> None:
    truth = ("--truth", workshop / "model" / TRUTH)
    assert code("score", scored, *truth, "--fail-over", ALL) == 0
    assert code("score", scored, *truth, "--fail-over", NONE) == 1
    before = (scored / SCORE).read_bytes()
    assert code("score", scored, *truth, "--fail-over", "recovered") == 2
    assert (scored / SCORE).read_bytes() == before


def test_the_gate_of_audit(workshop: Path, tmp_path: Path, capsys: Capture) -> None:
    run, words = tmp_path / "run", ("audit", workshop / "model", "--samples", 4, "--device", "cpu")
    others = workshop / "model" / TRUTH  # of no use for what is no image, and noted
    assert code(*words, "--out", run, "--fail-over", NONE, "--held-out", others) == 1
    roles = [entry["role"] for entry in json.loads((run / SCORE).read_text())["inputs"]]
    assert roles == ["result", "candidates", "truth", "held out"]
    assert code(*words, "--out", tmp_path / "a", "--fail-over", ALL, "--truth", "none") == 2
    assert "--truth" in capsys.readouterr().err
    assert code(*words, "--out", tmp_path / "b", "--truth", workshop / "model" / TRUTH) == 2
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()  # nothing was begun
    data.save(data.sphere(19, 4), short := tmp_path / "short.safetensors")
    for unseen in ("none", short):  # there is no such file, and it is of another model
        assert code(*words, "--out", tmp_path / "d", "--held-out", unseen) == 2
    assert not (tmp_path / "d").exists()
    data.save(data.sphere(20, 4, seed=7), tmp_path / "other.safetensors")
    other = ("--truth", tmp_path / "other.safetensors", "--fail-over", NONE)
    assert code(*words, "--out", tmp_path / "c", *other) == 0
