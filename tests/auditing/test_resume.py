"""Going on after an end: the same bits as a run that was left alone."""

import errno
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import save_file

from commands import FINISHED, audit, events_of, names, result_of, same, tree
from exhume.auditing.folder import BEFORE, CANDIDATES, CHECKPOINT, CONFIG, EVENTS, RESULT, RunFolder
from exhume.auditing.run import Event, Recorder
from exhume.auditing.settings import Settings
from exhume.cli import main
from exhume.errors import InputError
from exhume.files import LOCK, held
from exhume.methods import progress
from problems import gaussian

Patch = pytest.MonkeyPatch
Leave = Callable[[Path], object]

BOTH = (CHECKPOINT, BEFORE)


@pytest.fixture(autouse=True)
def every_move(monkeypatch: Patch) -> None:
    """An event for every move, so that a test can interrupt at each."""
    monkeypatch.setattr("exhume.auditing.run.EVENT_SECONDS", 0.0)


def interrupted(settings: Settings, out: Path, move: int) -> Path:
    """A run that Ctrl-C ends at one of its moves."""
    moves = itertools.count(1)

    def show(_: Event) -> None:
        if next(moves) == move:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(settings, out, show=show)
    assert (out / CHECKPOINT).exists() and not (out / RESULT).exists()
    assert stat.S_IMODE((out / CHECKPOINT).stat().st_mode) == 0o600
    return out


