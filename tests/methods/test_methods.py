"""Methods on random features: exact recovery where theory promises it, honest failure elsewhere."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from exhume.equation.objective import fitted
from exhume.equation.problem import Premise
from exhume.evaluate import score
from exhume.features.activations import activation
from exhume.methods import METHODS, Iurada2025, Loo2023, Shen2026, method_named, reconstruct
from exhume.methods.exhume import Exhume, Found
from exhume.methods.progress import pack
from exhume.methods.replay import Replay
from exhume.methods.stationary import Stationary
from exhume.search.moves import dropping
from exhume.solvers import Outcome
from problems import case, cosines, on_sphere, refusals

IURADA = Iurada2025(rate=4.0, steps=3000)
single = partial(case, dtype=torch.float32)


RECOVERED: list[tuple[tuple[int, int, float, str, int, int], int | None]] = [
    ((20, 5, 5, "relu", 1, 15), 5),  # where a large sample had been split
    ((20, 5, 5, "relu", 1, 27), 5),
    ((20, 5, 5, "relu+tanh", 1, 0), 5),
    ((30, 10, 2.5, "relu", 1, 0), 10),
    ((40, 8, 4, "relu", 3, 1), 8),
    ((30, 6, 4, "relu+tanh", 3, 0), 6),
    ((20, 4, 4, "gelu", 1, 0), 4),
    ((20, 4, 4, "polynomial:0,0,0,1", 1, 0), 4),
    ((20, 1, 5, "relu", 1, 0), 1),
    ((30, 6, 3, "relu", 1, 5), None),
    ((30, 6, 5, "relu+tanh", 1, 0), None),
    ((30, 6, 6, "relu", 1, 1), 8),  # too many
    ((30, 6, 6, "relu+tanh", 1, 1), 7),
]


@pytest.mark.parametrize(("sizes", "asked"), RECOVERED, ids=str)
def test_every_sample_is_recovered(sizes: Any, asked: int | None) -> None:
    dim, samples, _, name, _, seed = sizes
    truth = single(*sizes)
    found = reconstruct(truth.problem, asked, seed)
    assert found.outcome is Outcome.CONVERGED and found.residual < 1e-11
    assert found.samples.shape == (asked or samples, dim)
    assert found.samples.dtype == found.coefficients.dtype == torch.float64
    result = score(found.samples, truth.inputs)
    assert result.recovered == 1 and (result.flips == 0 or "+" not in name)
    assert result.exact == 1 or asked not in (samples, None)
    there = fitted(truth.problem, found.samples)
    assert there.value == pytest.approx(found.residual, abs=1e-12)
    if asked in (samples, None):  # else coefficients are not unique
        torch.testing.assert_close(found.coefficients, there.coefficients, rtol=1e-3, atol=1e-6)


def test_every_method_for_a_change_recovers_random_features() -> None:
    truth = single(10, 1, 10)
    loo = Loo2023(rate=0.05, steps=1500)
    for method in (Exhume(), method_named("tansley2026"), IURADA, loo, Shen2026(IURADA)):
        found = reconstruct(truth.problem, 1, method=method)
        assert found.method == method.name
        assert cosines(found.samples, truth.inputs).abs().max() > 0.99
        if method is not loo:  # which knows no norm
            assert found.outcome is Outcome.CONVERGED and found.residual <= 1e-7
            assert score(found.samples, truth.inputs).recovered == 1


def test_of_few_equations_a_softplus_that_sharpens_leads_where_kinks_do_not() -> None:
    found = {0.0: 0, 3.5: 0}  # of 48 samples, with trials of ReLU alone and with softer ones first
    for seed in range(2):
        truth = single(80, 24, 2.2, seed=seed)
        for dense in found:
            result = reconstruct(truth.problem, 24, 0, Exhume(dense=dense), product_limit=1400)
            found[dense] += round(24 * score(result.samples, truth.inputs).recovered)
    assert found[3.5] > max(36, 1.5 * found[0.0])


def test_a_trial_begins_softly_and_ends_with_relu_and_what_is_answered_is_of_relu() -> None:
    truth, seen = single(80, 24, 2.2), list[tuple[Any, float]]()
    begun = reconstruct(truth.problem, 24, product_limit=60, observe=lambda *m: seen.append(m))
    soft = [move for move, _ in seen]
    assert all(move.phase == "sharpen" and len(move.candidates) == 24 for move in soft)
    assert begun.residual == pytest.approx(fitted(truth.problem, begun.samples).value, rel=1e-6)
    assert begun.residual != pytest.approx(soft[-1].residual, rel=0.01)
    brief, ended = Exhume(trial=1, softly=1, restarts=0), []
    reconstruct(truth.problem, 24, 0, brief, product_limit=250, observe=lambda *m: ended.append(m))
    sharpness = [move.sharpness for move, _ in ended if move.phase == "sharpen"]
    assert sharpness == sorted(sharpness)
    assert sharpness[-1] == pytest.approx(16 * sharpness[0])
    after = next(move for move, _ in ended if move.phase == "explore")
    assert after.sharpness == 0 and after.state.fit.value < 0.2
    enough, few = Exhume().init(single(80, 24, 3.6).problem, 24, 0), truth.problem
    assert enough.phase == "explore" and len(enough.candidates) == 39
    for other in (replace(few, drift=1.0), case(80, 24, 2.2, "tanh").problem):
        assert Exhume().init(other, 24, 0).phase == "explore"
    assert Exhume().init(few, None, 0).phase == "explore"


def test_only_candidates_that_are_there_again_count_as_returned() -> None:
    truth = case(12, 4, 10)
    problem = replace(truth.problem, drift=1.0)
    best = torch.cat([truth.inputs, on_sphere(2, 12, seed=9)])
    order, start = dropping(problem, fitted(problem, best))[0], best.clone()
    start[order[2]] = on_sphere(1, 12, seed=8)[0]  # beyond the surplus two were dropped
    begun = Exhume().begin(problem, 4, 0, start)
    ended, led = replace(begun.state, outcome=Outcome.STALLED), Found(best, begun.residual)
    at = {"best": led, "lowest": led.residual, "dropped": 2}
    after = Exhume().advance(problem, replace(begun, state=ended, **at))
    assert (after.phase, after.returned) == ("explore", 1)


@pytest.mark.parametrize("times", [0.9, 1.1, 1.9, 2.1])
def test_the_next_trial_begins_at_what_is_a_little_worse_and_the_best_is_not_lost(
    times: float,
) -> None:
    truth = case(12, 4, 1.2)
    problem = truth.problem
    begun, led = (Exhume().begin(problem, 4, 0, on_sphere(4, 12, seed=i)) for i in (1, 2))
    ended = replace(begun.state, outcome=Outcome.STALLED)
    best = Found(led.candidates, begun.residual / times)
    at = replace(begun, state=ended, best=best, lowest=best.residual)
    goes_on, better = 1 < times < 2, times < 1
    for seen, asked in (problem, 4), (replace(problem, drift=1.0), 4), (problem, None):
        after = Exhume().advance(seen, replace(at, samples=asked))
        moved = better or (goes_on and seen is problem and asked == 4)
        assert torch.equal(after.leader.candidates, (begun if moved else best).candidates)
        assert after.lowest == min(begun.residual, best.residual)
        assert after.misses == (not better)
        assert (after.champion is best) == (moved and not better)
        assert after.record.residual == after.lowest
    lower = Found(truth.inputs, best.residual / 2)
    again = Exhume().advance(problem, replace(at, champion=lower))
    assert again.record is lower
    assert torch.equal(Exhume().finish(problem, again).candidates, lower.candidates)


def test_observers_see_every_move_and_out_of_budget_the_best_so_far_is_returned() -> None:
    truth, seen = single(30, 6, 4), list[tuple[Any, float]]()
    found = reconstruct(truth.problem, 6, observe=lambda *move: seen.append(move))
    moves, seconds = zip(*seen, strict=True)
    last = moves[-1]
    assert (last.total_steps, last.total_products) == (found.steps, found.products)
    assert last.outcome is found.outcome and all(p.outcome is None for p in moves[:-1])
    assert list(seconds) == sorted(seconds)
    none = reconstruct(truth.problem, 6, time_limit=0)
    assert (none.outcome, none.steps, len(none.samples)) == (Outcome.BUDGET, 0, 6)
    late = reconstruct(truth.problem, 6, time_limit=1.0, resume=pack(moves[2], 1.0))
    assert (late.outcome, late.steps) == (Outcome.BUDGET, moves[2].total_steps)


def test_a_time_limit_ends_a_step_between_products(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # a clock that goes on by one whenever it is looked at
    monkeypatch.setattr("exhume.methods.time.perf_counter", lambda: float(next(ticks)))
    truth = single(20, 5, 5, "relu", 1, 15)
    start, ends = reconstruct(truth.problem, 5, time_limit=0), []
    for limit in (8, 16):
        found = reconstruct(truth.problem, 5, time_limit=limit)
        assert found.outcome is Outcome.BUDGET and 3 <= found.products < limit  # of 40 a step
        ends.append(found.residual)
    assert ends[1] < ends[0] < start.residual  # what was done is kept


def test_a_budget_of_products_ends_a_run_at_the_same_place_every_time_and_nan_at_once() -> None:
    problem = case(10, 4, 1.1, seed=3).problem
    for method in ("exhume", "iurada2025"):
        one, other = (reconstruct(problem, 4, 3, method, product_limit=300) for _ in range(2))
        assert one.outcome is Outcome.BUDGET and 300 <= one.products < 400
        assert torch.equal(one.samples, other.samples)
    broken = replace(problem.features, activation=replace(activation("relu"), value=torch.log))
    assert reconstruct(replace(problem, features=broken), 4).outcome is Outcome.DIVERGED


def test_the_published_recipe_starts_and_steps_as_published() -> None:
    truth = single(100, 20, 1)
    start = Iurada2025().init(truth.problem, 20, seed=0).candidates
    assert start.mean().abs() < 0.1 and start.std().item() == pytest.approx(1, abs=0.1)
    assert start.norm(dim=1).std() > 0.1  # not projected before the first step
    assert Iurada2025()._solver(truth.problem).rate == 20
    assert Iurada2025()._solver(replace(truth.problem, shape=(10, 10))).rate == 2000
    assert Iurada2025().steps == 10**6
    found = reconstruct(truth.problem, 20, method=Iurada2025(rate=1e-6), product_limit=3)
    assert (found.outcome, found.steps) == (Outcome.BUDGET, 3)
    torch.testing.assert_close(found.samples.norm(dim=1), torch.full((20,), 10.0).double())


test_what_no_run_could_use_is_refused = refusals(
    ({"method": "exhumed"}, "unknown method 'exhumed'; known are exhume, iurada2025"),
    ({"samples": 0}, "samples: expected a whole number of at least 1, got 0"),
    ({"samples": 10_000}, "more than the 200 features"),
    ({"seed": -1}, "seed: expected"),
    ({"time_limit": -1.0}, "time_limit: expected"),
    ({"product_limit": 0}, "product_limit: expected"),
    ({"method": "iurada2025", "samples": None}, "needs the number of samples"),
    call=partial(reconstruct, single(20, 2, 5).problem, samples=2),
)


def test_a_name_picks_the_method_and_the_premise_one_of_three() -> None:
    mine = Exhume(patience=2)
    assert method_named(mine) is mine
    assert [method_named(name).name for name in METHODS] == [*METHODS]
    for premise in Premise:
        ours = {Premise.CHANGE: Exhume(), Premise.REPLAY: Replay()}.get(premise, Stationary())
        problem = replace(case(6, 2, 4).problem, premise=premise)
        assert method_named("exhume", problem) == ours and ours.name == "exhume"
