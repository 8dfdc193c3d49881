"""Identifiability: symmetric tensors, the rank condition, recovery, and the local version."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import root
from torch import Tensor, nn

from exhume import data, victims
from exhume.equation.objective import fitted
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.features.layers import Elementwise
from exhume.models.architectures import initialise, two_layer
from exhume.theory import (
    Identifiability,
    fewest_neurons,
    identifiability,
    local_identifiability,
    recover,
)
from exhume.theory.neurons import Neurons, explained, neurons_of, output, violation
from exhume.theory.recovery import decompose, refine
from exhume.theory.tensors import contract, dimension, exponents, matrix, powers, slices
from exhume.victims import Victim

CUBE = "polynomial:0,0,0,1"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(coordinates: Tensor, size: int, degree: int) -> Tensor:
    """The full array of a symmetric tensor, entry by entry."""
    full = torch.zeros((size,) * degree, dtype=torch.float64)
    letters = exponents(size, degree)
    for index in itertools.product(range(size), repeat=degree):
        counts = torch.tensor([index.count(j) for j in range(size)])
        place = int((letters == counts).all(1).nonzero())
        times = math.factorial(degree) / math.prod(math.factorial(c) for c in counts.tolist())
        full[index] = coordinates[place] / math.sqrt(times)
    return full


sizes = st.tuples(st.integers(1, 4), st.integers(2, 4), st.integers(0, 99))


@settings(max_examples=25, deadline=None)
@given(sizes)
def test_coordinates_are_those_of_the_full_array(case: tuple[int, int, int]) -> None:
    size, degree, seed = case
    tensor, other = random(2, dimension(size, degree), seed=seed)
    full = dense(tensor, size, degree)
    inner = (full * dense(other, size, degree)).sum()
    assert torch.allclose(tensor @ other, inner)
    for axes in itertools.permutations(range(degree)):
        assert torch.equal(full.permute(axes), full)


@settings(max_examples=25, deadline=None)
@given(sizes)
def test_products_are_those_of_the_full_array(case: tuple[int, int, int]) -> None:
    size, degree, seed = case
    tensor, vectors = random(dimension(size, degree), seed=seed), random(2, size, seed=seed + 1)
    for k, v in enumerate(vectors):
        once = torch.tensordot(dense(tensor, size, degree), v, 1)
        assert torch.allclose(dense(contract(tensor, vectors, degree)[k], size, degree - 1), once)
        last = once
        for _ in range(degree - 2):
            last = torch.tensordot(last, v, 1)
        assert torch.allclose(slices(vectors, degree)[k] @ tensor, last)
        assert torch.allclose(powers(vectors, degree)[k] @ tensor, last @ v)
    if degree == 2:
        assert torch.allclose(matrix(tensor, size), dense(tensor, size, 2))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_inner_products_of_powers(size: int, degree: int, seed: int) -> None:
    u, v = random(2, size, seed=seed)
    product = powers(u[None], degree)[0] @ powers(v[None], degree)[0]
    assert torch.allclose(product, (u @ v) ** degree)


@pytest.mark.parametrize(
    ("degree", "size"), [(3, 3), (3, 4), (3, 5), (3, 6), (4, 3), (4, 4), (4, 5), (5, 3)]
)
def test_fewest_neurons_are_the_fewest(degree: int, size: int) -> None:
    def rank(count: int) -> int:
        units = torch.nn.functional.normalize(random(count, size), dim=1)
        rows = slices(units, degree).flatten(0, 1)
        return int(torch.linalg.matrix_rank(rows, rtol=1e-10))

    fewest = fewest_neurons(degree, size)
    assert rank(fewest) == dimension(size, degree)
    assert rank(fewest - 1) < dimension(size, degree)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(3, 5), st.integers(0, 99))
def test_decomposition_of_independent_terms(size: int, degree: int, seed: int) -> None:
    true = torch.nn.functional.normalize(random(size, size, seed=seed), dim=1)
    if torch.linalg.cond(true) > 50:
        return
    strengths = random(size, seed=seed + 1).sign() * (1 + random(size, seed=seed + 2).abs())
    found, weights, rest = decompose(strengths @ powers(true, degree), size, degree, 1e-10)
    assert rest < 1e-8 and len(found) == size
    cosines = (found @ true.T).abs()
    assert torch.allclose(cosines.amax(1), torch.ones(size, dtype=torch.float64))
    assert torch.allclose(weights.abs(), strengths[cosines.argmax(1)].abs(), rtol=1e-5)


def test_the_number_of_terms_is_found() -> None:
    true = random(2, 4)
    found, _, rest = decompose(powers(true, 3).sum(0), 4, 3, 1e-10)
    assert found.shape == (2, 4) and rest < 1e-10


@pytest.mark.parametrize("coefficients", [(0, 0, 0, 1), (0, 0.5, -1, 2), (0, 0, 0, 0, 1)])
def test_what_samples_explain_is_the_gradient(coefficients: tuple[float, ...]) -> None:
    neurons = Neurons(random(3, 4), random(3, seed=1), tuple(map(float, coefficients)))
    x, b = random(2, 4, seed=2), random(2, seed=3)
    w, a = neurons.first.clone().requires_grad_(), neurons.last.clone().requires_grad_()
    z = x @ w.T
    powered = sum(s * z**q for q, s in enumerate(coefficients))
    assert isinstance(powered, Tensor)
    assert torch.allclose(output(neurons, x), powered @ a)
    first, last = torch.autograd.grad(b @ (powered @ a), (w, a))
    for found, expected in zip(explained(neurons, x, b), (first, last), strict=True):
        assert torch.allclose(found, expected)


@functools.cache
def victim(degree: int = 3, width: int = 16, seed: int = 2) -> Victim:
    """Four samples in nine dimensions, under labels that allow many neurons."""
    labelled = victims.labellings(data.sphere(9, 4, seed), degree)[0]
    return victims.polynomial(labelled, width, degree)


def net(made: Victim) -> nn.Module:
    assert made.model is not None
    return made.model.network.module


@functools.cache
def judged(degree: int = 3, width: int = 16) -> Identifiability:
    made = victim(degree, width)
    return identifiability(net(made), made.trained)


@pytest.mark.parametrize(("degree", "width", "unknowns"), [(3, 16, 20), (4, 24, 35)])
def test_samples_of_a_kkt_point_are_recovered(degree: int, width: int, unknowns: int) -> None:
    found = judged(degree, width)
    assert found.holds and found.margin > 100 and found.reasons == ()
    assert (found.degree, found.dim, found.rank_of_neurons) == (degree, 9, 4)
    assert (found.rank, found.unknowns, found.equations) == (unknowns, unknowns, 4 * width)
    assert found.misfit < 1e-10
    assert found.samples is not None and found.multipliers is not None
    assert found.residual is not None and found.residual < 1e-12
    result = score(found.samples, victim(degree, width).truth)
    assert result.errors.max() < 1e-8 and result.candidates == 4
    assert any("would show" in sentence for sentence in found.undetermined)


def test_labels_are_recovered_with_an_even_degree() -> None:
    found, truth = judged(4, 24), victim(4, 24).truth
    assert found.samples is not None and found.multipliers is not None
    matched = score(found.samples, truth).matched
    assert torch.equal(found.multipliers[matched].sign(), truth.targets[:, 0])


def test_an_odd_degree_loses_the_sign_together_with_the_label() -> None:
    found, truth = judged(), victim().truth
    assert found.samples is not None and found.multipliers is not None
    assert (found.multipliers > 0).all()
    signed = truth.inputs * truth.targets
    assert score(found.samples, signed).signed_errors.max() < 1e-8
    assert any("label" in sentence for sentence in found.undetermined)


def test_the_condition_depends_neither_on_units_nor_on_axes_nor_on_order() -> None:
    made, found = victim(), judged()
    first, last = made.trained.values()
    turn = torch.linalg.qr(random(9, 9)).Q
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    moved = {"1.weight": 1e3 * (first @ turn)[order], "3.weight": 1e-2 * last[:, order]}
    other = identifiability(net(made), moved)
    assert other.rank == found.rank and other.sufficient_rank == found.sufficient_rank
    assert other.smallest == pytest.approx(found.smallest, rel=1e-8)


def test_twins_change_nothing() -> None:
    made, found = victim(), judged()
    first, last = made.trained.values()
    state = {"1.weight": torch.cat([first, first]), "3.weight": torch.cat([last, last], 1)}
    wide = two_layer((9,), 32, activation=CUBE)
    twins = identifiability(wide, state)
    assert twins.rank == found.rank
    assert twins.smallest == pytest.approx(found.smallest, rel=1e-8)


def test_the_level_sets_the_norm_and_nothing_else() -> None:
    made = victim()
    found = identifiability(net(made), made.trained, level=8.0)
    assert found.samples is not None and found.residual is not None and found.residual < 1e-12
    assert score(found.samples / 2, made.truth).errors.max() < 1e-8


def test_the_condition_fails_with_too_few_neurons_and_the_recovery_with_it() -> None:
    made = victim(width=4)
    found = identifiability(net(made), made.trained)
    assert not found.holds and found.samples is None and found.smallest == 0
    assert (found.rank, found.unknowns) == (16, 20)
    assert "5 neurons in general position" in found.reasons[0]
    assert "local_identifiability" in found.reasons[0]
    assert score(recover(net(made), made.trained).samples, made.truth).errors.max() > 0.05


def test_where_it_fails_other_tensors_fit_as_well() -> None:
    made = victim(width=4)
    neurons = neurons_of(net(made), made.trained)
    basis = torch.linalg.svd(neurons.first, full_matrices=False).Vh.T
    inside = replace(neurons, first=neurons.first @ basis)
    rows = slices(inside.first, 3).flatten(0, 1)
    null = torch.linalg.svd(rows).Vh[-1]
    true = powers(made.truth.inputs @ basis, 3)
    assert (rows @ null).abs().max() < 1e-12 * rows.abs().max()
    outside = null - true.T @ torch.linalg.lstsq(true.T, null[:, None]).solution[:, 0]
    assert outside.norm() > 1e-2  # a change that the samples' own strengths do not explain


def test_where_it_fails_other_samples_may_explain_the_weights_exactly() -> None:
    made = victims.polynomial(victims.labellings(data.sphere(10, 5, 8))[0], 5)
    neurons = neurons_of(net(made), made.trained)
    basis = torch.linalg.svd(neurons.first, full_matrices=False).Vh.T
    inside = replace(neurons, first=neurons.first @ basis)
    truth = made.truth.inputs @ basis
    b = torch.linalg.lstsq((inside.first @ truth.T) ** 3, inside.last[:, None]).solution[:, 0]
    assert violation(inside, truth, b) < 1e-12
    exact, wrong = 0, 0
    for seed in range(30):
        start = truth + random(5, 5, seed=seed)
        samples, multipliers = refine(inside, start, b)
        if violation(inside, samples, multipliers) < 1e-10:
            cosines = torch.nn.functional.normalize(samples, dim=1) @ truth.T / math.sqrt(10)
            exact += 1
            wrong += bool(cosines.abs().amax(0).min() < 0.95)
    assert wrong > 0, f"{exact} exact"


def test_an_inactive_sample_leaves_no_trace() -> None:
    known = victim().truth
    beyond = 1.5 * known.inputs[:1] + 0.02 * random(1, 9)
    more = data.Data(
        torch.cat([known.inputs, beyond]),
        torch.cat([known.targets, known.targets[:1]]),
        (9,),
    )
    made = victims.polynomial(more, 16, active=range(4))
    assert made.training["margins"][4] > 2
    found = identifiability(net(made), made.trained)
    assert found.samples is not None and len(found.samples) == 4
    result = score(found.samples, more)
    assert (result.errors[:4] < 1e-8).all() and result.errors[4] > 0.3
    assert "multiplier zero" in found.undetermined[0]


def test_noise_in_the_weights_costs_as_much_as_it_is() -> None:
    made = victim()
    worst, margins = [], []
    for noise in (1e-9, 1e-7, 1e-5):
        moved = {n: w + noise * w.abs().mean() * random(*w.shape) for n, w in made.trained.items()}
        found = identifiability(net(made), moved)
        assert found.holds and found.rank_of_neurons == 4 and found.samples is not None
        worst.append(float(score(found.samples, made.truth).errors.max()))
        margins.append(found.margin)
        assert worst[-1] < 1e3 * noise
    assert worst[0] < worst[1] < worst[2] and margins[0] > margins[1] > margins[2]


def test_weights_in_single_precision() -> None:
    made = victim()
    single = {name: w.float() for name, w in made.trained.items()}
    found = identifiability(net(made), single)
    assert found.samples is not None
    assert score(found.samples, made.truth).errors.max() < 1e-4


def test_weights_that_are_no_kkt_point_give_nothing() -> None:
    found = identifiability(initialise(two_layer((3,), 12, activation=CUBE)))
    assert found.holds and found.misfit > 0.1 and found.samples is None
    assert "KKT point" in found.reasons[0]


def test_silent_neurons_do_not_count() -> None:
    made = victim()
    padded = {
        "1.weight": torch.cat([made.trained["1.weight"], 1e-12 * random(1, 9)]),
        "3.weight": torch.nn.functional.pad(made.trained["3.weight"], (0, 1)),
    }
    found = identifiability(two_layer((9,), 17, activation=CUBE), padded)
    assert found.neurons == 16 and found.samples is not None
    with pytest.raises(InputError, match="every neuron is zero"):
        identifiability(net(made), {n: torch.zeros_like(w) for n, w in made.trained.items()})


def stationary(
    samples: Tensor, multipliers: Tensor, coefficients: Sequence[float], starts: int = 400
) -> tuple[Tensor, Tensor]:
    """Neurons w = a Σ b σ'(w·x) x, a = Σ b σ(w·x) that are not zero, by a solver from scipy."""
    shape = Neurons(torch.zeros(1, 1), torch.zeros(1), tuple(coefficients))
    found: list[Tensor] = []
    size = samples.shape[1]
    scale = random(starts, size).abs().mean()

    def missed(entries: Sequence[float]) -> list[float]:
        theta = torch.tensor(entries, dtype=torch.float64)
        one = replace(shape, first=theta[None, :-1], last=theta[-1:])
        first, last = explained(one, samples, multipliers)
        rest: list[float] = torch.cat([theta[:-1] - first[0], theta[-1:] - last]).tolist()
        return rest

    for seed in range(starts):
        done = root(missed, (random(size + 1, seed=seed) / scale).numpy(), tol=1e-15)
        theta = torch.from_numpy(done.x)
        good = max(map(abs, missed(done.x))) < 1e-12 and theta.norm() > 1e-2
        if good and all((theta - other).norm() > 1e-4 for other in found):
            found.append(theta)
    stacked = torch.stack(found)
    return stacked[:, :-1], stacked[:, -1]


