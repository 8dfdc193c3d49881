"""Whatever ends a command from outside: a sentence, exit code 2, no traceback."""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import exhume_
from exhume.cli import main
from exhume.cli.console import new_console, table
from exhume.errors import InputError

Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]

ENDS = [
    (OSError(errno.ENOSPC, "No space left on device", "run/x"), "run/x: No space left on device"),
    (PermissionError(errno.EACCES, "Permission denied", "model"), "model: Permission denied"),
    (np.linalg.LinAlgError("SVD did not converge"), "scale of the weights"),
    (torch.linalg.LinAlgError("linalg.eigh: failed"), "scale of the weights"),
    (MemoryError(), "memory"),
    (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
    (InputError("tensor \x1b[2Jlayer\x07: is damaged."), "tensor \ufffd[2Jlayer\ufffd"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "Traceback"),  # a fault of ours
]


@pytest.mark.parametrize(("error", "words"), ENDS)
def test_errors_are_sentences(
    error: Exception, words: str, monkeypatch: Patch, capsys: Capture
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules["exhume.cli.main"], "_run", fails)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["score", "run"])
    said = capsys.readouterr().err
    assert words in said and ("Traceback" in said) == (words == "Traceback")
    assert "\x1b" not in said and "\x07" not in said


class Closed(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_nobody_listens(workshop: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(SystemExit, match=r"^2$"):
        exhume_("report", workshop / "run")
    monkeypatch.setattr(sys, "stdout", None)
    exhume_("report", workshop / "run")
    sys.stdout.close()
    assert capsys.readouterr().err == ""


def test_a_terminal_without_greek(workshop: Path, monkeypatch: Patch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    exhume_("report", workshop / "run")
    new_console().print("√d", markup=False)
    sys.stdout.flush()
    assert raw.getvalue().endswith(b"?d\n")


def test_names_cannot_steer_a_terminal(capsys: Capture) -> None:
    name = "\x1b]0;owned\x07\x9b2J\u202elayer"
    new_console().print(f"warning: {name}", markup=False)
    new_console().print(table(("name",), [[name]]))
    said = capsys.readouterr().out
    assert "owned" in said and not set("\x1b\x07\x9b\u202e") & set(said)


def test_a_pipe_is_not_waited_for(tmp_path: Path, capsys: Capture) -> None:
    for name in ("model/card.json", "run/result.json", "w.pt", "card.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    own = ("--trained", tmp_path / "w.pt", "--input-shape", 3, "--initial", "zero-head")
    for words in (
        ("audit", tmp_path / "model"),
        ("report", tmp_path / "run"),
        ("audit", "m:f", *own),
        ("audit", "m:f", "--trained", "w.pt", "--card", tmp_path / "card.yaml"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            exhume_(*words, *(["--out", tmp_path / "new"] if words[0] == "audit" else []))
        assert "is a pipe or a device" in capsys.readouterr().err
