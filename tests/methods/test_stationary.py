"""Ours for the weights themselves: starts, renewal, the answer, and planted samples."""

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from recipe_problems import DIM, SAMPLES, planted, weights_of
from torch import Tensor, nn

from exhume.equation.domain import Box, Domain, Sphere
from exhume.equation.objective import fitted, fitted_with
from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.features.activations import softplus
from exhume.methods import reconstruct, stationary
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.progress import stream
from exhume.methods.stationary import (
    Sharpening,
    Stationary,
    resized,
    softened,
    starts,
    traces,
)
from exhume.models.formulation import Told, weights_problem
from exhume.models.prepare import prepare
from exhume.solvers import Outcome
from problems import case, cosines, gaussian

Unused = tuple[Problem, Sharpening, Stationary]
GENTLE = Buzaglo2023(rate=1e-3, multiplier_rate=1e-4)  # published steps go too far for few weights
Trials = partial(Stationary, leads=0)  # without the published steps before them


def moved(method: Stationary, problem: Problem, samples: int, until: int) -> list[Sharpening]:
    """The progress at the start and after every move."""
    moves = [method.init(problem, samples, 0)]
    while moves[-1].outcome is None and len(moves) <= until:
        moves.append(method.advance(problem, moves[-1]))
    return moves


@pytest.fixture(scope="module")
def unused() -> Unused:
    """A search at the end of a trial, with candidates that have no multiplier."""
    problem, method = weights_of(), Trials(steps=4, trials=3, surplus=4.0)
    progress = moved(method, problem, 3, until=4)[-1]
    assert progress.state.steps == 4 and progress.rounds == 0
    return problem, progress, method


def test_a_trace_is_what_a_candidate_alone_leaves() -> None:
    posed = [weights_of(premise, c) for premise in (Premise.MARGIN, Premise.DECAY) for c in (1, 3)]
    for problem in (*posed, case(8, 3, 6, outputs=2).problem):  # every column counts
        fit = fitted(problem, gaussian(5, problem.dim, seed=2))
        owner, left = torch.arange(len(fit.coefficients)) // fit.rows, []
        for i in range(5):
            own = fit.coefficients * (owner == i)[:, None]
            alone = fitted_with(problem, fit.candidates, own)
            left.append((problem.target - alone.residual).square().sum())
        torch.testing.assert_close(traces(fit), torch.stack(left))
        assert max(left) > 0


def two_directions(domain: Domain) -> tuple[Problem, Tensor]:
    """A first layer that moved with singular values 9, 1 and, not to be seen, 0.001."""
    q = torch.linalg.qr(gaussian(DIM, DIM)).Q.T[:3]
    left = torch.linalg.qr(gaussian(12, 3, seed=1)).Q
    layer = left @ torch.diag(torch.tensor([9.0, 1.0, 0.001]).double()) @ q
    before = gaussian(*layer.shape, seed=7)
    return replace(weights_of(domain=domain), first_layer=FirstLayer(before, before + layer)), q


def test_starts_lie_in_the_row_space_in_the_proportions_of_the_singular_values() -> None:
    problem, directions = two_directions(Box(-1.0, 1.0))
    found = starts(problem, 4000, stream(0, 0))
    inside = found @ directions.T
    torch.testing.assert_close(inside[:, :2] @ directions[:2], found, rtol=0, atol=1e-9)
    ratio = (inside[:, 0] / inside[:, 1]).abs().median().item()
    assert ratio == pytest.approx(3, rel=0.1)  # √(9/1)
    assert 0.45 < (inside[:, 0] > 0).double().mean() < 0.55


def test_starts_have_a_share_of_the_norm_that_the_domain_draws() -> None:
    for domain, share, exact in (
        (Sphere(), 1.0, True),
        (Box(-1e9, 1e9), stationary.SPREAD, True),
        (Box(-1.0, 1.0), stationary.SPREAD, False),  # which projects them
        (Box(-3.0, 0.5), stationary.SPREAD, False),
        (Box(1.0, 3.0), math.inf, False),
    ):
        found = starts(two_directions(domain)[0], 50, stream(3, 1))
        norms = share * domain.start(50, DIM, stream(3, 1)).norm(dim=1)
        torch.testing.assert_close(domain.project(found), found)
        assert (found.norm(dim=1) <= norms * (1 + 1e-12)).all()
        assert not exact or torch.allclose(found.norm(dim=1), norms, rtol=1e-9)


