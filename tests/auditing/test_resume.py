"""Going on after an end: the same bits as a run that was left alone."""

import json
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from exhume import data, methods
from exhume.auditing.folder import CANDIDATES, CHECKPOINT, CONFIG, EVENTS, RESULT, RunFolder
from exhume.auditing.run import Event
from exhume.auditing.settings import Settings
from exhume.cli import main
from exhume.errors import InputError
from exhume.methods import progress
from exhume.methods.exhume import Exhume
from exhume.methods.iurada2025 import Iurada2025
from exhume.victims import random_features, two_layer
from folders import FINISHED, audit, contents, events_of, result_of, same
from problems import gaussian


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    random_features(data.sphere(20, 4), 480).save(folder)
    return folder


@pytest.fixture
def settings(model: Path) -> Settings:
    return Settings(str(model), samples=4)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    audit(Settings(str(model), samples=4), folder)
    return folder


@pytest.fixture(autouse=True)
def every_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event for every move, so that a test can interrupt at each."""
    monkeypatch.setattr("exhume.auditing.run.EVENT_SECONDS", 0.0)


def interrupted(settings: Settings, out: Path, move: int, resume: bool = False) -> Path:
    """A run that Ctrl-C ends at one of its moves."""
    moves = 0

    def show(_: Event) -> None:
        nonlocal moves
        moves += 1
        if moves == move:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(settings, out, resume=resume, show=show)
    assert (out / CHECKPOINT).exists() and not (out / RESULT).exists()
    assert stat.S_IMODE((out / CHECKPOINT).stat().st_mode) == 0o600
    return out


def every_one(events: list[Event]) -> list[int]:
    return list(range(1, len(events) + 1))


def check_resuming(
    settings: Settings, tmp_path: Path, choose: Callable[[list[Event]], list[int]] = every_one
) -> None:
    """Interrupt a run at each of the moves chosen, go on, and compare with a run left alone."""
    events: list[Event] = []
    audit(settings, tmp_path / "whole", show=events.append)
    chosen = choose(events)
    assert chosen
    for move in chosen:
        out = interrupted(settings, tmp_path / f"{move}", move)
        audit(settings, out, resume=True)
        assert same(out, tmp_path / "whole"), f"interrupted at move {move} of {len(events)}"
        assert [event["step"] for event in events_of(out)] == [event.step for event in events]
        assert contents(out).keys() == FINISHED


@pytest.mark.parametrize("samples", [4, None])
def test_a_run_can_be_interrupted_at_any_move(
    samples: int | None, settings: Settings, tmp_path: Path
) -> None:
    thin = every_one if samples else lambda events: every_one(events)[:: len(events) // 12]
    check_resuming(replace(settings, samples=samples), tmp_path, thin)


def stuck(events: list[Event]) -> list[int]:
    """A move before which there was little progress for a while, one later, and one at the end."""
    moves = [
        move
        for move, (before, now) in enumerate(zip(events, events[4:], strict=False), start=5)
        if (before.phase, before.candidates) == (now.phase, now.candidates)
        and now.residual > 0.99 * before.residual
    ]
    return [moves[0], moves[len(moves) // 2], len(events) - 2]


def test_a_search_that_fails_gives_up_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_features(data.sphere(8, 4), 36).save(tmp_path / "model")
    monkeypatch.setitem(methods.METHODS, "exhume", lambda: Exhume(patience=1, trial=15))
    check_resuming(Settings(str(tmp_path / "model"), samples=4), tmp_path, stuck)
    assert result_of(tmp_path / "whole")["outcome"] not in ("converged", "budget")


def test_momentum_goes_on_where_it_was(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods.METHODS, "iurada2025", lambda: Iurada2025(steps=40))
    momentum = replace(settings, method="iurada2025")
    check_resuming(momentum, tmp_path, lambda _: [1, 17, 39, 40])


def test_a_network_in_its_subspace_goes_on_where_it_was(tmp_path: Path) -> None:
    two_layer(data.sphere(10, 3), 120, until=1e-6).save(tmp_path / "model")
    settings = Settings(str(tmp_path / "model"), 3, method="tansley2026", point="initial")
    check_resuming(settings, tmp_path, lambda events: [len(events) // 2])
    result = result_of(tmp_path / "whole")
    assert (result["parameters"], result["point"], result["rank"]) == ("last", "initial", 3)
    assert result["prepared"] == {"changes": [], "warnings": [], "derivative_error": None}


def test_a_run_can_be_interrupted_again_and_again(
    settings: Settings, run: Path, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 3)
    for move in (1, 4):
        interrupted(settings, out, move, resume=True)
    audit(settings, out, resume=True)
    assert same(out, run)
    seconds = [event["seconds"] for event in events_of(out)]
    assert seconds == sorted(seconds)


def test_the_seconds_of_earlier_sittings_count(settings: Settings, tmp_path: Path) -> None:
    limited = replace(settings, time_limit=1e6)
    folder = RunFolder(interrupted(limited, tmp_path / "run", 3))
    begun = folder.resume(limited)
    assert begun is not None
    problem = settings.open().problem
    folder.save(progress.unpack(problem, begun), 2e6)
    result = audit(limited, folder.path, resume=True)
    assert (result["outcome"], result["steps"]) == ("budget", 3)
    assert result["seconds"] >= 2e6


def late_events(out: Path) -> None:
    """Events after the checkpoint, the last of them cut short."""
    kept = (out / EVENTS).read_text()
    late = {**json.loads(kept.splitlines()[-1]), "seconds": 1e6, "phase": "late"}
    (out / EVENTS).write_text(kept + json.dumps(late) + "\n" + '{"seconds": 0.0, "st')


def no_checkpoint(out: Path) -> None:
    (out / CHECKPOINT).unlink()


def only_settings(out: Path) -> None:
    (out / CHECKPOINT).unlink()
    (out / EVENTS).unlink()


def half_finished(out: Path) -> None:
    (out / CANDIDATES).write_bytes(b"from another time")
    (out / f".{CHECKPOINT}.abc").write_bytes(b"half")


@pytest.mark.parametrize("leave", [late_events, no_checkpoint, only_settings, half_finished])
def test_a_run_killed_between_two_files_goes_on(
    leave: Callable[[Path], None], settings: Settings, run: Path, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 5)
    leave(out)
    audit(settings, out, resume=True)
    events = events_of(out)
    assert "late" not in {event["phase"] for event in events}
    assert [event["step"] for event in events][:4] == [1, 2, 3, 4]
    assert same(out, run) and contents(out).keys() == FINISHED


def damaged(name: str, content: bytes | None = None) -> Callable[[Path], None]:
    """A file cut short, or with another content."""

    def damage(out: Path) -> None:
        (out / name).write_bytes((out / name).read_bytes()[:-8] if content is None else content)

    return damage


def plain_checkpoint(out: Path) -> None:
    save_file({"candidates": gaussian(4, 20)}, out / CHECKPOINT)


@pytest.mark.parametrize(
    ("changes", "damage", "words"),
    [
        ({"samples": 5}, None, "samples"),
        ({"samples": None}, None, "samples"),
        ({"seed": 1}, None, "seed"),
        ({"method": "iurada2025"}, None, "method"),
        ({"product_limit": 900}, None, "product_limit"),
        ({}, damaged(CHECKPOINT), CHECKPOINT),
        ({}, plain_checkpoint, CHECKPOINT),
        ({}, damaged(CONFIG, b""), CONFIG),
        ({}, damaged(CONFIG, b"model: {"), CONFIG),
    ],
    ids=range(9),
)
def test_what_cannot_go_on_is_refused_and_left_alone(
    changes: dict[str, Any],
    damage: Callable[[Path], None] | None,
    words: str,
    settings: Settings,
    tmp_path: Path,
) -> None:
    out = interrupted(settings, tmp_path / "run", 1)
    if damage is not None:
        damage(out)
    before = contents(out)
    with pytest.raises(InputError, match=words):
        audit(replace(settings, **changes), out, resume=True)
    assert contents(out) == before


# Real signals

CHILD = """
import os, signal, sys
from exhume.auditing import run
from exhume.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
run.CHECKPOINT_SECONDS = 0.0
observe = run.Recorder.observe

