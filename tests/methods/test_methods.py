"""Methods end to end: exact recovery where theory promises it, and honest failure elsewhere."""

from dataclasses import replace

import pytest
import torch

from exhume import data, victims
from exhume.equation.objective import fitted
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.features.activations import activation
from exhume.features.random import RandomFeatures
from exhume.features.weights import Seeded
from exhume.methods import METHODS, Progress, Reconstruction, method_named, reconstruct
from exhume.methods.exhume import Exhume
from exhume.methods.iurada2025 import Iurada2025
from exhume.solvers import Outcome, solve
from exhume.solvers.levenberg_marquardt import LevenbergMarquardt
from problems import Case, case, cosines, dense_phi, make_problem, with_hidden_flips


def single(*arguments: object, **options: object) -> Case:
    return case(*arguments, **options, dtype=torch.float32)  # type: ignore[arg-type]


def same(a: Reconstruction, b: Reconstruction) -> bool:
    alike = replace(a, seconds=0.0, samples=b.samples, coefficients=b.coefficients)
    return (
        torch.equal(a.samples, b.samples)
        and torch.equal(a.coefficients, b.coefficients)
        and vars(alike) == vars(replace(b, seconds=0.0))
    )


# Recovery


@pytest.mark.parametrize(
    ("dim", "samples", "ratio", "name", "outputs"),
    [
        (20, 5, 5, "relu", 1),
        (20, 5, 5, "relu+tanh", 1),
        (30, 10, 2.5, "relu", 1),
        (40, 8, 4, "relu", 3),
        (40, 8, 4, "relu+tanh", 3),
        (30, 6, 4, "gelu", 1),
        (30, 6, 4, "softplus", 1),
        (30, 6, 4, "tanh", 1),
        (30, 6, 4, "erf", 1),
        (30, 6, 4, "polynomial:0,0,0,1", 1),
        (20, 1, 5, "relu", 1),
    ],
)
def test_every_sample_is_recovered(
    dim: int, samples: int, ratio: float, name: str, outputs: int
) -> None:
    for seed in range(2):
        truth = single(dim, samples, ratio, name, outputs, seed)
        found = reconstruct(truth.problem, samples, seed)
        assert found.outcome is Outcome.CONVERGED
        assert found.residual < 1e-11
        assert found.samples.shape == (samples, dim)
        assert found.samples.dtype == found.coefficients.dtype == torch.float64
        assert score(found.samples, truth.inputs).exact == 1
        there = fitted(truth.problem, found.samples)
        assert there.value == pytest.approx(found.residual, abs=1e-12)
        torch.testing.assert_close(found.coefficients, there.coefficients, rtol=1e-3, atol=1e-6)


def test_features_that_are_never_stored_recover_too() -> None:
    truth = single(20, 4, 5)
    v = Seeded(400, 20, seed=0)
    streamed = RandomFeatures(v, activation("relu"), block=128)
    found = reconstruct(make_problem(streamed, truth.problem.target), 4)
    assert score(found.samples, truth.inputs).exact == 1


@pytest.mark.parametrize("name", ["relu", "relu+tanh"])
def test_the_number_of_samples_is_found(name: str) -> None:
    for seed in range(3):
        truth = single(40, 8, 5, name, seed=seed)
        found = reconstruct(truth.problem, seed=seed)
        assert found.outcome is Outcome.CONVERGED
        assert abs(len(found.samples) - 8) <= 1
        assert score(found.samples, truth.inputs).exact == 1


def test_the_number_of_samples_is_found_exactly() -> None:
    for name, ratio, seed in [("relu", 5, 0), ("relu", 5, 5), ("relu", 3, 5), ("relu+tanh", 8, 5)]:
        truth = single(40, 8, ratio, name, seed=seed)
        assert len(reconstruct(truth.problem, seed=seed).samples) == 8


def test_a_large_sample_that_was_split_does_not_push_out_a_small_one() -> None:
    for seed in (15, 27, 41):
        truth = single(20, 5, 5, seed=seed)
        assert score(reconstruct(truth.problem, 5, seed).samples, truth.inputs).exact == 1


# Too many, too few, too little