TWO = torch.tensor([[1.0, 0.2], [-0.3, 1.2]], dtype=torch.float64)


@pytest.mark.parametrize("coefficients", [(0.0, 0.0, 0.3, 1.0), (0.0, 0.3, 0.0, 1.0)])
def test_several_degrees_show_the_norm(coefficients: tuple[float, ...]) -> None:
    basis = torch.linalg.qr(random(5, 2)).Q
    truth, b = TWO @ basis.T, torch.tensor([1.0, 0.7], dtype=torch.float64)
    first, last = stationary(TWO, b, coefficients)
    name = "polynomial:" + ",".join(map(str, coefficients))
    model = two_layer((5,), len(first), activation=name)
    state = {"1.weight": first @ basis.T, "3.weight": last[None]}
    found = identifiability(model, state)
    assert found.holds, (len(first), found.reasons)
    assert found.unknowns == sum(dimension(2, q) for q in found.degrees)
    assert found.equations == 3 * len(first)
    assert found.samples is not None and found.multipliers is not None
    result = score(found.samples, truth)
    assert result.signed_errors.max() < 1e-6  # b > 0, which an odd σ takes for granted
    assert torch.allclose(found.multipliers[result.matched], b)
    assert not any("norm" in sentence for sentence in found.undetermined)


