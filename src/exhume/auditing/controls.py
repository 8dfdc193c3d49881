"""Controls: the same attack where there is nothing to find, for what it finds there is chance.

They can only take away. So they follow an attack that found something, with the same method, seed
and number of candidates, and with no more products than it took.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.auditing.judgement import SEED, SURE, Judgement, judge
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.features import Features
from exhume.features.modules import BlockFeatures, ModuleFeatures
from exhume.features.network import Weights
from exhume.features.random import RandomFeatures
from exhume.features.replay import TrainingRun
from exhume.features.weights import Seeded, Stored
from exhume.methods import Observer, Reconstruction, reconstruct
from exhume.methods.progress import Method
from exhume.solvers import Outcome


def permuted(problem: Problem, seed: int) -> Problem | None:
    """Return a problem that no samples explain: the rows of its target in another order.

    Δ (p, m) becomes Δ[π], with a permutation π within each tensor of the parameters where the
    features know them, else of all rows. A training run is then to end at θ₀ + Δ[π]. None where
    the order makes no difference.
    """
    features, generator = problem.features, torch.Generator().manual_seed(seed)
    sizes = [len(problem.target)]
    if isinstance(features, BlockFeatures):
        sizes = [features.points[0][name].numel() for name in features.block]
    parts = torch.split(problem.target, sizes)
    target = torch.cat([x[_order(len(x), generator, x.device)] for x in parts])
    if torch.equal(target, problem.target):
        return None
    if isinstance(features, TrainingRun):
        features = _ending(features, features.points[0], target)
    return replace(problem, target=target, features=features)


def elsewhere(problem: Problem, seed: int) -> Problem | None:
    """Return the problem of an auditor whose initial weights are not those that training began at.

    The target stays. The features have the entries of each of their weights in another order, or
    random ones of another seed. None where it is not known how to make such features.
    """
    features = _elsewhere(problem.features, seed)
    return None if features is None else replace(problem, features=features)


def untrained(problem: Problem, seed: int, outputs: int = 3) -> Problem:
    """Return a problem that nothing was trained for: Gaussian columns, (p, m), for its target."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(problem.features.width, outputs, generator=generator)
    return replace(problem, target=target.to(problem.target))


def _elsewhere(features: Features, seed: int) -> Features | None:
    if isinstance(features, TrainingRun):
        lazy = _elsewhere(features.lazy, seed)
        if lazy is None:
            return None
        moved = replace(features, lazy=lazy)
        return _ending(moved, _shuffled(features.points[0], seed), features.change[:, None])
    if isinstance(features, ModuleFeatures):
        return replace(features, points=tuple(_shuffled(w, seed) for w in features.points))
    if not isinstance(features, RandomFeatures):
        return None
    weights = features.weights
    if isinstance(weights, Seeded):
        return replace(features, weights=replace(weights, seed=weights.seed + 1 + seed))
    weights = features.resident().weights
    if not isinstance(weights, Stored):  # it is read from a file, and does not fit into memory
        return None
    both = {"weight": weights.tensor}
    both |= {} if features.bias is None else {"bias": features.bias}
    other = _shuffled(both, seed)
    return replace(features, weights=Stored(other["weight"]), bias=other.get("bias"))


def _ending(run: TrainingRun, before: Weights, change: Tensor) -> TrainingRun:
    """Return a training run from other weights, that ends where they have changed by (p, 1)."""
    sizes = [before[name].numel() for name in run.block]
    parts = zip(run.block, torch.split(change.flatten(), sizes), strict=True)
    after = {**before, **{name: before[name] + part.view_as(before[name]) for name, part in parts}}
    return replace(run, points=(before, after), captured={}, keeps={})


def _shuffled(weights: Weights, seed: int) -> dict[str, Tensor]:
    """Return the entries of each tensor in another order, the same one at every point."""
    generator, other = torch.Generator().manual_seed(seed), {}
    for name, tensor in weights.items():
        order = _order(tensor.numel(), generator, tensor.device)
        other[name] = tensor.flatten()[order].view_as(tensor)
    return other


