"""Does splitting help? Against the same method without, and with as many candidates as after."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from exhume import data, victims
from exhume.bench.common import check_count, console, heading
from exhume.data import Data
from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.features.activations import softplus
from exhume.methods import seen_by, threads_for
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.iurada2025 import Iurada2025, Rolling
from exhume.methods.loo2023 import Loo2023
from exhume.methods.penalised import Descending, Penalised
from exhume.methods.penalties import bounds
from exhume.methods.progress import Method, Progress, stream
from exhume.methods.shen2026 import Choice, CountMatched, Shen2026, with_splits
from exhume.methods.splitting import SMOOTHING, Loss, Penalty, Projection, curvatures
from exhume.search.split import halves, shared

RULES: tuple[Choice, ...] = ("published", "adaptive")
ARMS = ("base", *(arm for rule in RULES for arm in (f"split, {rule}", f"count of {rule}")))
EPSILONS = (1e-4, 3e-5, 1e-5)
"""Of the check of the predicted decrease, as shares of the median norm of the candidates.

The first at which half of them stay clear of the box's bounds; rounding shows if it is small.
"""

ALIKE = 0.95
"""Cosine from which a sample counts as found where its norm leaves no trace."""

TRIALS, PROBE = 9, 100
"""Of tuning: enough for networks of this size."""


@dataclass(frozen=True, eq=False)
class Case:
    """An objective on one victim.

    Attributes:
        problem: what is attacked, in float64.
        truth: the samples, (n, d).
        base: the method without splitting.
        count: candidates that it begins with.
    """

    problem: Problem
    truth: Tensor
    base: Penalised | Iurada2025
    count: int


Spent = Callable[[Method, Problem, Progress], Progress]
"""A run until its budget is spent."""


@dataclass(frozen=True)
class Row:
    """One run, measured."""

    candidates: int
    steps: int
    residual: float
    cosine: float
    alike: float
    error: float
    recovered: float


def splitting(
    cases: tuple[str, ...] = ("margin", "classes", "change", "projection"),
    seeds: int = 3,
    first_seed: int = 0,
    limit: float = 30.0,
    samples: int = 12,
    width: int = 200,
) -> None:
    """Splitting against tuned baselines, at equal time and at equal numbers of candidates.

    Hyperparameters are tuned once, for the base, without the truth; all runs of a seed take them.

    Args:
        cases: margin (one output, haim2022) and classes (three, buzaglo2023), where weight decay
            holds what the margin would; change (loo2023); projection (coefficients eliminated,
            iurada2025, on random features of points of a sphere).
        seeds: how many, each of data, network and attack alike.
        first_seed: where they begin.
        limit: seconds of the processor for the runs of one seed and case, in equal parts.
        samples: n, of the training set: digits, but for the projection.
        width: of the networks' hidden layer.
    """
    check_count("seeds", seeds)
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        raise InputError(f"case {unknown[0]!r}: expected some of {', '.join(CASES)}.")
    heading(f"splitting: n={samples}, width {width}, {limit / len(ARMS):g} s a run")
    for name in cases:
        rows: dict[str, list[Row]] = {arm: [] for arm in ARMS}
        ratios = []
        for seed in range(first_seed, first_seed + seeds):
            spent = partial(_spent, limit=limit / len(ARMS))
            found, ratio = compared(CASES[name](samples, width, seed), seed, spent)
            ratios.append(ratio)
            for arm, row in found.items():
                rows[arm].append(row)
            console.print(
                f"  {name} seed {seed}: cosine "
                + ", ".join(f"{arm} {rows[arm][-1].cosine:.3f}" for arm in ARMS)
            )
        console.print(_table(name, rows))
        predicted = ", ".join(f"{ratio:.4f}" for ratio in ratios)
        console.print(f"{name}: predicted ΔL / measured ΔL, by seed: {predicted}")
        for rule in RULES:
            console.print(f"{name}: {_sentence(rule, rows)}")


def compared(case: Case, seed: int, spent: Spent) -> tuple[dict[str, Row], float]:
    """All runs of one seed; the predicted decrease over the measured one, where the base ends.

    Args:
        case: the objective and its victim.
        seed: of the attack.
        spent: advances a run until its budget is spent.
    """
    base, samples = case.base, len(case.truth)
    problem = seen_by(base, case.problem)
    start = CountMatched(base, case.count, _tuned(base, problem, samples, seed))

    def go(method: Method, begin: CountMatched) -> tuple[Row, Progress]:
        started = begin.init(problem, samples, seed)
        progress: Progress = with_splits(started) if isinstance(method, Shen2026) else started
        with threads_for(problem, samples):
            progress = spent(method, problem, progress)
        point = method.finish(problem, progress)
        return _measured(point, progress.total_steps, case.truth), progress

    alone, at_rest = go(base, start)
    found = {"base": alone}
    for rule in RULES:
        split, control = go(Shen2026(base, max(1, alone.steps // 4), rule=rule), start)[0], alone
        if split.candidates > case.count:
            control = go(base, replace(start, count=split.candidates))[0]
        else:
            split = alone  # nothing was split: the same run, but for where time cut it off
        found |= {f"split, {rule}": split, f"count of {rule}": control}
    return found, predicted_over_measured(base, problem, at_rest)


def _spent(method: Method, problem: Problem, progress: Progress, limit: float) -> Progress:
    """The run after so many seconds of the processor, whatever else that was busy with."""
    start = time.process_time()
    while progress.outcome is None and time.process_time() - start < limit:
        progress = method.advance(problem, progress)
    return progress


def _tuned(base: Penalised | Iurada2025, problem: Problem, samples: int, seed: int) -> int:
    """The trial that tuning chose; nothing is tuned in the projection."""
    if isinstance(base, Iurada2025):
        return 0
    progress = base.init(problem, samples, seed)
    while progress.phase == "tune" and progress.outcome is None:
        progress = base.advance(problem, progress)
    return progress.state.trial


def predicted_over_measured(
    base: Penalised | Iurada2025, problem: Problem, progress: Progress
) -> float:
    """½ε² Σ uᵀSu over what the loss does when candidates are split by a small ε.

    The published surrogate of ReLU has a forward and a backward function that do not belong
    together, so no loss has its second derivative: softplus of the same slope takes its place.
    """
    loss: Loss
    if isinstance(base, Penalised):
        assert isinstance(progress, Descending)
        settings = base.settings_of(problem, progress)
        sigma = settings.surrogate(progress.state.steps)
        slope = 4 * sigma.second(torch.zeros((), dtype=torch.float64)).item()
        smooth = replace(problem, features=problem.features.substituted(softplus(slope)))
        loss = Penalty(smooth, settings, progress)
    else:
        assert isinstance(progress, Rolling)
        smooth = replace(problem, features=problem.features.substituted(softplus(SMOOTHING)))
        fit = progress.state.fit
        fit = fitted_with(smooth, fit.candidates, fit.coefficients)
        loss = Projection(smooth, replace(progress, state=replace(progress.state, fit=fit)))
    pairs = curvatures(loss, problem.dim, stream(progress.seed, 0))
    size = float(loss.candidates.norm(dim=1).median())
    for share in EPSILONS:
        epsilon, chosen = share * size, torch.arange(len(loss.candidates))
        if isinstance(loss, Penalty):
            chosen = _off_the_edge(loss, epsilon * pairs.vectors)
        if 2 * len(chosen) >= len(loss.candidates):
            break
    moved = halves(loss.candidates, chosen, pairs.vectors, epsilon)
    after = loss.after(moved, chosen) if isinstance(loss, Penalty) else _held(loss, moved, chosen)
    return 0.5 * epsilon**2 * float(pairs.values[chosen].sum()) / (after - loss.value)


def _off_the_edge(loss: Penalty, step: Tensor) -> Tensor:
    """Candidates whose halves, at x ± step, are on the same side of every bound of the box as x.

    The second derivative of the penalty jumps at a bound, from 0 to 2.
    """
    low, high = bounds(loss.problem.domain, loss.candidates)
    room = torch.minimum((loss.candidates - low).abs(), (loss.candidates - high).abs())
    return (room > step.abs()).all(1).nonzero()[:, 0]


def _held(loss: Loss, moved: Tensor, chosen: Tensor) -> float:
    """The relative residual of halves with half the coefficients of their parent each."""
    if not isinstance(loss, Projection):
        raise TypeError("only the projection has coefficients to hold")
    point = loss.progress.state.fit
    parts = shared(point.shares, chosen).reshape(-1, point.coefficients.shape[1])
    return fitted_with(loss.problem, loss.problem.domain.project(moved), parts).value


def _measured(point: Fit, steps: int, truth: Tensor) -> Row:
    result = score(point.candidates, truth)
    return Row(
        len(point.candidates),
        steps,
        point.value,
        result.cosine,
        float((result.cosines > ALIKE).double().mean()),
        result.error,
        result.recovered,
    )


def _table(name: str, rows: dict[str, list[Row]]) -> Table:
    columns = ("candidates", "steps", "stationarity", "cosine", f"over {ALIKE}", "error")
    table = Table(name, *columns, "recovered")
    for arm, runs in rows.items():
        table.add_row(
            arm,
            _spread([run.candidates for run in runs], ".0f"),
            _spread([run.steps for run in runs], ".0f"),
            _spread([run.residual for run in runs], ".1e"),
            _spread([run.cosine for run in runs], ".3f"),
            _spread([run.alike for run in runs], ".0%"),
            _spread([run.error for run in runs], ".2f"),
            _spread([run.recovered for run in runs], ".0%"),
        )
    return table


def _spread(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation over the seeds."""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {format(statistics.stdev(values), form)}"


