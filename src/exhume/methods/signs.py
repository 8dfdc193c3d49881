"""Replay of Adam: its change is close to a sum of signs, which jump where a gradient passes zero.

Three things make it least squares that can be solved. Mean squares are pooled over rows and columns
at first, which takes the jumps away, and then less and less. Adam does not see the scale of an
entry of the inputs, so that public inputs say how large it is, as a prior that counts as much as
the residual allows. And what columns of a dense first layer tell is held: one that did not move
belongs to an entry that is zero in every sample, and one that moved as the bias does, to an entry
with the same value in every sample.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Problem
from exhume.features.replay import DENSE, Replayed, TrainingRun
from exhume.solvers import Outcome, judged
from exhume.solvers.levenberg_marquardt import LEAST_DAMPING, DampedState


class Rung(NamedTuple):
    """A rung says how the steps of one part of a trial are taken."""

    pooling: float  # share of the mean squares that is pooled
    weight: float  # of the prior, times the variance of a row
    # A row bends where the candidates' error moves it by its whole size, and counts less there. The
    # error is so many times the root of the residual, in standard deviations of the prior
    error: float
    cut: float  # rows further off than so many deviations count less: some have the wrong sign
    shared: bool  # whether entries that are the same in every sample move, too


# At a pooling of s the samples leave about 0.35 s^0.65 of the change unexplained
RUNGS = (
    Rung(0.3, 1.0, 0.3, math.inf, False),
    Rung(0.03, 0.3, 0.3, math.inf, False),
    Rung(3e-3, 0.3, 0.3, math.inf, False),
    Rung(1e-3, 0.3, 3.0, 3.0, True),
    Rung(1e-4, 0.1, 3.0, 3.0, True),
    Rung(1e-5, 0.01, 3.0, 3.0, True),
    Rung(0.0, 1e-3, 0.3, math.inf, True),
)
STEPS = 12  # on each, and twice as many on the last, where the residual falls to rounding
EARLY = 2  # rungs after which a trial ends that leaves more than LOST
LOST = 0.03  # those near the samples leave 0.01 by then, and others 0.06 and more
DAMPING = 1e-2  # at the first step of each: little, as the prior holds steps back too
NORMAL = 1.4826  # standard deviations of a Gaussian in the median of its absolute values
TRIES = 8  # dampings, each four times the last: with 65,000 times the first a step is none
ROUNDED = 1e-6  # one step of the wrong sign among p = 3,000 weights leaves so much
SAME = 1e-3  # share of a column's change by which it may differ from the bias: rounding leaves less
STILL = 1e-5  # share of the largest change below which a column has moved by rounding alone
SHRINKAGE = 0.05  # of the public inputs' covariance towards its diagonal: there may be few of them


@dataclass(frozen=True, eq=False)
class Prior:
    """A prior holds what is known of the samples before any step."""

    mean: Tensor  # (d,) float64, of all entries
    precision: Tensor  # (d, d), the inverse of their covariance
    value: Tensor  # (d,), of the entries that are held
    moved: Tensor  # (d,) bool: not zero in every sample
    free: Tensor  # (d,) bool: neither zero nor the same in every sample

    def basis(self, tangent: Tensor, shared: bool) -> Tensor:
        """Return the directions (n·d, m) of candidates, as columns, that are not held.

        Entries of the tangent (n, d) that are zero are; one that is the same in every sample moves
        in all of them alike, if at all.
        """
        n, d = tangent.shape
        units = torch.eye(n * d, dtype=torch.float64)
        each = units[:, ((tangent != 0) & self.free).flatten()]
        if not shared:
            return each
        alike = units.reshape(n * d, n, d).sum(1)[:, self.moved & ~self.free] / math.sqrt(n)
        return torch.cat([each, alike], 1)

    def held(self, candidates: Tensor) -> Tensor:
        """Return the candidates (n, d) with the entries that are held at their values."""
        return torch.where(self.free, candidates, self.value.to(candidates))


def applies(problem: Problem, samples: int) -> bool:
    """Tell whether a run is Adam's, on the CPU, and its Jacobian small enough to keep."""
    run = cast(TrainingRun, problem.features)
    small = run.width * samples * problem.dim <= DENSE and run.device.type == "cpu"
    return run.recipe.optimizer != "sgd" and small