def test_a_hidden_bias_shows_norm_and_sign() -> None:
    truth = torch.tensor([[1.3, 0.2, -0.4], [-0.5, 1.1, 0.3]], dtype=torch.float64)
    lifted = torch.nn.functional.pad(truth, (0, 1), value=1.0)
    b = torch.tensor([1.0, -0.8], dtype=torch.float64)
    basis = torch.linalg.qr(lifted.T).Q
    first, last = stationary(lifted @ basis, b, (0.0, 0.0, 0.0, 1.0))
    model = nn.Sequential(
        nn.Linear(3, len(first)), Elementwise(CUBE), nn.Linear(len(first), 1, bias=False)
    )
    weights = first @ basis.T
    state = {"0.weight": weights[:, :3], "0.bias": weights[:, 3], "2.weight": last[None]}
    found = identifiability(model, state)
    assert found.holds and found.dim == 3, found.reasons
    assert found.samples is not None and found.multipliers is not None
    result = score(found.samples, truth)
    assert result.signed_errors.max() < 1e-6
    assert torch.allclose(found.multipliers[result.matched], b)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (two_layer((3,), 4, activation="polynomial:0,0,1"), "infinitely many ways"),
        (two_layer((3,), 4, activation="polynomial:0,1,1,0"), "degree 2"),
        (two_layer((3,), 4, activation="polynomial:0,1"), "degree 1"),
        (two_layer((3,), 4, activation="polynomial:1,0,0,1"), "constant term 1"),
        (two_layer((3,), 4, activation="relu"), "is no polynomial"),
        (two_layer((3,), 4, 2, activation=CUBE), "2 outputs and no bias"),
        (two_layer((3,), 4, activation=CUBE, bias=True), "1 outputs and a bias"),
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), "found Linear, Tanh, Linear"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_refusals_say_why_and_where_to_go(model: nn.Module, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as refused:
        identifiability(model)
    assert "local_identifiability" in str(refused.value)


class Squashed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(super().forward(x)) + 1
        return result


def test_a_model_that_computes_something_else_is_refused() -> None:
    model = Squashed(*two_layer((3,), 4, activation=CUBE))
    with pytest.raises(InputError, match="its outputs are not"):
        identifiability(model)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"rank": 20}, "rank"),
        ({"level": 0.0}, "level"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": 1.0}, "between 0 and 1"),
        ({"rank": 1}, "outside of 1 dimensions"),
    ],
)
def test_numbers_that_cannot_be(words: dict[str, float], named: str) -> None:
    with pytest.raises(InputError, match=named):
        identifiability(two_layer((3,), 4, activation=CUBE), **words)  # type: ignore[arg-type]