def _order(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randperm(count, generator=generator).to(device)


MATCHED = 0.1  # as near as a candidate must be to a training sample to count as that one
CONTROLS: dict[str, Callable[[Problem, int], Problem | None]] = {
    "target permuted": permuted,
    "other initial weights": elsewhere,
}


@dataclass(frozen=True)
class Control:
    """A control says what the attack finds where there is nothing, or why it was not run."""

    name: str
    residual: float | None = None  # that it left
    sure: int | None = None  # candidates that would be taken for training samples
    products: int | None = None  # that it took
    cut: bool = False  # whether the time was up before it had as many products as the attack
    why: str | None = None  # it was not run


def tried(
    problem: Problem,
    found: Reconstruction,
    method: Method,
    left: Callable[[], float | None],
    watch: Callable[[str], Observer | None],
) -> tuple[Control, ...]:
    """Run each control after an attack.

    `left` says how many seconds there are, None for any number; controls that are still to come
    have equal shares of them. `watch` makes the observer of the control of a name.
    """
    controls: list[Control] = []
    most = max(1, found.products)
    for name, changed in CONTROLS.items():
        seconds = left()
        if seconds is not None and seconds <= 0:
            controls.append(Control(name, why="the time limit was reached"))
            continue
        share = None if seconds is None else seconds / (len(CONTROLS) - len(controls))
        asked = len(found.samples), found.seed, method, share, watch(name)
        try:
            other = changed(problem, found.seed)
            if other is None:
                controls.append(Control(name, why="there is no such problem with these features"))
                continue
            control = reconstruct(other, *asked, product_limit=most)
            sure = judge(other, control).sure
        except (InputError, RuntimeError, MemoryError) as error:  # torch's own for memory, too
            controls.append(Control(name, why=f"it cannot be attacked ({error})"))
            continue
        residual = control.residual if math.isfinite(control.residual) else None
        cut = control.outcome is Outcome.BUDGET and control.products < most
        controls.append(Control(name, residual, sure, control.products, cut))
    return tuple(controls)


def comparable(problem: Problem, others: Tensor) -> Tensor:
    """Return held-out samples as rows (N, d), if they are inputs of the model."""
    rows = others.flatten(1).double().cpu()
    if rows.shape[1] != problem.dim or not rows.isfinite().all():
        expected = f"samples of {problem.dim:,} finite entries, as the model takes them"
        raise InputError(f"held_out: expected {expected}, got shape {tuple(others.shape)}.")
    return rows


def unseen(judged: Judgement, found: Reconstruction, others: Tensor) -> Control:
    """Compare what was found with samples (N, d) of the same kind that the model never saw.

    A candidate within `MATCHED` of one of them, relative to its norm and with either sign, comes
    from what all samples of the kind have in common.
    """
    x = found.samples
    near = torch.minimum(torch.cdist(x, others), torch.cdist(-x, others))
    matched = (near < MATCHED * others.norm(dim=1)).any(1)
    return Control("held-out samples", sure=int((matched & (judged.probabilities >= SURE)).sum()))


def weighed_against(
    judged: Judgement, controls: Sequence[Control], advice: str = SEED
) -> Judgement:
    """Return the judgement, which is *no evidence* where as much was found in a control.

    The probabilities were learnt where a control finds nothing. They are not known there, and NaN.
    Where some is found in a control it is *partly* at most, and that none ended is said.
    """
    if controls and all(x.why is not None or x.cut for x in controls):
        judged = replace(judged, reason=f"{judged.reason} No control was run to its end.")
    control = max(controls, key=lambda x: x.sure or 0, default=None)
    if control is None or not control.sure or not judged.sure:
        return judged
    if control.sure < judged.sure:
        said = f"But in a control, {control.name}, the same attack is sure of {control.sure}."
        verdict = "partly" if judged.verdict == "reconstructed" else judged.verdict
        return replace(judged, verdict=verdict, reason=f"{judged.reason} {said}")
    return replace(
        judged,
        verdict="no evidence",
        chance=control.name,
        reason=f"The same attack is sure of as many candidates in a control: {control.name}, "
        f"{control.sure} of {len(judged.probabilities)}, where there is nothing to find.",
        probabilities=torch.full_like(judged.probabilities, math.nan),
        advice=[advice],
    )
