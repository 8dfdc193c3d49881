"""Run folders: problem → reconstruction → files, resumable and private.

A run folder holds config.yaml, events.jsonl (one line a moment), checkpoint.safetensors (while it
runs), candidates.safetensors and result.json (at the end).
"""

import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import yaml
from torch import Tensor

from exhume.auditing import evidence
from exhume.device import device_name
from exhume.equation.objective import fitted, fitted_with
from exhume.equation.problem import Problem, ThreatModel
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
from exhume.methods.penalised import PenalisedState
from exhume.methods.progress import Method, Progress
from exhume.methods.tansley2026 import Tansley2026
from exhume.models.card import DataCard
from exhume.solvers import Outcome, State
from exhume.solvers.gradient import MomentumState
from exhume.solvers.levenberg_marquardt import DampedState
from exhume.version import VERSION

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
    """What an audit was asked for; what config.yaml holds.

    Attributes:
        model: a model folder; or, with `trained`, a factory (see `models.factory`); or None for a
            module in memory, which cannot be opened again.
        samples: how many there are; found if None.
        seed: of everything random.
        method: its name.
        time_limit: seconds after which the best so far is taken.
        product_limit: passes over the features' derivative after which it is: a budget that, unlike
            seconds, is the same on every machine.
        device: where to compute.
        parameters: block of parameters that is attacked; the last layer if None.
        point: where features are taken; None for the default.
        rank: of the subspace: a number, gap, energy or count; for tansley2026.
        initial: file with the weights before training, or zero-head.
        trained: file with the weights after it.
        arguments: of the factory.
        head: name of the last linear layer; found if None.
        card: what is told of the inputs.
        premise: change, margin or decay; that of a model folder's training, or change, if None.
    """

    model: str | None
    samples: int | None = None
    seed: int = 0
    method: str = "exhume"
    time_limit: float | None = None
    product_limit: int | None = None
    device: str = "cpu"
    parameters: str | None = None
    point: str | None = None
    rank: int | str | None = None
    initial: str | None = None
    trained: str | None = None
    arguments: dict[str, Any] | None = None
    head: str | None = None
    card: DataCard | None = None
    premise: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Settings":
        """From what `read_config` gave; what older runs did not have is left at its default."""
        if unknown := config.keys() - {field.name for field in fields(cls)}:
            raise InputError(
                f"{CONFIG}: unknown setting {min(unknown)!r}; was the run written by a later "
                "version?"
            )
        card = config.get("card")
        told = DataCard.of(card, f"card in {CONFIG}") if card is not None else None
        return cls(**{**config, "card": told})


@dataclass(frozen=True, eq=False)
class Opened:
    """A model as a problem, and what was done to it on the way.

    Attributes:
        problem: what the auditor may see.
        parameters: the block of parameters that is its target, or whose change is.
        point: where its features are taken; None for random features, which do not move.
        changes: see `exhume.models.prepare.Prepared`; none for models of exhume's own.
        warnings: likewise, and what the weights lack.
        derivative_error: likewise.
    """

    problem: Problem
    parameters: str = "last"
    point: str | None = None
    changes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    derivative_error: float | None = None


@dataclass(frozen=True)
class Event:
    """One moment of a run."""

    seconds: float
    step: int
    residual: float
    candidates: int
    settled: int
    phase: str


def method_of(settings: Settings, problem: Problem) -> Method:
    """The method that was asked for, with its rank."""
    method = method_named(settings.method)
    rank = settings.rank
    if rank is None:
        return method
    if not isinstance(method, Tansley2026):
        raise InputError(
            f"rank: {settings.method} works in the full space, and takes none; leave it out, or "
            "use the method tansley2026."
        )
    if problem.first_layer is None:
        raise InputError(
            "rank: there is no dense first layer whose change is known, hence no subspace that "
            "could have one; leave it out."
        )
    if rank == "count":
        if settings.samples is None:
            raise InputError("rank: count is the number of samples; give that too.")
        rank = settings.samples
    return replace(method, rank=rank)