def test_the_search_begins_with_a_surplus_over_samples_or_visible_directions() -> None:
    domain = Box(-1.0, 1.0)
    blind = replace(weights_of(domain=domain), first_layer=None)
    assert torch.equal(starts(blind, 7, stream(1, 2)), domain.start(7, DIM, stream(1, 2)))
    for problem, samples, surplus, count in (
        (weights_of(), 3, 2.0, 6),
        (weights_of(), 3, 1.5, 5),
        (two_directions(domain)[0], None, 2.0, 4),
        (blind, None, 2.0, 2 * DIM),  # all directions count as visible
    ):
        progress = Trials(surplus=surplus).init(problem, samples, 0)
        assert progress.candidates.shape == (count, DIM) and progress.phase == "sharpen"
        view = softened(problem, progress.sharpness)
        assert progress.state.fit.cost == fitted(view, progress.candidates).cost


@pytest.mark.parametrize("premise", [Premise.MARGIN, Premise.DECAY])
def test_the_size_of_the_weights_makes_no_difference(premise: Premise) -> None:
    problem, method = weights_of(premise), Stationary(recipe=GENTLE, lead=2.0, trials=2, steps=5)
    weights = {name: 2.0**9 * w for name, w in problem.features.points[0].items()}
    told = Told(problem.domain)
    scaled = weights_problem(problem.features.network, weights, premise, told)
    if premise is Premise.MARGIN:
        led = [p for p in moved(method, scaled, 3, until=99) if p.phase == "lead"]
        assert led[-1].residual < led[0].residual and not any(run.diverged for run in led[-1].runs)
    found, other = (reconstruct(one, 3, method=method) for one in (problem, scaled))
    torch.testing.assert_close(other.samples, found.samples, rtol=1e-6, atol=1e-8)
    assert other.residual == pytest.approx(found.residual, rel=1e-6)


def test_published_steps_from_several_starts_come_first() -> None:
    problem, method = (
        planted(seed=1)[0],
        Stationary(recipe=GENTLE, leads=3, lead=2.0, trials=2, steps=2),
    )
    moves = moved(method, problem, 3, until=99)
    led = [p for p in moves if p.phase == "lead"]
    assert led and all(p.candidates.shape == (3 * 6, DIM) for p in led)
    begun = moves[len(led)]
    assert begun.phase == "sharpen" and begun.candidates.shape == (6, DIM)
    assert begun.total_steps == 3 * 2 * 6  # starts, steps for each candidate, candidates
    both = moved(Trials(trials=2, steps=2), problem, 3, until=0)[0], begun
    assert both[1].state.fit.cost <= both[0].state.fit.cost  # else it had begun at random
    assert len(method.finish(problem, led[-1]).candidates) == 6
    assert Stationary().init(weights_of(Premise.DECAY), 3, 0).phase == "sharpen"


def test_weights_are_multiplied_where_that_is_no_other_problem(monkeypatch: Any) -> None:
    problem = weights_of()
    usual = resized(problem)
    assert usual.features is not problem.features
    other = replace(problem, target=2 * problem.target, domain=Box(5.0, 6.0))
    again = resized(other)  # the same features, and another problem
    torch.testing.assert_close(again.target, 2 * usual.target)
    assert again.domain == other.domain and again.features is usual.features
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1)).eval()
    network = prepare(module.double(), (3,)).network
    weights = {k: v.detach() for k, v in network.module.state_dict().items()}
    made = resized(weights_problem(network, weights, Premise.DECAY)).features.points[0]
    kept = {k for k in weights if torch.equal(made[k], weights[k])}
    assert {k for k in weights if "running" in k or "tracked" in k} <= kept
    assert "0.weight" not in kept and "1.weight" not in kept
    for grown in (1.2, 1.0 + 1e-9, 0.5, math.inf):  # no homogeneous network
        monkeypatch.setattr(stationary, "_outputs", lambda _, x, factor, g=grown: g ** (factor - 1))
        assert resized(fresh := weights_of()) is fresh
    monkeypatch.setattr(stationary, "_outputs", lambda _, x, factor: 1e-30 * factor)
    assert resized(fresh := weights_of()) is fresh


