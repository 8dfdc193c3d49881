"""One run: an attack on a problem, and what may be said of it; the truth is not looked at."""

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exhume import ranks
from exhume.auditing import controls, evidence
from exhume.auditing.controls import Control
from exhume.auditing.folder import CONFIG, JUDGING, SCHEMA, RunFolder, config_of
from exhume.auditing.judgement import FOUND, Asked, Judgement, advice, judge, worth_again
from exhume.auditing.settings import Settings
from exhume.auditing.suspects import suspects
from exhume.device import device_name
from exhume.equation.problem import Premise
from exhume.errors import InputError
from exhume.methods import Observer, Reconstruction, reconstruct
from exhume.methods.progress import Checkpoint, Method, Progress
from exhume.models.opening import Opened
from exhume.models.state import Input
from exhume.version import VERSION

# Events are at least this far apart: ten lines a second are enough for any display
EVENT_SECONDS = 0.1
# Checkpoints are at least this far apart: a kill loses a second, and writing takes far less
CHECKPOINT_SECONDS = 1.0
# A candidate has settled when its last step moved it by less than this share of its norm
SETTLED = 0.01


@dataclass(frozen=True)
class Event:
    """One moment of a run, a line of events.jsonl."""

    seconds: float  # since its start, with those of earlier sittings
    step: int  # solver steps so far
    residual: float  # of the candidates as they are
    candidates: int  # how many there are
    settled: int  # how many of them hardly moved in the last step
    phase: str  # what the method is doing, in a word


Show = Callable[[Event], None]


def run(
    settings: Settings,
    opened: Opened,
    out: Path | None = None,
    resume: bool = False,
    show: Show | None = None,
    held_out: Tensor | None = None,
) -> tuple[Reconstruction, dict[str, Any]]:
    """Attack a model, and leave a run folder if there is a place for one.

    A run that is refused leaves nothing half written; one that Ctrl-C ends leaves a checkpoint,
    and `resume` goes on with it if the settings are the same. `show` is called with each event.
    Held-out samples (N, …), which the model never saw, are one more control.
    Returned are what was found, and the result as in result.json. The first rank alone judges, and
    writes the folder.
    """
    method = settings.attack(opened.problem)
    opened = placed(settings, opened)
    if held_out is not None:
        held_out = controls.comparable(opened.problem, held_out)
    with ExitStack() as held:
        if out is not None:
            ranks.on_first(lambda: held.enter_context(RunFolder(out).held(resume)))
        folder = None if out is None or ranks.rank() else RunFolder(out)
        found = _attacked(settings, opened, method, folder, resume, show)
        if folder is not None:  # before it is judged: that may fail, and be done again by --resume
            folder.keep({"samples": found.samples, "coefficients": found.coefficients})
        judged, tried = _judged(settings, opened, method, found, show, held_out)
        result = ranks.on_first(partial(_result, settings, opened, found, judged, tried))
        if ranks.count() > 1:
            result["device_name"] += f", {ranks.count()} ranks"
        if folder is not None:
            folder.finish(result)
    return found, result


def placed(settings: Settings, opened: Opened) -> Opened:
    """Return a model where it is attacked, and in the precision in which it is.

    A simulated run is solved to the weights' last digits, which a CPU affords in float64.
    """
    exact = opened.problem.premise is Premise.REPLAY and settings.device == "cpu"
    dtype = torch.float64 if exact else torch.float32
    return replace(opened, problem=opened.problem.to(settings.device, dtype))


def _attacked(
    settings: Settings,
    opened: Opened,
    method: Method,
    folder: RunFolder | None,
    resume: bool,
    show: Show | None,
) -> Reconstruction:
    def begin() -> Checkpoint | None:
        if folder is not None and resume:
            return folder.resume(settings)
        if folder is not None:
            folder.begin(settings)
        return None

    begun = ranks.on_first(begin)
    recorder = Recorder(folder, show)
    try:
        asked = settings.samples, settings.seed, method, settings.time_limit
        ends = recorder.observe, begun, settings.product_limit
        found = reconstruct(opened.problem, *asked, *ends)
        recorder.end(found)
        return found
    except (KeyboardInterrupt, ConnectionError):  # the latter where another rank has ended
        recorder.save()
        raise
    except InputError:
        if folder is not None and not resume and recorder.latest is None:
            folder.discard()
        raise


class Recorder:
    """Shows events as they come; with a run folder, writes them, and a checkpoint every second."""

    def __init__(self, folder: RunFolder | None, show: Show | None) -> None:
        """Begin with nothing noted."""
        self.folder, self.show = folder, show
        self.before: Tensor | None = None
        self.phase = ""
        self.last_event = self.last_checkpoint = -1e9
        self.latest: tuple[Progress, float] | None = None

    def observe(self, progress: Progress, seconds: float) -> None:
        """Take note of one move."""
        self.latest = (progress, seconds)
        now, candidates = time.perf_counter(), progress.candidates
        if now - self.last_event >= EVENT_SECONDS or progress.phase != self.phase:
            step, residual, phase = progress.total_steps, progress.residual, progress.phase
            settled = _settled(self.before, candidates)
            self._note(Event(round(seconds, 3), step, residual, len(candidates), settled, phase))
            self.last_event, self.phase = now, progress.phase
        self.before = candidates
        if now - self.last_checkpoint >= CHECKPOINT_SECONDS:
            self.save()
            self.last_checkpoint = now

    def end(self, found: Reconstruction) -> None:
        """Note what is to be judged: the best of all trials, cut to the number asked for."""
        count, seconds = len(found.samples), round(found.seconds, 3)
        self._note(Event(seconds, found.steps, found.residual, count, count, JUDGING))
        self.save()  # judging and controls may take long, and be interrupted

    def _note(self, event: Event) -> None:
        if self.folder is not None:
            self.folder.note(asdict(event))
        if self.show is not None:
            self.show(event)

    def save(self) -> None:
        """Write the checkpoint, where there is a folder for it."""
        if self.folder is not None and self.latest is not None:
            self.folder.save(*self.latest)