def prior_of(problem: Problem) -> Prior:
    """Return the prior: of public inputs if there are any, else of random ones of the domain."""
    run = cast(TrainingRun, problem.features)
    drawn = run.public
    if drawn is None:
        drawn = problem.domain.start(1024, problem.dim, torch.Generator().manual_seed(0))
    inputs = drawn.double()
    mean = inputs.mean(0)
    covariance = (inputs - mean).T @ (inputs - mean) / len(inputs)
    spread = covariance.diagonal().clone()
    never = spread <= STILL * spread.mean()  # constant entries, of which nothing is known
    covariance = torch.lerp(covariance, torch.diag(spread), SHRINKAGE)
    covariance += torch.diag(torch.where(never, spread.mean(), 0.0))
    zero, sign = columns(run)
    known = torch.nanmedian(torch.where(inputs * sign > 0, inputs, math.nan), 0).values
    same = (sign != 0) & ~known.isnan() & (run.public is not None)
    value = torch.where(same & ~zero, known, 0.0)
    return Prior(mean, torch.linalg.inv(covariance), value, ~zero, ~zero & ~same)


def columns(run: TrainingRun) -> tuple[Tensor, Tensor]:
    """Return which columns of a dense first layer did not move, and which moved as the bias, (d,).

    Where an entry is x in every sample, the gradient of its column is x times that of the bias, and
    Adam takes the same steps for both, or the opposite ones: the signs of x are returned, else 0.
    """
    name, (before, after) = run.network.first_dense(run.points[1]), run.points
    recipe, none = run.recipe, torch.zeros(run.dim, dtype=torch.float64)
    decay = recipe.weight_decay
    unknown = decay and (recipe.optimizer == "adam" or recipe.lr is None)
    if name not in run.block or before[str(name)].ndim != 2 or unknown:
        return none.bool(), none
    kept = 1.0
    if decay:
        length = recipe.length(len(run.labels or (0,)))
        kept = math.prod(1 - recipe.rate(k, length) * decay for k in range(length))
    change = after[name].double() - kept * before[name].double()
    size = change.norm(dim=0)
    still = size <= STILL * size.max()
    bias = str(name).removesuffix("weight") + "bias"
    if bias not in run.block:
        return still, none
    shift = (after[bias].double() - kept * before[bias].double())[:, None]
    near = SAME * shift.norm()
    with_it, against = (change - shift).norm(dim=0) < near, (change + shift).norm(dim=0) < near
    return still, with_it.double() - against.double()


def eased(problem: Problem) -> Problem:
    """Return the problem as the first rung has it; what is held is so in public inputs, too."""
    run, prior = cast(TrainingRun, problem.features), prior_of(problem)
    public = None if run.public is None else prior.held(run.public)
    return replace(problem, features=replace(run, pooling=RUNGS[0].pooling, public=public))


@dataclass(frozen=True)
class Signs:
    """The solver takes Levenberg-Marquardt's steps, from pooled mean squares to Adam's own.

    It has a prior, and the whole Jacobian.
    """

    tolerance: float  # relative residual at which the weights count as explained

    def step(self, problem: Problem, state: DampedState) -> DampedState:
        """Take the next step of a trial; the fit of the state is always that of Adam itself."""
        number, fresh = divmod(state.steps, STEPS)
        rung = RUNGS[min(number, len(RUNGS) - 1)]
        run = replace(cast(TrainingRun, problem.features), pooling=rung.pooling)
        seen = replace(problem, features=run)
        fit = fitted_with(seen, state.fit.candidates, state.fit.coefficients)
        damping = state.damping if fresh else DAMPING
        moved, damping = informed_step(seen, fit, prior_of(problem), rung, damping)
        fit = fitted_with(problem, moved.candidates, moved.coefficients)
        ended = state.steps + 1 >= STEPS * (len(RUNGS) + 1)
        ended |= state.steps + 1 == STEPS * EARLY and fit.value > LOST
        new = DampedState(
            fit=fit,
            damping=damping,
            steps=state.steps + 1,
            products=state.products + fit.candidates.numel(),  # a column of J is a product
            outcome=Outcome.STALLED if ended else None,
        )
        least = 0.0 if rung.pooling else rounding(problem, fit)
        return judged(new, max(self.tolerance, least))


