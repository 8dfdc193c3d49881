"""Splitting inside the published methods: the books balance, and what was stuck comes loose."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from recipe_problems import combined, haim, watched

from exhume.equation.coefficients import Rule
from exhume.equation.objective import fitted, fitted_with
from exhume.equation.problem import Premise
from exhume.errors import InputError
from exhume.features.activations import softplus
from exhume.methods import Buzaglo2023, Haim2022, Iurada2025, Loo2023, reconstruct, shen2026
from exhume.methods.descent import Descent, Moments, smoothed
from exhume.methods.penalised import Descending
from exhume.methods.penalties import Hyperparameters, Place, balanced_labels, loss_at, outputs
from exhume.methods.progress import stream
from exhume.methods.shen2026 import Penalty, Projection, Shen2026, begun_with, curvatures, paced
from exhume.search.split import halves, shared
from nets import make
from problems import case, gaussian, refusals

SMOOTH = Hyperparameters(0.01, 0.01, 1.0, lambda step: 5.0, softplus)
PUSHED = replace(SMOOTH, threshold=3.0, push=5.0)
CASES = {
    "margin": (combined(), PUSHED),
    "margin of several": (combined(3), PUSHED),
    "free": (combined(2, Rule.FREE), replace(SMOOTH, adam=True)),
    "free, rough": (combined(1, Rule.FREE), replace(SMOOTH, box=0.3, smoothness=0.2, sparsity=0.1)),
}


def penalty(name: str, divisor: float) -> Penalty:
    """The loss of a recipe at four candidates, of which some lie outside of the box."""
    problem, settings = CASES[name]
    entries = 1 if problem.rule is Rule.MARGIN else outputs(problem)
    x, multipliers = gaussian(4, problem.dim, seed=7), 1 + gaussian(4, entries, seed=8).abs()
    labels, shares = balanced_labels(4, outputs(problem)), torch.rand(4, generator=stream(0, 9))
    place = Place(x, multipliers, labels, shares.double(), divisor)
    smooth = smoothed(problem, settings, 0)
    velocity = gaussian(4, problem.dim), gaussian(*place.multipliers.shape)
    moments = replace(Moments.at_rest(place, settings), velocity=velocity)
    state = Descent(place, moments, 0, 1.0, 1.0)
    return Penalty(smooth, settings, Descending(seed=0, samples=None, state=state))


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_decrease_is_that_of_the_methods_own_loss(name: str) -> None:
    loss = penalty(name, divisor=4.0)
    pairs = curvatures(loss, loss.problem.dim, stream(0, 0))
    chosen, epsilon = torch.tensor([0, 1, 3]), 1e-3
    moved = loss.after(halves(loss.candidates, chosen, pairs.vectors, epsilon), chosen)
    predicted = 0.5 * epsilon**2 * float(pairs.values[chosen].sum())
    assert moved - loss.value == pytest.approx(predicted, rel=1e-3)


@pytest.mark.parametrize("forget", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_split_of_no_distance_changes_no_loss(name: str, forget: bool) -> None:
    loss = penalty(name, divisor=8.0)
    before, chosen = loss.progress.state, torch.tensor([1, 2])
    still = halves(loss.candidates, chosen, torch.zeros_like(loss.candidates), 0.0)
    after = loss.split(still, chosen, forget).state
    value = loss_at(loss.problem, loss.settings, after.place).value
    assert value == pytest.approx(loss.value, rel=1e-13)
    assert value == loss.after(still, chosen) and after.place.divisor == 8.0
    assert after.place.labels[4:].tolist() == before.place.labels[chosen].tolist()
    assert {len(z) for z in (*after.moments.velocity, *(after.moments.square or ()))} == {6}
    (x, multipliers), (old, steps) = after.moments.velocity, before.moments.velocity
    assert bool(x.any()) == bool(multipliers.any()) != forget
    if not forget:  # the sum of the halves goes on as their parent did
        assert torch.allclose(multipliers[1] + multipliers[4], steps[1])
        assert torch.equal(x[4:], old[chosen])


def test_the_projection_predicts_what_halves_with_half_the_coefficients_do() -> None:
    problem, base = case(6, 5, 6.0, "tanh", outputs=2).problem, Iurada2025(rate=1e-3)
    progress = base.init(problem, 3, 0)
    fit = fitted(problem, problem.domain.project(progress.candidates))
    loss = Projection(problem, replace(progress, state=replace(progress.state, fit=fit)))
    pairs = curvatures(loss, 6, stream(0, 0))
    chosen, epsilon = torch.tensor([0, 2]), 1e-3
    moved = problem.domain.project(halves(loss.candidates, chosen, pairs.vectors, epsilon))
    held = fitted_with(problem, moved, shared(fit.coefficients, chosen)).value
    predicted = 0.5 * epsilon**2 * float(pairs.values[chosen].sum())
    assert held - loss.value == pytest.approx(predicted, rel=2e-3)
    assert loss.after(moved, chosen) < held
    problem = base.view(case(6, 5, 6.0, "relu").problem)  # which it does not smooth
    loss = Projection(problem, base.init(problem, 3, 0))
    assert curvatures(loss, 6, stream(0, 0)).values.min() < 0


HAIM = combined(samples=6), haim(330)
IURADA = case(8, 6, 6.0, "relu+tanh", seed=1).problem, Iurada2025(rate=1.0, steps=400)
RUNS = [(HAIM, "published"), (HAIM, "adaptive"), (IURADA, "adaptive")]


@pytest.mark.parametrize(("posed", "rule"), RUNS)
def test_a_run_with_splits(posed: Any, rule: Any) -> None:
    problem, base = posed
    method = Shen2026(base, every=100, rule=rule)
    found, seen = watched(problem, 2, method)
    counts = [len(progress.candidates) for progress in seen]
    assert counts[-1] > counts[0] and sorted(counts) == counts
    assert len(found.samples) == counts[-1] and seen[-1].looks == 6
    problem = method.view(problem)
    for before, after in itertools.pairwise(seen):
        parents = after.parents
        assert len(parents) == len(after.candidates)
        if len(parents) > len(before.candidates):
            assert before.state.steps == after.state.steps >= 100
            assert after.total_products >= before.total_products + method.iterations + 1
            less, more = (shen2026.loss_of(base, problem, one).value for one in (after, before))
            assert less < more
        if isinstance(after, Descending):
            place, start = after.state.place, counts[0]
            total = torch.zeros(start, dtype=torch.float64).index_add(0, parents, place.shares)
            assert torch.allclose(total, torch.ones_like(total)) and place.divisor == start
            assert torch.equal(place.labels, seen[0].state.place.labels[parents])
            assert after.state.pace == (place.shares.min().item() if rule == "adaptive" else 1.0)


def test_splits_come_at_multiples_and_after_tuning() -> None:
    _, seen = watched(combined(), 2, Shen2026(haim(80), rounds=2))
    steps = [(progress.state.steps, progress.looks) for progress in seen]
    changes = [after for before, after in itertools.pairwise(steps) if after[1] > before[1]]
    assert changes == [(20, 1), (30, 2), (40, 3), (60, 4)]  # halves of 80/3 steps
    _, seen = watched(combined(), 2, Shen2026(Haim2022(steps=60, trials=2, probe=5)))
    phases = {(progress.phase, progress.parents is not None) for progress in seen}
    assert {("tune", False), ("run", True)} <= phases and ("tune", True) not in phases


def test_too_few_candidates_come_loose() -> None:
    problem, base = combined(activation="tanh"), haim(400)
    alone = reconstruct(problem, 1, 0, base)
    for rule in ("published", "adaptive"):
        split = reconstruct(problem, 1, 0, Shen2026(base, every=100, rule=rule))
        assert len(alone.samples) == 2 and len(split.samples) >= 4
        assert split.residual < 0.5 * alone.residual


def test_smaller_shares_make_smaller_steps_of_the_multipliers() -> None:
    problem, base = combined(), haim(20)
    whole = base.init(problem, 2, 0)
    place = replace(whole.state.place, shares=torch.tensor([1.0, 0.25, 0.5, 1.0]).double())
    progress = replace(whole, state=replace(whole.state, place=place))
    paced_run = replace(progress, state=paced(progress.state))
    slower = base.advance(problem, paced_run).state.place.multipliers
    slow = replace(base, multiplier_rate=0.25 * 0.05)
    assert torch.equal(slower, slow.advance(problem, progress).state.place.multipliers)
    adam = Loo2023(steps=20, rate=0.02).init(combined(rule=Rule.FREE), 2, 0)
    assert paced(adam.state) is adam.state


def test_the_control_has_as_many_candidates() -> None:
    for problem, base in (HAIM, IURADA):
        begun = begun_with(base, base.view(problem), 7, seed=3)
        assert len(begun.candidates) == 7 and begun.seed == 3 and begun.phase != "tune"
        split = shen2026.with_splits(begun)
        assert split.looks == 0 and split.state is begun.state
        with pytest.raises(InputError, match="premise"):
            begun_with(base, replace(case(6, 3, 4.0).problem, premise=Premise.DECAY), 7, seed=3)


def test_the_base_follows_from_the_problem() -> None:
    for problem, base in (
        (combined(), Haim2022),
        (combined(3), Buzaglo2023),
        (combined(rule=Rule.FREE), Loo2023),
        (replace(combined(), premise=Premise.DECAY), Buzaglo2023),
        (case(6, 3, 4.0).problem, Iurada2025),
        (make("mlp").problem("last"), Iurada2025),
    ):
        assert type(shen2026.base_for(problem)) is base


test_settings_that_cannot_be = refusals(
    ({"rule": "greedy"}, "published or adaptive, got 'greedy'"),
    ({"every": 0}, "at least 1.*got 0, 20 and 3"),
    ({"rounds": -1}, "at least 0.*got None, 20 and -1"),
    ({"iterations": 0}, "at least 1.*got None, 0 and 3"),
    ({"base": Iurada2025()}, "iurada2025 where coefficients are free"),  # not at the margin
    ({"base": replace(haim(20), starts=2)}, "candidates of one run.*starts=1"),
    call=lambda **settings: reconstruct(combined(), 2, 0, Shen2026(**settings)),
)
