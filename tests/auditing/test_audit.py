"""Audits: what a run folder holds, that the truth is not read, and going on after an end."""

import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from exhume import data, files, methods
from exhume.auditing import evidence
from exhume.auditing.folder import (
    CANDIDATES,
    CHECKPOINT,
    CONFIG,
    EVENTS,
    RESULT,
)
from exhume.auditing.run import Event
from exhume.auditing.run import run as attack
from exhume.auditing.settings import Settings
from exhume.errors import InputError
from exhume.evaluate.runs import score_run
from exhume.files import write_private
from exhume.methods import Reconstruction
from exhume.methods.exhume import Exhume
from exhume.methods.iurada2025 import Iurada2025
from exhume.models.folder import CARD, TRAINED, TRUTH
from exhume.solvers import Outcome
from exhume.victims import random_features
from problems import case, gaussian

NAME = attack.__module__
TIMES = {"seconds", "started"}


def audit(settings: Settings, out: Path, **options: Any) -> dict[str, Any]:
    """The result of a run, as the command line makes it."""
    return attack(settings, settings.open(), out, **options)[1]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict(text: str) -> Any:
    """JSON as other readers know it: without NaN and infinities."""
    return json.loads(text, parse_constant=refuse_constant)


def result_of(run: Path) -> dict[str, Any]:
    record = strict((run / RESULT).read_text())
    assert isinstance(record, dict)
    return record


def events_of(run: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in (run / EVENTS).read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(a: Path, b: Path) -> bool:
    """Whether two runs found the same, to the last bit, at the same cost."""
    one, other = load_file(a / CANDIDATES), load_file(b / CANDIDATES)
    left, right = ({k: v for k, v in result_of(r).items() if k not in TIMES} for r in (a, b))
    return left == right and all(torch.equal(one[name], other[name]) for name in one)


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


# The run folder


def test_a_run_folder_holds_what_it_should(run: Path, model: Path) -> None:
    assert contents(run).keys() == {CONFIG, EVENTS, CANDIDATES, RESULT}
    config = yaml.safe_load((run / CONFIG).read_text())
    assert {word: value for word, value in config.items() if value is not None} == {
        **{"model": str(model), "samples": 4, "seed": 0},
        **{"method": "exhume", "device": "cpu"},
    }
    assert config.keys() == set(Settings.__dataclass_fields__)
    found = load_file(run / CANDIDATES)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "samples": (4, 20),
        "coefficients": (4, 1),
    }
    assert all(t.dtype == torch.float64 and t.isfinite().all() for t in found.values())
    assert torch.allclose(found["samples"].norm(dim=1), torch.tensor(20.0).sqrt().double())


def test_the_result_says_all_that_a_report_needs(run: Path) -> None:
    result = result_of(run)
    assert result.keys() == {
        *("schema", "exhume", "versions", "device", "device_name", "seed", "method", "started"),
        *("seconds", "outcome", "sentence", "residual", "candidates", "samples_given", "steps"),
        *("products", "problem", "threat_model", "display", "claims", "limits"),
        *("parameters", "point", "premise", "rank", "prepared"),
    }
    assert (result["schema"], result["seed"], result["method"]) == (1, 0, "exhume")
    assert (result["outcome"], result["candidates"], result["samples_given"]) == ("converged", 4, 4)
    assert 0 <= result["residual"] < 1e-11
    assert result["steps"] > 0 and result["products"] > 0 and result["seconds"] > 0
    assert result["problem"] == {
        **{"name": "random features, relu", "dim": 20, "width": 480, "outputs": 1},
        **{"shape": [20], "domain": "sphere of radius √d", "ratio": 6.0},
    }
    assert result["threat_model"]["knows"] and result["claims"] and result["limits"]


def test_what_is_returned_is_what_was_written(settings: Settings, tmp_path: Path) -> None:
    assert files.finite(audit(settings, tmp_path / "run")) == result_of(tmp_path / "run")


def test_every_event_is_a_line(run: Path) -> None:
    events = events_of(run)
    assert events
    assert all(event.keys() == set(Event.__dataclass_fields__) for event in events)
    seconds = [event["seconds"] for event in events]
    steps = [event["step"] for event in events]
    assert seconds == sorted(seconds) and steps == sorted(steps)
    assert all(0 <= event["settled"] <= event["candidates"] for event in events)
    assert {event["phase"] for event in events} >= {"explore", "tidy"}