def test_weights_of_too_few_digits_are_refused() -> None:
    with pytest.raises(InputError, match="more digits"):
        identifiability(two_layer((3,), 4, activation=CUBE).bfloat16())


def test_too_many_unknowns_are_refused() -> None:
    with pytest.raises(InputError, match="up to 3000"):
        identifiability(two_layer((40,), 60, activation=CUBE))


def joint_null_space(problem: Problem, candidates: Tensor) -> int:
    """The dimension of the null space in X and A together, by autograd."""
    point = fitted(problem, candidates)
    a = point.coefficients

    def weights(x: Tensor, coefficients: Tensor) -> Tensor:
        v = problem.features.weights.rows(0, problem.features.width).double()  # type: ignore[attr-defined]
        sigma: Tensor = problem.features.activation.value(x @ v.T)  # type: ignore[attr-defined]
        return sigma.T @ coefficients

    jacobians = torch.autograd.functional.jacobian(weights, (candidates, a))
    matrices = [j.reshape(problem.target.numel(), -1) for j in jacobians]
    both = torch.cat([m / m.norm() for m in matrices], 1)
    return both.shape[1] - int(torch.linalg.matrix_rank(both, rtol=1e-9))


@pytest.mark.parametrize(("activation", "free"), [("relu", 3), ("tanh", 0)])
def test_directions_that_random_features_leave_free(activation: str, free: int) -> None:
    known = data.sphere(5, 3)
    problem = victims.random_features(known, 80, activation).problem.to("cpu", torch.float64)
    found = local_identifiability(problem, known.inputs)
    assert (found.unknowns, found.rank, found.equations) == (15, 15 - free, 77)
    assert len(found.undetermined) == free == joint_null_space(problem, known.inputs)
    assert found.residual < 1e-10 and found.holds == (free == 0)
    along = torch.zeros(3, 3, 5, dtype=torch.float64)
    for i, x in enumerate(known.inputs):
        along[i, i] = x / x.norm()
    if free:  # the norms
        flat = found.undetermined.flatten(1)
        assert torch.allclose(flat @ along.flatten(1).T @ along.flatten(1), flat, atol=1e-8)
        assert torch.allclose(flat @ flat.T, torch.eye(3, dtype=torch.float64), atol=1e-10)
    assert local_identifiability(problem, known.inputs, within=True).holds


