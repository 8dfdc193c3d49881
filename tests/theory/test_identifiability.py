"""Rank conditions, recovery where they hold, what is determined locally, symmetric tensors."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
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
from exhume.theory.moments import (
    at_scale,
    contract,
    decompose,
    dimension,
    exponents,
    moments_of,
    powers,
    slices,
    view_of,
)
from exhume.theory.neurons import Neurons, explained, neurons_of, output
from exhume.victims import Victim
from problems import gaussian

CUBE = "polynomial:0,0,0,1"
NOISES = (1e-9, 1e-7, 1e-5)


@pytest.mark.parametrize("coefficients", [(0, 0, 0, 1), (0, 0.5, -1, 2), (0, 0, 0, 0, 1)])
def test_what_samples_explain_is_the_gradient(coefficients: tuple[float, ...]) -> None:
    neurons = Neurons(gaussian(3, 4), gaussian(3, seed=1), tuple(map(float, coefficients)))
    x, b = gaussian(2, 4, seed=2), gaussian(2, seed=3)
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
    found, truth = judged(degree, width), victim(degree, width).truth
    assert found.holds and found.margin > 100 and found.reasons == ()
    assert (found.degree, found.dim, found.rank_of_neurons) == (degree, 9, 4)
    assert (found.rank, found.unknowns, found.equations) == (unknowns, unknowns, 4 * width)
    assert found.misfit < 1e-10
    assert found.samples is not None and found.multipliers is not None
    assert found.residual is not None and found.residual < 1e-12
    result = score(found.samples, truth)
    assert result.errors.max() < 1e-8 and result.candidates == 4
    assert any("would show" in sentence for sentence in found.undetermined)
    if degree % 2:  # which loses the sign together with the label
        assert (found.multipliers > 0).all()
        assert score(found.samples, truth.inputs * truth.targets).signed_errors.max() < 1e-8
        assert any("label" in sentence for sentence in found.undetermined)
    else:
        signs = found.multipliers[result.matched].sign()
        assert torch.equal(signs, truth.targets[:, 0])


def test_the_condition_depends_neither_on_units_axes_and_order_nor_on_twins() -> None:
    made, found = victim(), judged()
    first, last = made.trained.values()
    turn = torch.linalg.qr(gaussian(9, 9)).Q
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    for w, a in (
        (1e3 * (first @ turn)[order], 1e-2 * last[:, order]),
        (torch.cat([first, first]), torch.cat([last, last], 1)),
    ):
        model = two_layer((9,), len(w), activation=CUBE)
        other = identifiability(model, {"1.weight": w, "3.weight": a})
        assert other.rank == found.rank and other.sufficient_rank == found.sufficient_rank
        assert other.smallest == pytest.approx(found.smallest, rel=1e-8)
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


def test_noise_in_the_weights_costs_as_much_as_it_is() -> None:
    made = victim()
    noise = {name: w.abs().mean() * gaussian(*w.shape) for name, w in made.trained.items()}
    states = [{n: w + size * noise[n] for n, w in made.trained.items()} for size in NOISES]
    states.append({name: w.float() for name, w in made.trained.items()})
    found = [identifiability(net(made), state) for state in states]
    assert all(one.holds and one.rank_of_neurons == 4 for one in found)
    worst = [float(score(one.samples, made.truth).errors.max()) for one in found if one.holds]
    assert all(error < 1e3 * size for error, size in zip(worst, (*NOISES, 1e-7), strict=True))
    assert worst[0] < worst[1] < worst[2]
    assert found[0].margin > found[1].margin > found[2].margin


def test_weights_that_are_no_kkt_point_give_nothing_and_silent_neurons_do_not_count() -> None:
    found = identifiability(initialise(two_layer((3,), 12, activation=CUBE)))
    assert found.holds and found.misfit > 0.1 and found.samples is None
    assert "KKT point" in found.reasons[0]
    made = victim()
    padded = {
        "1.weight": torch.cat([made.trained["1.weight"], 1e-12 * gaussian(1, 9)]),
        "3.weight": torch.nn.functional.pad(made.trained["3.weight"], (0, 1)),
    }
    found = identifiability(two_layer((9,), 17, activation=CUBE), padded)
    assert found.neurons == 16 and found.samples is not None
    with pytest.raises(InputError, match="every neuron is zero"):
        identifiability(net(made), {n: torch.zeros_like(w) for n, w in made.trained.items()})


def stationary(
    samples: Tensor, multipliers: Tensor, coefficients: Sequence[float], starts: int = 100
) -> tuple[Tensor, Tensor]:
    """Neurons w = a Σ b σ'(w·x) x, a = Σ b σ(w·x) that are not zero, by a solver from scipy."""
    shape = Neurons(torch.zeros(1, 1), torch.zeros(1), tuple(coefficients))
    found: list[Tensor] = []
    size = samples.shape[1]
    scale = gaussian(starts, size).abs().mean()

    def missed(entries: Sequence[float]) -> list[float]:
        theta = torch.tensor(entries, dtype=torch.float64)
        one = replace(shape, first=theta[None, :-1], last=theta[-1:])
        first, last = explained(one, samples, multipliers)
        rest: list[float] = torch.cat([theta[:-1] - first[0], theta[-1:] - last]).tolist()
        return rest

    for seed in range(starts):
        done = root(missed, (gaussian(size + 1, seed=seed) / scale).numpy(), tol=1e-15)
        theta = torch.from_numpy(done.x)
        good = max(map(abs, missed(done.x))) < 1e-12 and theta.norm() > 1e-2
        if good and all((theta - other).norm() > 1e-4 for other in found):
            found.append(theta)
    stacked = torch.stack(found)
    return stacked[:, :-1], stacked[:, -1]