def _sentence(rule: str, rows: dict[str, list[Row]]) -> str:
    """In how many seeds splitting was better than each baseline."""
    split = rows[f"split, {rule}"]
    parts = []
    for other, name in (("base", "without"), (f"count of {rule}", "with as many from the start")):
        pairs = list(zip(split, rows[other], strict=True))
        closer = sum(one.cosine > two.cosine for one, two in pairs)
        lower = sum(one.residual < two.residual for one, two in pairs)
        parts.append(f"than {name}: closer to the truth in {closer}, lower residual in {lower}")
    return f"split, {rule}, of {len(split)} seeds, {'; '.join(parts)}."


def _at_rest(known: Data, width: int, loss: str, seed: int) -> Problem:
    """The weights of a network that weight decay holds: θ = Σ λ_i y_i ∇f(x_i), as at the margin."""
    victim = victims.two_layer(
        known, width, loss=loss, seed=seed, decay=1e-3, until=0.0, steps=4000
    )
    return victim.posed(premise="margin")


def _margin(samples: int, width: int, seed: int) -> Case:
    known = data.load("digits", samples, seed, classes="parity", centre="pixels")
    base = Haim2022(steps=10**9, trials=TRIALS, probe=PROBE)
    return Case(_at_rest(known, width, "logistic", seed), known.inputs, base, 2 * samples)


def _classes(samples: int, width: int, seed: int) -> Case:
    known = data.load("digits", samples, seed, classes=(0, 1, 2), centre="pixels")
    base = Buzaglo2023(steps=10**9, trials=TRIALS, probe=PROBE)
    return Case(_at_rest(known, width, "cross_entropy", seed), known.inputs, base, 2 * samples)


def _change(samples: int, width: int, seed: int) -> Case:
    known = data.load("digits", samples, seed, classes="parity", centre="pixels")
    victim = victims.two_layer(known, width, seed=seed, until=1e-6, lazy=10.0)
    base = Loo2023(steps=10**9, trials=TRIALS, probe=PROBE)
    return Case(victim.posed("all", "final"), known.inputs, base, 2 * samples)


def _projection(samples: int, width: int, seed: int) -> Case:
    known = data.sphere(20, samples, seed)
    victim = victims.random_features(known, 4 * known.dim * samples, seed=seed)
    return Case(victim.problem.to("cpu", torch.float64), known.inputs, Iurada2025(), samples)


CASES: dict[str, Callable[[int, int, int], Case]] = {
    "margin": _margin,
    "classes": _classes,
    "change": _change,
    "projection": _projection,
}