def test_a_direction_left_free_changes_nothing_and_another_does() -> None:
    known = data.sphere(6, 4)
    problem = victims.random_features(known, 20, "tanh").problem.to("cpu", torch.float64)
    problem = replace(problem, target=problem.target - fitted(problem, known.inputs).residual)
    found = local_identifiability(problem, known.inputs)
    assert not found.holds and found.smallest == 0  # fewer equations than unknowns
    assert found.rank == found.equations == 16
    free = found.undetermined[0]
    other = torch.linalg.svd(found.undetermined.flatten(1)).Vh[-1].reshape(4, 6)
    moved = [math.sqrt(fitted(problem, known.inputs + 1e-5 * move).value) for move in (free, other)]
    assert moved[0] < 1e-3 * moved[1]


def test_a_candidate_without_coefficient_is_wholly_free() -> None:
    known = data.sphere(5, 2)
    problem = victims.random_features(known, 60, "tanh").problem
    extra = torch.cat([known.inputs, data.sphere(5, 1, seed=7).inputs])
    weights = problem.features.weights.rows(0, 60).double()  # type: ignore[attr-defined]
    target = torch.tanh(known.inputs @ weights.T).T @ torch.ones(2, 1, dtype=torch.float64)
    exact = replace(problem.to("cpu", torch.float64), target=target)
    found = local_identifiability(exact, extra)
    assert found.rank == 10 and found.undetermined[:, :2].abs().max() < 1e-6


def test_a_kkt_point_determines_all_but_the_norms() -> None:
    made = victim()
    found = local_identifiability(made.problem, made.truth.inputs)
    assert found.residual < 1e-20
    assert (found.unknowns, found.rank) == (36, 32)
    unit = torch.nn.functional.normalize(made.truth.inputs, dim=1)
    across = found.undetermined - (found.undetermined * unit).sum(2, keepdim=True) * unit
    assert across.abs().max() < 1e-6


def test_the_local_version_refuses_what_it_cannot_hold() -> None:
    problem = victims.random_features(data.sphere(5, 2), 60).problem
    with pytest.raises(InputError, match="expected shape"):
        local_identifiability(problem, torch.zeros(2, 4))
    with pytest.raises(InputError, match="4000 unknowns"):
        local_identifiability(problem, torch.zeros(1000, 5))