@pytest.mark.parametrize(("name", "surplus"), [("relu", 2), ("relu+tanh", 1), ("relu+tanh", 3)])
def test_asked_for_too_many_all_are_found_and_the_rest_says_nothing(
    name: str, surplus: int
) -> None:
    """Zero residual leaves a surplus candidate three ways out, and no fourth.

    Kinks of different candidates cannot cancel, so the coefficients on a line ±u must add up to
    those of the true samples on it: the candidate repeats a sample, has no part in the sum, or
    cancels with others on its own line.
    """
    for seed in range(3):
        truth = single(30, 6, 6, name, seed=seed)
        found = reconstruct(truth.problem, 6 + surplus, seed)
        assert found.outcome is Outcome.CONVERGED
        assert len(found.samples) == 6 + surplus
        assert score(found.samples, truth.inputs).recovered == 1
        part = found.coefficients.norm(dim=1) * dense_phi(
            truth.problem.features, found.samples
        ).norm(dim=1)
        negligible = part < 1e-2 * truth.problem.target.norm()
        repeats = cosines(found.samples, truth.inputs).abs().max(1).values > 0.9
        on_line = (cosines(found.samples, found.samples).abs() > 0.9).double()
        cancels = (on_line @ found.coefficients).norm(dim=1) < 0.1 * found.coefficients.norm(dim=1)
        assert (repeats | negligible | cancels).all()


def test_asked_for_too_few_the_residual_says_so() -> None:
    for seed in range(3):
        truth = single(30, 6, 6, "relu+tanh", seed=seed, even=True)
        found = reconstruct(truth.problem, 4, seed, method=Exhume(patience=5))
        assert found.outcome is Outcome.STALLED
        assert len(found.samples) == 4
        assert found.residual > 1e-3


def test_asked_for_too_few_candidates_are_mixtures_of_samples() -> None:
    known = data.sphere(30, 4, seed=1)
    victim = victims.random_features(known, width=30 * 4 * 8, seed=1)
    found = reconstruct(victim.problem, 2, seed=1)
    assert found.outcome is Outcome.STALLED and found.explained == 4
    samples = torch.nn.functional.normalize(known.inputs, dim=1)
    candidates = torch.nn.functional.normalize(found.samples, dim=1)
    span = torch.linalg.qr(samples.T).Q
    assert (candidates @ span).norm(dim=1).min() > 0.95  # of nothing but training samples
    shares = (candidates @ samples.T).abs().sort(1, descending=True).values
    assert (shares[:, 1] > 0.4).any()  # one of them is a mixture of two or more


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_below_one_equation_an_unknown_zero_residual_means_nothing(seed: int) -> None:
    truth = single(20, 5, 0.5, "relu+tanh", seed=seed)
    found = reconstruct(truth.problem, 5, seed, method=Exhume(patience=20))
    assert found.residual < 1e-7
    assert score(found.samples, truth.inputs).recovered == 0


# Signs


def test_relu_with_tanh_recovers_every_sign() -> None:
    for seed in range(8):
        truth = single(30, 6, 4, "relu+tanh", seed=seed)
        result = score(reconstruct(truth.problem, 6, seed).samples, truth.inputs)
        assert (result.exact, result.flips) == (1, 0)


def test_two_candidates_too_many_can_hide_flips_from_relu_but_not_from_relu_with_tanh() -> None:
    truth = case(30, 6, 8, even=True)
    candidates, _ = with_hidden_flips(truth.inputs, truth.coefficients, [0, 3, 4])
    assert len(candidates) == 8
    solved = solve(LevenbergMarquardt(), truth.problem, candidates, 10)
    assert (solved.outcome, solved.steps) == (Outcome.CONVERGED, 0)
    assert solved.fit.value < 1e-20
    assert score(candidates, truth.inputs).exact == 1
    assert score(candidates, truth.inputs).flips == 3
    other = case(30, 6, 8, "relu+tanh", even=True)
    assert torch.equal(other.inputs, truth.inputs)
    assert fitted(other.problem, candidates).value > 1e-3


def test_tanh_is_odd_so_no_sign_can_be_known() -> None:
    truth = case(20, 4, 5, "tanh")
    signs = torch.tensor([[1.0], [-1], [-1], [1]])
    assert fitted(truth.problem, signs * truth.inputs).value < 1e-20


# Repeatable, resumable, limited