TWO = torch.tensor([[1.0, 0.2], [-0.3, 1.2]], dtype=torch.float64)


@pytest.mark.parametrize("coefficients", [(0.0, 0.0, 0.3, 1.0), (0.0, 0.3, 0.0, 1.0)])
def test_several_degrees_show_the_norm(coefficients: tuple[float, ...]) -> None:
    basis = torch.linalg.qr(gaussian(5, 2)).Q
    truth, b = TWO @ basis.T, torch.tensor([1.0, 0.7], dtype=torch.float64)
    first, last = stationary(TWO, b, coefficients)
    name = "polynomial:" + ",".join(map(str, coefficients))
    model = two_layer((5,), len(first), activation=name)
    state = {"1.weight": first @ basis.T, "3.weight": last[None]}
    found = identifiability(model, state)
    assert found.holds, (len(first), found.reasons)
    assert found.unknowns == sum(dimension(2, q) for q in found.degrees)
    assert found.equations == 3 * len(first)
    assert found.misfit < 1e-8
    # Moments and norms are right before the refinement, which would mend them.
    view = view_of(neurons_of(model, state), None, None)
    tensors = moments_of(view).tensors
    for q, tensor in tensors.items():
        assert torch.allclose(tensor, b @ powers(truth @ view.basis, q), atol=1e-8)
    vectors, strengths, _ = decompose(tensors.pop(3), 2, 3, 1e-10)
    samples, _ = at_scale(vectors, strengths, tensors, 3)
    assert score(samples @ view.basis.T, truth).errors.max() < 1e-6
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


class Squashed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(super().forward(x)) + 1
        return result