def run(
    settings: Settings,
    opened: Opened,
    out: Path,
    resume: bool = False,
    show: Callable[[Event], None] | None = None,
) -> tuple[Reconstruction, dict[str, Any]]:
    """Attack a model and leave a run folder; the truth is not looked at.

    Args:
        settings: what was asked for.
        opened: the model that they name.
        out: the run folder.
        resume: go on with an interrupted run; its settings must be the same.
        show: called with each event.

    Returns:
        What was found, and the result as in result.json.
    """
    check_numbers(settings.samples, settings.seed, settings.time_limit, settings.product_limit)
    method = method_of(settings, opened.problem)
    opened = replace(opened, problem=opened.problem.to(settings.device))
    created = not out.exists()
    _open(settings, out, resume)
    try:
        found = _attack(method, opened.problem, settings, out, resume, show)
    except InputError:
        if not resume:  # leave nothing half written
            for name in (CONFIG, EVENTS, CHECKPOINT):
                (out / name).unlink(missing_ok=True)
            if created:
                out.rmdir()
        raise
    result = _result(settings, opened, found)
    tensors = {"samples": found.samples, "coefficients": found.coefficients}
    write_tensors(out / CANDIDATES, tensors)
    write_json(out / RESULT, result)
    (out / CHECKPOINT).unlink(missing_ok=True)
    return found, result


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
            recorder = Recorder(show, out, events)
            try:
                return reconstruct(
                    problem,
                    settings.samples,
                    settings.seed,
                    method,
                    settings.time_limit,
                    recorder.observe,
                    begun,
                    settings.product_limit,
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
        before = Settings.of(read_config(out))
        if before != settings:
            names = [field.name for field in fields(settings)]
            changed = [name for name in names if getattr(before, name) != getattr(settings, name)]
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
    """The settings of a run, for `Settings.of`."""
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


class Recorder:
    """Shows events as they come; with a run folder, writes them, and a checkpoint every second."""

    def __init__(
        self,
        show: Callable[[Event], None] | None,
        out: Path | None = None,
        events: TextIO | None = None,
    ) -> None:
        """Begin with nothing noted."""
        self.out, self.events, self.show = out, events, show
        self.before: Tensor | None = None
        self.phase = ""
        self.last_event = self.last_checkpoint = -1e9
        self.latest: tuple[Progress, float] | None = None

    def observe(self, progress: Progress, seconds: float) -> None:
        """Take note of one move."""
        self.latest = (progress, seconds)
        now = time.perf_counter()
        candidates = progress.state.fit.candidates
        if now - self.last_event >= EVENT_SECONDS or progress.phase != self.phase:
            event = Event(
                seconds=round(seconds, 3),
                step=progress.total_steps,
                residual=progress.state.fit.value,
                candidates=len(candidates),
                settled=_settled(self.before, candidates),
                phase=progress.phase,
            )
            if self.events is not None:
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
        if self.out is not None and self.latest is not None:
            _dump(self.out / CHECKPOINT, *self.latest)


def _settled(before: Tensor | None, after: Tensor) -> int:
    if before is None or before.shape != after.shape:
        return 0
    return int(((after - before).norm(dim=1) < SETTLED * after.norm(dim=1)).sum())


def _dump(path: Path, progress: Progress, seconds: float) -> None:
    """Progress as one file: tensors, and the rest as JSON in its metadata."""
    state = progress.state
    tensors = {f"memory.{name}": tensor for name, tensor in progress.memory.items()}
    tensors["candidates"] = state.fit.candidates
    if isinstance(state, PenalisedState):
        tensors |= {f"state.{name}": tensor for name, tensor in state.memory.items()}
    if isinstance(state, MomentumState):
        tensors["velocity"] = state.velocity
    if not state.fit.eliminated:
        tensors["coefficients"] = state.fit.coefficients
    for name in ("best", "champion"):
        if getattr(progress, name) is not None:
            tensors[name] = getattr(progress, name)
    search = {
        name: getattr(progress, name)
        for name in Progress.__dataclass_fields__
        if name not in ("state", "memory", "best", "champion", "outcome")
    }
    numbers = ("steps", "products", "stalled", "damping")
    solver = {name: getattr(state, name) for name in numbers if hasattr(state, name)}
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
    # Copies: as aligned as they were, without which sums may differ in their last bit.
    tensors = {name: t.clone() for name, t in read_tensors(path, ("candidates",)).items()}
    record = json.loads(read_metadata(path)["progress"])
    device = problem.features.device
    search_outcome, solver_outcome = (Outcome(x) if x else None for x in record["outcomes"])

    def memory(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): tensor if tensor.ndim == 0 else tensor.to(device)
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }

    candidates, own = tensors["candidates"], tensors.get("coefficients")
    fit = fitted(problem, candidates) if own is None else fitted_with(problem, candidates, own)
    solver = record["solver"] | {"fit": fit, "outcome": solver_outcome}
    state: State
    if "damping" in solver:
        state = DampedState(**solver)
    elif "velocity" in tensors:
        state = MomentumState(velocity=tensors["velocity"].to(device), **solver)
    else:
        state = PenalisedState(memory=memory("state."), **solver)
    best, champion = (
        tensors[name].to(device) if name in tensors else None for name in ("best", "champion")
    )
    progress = Progress(
        state=state,
        memory=memory("memory."),
        best=best,
        champion=champion,
        outcome=search_outcome,
        **record["search"],
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


def _result(settings: Settings, opened: Opened, found: Reconstruction) -> dict[str, Any]:
    problem, count = opened.problem, len(found.samples)
    return {
        "schema": 1,
        "exhume": VERSION,
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
        "premise": problem.premise.value,
        "parameters": opened.parameters,
        "point": opened.point,
        "rank": found.rank,
        "steps": found.steps,
        "products": found.products,
        "problem": {
            **problem.describe(),
            "ratio": problem.ratio(count),
        },
        "threat_model": asdict(_told(problem.threat_model, settings.samples)),
        "prepared": {
            "changes": opened.changes,
            "warnings": opened.warnings,
            "derivative_error": opened.derivative_error,
        },
        "display": asdict(problem.display) if problem.display else None,
        "claims": evidence.claims(problem, found),
        "limits": evidence.limits(problem, found),
    }