@pytest.mark.parametrize("samples", [6, None])
def test_the_same_seed_gives_the_same_bits(samples: int | None) -> None:
    problem = single(30, 6, 4, seed=3).problem
    first, again, other = (reconstruct(problem, samples, seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert not torch.equal(first.samples, other.samples)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    ("method", "samples"),
    [("exhume", 6), ("exhume", None), (Iurada2025(steps=30), 6), ("tansley2026", 6)],
)
def test_an_interrupted_run_goes_on_to_the_same_bits(
    method: str | Iurada2025, samples: int | None
) -> None:
    problem = single(30, 6, 2.5, seed=2).problem
    moves: list[Progress] = []
    whole = reconstruct(problem, samples, 1, method, observe=lambda p, _: moves.append(p))
    assert len(moves) > 12
    phases = [p.phase for p in moves]
    stops = {1, len(moves) // 2, len(moves) - 1} | {phases.index(p) + 1 for p in set(phases)}
    for stop in stops:
        seen: list[Progress] = []

        def interrupt(progress: Progress, _: float, seen: list = seen, stop: int = stop) -> None:
            seen.append(progress)
            if len(seen) == stop:
                raise Interrupted

        with pytest.raises(Interrupted):
            reconstruct(problem, samples, 1, method, observe=interrupt)
        resumed = reconstruct(problem, samples, 1, method, resume=(seen[-1], 5.0))
        assert same(resumed, whole)
        assert resumed.seconds >= 5


def test_out_of_time_the_best_so_far_is_returned() -> None:
    truth = single(30, 6, 4)
    found = reconstruct(truth.problem, 6, time_limit=0)
    assert (found.outcome, found.steps, len(found.samples)) == (Outcome.BUDGET, 0, 6)
    resumed: list[Progress] = []
    reconstruct(truth.problem, 6, observe=lambda p, _: resumed.append(p))
    late = reconstruct(truth.problem, 6, time_limit=1.0, resume=(resumed[2], 1.0))
    assert (late.outcome, late.steps) == (Outcome.BUDGET, resumed[2].total_steps)


def test_observers_see_every_move() -> None:
    moves: list[tuple[Progress, float]] = []
    found = reconstruct(single(30, 6, 4).problem, 6, observe=lambda p, s: moves.append((p, s)))
    assert moves[-1][0].total_steps == found.steps
    assert moves[-1][0].total_products == found.products
    assert moves[-1][0].outcome is found.outcome
    seconds = [s for _, s in moves]
    assert seconds == sorted(seconds)
    assert all(p.outcome is None for p, _ in moves[:-1])


def test_weights_that_are_not_numbers_end_the_search() -> None:
    truth = single(20, 4, 5)
    broken = replace(
        truth.problem.features, activation=replace(activation("relu"), value=torch.log)
    )
    found = reconstruct(make_problem(broken, truth.problem.target), 4)
    assert found.outcome is Outcome.DIVERGED


# The published recipe


def test_the_published_recipe_runs_and_recovers_one_sample() -> None:
    truth = single(10, 1, 10)
    found = reconstruct(truth.problem, 1, method=Iurada2025(rate=4.0, steps=3000))
    assert found.outcome is Outcome.CONVERGED
    assert found.method == "iurada2025"
    assert found.residual <= 1e-7
    assert score(found.samples, truth.inputs).exact == 1
    torch.testing.assert_close(found.samples.norm(dim=1), torch.tensor([10.0]).double().sqrt())


def test_the_published_recipe_starts_and_steps_as_published() -> None:
    truth = single(100, 20, 1)
    start = Iurada2025().init(truth.problem, 20, seed=0).state.fit.candidates
    assert start.mean().abs() < 0.1
    assert start.std().item() == pytest.approx(1, abs=0.1)
    assert start.norm(dim=1).std() > 0.1  # not projected before the first step
    assert Iurada2025()._solver(truth.problem).rate == 20
    assert Iurada2025()._solver(replace(truth.problem, shape=(10, 10))).rate == 2000
    assert Iurada2025().steps == 10**6


def test_the_published_recipe_needs_the_number_and_may_run_out_of_time() -> None:
    problem = single(20, 4, 5).problem
    with pytest.raises(InputError, match="needs the number of samples"):
        reconstruct(problem, method="iurada2025")
    found = reconstruct(problem, 4, method="iurada2025", time_limit=0)
    assert found.outcome is Outcome.BUDGET
    assert len(found.samples) == 4
    slow = reconstruct(problem, 4, method=Iurada2025(rate=1e-6), time_limit=0.05)
    assert slow.outcome is Outcome.BUDGET
    assert slow.steps > 0


# Bad input


@pytest.mark.parametrize("name", ["exhumed", "", "Exhume"])
def test_an_unknown_method_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError, match="exhume, iurada2025"):
        reconstruct(single(20, 2, 5).problem, 2, method=name)


@pytest.mark.parametrize("samples", [0, -3])
def test_no_samples_are_refused(samples: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        reconstruct(single(20, 2, 5).problem, samples)


def test_methods_are_known_by_their_names() -> None:
    assert {name: method_named(name).name for name in METHODS} == {name: name for name in METHODS}
    mine = Exhume(patience=2)
    assert method_named(mine) is mine


@pytest.mark.parametrize("method", ["exhume", "iurada2025"])
def test_a_budget_of_products_ends_a_run_at_the_same_place_every_time(method: str) -> None:
    known = data.sphere(10, 4, seed=3)
    problem = victims.random_features(known, 44, seed=3).problem
    runs = [reconstruct(problem, 4, 3, method, product_limit=300) for _ in range(2)]
    assert runs[0].outcome is Outcome.BUDGET
    assert 300 <= runs[0].products < 400
    assert torch.equal(runs[0].samples, runs[1].samples)
    with pytest.raises(InputError, match="product_limit"):
        reconstruct(problem, 4, product_limit=0)