def informed_step(
    problem: Problem, fit: Fit, prior: Prior, rung: Rung, damping: float
) -> tuple[Fit, float]:
    """Return the fit after a step, or the same if none helps, and the next damping.

    With the residual R (p,), its Jacobian J (p, m) in the directions that may move and weights W of
    rows, a step D solves (JᵀWJ + (s + λ) Q) D = JᵀWR − s Q (x − μ). Q is the prior's precision and
    the metric of the damping λ, which is relative to JᵀWJ; s is the variance of a row of R.
    """
    here, coefficients = fit.candidates, fit.coefficients
    left, size = fit.residual.double(), float(problem.target.double().square().mean())
    at = cast(Replayed, _single(problem, fit).linearization)
    jacobian = cast(Tensor, at.jacobian).double()  # float32 is far closer than a linear step
    descent = (jacobian.T @ left).reshape(here.shape).to(here)
    basis = prior.basis(problem.domain.tangent(here, descent)(torch.ones_like(here)), rung.shared)
    jacobian = jacobian @ basis
    whole = torch.kron(torch.eye(len(here), dtype=torch.float64), prior.precision.contiguous())
    metric = basis.T @ whole @ basis
    lower = torch.linalg.cholesky(metric)
    reach = torch.linalg.solve_triangular(lower, jacobian.T, upper=False).square().sum(0)
    rows = 1 / (1 + rung.error**2 * fit.value * reach[:, None] / size)
    variance = fit.value * size
    if rung.cut < math.inf:
        variance = (NORMAL * float(left[left != 0].abs().median())) ** 2
        rows = rows / (1 + left.square() / (rung.cut**2 * variance))
    noise = rung.weight * variance

    def off(candidates: Tensor) -> Tensor:
        return (candidates.double() - prior.mean).reshape(-1, 1)

    def cost(new: Fit) -> float:
        pulled = off(new.candidates)
        misfit = (rows * new.residual.double().square()).sum()
        return float(misfit + noise * pulled.T @ whole @ pulled)

    matrix = jacobian.T @ (rows * jacobian)
    damp = metric * (matrix.diagonal().mean() / metric.diagonal().mean())
    matrix = matrix + noise * metric
    right = jacobian.T @ (rows * left) - noise * basis.T @ (whole @ off(here))
    before = cost(fit)
    for _ in range(TRIES):
        step = torch.linalg.solve(matrix + damping * damp, right)
        moved = problem.domain.project(here + (basis @ step).reshape(here.shape).to(here))
        new = fitted_with(problem, moved, coefficients)
        if (after := cost(new)) < before:
            expected = float(2 * right.T @ step - step.T @ matrix @ step)
            share = min(1.0, (before - after) / expected)
            return new, max(LEAST_DAMPING, damping * max(0.2, 1 - (2 * share - 1) ** 3))
        damping *= 4
    return fit, damping


def _single(problem: Problem, fit: Fit) -> Fit:
    """Return the same fit in float32."""
    run = problem.features.to(torch.device("cpu"), torch.float32)
    single = replace(problem, features=run, target=problem.target.float())
    return fitted_with(single, fit.candidates.float(), fit.coefficients)


def rounding(problem: Problem, fit: Fit) -> float:
    """Return what training in float32 may leave: the run's change in it and in float64 differ so.

    Adam makes whole steps of gradients that are zero but for rounding. No more than ROUNDED counts,
    since a run that is off somewhere else can be as sensitive.
    """
    off = _single(problem, fit).residual.double() - fit.residual.double()
    return min(ROUNDED, float(off.square().sum() / problem.size))