def _settled(before: Tensor | None, after: Tensor) -> int:
    if before is None or before.shape != after.shape:
        return 0
    return int(((after - before).norm(dim=1) < SETTLED * after.norm(dim=1)).sum())


def _judged(
    settings: Settings,
    opened: Opened,
    method: Method,
    found: Reconstruction,
    show: Show | None,
    held_out: Tensor | None,
) -> tuple[Judgement, tuple[Control, ...]]:
    """Judge what was found, from another start too, and compare with controls if it is anything."""
    ended = time.perf_counter()
    asked = Asked(opened.parameters, opened.point, settings.samples)
    judged = ranks.on_first(partial(judge, opened.problem, found, asked=asked))

    def left() -> float | None:
        spent = found.seconds + time.perf_counter() - ended
        return None if settings.time_limit is None else ranks.agreed(settings.time_limit - spent)

    def watch(phase: str) -> Observer | None:
        before = found.seconds + time.perf_counter() - ended

        def shown(event: Event) -> None:
            seconds = round(before + event.seconds, 3)
            if show is not None:
                show(replace(event, seconds=seconds, phase=phase))

        return Recorder(None, shown).observe  # which writes nothing: events are the attack's

    problem, repeat = opened.problem, controls.Repeat(found, method, left, watch)
    if settings.controls and worth_again(problem, found, judged.support):
        again = controls.again(problem, repeat)
        more = partial(judge, problem, found, judged.support, asked=asked, again=again)
        judged = ranks.on_first(more)
    if judged.verdict not in FOUND:
        return judged, ()
    if settings.controls:
        tried = controls.tried(problem, repeat, sought=judged.again is not None)
    else:
        tried = tuple(Control(name, why="it was not asked for") for name in controls.CONTROLS)
    if held_out is not None:  # no attack, so that it takes no time
        tried += (controls.unseen(judged, found, held_out),)
    elif not settings.controls:
        return judged, tried
    other = advice(problem, found, asked)["other"]
    return controls.weighed_against(judged, tried, other), tried


def _result(
    settings: Settings,
    opened: Opened,
    found: Reconstruction,
    judged: Judgement,
    tried: tuple[Control, ...],
) -> dict[str, Any]:
    problem, rests, count = opened.problem, judged.support, len(found.samples)
    sought = torch.zeros(count) if judged.again is None else judged.again
    libraries = {"torch": torch.__version__, "numpy": np.__version__}
    started = datetime.fromtimestamp(time.time() - found.seconds, UTC)
    threat_model = asdict(problem.threat_model)
    settled = Input("settings", CONFIG, sha256(config_of(settings)).hexdigest())
    if settings.samples is not None:
        threat_model["knows"] = (*threat_model["knows"], "the number of samples")
    return {
        "schema": SCHEMA,
        "exhume": VERSION,
        "versions": {"python": platform.python_version(), **libraries},
        "device": settings.device,
        "device_name": device_name(settings.device),
        "seed": found.seed,
        "method": found.method,
        "started": started.isoformat("T", "seconds"),
        "seconds": round(found.seconds, 3),
        "outcome": found.outcome.value,
        "sentence": found.outcome.sentence,
        "residual": found.residual,
        "candidates": count,
        "samples_given": settings.samples,
        "premise": problem.premise.value,
        "target": opened.target,
        "parameters": opened.parameters,
        "point": opened.point,
        "rank": found.rank,
        "recipe": found.recipe and asdict(found.recipe),
        "steps": found.steps,
        "products": found.products,
        "model": opened.card,
        "problem": {**problem.describe(), "ratio": problem.ratio(count)},
        "threat_model": threat_model,
        "prepared": {
            name: getattr(opened, name) for name in ("changes", "warnings", "derivative_error")
        },
        "display": asdict(problem.display) if problem.display else None,
        "verdict": judged.verdict,
        "reason": judged.reason,
        "advice": [*suspects(problem, found), *judged.advice],
        "probabilities": judged.probabilities.tolist(),
        "again": [None if x == 0 else x > 0 for x in sought.tolist()],
        "support": {
            **{"equations": rests.equations, "unknowns": rests.unknowns},
            **{"slack": rests.slack.tolist(), "errors": rests.errors.tolist()},
        },
        "controls": [asdict(control) for control in tried],
        "claims": evidence.claims(problem, found, rests, judged.chance),
        "limits": evidence.limits(problem, found),
        "inputs": [asdict(entry) for entry in (settled, *opened.inputs)],
    }