def test_of_all_starts_those_are_taken_that_explain_the_weights() -> None:
    problem, samples, _ = planted(seed=1)
    begun = Stationary(leads=4).init(problem, SAMPLES, 0)
    pool = [run.place.candidates.clone() for run in begun.runs]
    places = torch.tensor([1, 4, 0])  # of one sample in each of three runs
    for run, (place, sample) in enumerate(zip(places, samples, strict=True)):
        pool[run][place] = sample
    pairs = zip(begun.runs, pool, strict=True)
    runs = [replace(run, place=replace(run.place, candidates=x)) for run, x in pairs]
    chosen = Stationary()._chosen(problem, replace(begun, state=runs[0], beside=tuple(runs[1:])))
    assert len(chosen) == 2 * SAMPLES
    assert cosines(samples, chosen).amax(1).min() > 0.999


def test_sharpness_grows_from_trial_to_trial_and_stays() -> None:
    problem, method = weights_of(), Trials(steps=1, trials=5, sharpness=(10.0, 20.0, 40.0))
    moves = moved(method, problem, 3, until=99)
    asked = {p.trial: p.sharpness / moves[0].sharpness for p in moves}
    assert list(asked.values()) == pytest.approx([1, 2, 4, 4, 4])
    assert method.init(replace(problem, first_layer=None), 3, 0).sharpness == 10
    x, progress = gaussian(3, DIM), moves[3]
    layer = problem.features.substituted(softplus(progress.sharpness)).linearize(x)
    torch.testing.assert_close(progress.seen(problem).features.linearize(x).gram(), layer.gram())


def test_candidates_without_a_multiplier_start_again(unused: Unused) -> None:
    problem, progress, method = unused
    fit = progress.state.fit
    trace = traces(fit)
    count = int((trace == 0).sum())
    assert math.ceil(method.renewed * len(trace)) < count < len(trace)
    after = method.advance(problem, progress)
    assert (after.rounds, after.trial, after.total_steps) == (1, 1, 4)
    same = (after.candidates == fit.candidates).all(1)
    assert torch.equal(same, trace > 0)
    assert torch.equal(after.candidates[~same], starts(problem, count, stream(0, 1)))
    broken = replace(progress, state=replace(progress.state, outcome=Outcome.DIVERGED))
    assert method.advance(problem, broken).outcome is Outcome.DIVERGED


def test_at_least_a_share_of_the_candidates_starts_again() -> None:
    problem = weights_of(Premise.DECAY)  # where all have coefficients
    method = Trials(steps=2, trials=3, surplus=4.0, renewed=0.25)
    progress = moved(method, problem, 3, until=2)[-1]
    trace = traces(progress.state.fit)
    same = (method.advance(problem, progress).candidates == progress.candidates).all(1)
    assert trace.min() > 0 and int((~same).sum()) == 3  # a quarter of 12
    assert trace[~same].max() < trace[same].min()