def waiting(recorder, progress, seconds):
    observe(recorder, progress, seconds)
    if progress.total_steps >= int(sys.argv[1]):
        os.write(1, b"ready\\n")
        signal.pause()

run.Recorder.observe = waiting
main(sys.argv[2:])
"""


def ended(step: int, how: signal.Signals, words: list[str]) -> tuple[int, str]:
    """`exhume` in a process of its own that waits at a step, and what it says at a signal."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(step), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(how)
        _, errors = process.communicate()
    return process.returncode, errors


def test_a_run_survives_being_killed_and_being_interrupted(
    model: Path, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["audit", str(model), "--samples", "4", "--device", "cpu", "--out", str(out)]
    assert ended(4, signal.SIGKILL, words) == (-signal.SIGKILL, "")
    assert (out / CHECKPOINT).exists() and not (out / RESULT).exists()

    code, errors = ended(9, signal.SIGINT, [*words, "--resume"])
    assert code == 130
    assert "--resume" in errors and str(out) in errors and "Traceback" not in errors
    assert (out / CHECKPOINT).exists() and not (out / RESULT).exists()

    main([*words, "--resume"])
    assert same(out, run) and result_of(out)["outcome"] == "converged"
    assert not (out / CHECKPOINT).exists()
    steps = [event["step"] for event in events_of(out)]
    assert steps == sorted(steps)