@pytest.mark.parametrize(("samples", "stops"), [(4, 99), (None, 6)])
def test_stopped_at_any_move(samples: Any, stops: int, settings: Settings, tmp_path: Path) -> None:
    """A run that goes on is one that was left alone; that of other methods: `test_progress`."""
    events: list[Event] = []
    settings = replace(settings, samples=samples, controls=False)
    audit(settings, tmp_path / "whole", show=events.append)
    for move in range(1, len(events) + 1, max(1, len(events) // stops)):
        out = interrupted(settings, tmp_path / f"{move}", move)
        audit(settings, out, resume=True)
        assert same(out, tmp_path / "whole"), f"interrupted at move {move} of {len(events)}"
        assert [event["step"] for event in events_of(out)] == [event.step for event in events]
        assert names(out) == FINISHED


def test_the_seconds_of_earlier_sittings_count(settings: Settings, tmp_path: Path) -> None:
    limited = replace(settings, time_limit=1e6)
    folder = RunFolder(interrupted(limited, tmp_path / "run", 3))
    folder.save(progress.unpack(settings.open().problem, folder.resume(limited)), 2e6)
    result = audit(limited, folder.path, resume=True)
    assert (result["outcome"], result["steps"]) == ("budget", 3) and result["seconds"] >= 2e6


def late_events(out: Path) -> None:
    """Events after the checkpoint, the last of them cut short."""
    kept = (out / EVENTS).read_text()
    late = {**json.loads(kept.splitlines()[-1]), "seconds": 1e6, "phase": "late"}
    (out / EVENTS).write_text(kept + json.dumps(late) + "\n" + '{"seconds": 0.0, "st')


def without(*names: str) -> Leave:
    return lambda out: [(out / name).unlink(missing_ok=True) for name in names]


def torn(out: Path) -> None:
    """The last checkpoint damaged by a bit, which its hash shows."""
    content = bytearray((out / CHECKPOINT).read_bytes())
    content[-1] ^= 1
    (out / CHECKPOINT).write_bytes(content)


def half_finished(out: Path) -> None:
    for name in (CANDIDATES, f".{CHECKPOINT}.abcdefgh"):
        (out / name).write_bytes(b"from another time")


@pytest.mark.parametrize(
    "leave", [late_events, without(CHECKPOINT), without(*BOTH, EVENTS), half_finished, torn]
)
def test_a_run_killed_between_two_files_goes_on(
    leave: Leave, settings: Settings, workshop: Path, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 5)
    leave(out)
    audit(settings, out, resume=True)
    events = events_of(out)
    assert "late" not in {event["phase"] for event in events}
    assert [event["step"] for event in events][:4] == [1, 2, 3, 4]
    assert same(out, workshop / "run") and names(out) == FINISHED


OTHER = [("samples", 5), ("samples", None), ("seed", 1)]
OTHER += [("method", "iurada2025"), ("product_limit", 900)]


class Killed(BaseException):
    """As SIGKILL: nobody expects it, and nothing is cleaned up after it."""


def failing(monkeypatch: Patch, at: int, how: str) -> None:
    """Let the run end at one of its renamings: killed before or after it, or the disk is full."""
    calls, rename, remove = itertools.count(1), os.replace, os.unlink

    def replace_(source: Path, target: Path) -> None:
        if next(calls) < at:
            return rename(source, target)
        if how == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if how == "after":
            rename(source, target)
        monkeypatch.setattr(os, "unlink", lambda *_: None)
        raise Killed

    monkeypatch.setattr(os, "replace", replace_)
    monkeypatch.setattr(os, "unlink", remove)


@pytest.mark.parametrize("how", ["before", "after", "full"])
def test_nothing_is_lost_at_any_renaming(
    how: str, settings: Settings, workshop: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("exhume.auditing.run.CHECKPOINT_SECONDS", 0.0)
    ends = 0
    for at in itertools.chain(range(1, 9), itertools.count(10, 19)):
        out = tmp_path / f"{at}"
        with monkeypatch.context() as patch:
            failing(patch, at, how)
            try:
                audit(settings, out)
                break
            except (Killed, InputError) as error:
                assert how != "full" or "No space left" in str(error)
        ends += 1
        whole = [file for file in (out / name for name in BOTH) if file.exists()]
        assert at < 4 or whole  # config, events and the first checkpoint come first
        if (out / CONFIG).exists() and not (out / RESULT).exists():
            audit(settings, out, resume=True)
            assert same(out, workshop / "run") and names(out) == FINISHED
    assert ends > 8


def test_a_failure_after_the_search_keeps_what_was_found(
    settings: Settings, workshop: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("exhume.auditing.run.judge", Mock(side_effect=RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            audit(settings, out)
    assert (out / CANDIDATES).read_bytes() == (workshop / "run" / CANDIDATES).read_bytes()
    assert events_of(out)[-1]["phase"] == "judging" and not (out / RESULT).exists()
    audit(settings, out, resume=True)
    assert same(out, workshop / "run") and names(out) == FINISHED


def test_two_runs_never_share_a_folder(settings: Settings, tmp_path: Path) -> None:
    out = interrupted(settings, tmp_path / "run", 2)
    before = tree(out)
    with RunFolder(out).held(resume=True):
        with pytest.raises(InputError, match=rf"run: process {os.getpid()} on .* is at work here"):
            audit(settings, out, resume=True)
        assert {name: kept for name, kept in tree(out).items() if name != LOCK} == before
    (out / LOCK).write_text("process 1 on elsewhere since long ago")  # killed: its lock is gone
    audit(settings, out, resume=True)
    assert names(out) == FINISHED


def test_what_goes_wrong_while_a_folder_is_held_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="of another"), held(tmp_path):
        raise FileNotFoundError("of another")
    assert not (tmp_path / LOCK).exists()
    with held(tmp_path):
        (tmp_path / LOCK).unlink()
    with held(tmp_path):
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).write_text("of another")
    assert (tmp_path / LOCK).read_text() == "of another"


def test_without_locks_a_holder_that_is_dead_is_not_minded(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    mine, host = tmp_path / LOCK, socket.gethostname()
    for said, free in (
        (f"process {2**22 + 1} on {host} since", True),  # above any number of a process
        (f"process {os.getpid()} on {host} since", False),
        ("process 1 on elsewhere since", False),
        ("", True),
    ):
        mine.write_text(said)
        words = f"{said} is at work.*or remove {mine} if it is gone"
        with nullcontext() if free else pytest.raises(InputError, match=words), held(tmp_path):
            assert free and f"process {os.getpid()} on {host}" in mine.read_text()
        assert mine.exists() != free


@pytest.mark.parametrize(
    ("changes", "damage", "words"),
    [
        *(({word: value}, lambda out: None, word) for word, value in OTHER),
        ({}, lambda out: (out / CHECKPOINT).write_bytes(b"cut"), CHECKPOINT),
        ({}, lambda out: save_file({"x": gaussian(4, 20)}, out / CHECKPOINT), CHECKPOINT),
        *(({}, lambda out, x=x: (out / CONFIG).write_bytes(x), CONFIG) for x in (b"", b"model: {")),
    ],
)
def test_what_cannot_go_on_is_left_alone(
    changes: dict[str, Any], damage: Leave, words: str, settings: Settings, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 1)
    damage(out)
    before = tree(out)
    with pytest.raises(InputError, match=words):
        audit(replace(settings, **changes), out, resume=True)
    assert tree(out) == before


CHILD = """
import os, signal, sys
from exhume.auditing import run
from exhume.cli import main
run.CHECKPOINT_SECONDS = 0.0
observe = run.Recorder.observe

def waiting(recorder, progress, seconds):
    observe(recorder, progress, seconds)
    if progress.total_steps >= 4:
        os.write(1, b"ready\\n")
        signal.pause()

run.Recorder.observe = waiting
main(sys.argv[1:])
"""


def test_a_run_survives_being_killed_and_being_interrupted(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    model, out = workshop / "model", tmp_path / "run"
    words = ["audit", str(model), "--samples", "4", "--device", "cpu", "--out", str(out)]
    words += ["--no-controls"]
    command = [sys.executable, "-c", CHILD, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert any(line == "ready\n" for line in process.stdout)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert (out / CHECKPOINT).exists() and not (out / RESULT).exists()

    observe = Recorder.observe

    def interrupting(recorder: Recorder, state: progress.Progress, seconds: float) -> None:
        observe(recorder, state, seconds)
        if state.total_steps >= 9:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Recorder, "observe", interrupting)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
    with pytest.raises(SystemExit, match=r"^130$"):
        main([*words, "--resume"])
    signal.signal(signal.SIGINT, handler)
    errors = capsys.readouterr().err
    assert "--resume" in errors and str(out) in errors and "Traceback" not in errors
    assert (out / CHECKPOINT).exists() and not (out / RESULT).exists()

    monkeypatch.undo()
    main([*words, "--resume"])
    assert same(out, workshop / "run") and result_of(out)["outcome"] == "converged"
    assert not (out / CHECKPOINT).exists()
    moments = [(event["seconds"], event["step"]) for event in events_of(out)]
    assert moments == sorted(moments) and moments[-1][1] >= 9
