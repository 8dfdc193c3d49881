import runpy
from functools import partial
from pathlib import Path

import pytest

import exhume

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SHOWN = {
    "audit_your_own_model": ["settled, residual", "recovered 100%"],
    "finetuned": ["not lazy", "converged", "recovered 100%, exact 100%"],
    "first_audit": ["converged: 20 candidates", "recovered 100%, exact 100%"],
    "frozen_backbone": ["10 candidates", "converged", "recovered 100%, exact 100%"],
    "weights_alone": ["candidates leave", "of others 0", "cosine over 0.9"],
    "reading_a_report": ["All 6 samples recovered", "None of 6 samples recovered", "no such trace"],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_shows_what_it_says(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # what it writes, it writes here
    monkeypatch.setattr(exhume, "audit", partial(exhume.audit, controls=False))  # in half the time
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    assert [words for words in ["residual", *SHOWN.get(path.stem, [])] if words not in shown] == []