def net_of(activation: str = CUBE, dim: int = 3, width: int = 4, **options: Any) -> nn.Sequential:
    return two_layer((dim,), width, activation=activation, **options)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (net_of("polynomial:0,0,1"), {}, "infinitely many ways.*local"),
        (net_of("polynomial:0,1,1,0"), {}, "degree 2.*local_ident"),
        (net_of("polynomial:1,0,0,1"), {}, "constant term 1.*local_ident"),
        (net_of("relu"), {}, "is no polynomial.*local_ident"),
        (net_of(outputs=2), {}, "2 outputs and no bias.*local_ident"),
        (net_of(bias=True), {}, "1 outputs and a bias.*local_ident"),
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), {}, "Linear, Tanh, Linear"),
        (Squashed(*net_of()), {}, "its outputs are not"),
        (net_of().bfloat16(), {}, "more digits"),
        (net_of(CUBE, 40, 60), {}, "up to 3000"),
        (net_of(), {"rank": 20}, "rank"),
        (net_of(), {"rank": 1}, "outside of 1 dimensions"),
        (net_of(), {"level": 0.0}, "level"),
        (net_of(), {"tolerance": 1.0}, "between 0 and 1"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_cannot_be_judged_is_refused(
    model: nn.Module, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        identifiability(model, **options)


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
    narrow = victims.random_features(data.sphere(6, 4), 20, "tanh").problem
    short = local_identifiability(narrow.to("cpu", torch.float64), data.sphere(6, 4).inputs)
    assert not short.holds and short.smallest == 0  # fewer equations than unknowns
    assert short.rank == short.equations == 16


def test_a_kkt_point_determines_all_but_the_norms() -> None:
    made = victims.polynomial(victims.labellings(data.sphere(9, 4, 2))[0], 16)
    found = local_identifiability(made.problem, made.truth.inputs)
    assert found.residual < 1e-20
    assert (found.unknowns, found.rank) == (36, 32)
    unit = torch.nn.functional.normalize(made.truth.inputs, dim=1)
    across = found.undetermined - (found.undetermined * unit).sum(2, keepdim=True) * unit
    assert across.abs().max() < 1e-6
    for candidates, words in ((torch.zeros(2, 4), "shape"), (torch.zeros(999, 9), "4000 unknowns")):
        with pytest.raises(InputError, match=words):
            local_identifiability(made.problem, candidates)


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


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 99))
def test_coordinates_and_products_are_those_of_the_full_array(
    size: int, degree: int, seed: int
) -> None:
    tensor, other = gaussian(2, dimension(size, degree), seed=seed)
    full = dense(tensor, size, degree)
    assert torch.allclose(tensor @ other, (full * dense(other, size, degree)).sum())
    for axes in itertools.permutations(range(degree)):
        assert torch.equal(full.permute(axes), full)
    vectors = gaussian(2, size, seed=seed + 1)
    for k, v in enumerate(vectors):
        once = last = torch.tensordot(full, v, 1)
        assert torch.allclose(dense(contract(tensor, vectors, degree)[k], size, degree - 1), once)
        for _ in range(degree - 2):
            last = torch.tensordot(last, v, 1)
        assert torch.allclose(slices(vectors, degree)[k] @ tensor, last)
        assert torch.allclose(powers(vectors, degree)[k] @ tensor, last @ v)
    u, v = powers(vectors, degree)
    assert torch.allclose(u @ v, (vectors[0] @ vectors[1]) ** degree)


@pytest.mark.parametrize(
    ("degree", "size"), [(3, 3), (3, 4), (3, 5), (3, 6), (4, 3), (4, 4), (4, 5), (5, 3)]
)
def test_fewest_neurons_are_the_fewest(degree: int, size: int) -> None:
    def rank(count: int) -> int:
        units = torch.nn.functional.normalize(gaussian(count, size), dim=1)
        rows = slices(units, degree).flatten(0, 1)
        return int(torch.linalg.matrix_rank(rows, rtol=1e-10))

    fewest = fewest_neurons(degree, size)
    assert rank(fewest) == dimension(size, degree)
    assert rank(fewest - 1) < dimension(size, degree)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(3, 5), st.integers(0, 99))
def test_decomposition_of_independent_terms(size: int, degree: int, seed: int) -> None:
    true = torch.nn.functional.normalize(gaussian(size, size, seed=seed), dim=1)
    assume(torch.linalg.cond(true) < 50)
    strengths = gaussian(size, seed=seed + 1).sign() * (1 + gaussian(size, seed=seed + 2).abs())
    found, weights, rest = decompose(strengths @ powers(true, degree), size, degree, 1e-10)
    assert rest < 1e-8 and len(found) == size
    cosines = (found @ true.T).abs()
    assert torch.allclose(cosines.amax(1), torch.ones(size, dtype=torch.float64))
    assert torch.allclose(weights.abs(), strengths[cosines.argmax(1)].abs(), rtol=1e-5)
    fewer, _, rest = decompose(strengths[1:] @ powers(true[1:], degree), size, degree, 1e-10)
    assert fewer.shape == (size - 1, size) and rest < 1e-8