def test_events_are_shown_as_they_are_written(settings: Settings, tmp_path: Path) -> None:
    shown: list[Event] = []
    audit(settings, tmp_path / "run", show=shown.append)
    assert [vars(event) for event in shown] == events_of(tmp_path / "run")


def test_the_folder_is_private_whatever_the_umask(settings: Settings, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        audit(settings, tmp_path / "run")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "run").iterdir()} == {0o600}


def test_an_empty_folder_becomes_private(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    audit(settings, tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_the_same_seed_gives_the_same_bits(settings: Settings, run: Path, tmp_path: Path) -> None:
    audit(settings, tmp_path / "again")
    assert same(tmp_path / "again", run)
    audit(replace(settings, seed=1), tmp_path / "other")
    assert not same(tmp_path / "other", run)


@pytest.mark.parametrize("samples", [4, None])
def test_the_samples_are_found(
    samples: int | None, settings: Settings, model: Path, tmp_path: Path
) -> None:
    result = audit(replace(settings, samples=samples), tmp_path / "run")
    assert (result["candidates"], result["samples_given"]) == (4, samples)
    score = score_run(tmp_path / "run", model / TRUTH)["score"]
    assert score["recovered"] == score["exact"] == score["precision"] == 1
    assert strict((tmp_path / "run" / "score.json").read_text())["score"] == score


def test_the_published_method_can_be_asked_for(settings: Settings, tmp_path: Path) -> None:
    short = replace(settings, method="iurada2025", time_limit=0.2)
    result = audit(short, tmp_path / "run")
    assert (result["method"], result["candidates"]) == ("iurada2025", 4)


@pytest.mark.parametrize("limit", [0.0, 0.02])
def test_a_time_limit_ends_a_run(limit: float, settings: Settings, tmp_path: Path) -> None:
    hard = replace(settings, samples=70, time_limit=limit)  # more unknowns than equations
    result = audit(hard, tmp_path / "run")
    assert (result["outcome"], result["candidates"]) == ("budget", 70)
    assert "time" in result["sentence"]
    assert "Nothing can be claimed" in " ".join(result["claims"])
    assert not (tmp_path / "run" / CHECKPOINT).exists()
    assert contents(tmp_path / "run").keys() == {CONFIG, EVENTS, CANDIDATES, RESULT}


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose features are finite in double precision and infinite in single."""
    folder = tmp_path_factory.mktemp("models") / "overflowing"
    steep = "polynomial:0,0,0,0,0,0,0,0,0,1e36"
    random_features(data.sphere(20, 4), 480, steep).save(folder)
    return folder


def test_a_run_without_numbers_is_still_json(overflowing: Path, tmp_path: Path) -> None:
    audit(Settings(str(overflowing), samples=4), tmp_path / "run")
    result = result_of(tmp_path / "run")
    assert (result["outcome"], result["residual"]) == ("diverged", None)


def test_events_without_numbers_are_still_json(overflowing: Path, tmp_path: Path) -> None:
    audit(Settings(str(overflowing), samples=4), tmp_path / "run")
    assert events_of(tmp_path / "run")


# The truth


@pytest.mark.parametrize("change", ["missing", "damaged", "another"])
def test_the_truth_makes_no_difference(
    change: str, settings: Settings, model: Path, run: Path, tmp_path: Path
) -> None:
    blind = tmp_path / "model"
    shutil.copytree(model, blind)
    (blind / TRUTH).unlink()
    if change == "damaged":
        (blind / TRUTH).write_bytes(b"\xff" * 100)
    elif change == "another":
        data.save(data.sphere(20, 4, seed=9), blind / TRUTH)
    audit(replace(settings, model=str(blind)), tmp_path / "run")
    assert same(tmp_path / "run", run)


def test_the_truth_is_not_opened(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def watched_open(path: Path, **options: Any) -> Any:
        opened.append(Path(path).name)
        return safe_open(path, **options)

    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            opened.append(Path(os.fsdecode(arguments[0])).name)

    monkeypatch.setattr(files, "safe_open", watched_open)
    sys.addaudithook(hook)  # cannot be taken away again, so it is switched off
    audit(settings, tmp_path / "run")
    watching = False
    assert {CARD, TRAINED, EVENTS} <= set(opened), "the watch works"
    assert TRUTH not in opened


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": -3}, "-3"),
        ({"seed": -1}, "seed"),
        ({"time_limit": -1.0}, "time"),
        ({"time_limit": math.nan}, "time"),
        ({"product_limit": 0}, "product_limit: expected a whole number of at least 1, got 0"),
        ({"product_limit": 2.5}, "product_limit"),
        ({"method": "magic"}, "magic"),
        ({"model": "nowhere"}, "nowhere"),
    ],
    ids=str,
)
def test_bad_settings_leave_no_folder(
    changes: dict[str, Any], words: str, settings: Settings, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        audit(replace(settings, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_number_that_the_method_needs_leaves_no_folder(
    settings: Settings, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="samples"):
        audit(replace(settings, method="iurada2025", samples=None), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_refused_and_left_alone(
    settings: Settings, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("mine")
    for out in (tmp_path, tmp_path / "notes", tmp_path / "notes" / "run"):
        with pytest.raises(InputError, match=str(out)):
            audit(settings, out)
    assert contents(tmp_path) == {"notes": b"mine"}
    before = contents(run)
    with pytest.raises(InputError, match="--resume"):
        audit(settings, run)
    assert contents(run) == before


# Going on


class Interrupt:
    """Ctrl-C at one move of a run."""

    def __init__(self, move: int) -> None:
        self.left = move

    def __call__(self, _: Event) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.fixture
def every_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event, so that a test can interrupt, for every move."""
    monkeypatch.setattr(f"{NAME}.EVENT_SECONDS", 0.0)


def interrupted(settings: Settings, out: Path, move: int) -> Path:
    with pytest.raises(KeyboardInterrupt):
        audit(settings, out, show=Interrupt(move))
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
        steps = [event["step"] for event in events_of(out)]
        assert steps == sorted(steps) and len(steps) <= len(events)
        assert contents(out).keys() == {CONFIG, EVENTS, CANDIDATES, RESULT}


@pytest.mark.usefixtures("every_move")
@pytest.mark.parametrize("samples", [4, None])
def test_a_run_can_be_interrupted_at_any_move(
    samples: int | None, settings: Settings, tmp_path: Path
) -> None:
    check_resuming(replace(settings, samples=samples), tmp_path)


def test_a_checkpoint_can_be_written_at_every_move(
    settings: Settings, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{NAME}.CHECKPOINT_SECONDS", 0.0)
    audit(settings, tmp_path / "run")
    assert same(tmp_path / "run", run)


def impatient() -> Exhume:
    return Exhume(patience=2, trial=60)


def stuck(events: list[Event]) -> list[int]:
    """Some moves before which there was little progress for a while, and some near the end."""
    moves = [
        move
        for move, (before, now) in enumerate(zip(events, events[4:], strict=False), start=5)
        if (before.phase, before.candidates) == (now.phase, now.candidates)
        and now.residual > 0.99 * before.residual
    ]
    near_the_end = range(len(events) - 20, len(events), 7)
    return sorted({*moves[:: max(1, len(moves) // 6)], *near_the_end})


@pytest.mark.usefixtures("every_move")
def test_a_search_that_fails_gives_up_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_features(data.sphere(15, 6), 110).save(tmp_path / "model")
    monkeypatch.setitem(methods.METHODS, "exhume", impatient)
    check_resuming(Settings(str(tmp_path / "model"), samples=6), tmp_path, stuck)
    assert result_of(tmp_path / "whole")["outcome"] != "converged"


def short_momentum() -> Iurada2025:
    return Iurada2025(steps=40)


@pytest.mark.usefixtures("every_move")
@pytest.mark.parametrize("move", [1, 17, 39, 40])
def test_momentum_goes_on_where_it_was(
    move: int, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods.METHODS, "iurada2025", short_momentum)
    momentum = replace(settings, method="iurada2025")
    check_resuming(momentum, tmp_path, lambda _: [move])


@pytest.mark.usefixtures("every_move")
def test_a_run_can_be_interrupted_again_and_again(settings: Settings, tmp_path: Path) -> None:
    audit(settings, tmp_path / "whole")
    out = interrupted(settings, tmp_path / "run", 3)
    for move in (1, 4):
        with pytest.raises(KeyboardInterrupt):
            audit(settings, out, resume=True, show=Interrupt(move))
    audit(settings, out, resume=True)
    assert same(out, tmp_path / "whole")
    seconds = [event["seconds"] for event in events_of(out)]
    assert seconds == sorted(seconds)


@pytest.mark.usefixtures("every_move")
def test_the_seconds_of_earlier_sittings_count(settings: Settings, tmp_path: Path) -> None:
    limited = replace(settings, time_limit=0.3)

    def slow_then_interrupt(event: Event) -> None:
        if event.step == 2:
            raise KeyboardInterrupt
        time.sleep(0.2)

    def slow(_: Event) -> None:
        time.sleep(0.15)

    with pytest.raises(KeyboardInterrupt):
        audit(limited, tmp_path / "run", show=slow_then_interrupt)
    assert 0.2 <= strict_progress(tmp_path / "run")["seconds"] < 0.3
    result = audit(limited, tmp_path / "run", resume=True, show=slow)
    assert (result["outcome"], result["steps"]) == ("budget", 3)
    assert result["seconds"] >= 0.3


def strict_progress(run: Path) -> dict[str, Any]:
    record = json.loads(files.read_metadata(run / CHECKPOINT)["progress"])
    assert isinstance(record, dict)
    return record


@pytest.mark.usefixtures("every_move")
def test_events_after_the_checkpoint_and_cut_lines_are_forgotten(
    settings: Settings, run: Path, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 5)
    kept = (out / EVENTS).read_text()
    late = {**json.loads(kept.splitlines()[-1]), "seconds": 1e6, "phase": "late"}
    (out / EVENTS).write_text(kept + json.dumps(late) + "\n" + '{"seconds": 0.0, "st')
    audit(settings, out, resume=True)
    events = events_of(out)
    assert "late" not in {event["phase"] for event in events}
    assert [event["step"] for event in events][:4] == [1, 2, 3, 4]
    assert same(out, run)


def test_a_run_killed_before_its_first_checkpoint_starts_over(
    settings: Settings, run: Path, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 1)
    (out / CHECKPOINT).unlink()
    audit(settings, out, resume=True)
    assert same(out, run)


def test_a_run_killed_between_its_first_two_files_starts_over(
    settings: Settings, run: Path, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 1)
    (out / CHECKPOINT).unlink()
    (out / EVENTS).unlink()
    audit(settings, out, resume=True)
    assert same(out, run)


def test_a_run_killed_between_its_last_two_files_goes_on(
    settings: Settings, run: Path, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 1)
    (out / CANDIDATES).write_bytes(b"from another time")
    audit(settings, out, resume=True)
    assert same(out, run)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 5},
        {"samples": None},
        {"seed": 1},
        {"method": "iurada2025"},
        {"product_limit": 900},
    ],
    ids=str,
)
def test_resuming_with_other_settings_is_refused(
    changes: dict[str, Any], settings: Settings, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 1)
    before = contents(out)
    with pytest.raises(InputError, match=next(iter(changes))):
        audit(replace(settings, **changes), out, resume=True)
    assert contents(out) == before


def test_resuming_a_finished_run_is_refused(settings: Settings, run: Path) -> None:
    before = contents(run)
    with pytest.raises(InputError, match="complete"):
        audit(settings, run, resume=True)
    assert contents(run) == before


def test_resuming_where_there_is_no_run_is_refused(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for out in (tmp_path, tmp_path / "new", tmp_path / "notes"):
        with pytest.raises(InputError, match="no run to resume"):
            audit(settings, out, resume=True)
    assert contents(tmp_path) == {"notes": b"mine"}


def cut_checkpoint(out: Path) -> None:
    (out / CHECKPOINT).write_bytes((out / CHECKPOINT).read_bytes()[:-8])


def plain_checkpoint(out: Path) -> None:
    save_file({"candidates": gaussian(4, 20)}, out / CHECKPOINT)


def empty_config(out: Path) -> None:
    (out / CONFIG).write_text("")


def damaged_config(out: Path) -> None:
    (out / CONFIG).write_text("model: {")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (cut_checkpoint, CHECKPOINT),
        pytest.param(plain_checkpoint, CHECKPOINT),
        pytest.param(empty_config, CONFIG),
        pytest.param(damaged_config, CONFIG),
    ],
)
def test_a_damaged_run_is_named(
    damage: Callable[[Path], None], name: str, settings: Settings, tmp_path: Path
) -> None:
    out = interrupted(settings, tmp_path / "run", 1)
    damage(out)
    with pytest.raises(InputError, match=name):
        audit(settings, out, resume=True)


# Real signals

CHILD = """
import signal, sys
from importlib import import_module
from exhume.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
import_module({name!r}).CHECKPOINT_SECONDS = 0.1
main(sys.argv[1:])
"""


class Child:
    """`exhume audit` in a process of its own, with one thread and frequent checkpoints."""

    def __init__(self, model: Path, out: Path, *more: str) -> None:
        words = ["audit", str(model), "--out", str(out), "--samples", "10", "--device", "cpu"]
        self.out = out
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD.format(name=NAME), *words, *more],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until_round(self, count: int) -> "Child":
        """Wait for a checkpoint that is so many rounds into the search."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()
            if (self.out / CHECKPOINT).exists():
                try:
                    reached = strict_progress(self.out)["search"]["rounds"]
                except FileNotFoundError:
                    continue
                if reached >= count:
                    return self
            time.sleep(0.01)
        raise AssertionError("the run never came so far")

    def end(self, how: signal.Signals | None = None) -> tuple[int, str]:
        if how is not None:
            self.process.send_signal(how)
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors


def test_an_interruption_right_after_a_file_is_renamed_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.replace

    def interrupted_rename(source: str, target: Path) -> None:
        rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr("exhume.files.os.replace", interrupted_rename)
    with pytest.raises(KeyboardInterrupt):
        write_private(tmp_path / "file", b"whole")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]


def test_a_run_survives_being_killed_and_being_interrupted(tmp_path: Path) -> None:
    model, whole, out = tmp_path / "model", tmp_path / "whole", tmp_path / "run"
    random_features(data.sphere(40, 10), 600).save(model)
    undisturbed = Child(model, whole)
    assert Child(model, out).until_round(2).end(signal.SIGKILL) == (-signal.SIGKILL, "")
    assert undisturbed.end() == (0, "")
    assert (out / CHECKPOINT).exists() and not (out / RESULT).exists()
    killed_at = strict_progress(out)["search"]["rounds"]

    resumed = Child(model, out, "--resume").until_round(killed_at + 2)
    code, errors = resumed.end(signal.SIGINT)
    assert code == 130
    assert "--resume" in errors and str(out) in errors and "Traceback" not in errors
    assert (out / CHECKPOINT).exists() and not (out / RESULT).exists()

    assert Child(model, out, "--resume").end() == (0, "")
    assert same(out, whole)
    assert result_of(out)["outcome"] == "converged"
    assert score_run(out, model / TRUTH)["score"]["recovered"] == 1
    assert not (out / CHECKPOINT).exists()
    steps = [event["step"] for event in events_of(out)]
    assert steps == sorted(steps)


# Evidence


def reconstruction(count: int, outcome: Outcome, residual: float) -> Reconstruction:
    return Reconstruction(
        samples=gaussian(count, 10),
        coefficients=torch.tensor([[3.0]] + [[0.03]] * (count - 1), dtype=torch.float64),
        residual=residual,
        outcome=outcome,
        method="exhume",
        seed=0,
        steps=1,
        products=1,
        seconds=1.0,
    )


@pytest.mark.parametrize("outcome", list(Outcome))
def test_too_few_equations_prove_nothing(outcome: Outcome) -> None:
    problem = case(10, 2, 3.0).problem  # 60 equations
    few = " ".join(evidence.claims(problem, reconstruction(6, outcome, 0.0)))
    assert "Nothing can be claimed" in few and "1.00 equations" in few
    enough = " ".join(evidence.claims(problem, reconstruction(5, outcome, 0.0)))
    assert "Nothing can be claimed" not in enough and "1.20 equations" in enough


def test_only_a_run_that_converged_explains_the_weights() -> None:
    problem = case(10, 2, 3.0).problem
    for outcome in Outcome:
        residual = 2.5e-13 if outcome is Outcome.CONVERGED else 2.5e-3
        claims = " ".join(evidence.claims(problem, reconstruction(2, outcome, residual)))
        assert f"{residual:.1e}" in claims
        assert ("explain the weights" in claims) == (outcome is Outcome.CONVERGED)
        assert ("cannot be told apart" in claims) == (outcome is not Outcome.CONVERGED)
        assert "recovered" not in claims


def test_the_limits_name_the_smallest_coefficient() -> None:
    problem = case(10, 2, 3.0).problem
    limits = evidence.limits(problem, reconstruction(2, Outcome.CONVERGED, 0.0))
    assert any("is 0.01 of" in limit for limit in limits)
    assert any("does not show that the model is safe" in limit for limit in limits)