def test_trials_begin_from_the_best_at_the_greatest_sharpness(unused: Unused) -> None:
    method = Trials(steps=3, trials=6, sharpness=(20.0, 40.0))
    moves = moved(method, planted(width=30)[0], SAMPLES, until=999)
    assert moves[-1].outcome is Outcome.STALLED and moves[-1].rounds == 5
    ends = [(a, b) for a, b in itertools.pairwise(moves) if b.rounds > a.rounds]
    assert ends[0][1].best is None  # after the first trial, at the lesser sharpness
    least = math.inf
    for before, after in ends[1:]:
        least = min(least, before.state.fit.cost)
        assert after.best_cost == least and after.best is not None
        kept = (after.candidates == after.best).all(1)
        assert kept.any() and not kept.all()
    assert moves[-1].best_cost == min(least, moves[-2].state.fit.cost)
    problem, progress, _ = unused  # a trial that made it worse is forgotten
    best = starts(problem, 12, stream(9, 9))
    method = Trials(steps=4, trials=9, sharpness=(25.0,))
    after = method.advance(problem, replace(progress, best=best, best_cost=0.0))
    assert after.best is best and after.best_cost == 0.0
    kept = (after.candidates[:, None] == best[None]).all(2).any(1)
    assert torch.equal(kept, traces(fitted(progress.seen(problem), best)) > 0) and kept.any()


def test_the_answer_is_the_best_of_what_has_multipliers(unused: Unused, monkeypatch: Any) -> None:
    problem, progress, method = unused
    fit = progress.state.fit
    used = traces(fit) > 0
    answer = method.finish(problem, progress)
    assert torch.equal(answer.candidates, fit.candidates[used])
    assert answer.value == fitted(problem, fit.candidates[used]).value  # with ReLU itself
    rival = starts(problem, 12, stream(9, 9))
    for cost, expected in ((0.0, rival), (math.inf, progress.candidates)):
        answer = method.finish(problem, replace(progress, best=rival, best_cost=cost))
        assert all((row == expected).all(1).any() for row in answer.candidates)
    monkeypatch.setattr(stationary, "traces", lambda fit: torch.zeros(len(fit.candidates)))
    assert torch.equal(method.finish(problem, progress).candidates, progress.candidates)


def test_nothing_counts_as_explained_before_the_greatest_sharpness() -> None:
    method = Trials(trials=9, tolerance=1.0, sharpness=(5.0, 10.0, 20.0))  # all is good enough
    moves = moved(method, weights_of(), 2, until=99)
    assert [p.state.outcome for p in moves] == [Outcome.CONVERGED] * len(moves)
    assert [p.trial for p in moves] == [0, 1, 2, 2]
    assert [p.outcome for p in moves] == [None, None, None, Outcome.CONVERGED]


def test_weights_that_no_samples_left_stay_unexplained() -> None:
    problem, _, _ = planted(width=60)
    random = problem.target.norm() * gaussian(*problem.target.shape, seed=8)
    layer = random[: 60 * DIM, 0].reshape(60, DIM)
    first = FirstLayer(torch.zeros_like(layer), layer)
    problem = replace(problem, target=random, first_layer=first)
    found = reconstruct(problem, SAMPLES, method=Trials(trials=5))
    assert found.outcome is Outcome.STALLED and found.residual > 0.5


@pytest.mark.parametrize(("premise", "number"), [(Premise.MARGIN, 3), (Premise.DECAY, None)])
def test_planted_samples_are_recovered(premise: Premise, number: int | None) -> None:
    """In each sample's cell its coefficient, and the sample, as sum and mean of candidates."""
    problem, samples, coefficients = planted(premise, seed=1)
    assert problem.ratio(2 * SAMPLES) > 20  # equations over unknowns
    start = Trials().init(problem, number, 0).candidates
    found = reconstruct(problem, number, method="exhume")
    assert found.outcome is Outcome.CONVERGED and found.residual < 1e-6
    near, nearer = (cosines(samples, x).amax(1).min() for x in (start, found.samples))
    assert near < 0.9 < 0.99 < nearer
    w, b, *_ = problem.features.points[0].values()  # neurons that are on make a cell
    for x, a in zip(samples, coefficients, strict=True):
        same = ((found.samples @ w.T + b > 0) == (x @ w.T + b > 0)).all(1)
        assert same.any()
        shares = found.coefficients[same, 0]
        assert shares.sum().item() == pytest.approx(a.item(), rel=1e-2)
        mean = (shares[:, None] * found.samples[same]).sum(0) / shares.sum()
        assert (mean - x).norm() < 0.01 * x.norm()
        assert (found.samples[same] - x).norm(dim=1).min() < 0.2 * x.norm()
