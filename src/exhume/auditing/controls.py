"""The same attack once more: from another start, and where there is nothing to find.

What comes back from another start is less likely chance (`again`); what the attack finds in a
control is. Both have the method and number of candidates of the attack, and no more products than
it took. Controls can only take away, so they follow an attack that found something.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from exhume import ranks
from exhume.auditing.judgement import ABOVE, MATCHED, SEED, SURE, Judgement, allowed, judge
from exhume.equation.problem import Premise, Problem
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
        problem = without_layers(problem)
        features = _ending(features, features.points[0], target)
    return replace(problem, target=target, features=features)


def elsewhere(problem: Problem, seed: int) -> Problem | None:
    """Return the problem of an auditor whose initial weights are not those that training began at.

    The target stays. The features have the entries of each of their weights in another order, or
    random ones of another seed. None where it is not known how to make such features.
    """
    features = _elsewhere(problem.features, seed)
    if isinstance(features, TrainingRun):
        problem = without_layers(problem)
    return None if features is None else replace(problem, features=features)


def without_layers(problem: Problem) -> Problem:
    """Return the problem without what its first layer shows of the samples: replay begins there."""
    return replace(problem, first_layer=None, tiled=None)


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


STREAM = 0x5EED  # added to the seed for another start: no seed that is likely asked for next
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


@dataclass(frozen=True)
class Repeat:
    """The same attack can be run once more, with no more products than it took."""

    found: Reconstruction  # by the attack
    method: str | Method
    left: Callable[[], float | None]  # how many seconds there are; None for any number
    watch: Callable[[str], Observer | None]  # makes the observer of a phase

    def attack(
        self, problem: Problem, phase: str, seed: int, share: int
    ) -> tuple[Reconstruction, bool] | None:
        """Attack a problem in one of so many equal shares of the time that is left, if any is.

        Returned are what was found, and whether the time was up before there were as many products.
        """
        seconds, most = self.left(), max(1, self.found.products)
        if seconds is not None and seconds <= 0:
            return None
        seconds = None if seconds is None else seconds / share
        asked = len(self.found.samples), seed, self.method, seconds, self.watch(phase)
        other = reconstruct(problem, *asked, product_limit=most)
        return other, other.outcome is Outcome.BUDGET and other.products < most


def failures() -> tuple[type[Exception], ...]:
    """Return the errors after which an audit goes on without the attack that met them."""
    if ranks.count() > 1:  # other ranks, which did not meet it, would wait for this one
        return (InputError,)
    return InputError, RuntimeError, MemoryError  # torch's own for memory, too


def again(problem: Problem, repeat: Repeat) -> Tensor | None:
    """Tell of each candidate whether another start leads to it: 1, −1, or 0 if not known, (n,).

    That is a sign of `judgement`. Candidates of both are paired one to one, no farther apart than
    `MATCHED`. Those left over are not known if the other start explained the weights far less: its
    search failed. None where there was no time for one.
    """
    found, share = repeat.found, 1 + len(CONTROLS)  # controls are still to come
    if problem.premise is Premise.REPLAY:  # from another seed, unmixing leads to the same start
        problem = without_layers(problem)
    try:
        ended = repeat.attack(problem, "another start", found.seed + STREAM, share)
    except failures():
        return None
    if ended is None:
        return None
    other, most = ended[0], ABOVE * max(found.residual, allowed(problem))
    near = csr_array(_near(found.samples, other.samples).numpy())
    paired = torch.from_numpy(maximum_bipartite_matching(near, "column")) >= 0
    return torch.where(paired, 1.0, -1.0 if other.residual <= most else 0.0).double()


def tried(problem: Problem, repeat: Repeat, sought: bool = False) -> tuple[Control, ...]:
    """Run each control after an attack.

    If candidates of the attack were `sought` again, those of a control are judged as if they had
    been found again, which takes no other start and makes it no weaker.
    """
    controls: list[Control] = []
    for name, changed in CONTROLS.items():
        seed, share = repeat.found.seed, len(CONTROLS) - len(controls)
        try:
            other = changed(problem, seed)
            ended = None if other is None else repeat.attack(other, f"control: {name}", seed, share)
            if other is None or ended is None:
                why = "there is no such problem with these features"
                why = why if other is None else "the time limit was reached"
                controls.append(Control(name, why=why))
                continue
            control, cut = ended
            best = torch.ones(len(control.samples)).double() if sought else None
            sure = ranks.on_first(partial(judge, other, control, again=best)).sure
        except failures() as error:
            controls.append(Control(name, why=f"it cannot be attacked ({error})"))
            continue
        residual = control.residual if math.isfinite(control.residual) else None
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
    matched = _near(found.samples, others).any(1)
    return Control("held-out samples", sure=int((matched & (judged.probabilities >= SURE)).sum()))


def _near(x: Tensor, others: Tensor) -> Tensor:
    """Tell of x_i (n, d) and o_j (N, d) whether ‖o_j ± x_i‖ < `MATCHED` ‖o_j‖, (n, N)."""
    distances = torch.minimum(torch.cdist(x, others), torch.cdist(-x, others))
    return torch.lt(distances, MATCHED * others.norm(dim=1))


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
