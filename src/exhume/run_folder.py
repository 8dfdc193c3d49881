"""Audit: model folder → problem → reconstruction → run folder, resumable and private.

A run folder holds config.yaml, events.jsonl (one line a moment), checkpoint.safetensors (while it
runs), candidates.safetensors and result.json (at the end).
"""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import yaml
from torch import Tensor

from exhume import evidence
from exhume.checkpoint import read_model
from exhume.device import device_name
from exhume.errors import InputError
from exhume.files import (
    finite,
    private_folder,
    read_metadata,
    read_tensors,
    write_json,
    write_private,
    write_tensors,
)
from exhume.methods import (
    Reconstruction,
    check_numbers,
    method_named,
    reconstruct,
    seen_by,
    threads_for,
)
from exhume.methods.progress import Method, Progress
from exhume.objective import evaluate
from exhume.problem import Problem, ThreatModel
from exhume.solvers import Outcome, State

CONFIG, EVENTS, CHECKPOINT, CANDIDATES, RESULT = (
    "config.yaml",
    "events.jsonl",
    "checkpoint.safetensors",
    "candidates.safetensors",
    "result.json",
)
EVENT_SECONDS, CHECKPOINT_SECONDS = 0.1, 1.0
SETTLED = 0.01
"""A candidate has settled when its last step moved it by less than this share of its norm."""


@dataclass(frozen=True)
class Settings:
    """What an audit was asked for."""

    model: str
    samples: int | None = None
    seed: int = 0
    method: str = "exhume"
    time_limit: float | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Event:
    """One moment of a run."""

    seconds: float
    step: int
    residual: float
    candidates: int
    settled: int
    phase: str


def audit(
    settings: Settings,
    out: Path,
    resume: bool = False,
    show: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Attack a model folder and leave a run folder; the truth is not looked at.

    Args:
        settings: what to attack, and how.
        out: the run folder.
        resume: go on with an interrupted run; its settings must be the same.
        show: called with each event.

    Returns:
        The result, as in result.json.
    """
    method = method_named(settings.method)
    problem = read_model(Path(settings.model)).to(settings.device)
    check_numbers(settings.samples, settings.seed, settings.time_limit)
    created = not out.exists()
    _open(settings, out, resume)
    try:
        found = _attack(method, problem, settings, out, resume, show)
    except InputError:
        if not resume:  # leave nothing half written
            for name in (CONFIG, EVENTS, CHECKPOINT):
                (out / name).unlink(missing_ok=True)
            if created:
                out.rmdir()
        raise
    result = _result(settings, problem, found)
    tensors = {"samples": found.samples, "coefficients": found.coefficients}
    write_tensors(out / CANDIDATES, tensors)
    write_json(out / RESULT, result)
    (out / CHECKPOINT).unlink(missing_ok=True)
    return result


def _attack(
    method: Method,
    problem: Problem,
    settings: Settings,
    out: Path,
    resume: bool,
    show: Callable[[Event], None] | None,
) -> Reconstruction:
    problem = seen_by(method, problem)
    with threads_for(problem, settings.samples):
        begun = _load(problem, out / CHECKPOINT) if resume else None
        _trim(out / EVENTS, begun[1] if begun else 0.0)
        with (out / EVENTS).open("a") as events:
            recorder = _Recorder(out, events, show)
            try:
                return reconstruct(
                    problem,
                    settings.samples,
                    settings.seed,
                    method,
                    settings.time_limit,
                    recorder.observe,
                    begun,
                )
            except KeyboardInterrupt:
                recorder.save()
                raise


def _open(settings: Settings, out: Path, resume: bool) -> None:
    """Make the run folder, or check that it is the one to go on with."""
    config = out / CONFIG
    if resume:
        if not config.is_file():
            raise InputError(f"{out}: holds no run to resume; start one without --resume.")
        if (out / RESULT).exists():
            raise InputError(f"{out}: this run is complete; see {out / RESULT}.")
        before = read_config(out)
        if before != asdict(settings):
            changed = [k for k, v in asdict(settings).items() if before.get(k) != v]
            raise InputError(
                f"{config}: the run was started with other settings ({', '.join(changed)}); "
                "resume it with the same."
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"{out}: is there already and not empty; choose another --out, or go on with an "
            "interrupted run by --resume."
        )
    private_folder(out)
    write_private(config, yaml.safe_dump(asdict(settings), sort_keys=False).encode())
    write_private(out / EVENTS, b"")


def read_config(run: Path) -> dict[str, Any]:
    """The settings of a run."""
    path = run / CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "model" not in config:
            raise ValueError("it names no model")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; is {run} the folder of an audit?") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be used ({error}); audit the model again.") from error
    return config


class _Recorder:
    """Writes events as they come and a checkpoint every second."""

    def __init__(self, out: Path, events: TextIO, show: Callable[[Event], None] | None) -> None:
        self.out, self.events, self.show = out, events, show
        self.before: Tensor | None = None
        self.phase = ""
        self.last_event = self.last_checkpoint = -1e9
        self.latest: tuple[Progress, float] | None = None

    def observe(self, progress: Progress, seconds: float) -> None:
        """Take note of one move."""
        self.latest = (progress, seconds)
        now = time.perf_counter()
        candidates = progress.state.point.candidates
        if now - self.last_event >= EVENT_SECONDS or progress.phase != self.phase:
            event = Event(
                seconds=round(seconds, 3),
                step=progress.total_steps,
                residual=progress.state.point.value,
                candidates=len(candidates),
                settled=_settled(self.before, candidates),
                phase=progress.phase,
            )
            self.events.write(json.dumps(finite(asdict(event)), allow_nan=False) + "\n")
            self.events.flush()
            if self.show is not None:
                self.show(event)
            self.last_event, self.phase = now, progress.phase
        self.before = candidates
        if now - self.last_checkpoint >= CHECKPOINT_SECONDS:
            self.save()
            self.last_checkpoint = now

    def save(self) -> None:
        """Write the checkpoint."""
        if self.latest is not None:
            _dump(self.out / CHECKPOINT, *self.latest)


def _settled(before: Tensor | None, after: Tensor) -> int:
    if before is None or before.shape != after.shape:
        return 0
    return int(((after - before).norm(dim=1) < SETTLED * after.norm(dim=1)).sum())


def _dump(path: Path, progress: Progress, seconds: float) -> None:
    """Progress as one file: tensors, and the rest as JSON in its metadata."""
    state = progress.state
    tensors = {f"memory.{name}": tensor for name, tensor in state.memory.items()}
    tensors["candidates"] = state.point.candidates
    for name in ("best", "champion"):
        if getattr(progress, name) is not None:
            tensors[name] = getattr(progress, name)
    search = {
        name: getattr(progress, name)
        for name in Progress.__dataclass_fields__
        if name not in ("state", "best", "champion", "outcome")
    }
    solver = {name: getattr(state, name) for name in ("steps", "products", "stalled")}
    outcomes = [one.value if one else None for one in (progress.outcome, state.outcome)]
    record = {"search": search, "solver": solver, "outcomes": outcomes, "seconds": seconds}
    write_tensors(path, tensors, {"progress": json.dumps(record)})


def _load(problem: Problem, path: Path) -> tuple[Progress, float] | None:
    """Progress from a file, or None if the run was killed before its first checkpoint."""
    if not path.exists():
        return None
    try:
        return _progress(problem, path)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{path}: cannot be used ({error}); start the audit again in another folder."
        ) from error


def _progress(problem: Problem, path: Path) -> tuple[Progress, float]:
    tensors = read_tensors(path, ("candidates",))
    record = json.loads(read_metadata(path)["progress"])
    device = problem.features.device
    search_outcome, solver_outcome = (Outcome(x) if x else None for x in record["outcomes"])
    memory = {
        name.removeprefix("memory."): tensor if tensor.ndim == 0 else tensor.to(device)
        for name, tensor in tensors.items()
        if name.startswith("memory.")
    }
    state = State(
        evaluate(problem, tensors["candidates"]),
        memory,
        outcome=solver_outcome,
        **record["solver"],
    )
    best, champion = (
        tensors[name].to(device) if name in tensors else None for name in ("best", "champion")
    )
    progress = Progress(
        state=state, best=best, champion=champion, outcome=search_outcome, **record["search"]
    )
    return progress, record["seconds"]


def _trim(path: Path, seconds: float) -> None:
    """Forget events after the checkpoint, and a last line that was cut short."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            if json.loads(line)["seconds"] <= round(seconds, 3):
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            break
    for leftover in path.parent.glob(f".{CHECKPOINT}.*"):  # of a kill while it was written
        leftover.unlink()
    write_private(path, "".join(kept).encode())


def _told(threat_model: ThreatModel, samples: int | None) -> ThreatModel:
    """The threat model, with the number of samples if that was told."""
    if samples is None:
        return threat_model
    return replace(threat_model, knows=(*threat_model.knows, "the number of samples"))


def _result(settings: Settings, problem: Problem, found: Reconstruction) -> dict[str, Any]:
    from exhume import __version__

    count = len(found.samples)
    return {
        "schema": 1,
        "exhume": __version__,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "device": settings.device,
        "device_name": device_name(settings.device),
        "seed": found.seed,
        "method": found.method,
        "started": datetime.fromtimestamp(time.time() - found.seconds, UTC).isoformat(
            "T", "seconds"
        ),
        "seconds": round(found.seconds, 3),
        "outcome": found.outcome.value,
        "sentence": found.outcome.sentence,
        "residual": found.residual,
        "candidates": count,
        "samples_given": settings.samples,
        "steps": found.steps,
        "products": found.products,
        "problem": {
            **problem.describe(),
            "ratio": problem.ratio(count),
        },
        "threat_model": asdict(_told(problem.threat_model, settings.samples)),
        "display": asdict(problem.display) if problem.display else None,
        "claims": evidence.claims(problem, found),
        "limits": evidence.limits(problem, found),
    }
