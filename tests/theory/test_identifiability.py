"""Rank conditions, recovery where they hold, what is determined locally, symmetric tensors."""

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import root
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from exhume import data, victims
from exhume.equation.objective import fitted
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.features.network import Elementwise
from exhume.models.architectures import initialise, two_layer
from exhume.theory import fewest_neurons, identifiability, local_identifiability, moments, recover
from exhume.theory.identifiability import Identifiability
from exhume.theory.moments import (
    Neurons,
    decompose,
    dimension,
    explained,
    neurons_of,
    output,
    powers,
    slices,
)
from exhume.victims import Victim
from problems import dense_phi, gaussian, refusals
from problems import kkt_point as victim

CUBE = "polynomial:0,0,0,1"
NOISES = (1e-9, 1e-7, 1e-5)


@pytest.mark.parametrize("coefficients", [(0, 0, 0, 1), (0, 0.5, -1, 2), (0, 0, 0, 0, 1)])
def test_what_samples_explain_is_the_gradient(coefficients: tuple[float, ...]) -> None:
    neurons = Neurons(gaussian(3, 4), gaussian(3, seed=1), tuple(map(float, coefficients)))
    x, b = gaussian(2, 4, seed=2), gaussian(2, seed=3)
    w, a = neurons.first.clone().requires_grad_(), neurons.last.clone().requires_grad_()
    f = sum(s * (x @ w.T) ** q for q, s in enumerate(coefficients)) @ a
    torch.testing.assert_close(output(neurons, x), f)
    torch.testing.assert_close(explained(neurons, x, b), torch.autograd.grad(b @ f, (w, a)))


def judge(made: Victim, state: Mapping[str, Tensor] | None = None, **how: Any) -> Identifiability:
    return identifiability(made.model.network.module, state or made.trained, **how)


@pytest.mark.parametrize(("degree", "width", "unknowns"), [(3, 16, 20), (4, 24, 35)])
def test_samples_of_a_kkt_point_are_recovered(degree: int, width: int, unknowns: int) -> None:
    found, truth = judge(victim(degree, width)), victim(degree, width).truth
    assert found.holds and found.margin > 100 and found.reasons == ()
    assert (found.degree, found.dim, found.rank_of_neurons) == (degree, 9, 4)
    assert (found.rank, found.unknowns, found.equations) == (unknowns, unknowns, 4 * width)
    assert found.misfit < 1e-10 and found.residual < 1e-12
    result, said = score(found.samples, truth), " ".join(found.undetermined)
    assert result.errors.max() < 1e-8 and result.candidates == 4
    assert "would show" in said
    if degree % 2:  # which loses the sign together with the label
        assert (found.multipliers > 0).all() and "label" in said
        assert score(found.samples, truth.inputs * truth.targets).signed_errors.max() < 1e-8
    else:
        assert torch.equal(found.multipliers[result.matched].sign(), truth.targets[:, 0])


def test_the_condition_depends_neither_on_units_axes_and_order_nor_on_twins() -> None:
    made, found = victim(), judge(victim())
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
    found = judge(made, level=8.0)
    assert found.residual < 1e-12 and score(found.samples / 2, made.truth).errors.max() < 1e-8


def test_the_condition_fails_with_too_few_neurons_and_the_recovery_with_it() -> None:
    made = victim(width=4)
    found = judge(made)
    assert not found.holds and found.samples is None and found.smallest == 0
    assert (found.rank, found.unknowns) == (16, 20)
    assert "5 neurons in general position" in found.reasons[0]
    assert "local_identifiability" in found.reasons[0]
    anyway = recover(made.model.network.module, made.trained)
    assert score(anyway.samples, made.truth).errors.max() > 0.05


def test_noise_in_the_weights_costs_as_much_as_it_is() -> None:
    made = victim()
    noise = {name: w.abs().mean() * gaussian(*w.shape) for name, w in made.trained.items()}
    states = [{n: w + size * noise[n] for n, w in made.trained.items()} for size in NOISES]
    found = [judge(made, state) for state in states]
    found.append(judge(made, {name: w.float() for name, w in made.trained.items()}))
    assert all(one.holds and one.rank_of_neurons == 4 for one in found)
    worst = [float(score(one.samples, made.truth).errors.max()) for one in found if one.holds]
    assert all(error < 1e3 * size for error, size in zip(worst, (*NOISES, 1e-7), strict=True))
    assert worst[0] < worst[1] < worst[2]
    assert found[0].margin > found[1].margin > found[2].margin


def test_weights_that_are_no_kkt_point_give_nothing_and_silent_neurons_do_not_count() -> None:
    found = identifiability(initialise(two_layer((3,), 12, activation=CUBE)))
    assert found.holds and found.misfit > 0.1 and found.samples is None
    assert "KKT point" in found.reasons[0]
    first, last = victim().trained.values()
    padded = {"1.weight": torch.cat([first, 1e-12 * gaussian(1, 9)]), "3.weight": pad(last, (0, 1))}
    found = identifiability(two_layer((9,), 17, activation=CUBE), padded)
    assert found.neurons == 16 and found.samples is not None
    with pytest.raises(InputError, match="every neuron is zero"):
        judge(victim(), {n: torch.zeros_like(w) for n, w in victim().trained.items()})


def stationary(
    samples: Tensor, multipliers: Tensor, coefficients: tuple[float, ...], starts: int = 60
) -> tuple[Tensor, Tensor]:
    """Neurons w = a Σ b σ'(w·x) x, a = Σ b σ(w·x) that are not zero, by a solver from scipy."""

    def missed(entries: NDArray[np.float64]) -> NDArray[np.float64]:
        theta = torch.from_numpy(entries)
        one = Neurons(theta[None, :-1], theta[-1:], coefficients)
        first, last = explained(one, samples, multipliers)
        return (theta - torch.cat([first[0], last])).numpy()

    found: list[Tensor] = []
    for seed in range(starts):
        done = root(missed, 1.25 * gaussian(samples.shape[1] + 1, seed=seed).numpy(), tol=1e-15)
        theta = torch.from_numpy(done.x)
        good = abs(missed(done.x)).max() < 1e-12 and theta.norm() > 1e-2
        if good and all((theta - other).norm() > 1e-4 for other in found):
            found.append(theta)
    stacked = torch.stack(found)
    return stacked[:, :-1], stacked[:, -1]


@pytest.mark.parametrize("coefficients", [(0.0, 0.0, 0.3, 1.0), (0.0, 0.3, 0.0, 1.0)])
def test_several_degrees_show_the_norm(coefficients: tuple[float, ...]) -> None:
    basis = torch.linalg.qr(gaussian(5, 2)).Q
    inside = torch.tensor([[1.0, 0.2], [-0.3, 1.2]], dtype=torch.float64)
    truth, b = inside @ basis.T, torch.tensor([1.0, 0.7], dtype=torch.float64)
    first, last = stationary(inside, b, coefficients)
    name = "polynomial:" + ",".join(map(str, coefficients))
    model = two_layer((5,), len(first), activation=name)
    state = {"1.weight": first @ basis.T, "3.weight": last[None]}
    found = identifiability(model, state)
    assert found.holds and found.misfit < 1e-8, (len(first), found.reasons)
    assert found.unknowns == sum(dimension(2, q) for q in found.degrees)
    assert found.equations == 3 * len(first)
    # moments and norms are right before the refinement, which would mend them
    view = moments.view_of(neurons_of(model, state), None, None)
    tensors = moments.moments_of(view).tensors
    for q, tensor in tensors.items():
        assert torch.allclose(tensor, b @ powers(truth @ view.basis, q), atol=1e-8)
    vectors, strengths, _ = decompose(tensors.pop(3), 2, 3, 1e-10)
    scaled, _ = moments.at_scale(vectors, strengths, tensors, 3)
    assert score(scaled @ view.basis.T, truth).errors.max() < 1e-6
    result = score(found.samples, truth)
    assert result.signed_errors.max() < 1e-6  # b > 0, which an odd σ takes for granted
    assert torch.allclose(found.multipliers[result.matched], b)
    assert not any("norm" in sentence for sentence in found.undetermined)


def test_a_hidden_bias_shows_norm_and_sign() -> None:
    truth = torch.tensor([[1.3, 0.2, -0.4], [-0.5, 1.1, 0.3]], dtype=torch.float64)
    lifted, b = pad(truth, (0, 1), value=1.0), torch.tensor([1.0, -0.8], dtype=torch.float64)
    basis = torch.linalg.qr(lifted.T).Q
    first, last = stationary(lifted @ basis, b, (0.0, 0.0, 0.0, 1.0))
    head = nn.Linear(len(first), 1, bias=False)
    model = nn.Sequential(nn.Linear(3, len(first)), Elementwise(CUBE), head)
    weights = first @ basis.T
    state = {"0.weight": weights[:, :3], "0.bias": weights[:, 3], "2.weight": last[None]}
    found = identifiability(model, state)
    assert found.holds and found.dim == 3, found.reasons
    result = score(found.samples, truth)
    assert result.signed_errors.max() < 1e-6
    assert torch.allclose(found.multipliers[result.matched], b)


class Squashed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() + 1


def net_of(activation: str = CUBE, dim: int = 3, width: int = 4, **options: Any) -> nn.Sequential:
    return two_layer((dim,), width, activation=activation, **options)


PLAIN = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
test_what_cannot_be_judged_is_refused = refusals(
    ({"model": net_of("polynomial:0,0,1")}, "infinitely many ways.*local"),
    ({"model": net_of("polynomial:0,1,1,0")}, "degree 2.*local_ident"),
    ({"model": net_of("polynomial:1,0,0,1")}, "constant term 1.*local_ident"),
    ({"model": net_of("relu")}, "is no polynomial.*local_ident"),
    ({"model": net_of(outputs=2)}, "2 outputs and no bias.*local_ident"),
    ({"model": net_of(bias=True)}, "1 outputs and a bias.*local_ident"),
    ({"model": PLAIN}, "Linear, Tanh, Linear"),
    ({"model": Squashed(*net_of())}, "its outputs are not"),
    ({"model": net_of().bfloat16()}, "more digits"),
    ({"model": net_of(CUBE, 40, 60)}, "up to 3000"),
    ({"rank": 20}, "rank"),
    ({"rank": 1}, "outside of 1 dimensions"),
    ({"level": 0.0}, "level"),
    ({"tolerance": 1.0}, "between 0 and 1"),
    call=partial(identifiability, model=net_of()),
)


def joint_null_space(problem: Problem, candidates: Tensor) -> int:
    """The dimension of the null space in X and A together, by autograd."""
    at = (candidates, fitted(problem, candidates).coefficients)
    weights = lambda x, a: dense_phi(problem.features, x).T @ a  # noqa: E731
    jacobians = torch.autograd.functional.jacobian(weights, at)
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
    if free:  # the norms
        flat, along = found.undetermined.flatten(1), torch.block_diag(*normalize(known.inputs))
        assert torch.allclose(flat @ along.T @ along, flat, atol=1e-8)
        assert torch.allclose(flat @ flat.T, torch.eye(3, dtype=torch.float64), atol=1e-10)
    assert local_identifiability(problem, known.inputs, within=True).holds
    narrow = victims.random_features(data.sphere(6, 4), 20, "tanh").problem
    short = local_identifiability(narrow.to("cpu", torch.float64), data.sphere(6, 4).inputs)
    assert not short.holds and short.smallest == 0  # fewer equations than unknowns
    assert short.rank == short.equations == 16


def test_a_kkt_point_determines_all_but_the_norms() -> None:
    problem, inputs = victim().problem, victim().truth.inputs
    found, unit = local_identifiability(problem, inputs), normalize(inputs)
    assert (found.unknowns, found.rank) == (36, 32) and found.residual < 1e-20
    across = found.undetermined - (found.undetermined * unit).sum(2, keepdim=True) * unit
    assert across.abs().max() < 1e-6
    for candidates, words in ((torch.zeros(2, 4), "shape"), (torch.zeros(999, 9), "4000 unknowns")):
        with pytest.raises(InputError, match=words):
            local_identifiability(problem, candidates)


def dense(coordinates: Tensor, size: int, degree: int) -> Tensor:
    """The full array of a symmetric tensor, entry by entry."""
    full = torch.zeros((size,) * degree, dtype=torch.float64)
    letters = moments.exponents(size, degree)
    for index in itertools.product(range(size), repeat=degree):
        counts = [index.count(j) for j in range(size)]
        place = int((letters == torch.tensor(counts)).all(1).nonzero())
        times = math.factorial(degree) / math.prod(map(math.factorial, counts))
        full[index] = coordinates[place] / math.sqrt(times)
    return full


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 99))
def test_products_are_those_of_the_full_array(size: int, degree: int, seed: int) -> None:
    tensor, other = gaussian(2, dimension(size, degree), seed=seed)
    full, vectors = dense(tensor, size, degree), gaussian(2, size, seed=seed + 1)
    contracted = moments.contract(tensor, vectors, degree)
    assert torch.allclose(tensor @ other, (full * dense(other, size, degree)).sum())
    for axes in itertools.permutations(range(degree)):
        assert torch.equal(full.permute(axes), full)
    for k, v in enumerate(vectors):
        last = torch.tensordot(full, v, 1)
        assert torch.allclose(dense(contracted[k], size, degree - 1), last)
        for _ in range(degree - 2):
            last = torch.tensordot(last, v, 1)
        assert torch.allclose(slices(vectors, degree)[k] @ tensor, last)
        assert torch.allclose(powers(vectors, degree)[k] @ tensor, last @ v)
    u, v = powers(vectors, degree)
    assert torch.allclose(u @ v, (vectors[0] @ vectors[1]) ** degree)


def test_fewest_neurons_are_the_fewest() -> None:
    for degree, size in ((3, 3), (3, 4), (3, 5), (3, 6), (4, 3), (4, 4), (4, 5), (5, 3)):
        fewest, most = fewest_neurons(degree, size), dimension(size, degree)
        rows = slices(normalize(gaussian(fewest, size)), degree)
        pair = (rows.flatten(0, 1), rows[1:].flatten(0, 1))
        enough, less = (int(torch.linalg.matrix_rank(matrix, rtol=1e-10)) for matrix in pair)
        assert enough == most > less, (degree, size)


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 4), st.integers(3, 5), st.integers(0, 99))
def test_decomposition_of_independent_terms(size: int, degree: int, seed: int) -> None:
    true = normalize(gaussian(size, size, seed=seed))
    assume(torch.linalg.cond(true) < 50)
    strengths = gaussian(size, seed=seed + 1).sign() * (1 + gaussian(size, seed=seed + 2).abs())
    found, weights, rest = decompose(strengths @ powers(true, degree), size, degree, 1e-10)
    assert rest < 1e-8 and len(found) == size
    cosines = (found @ true.T).abs()
    assert torch.allclose(cosines.amax(1), torch.ones(size, dtype=torch.float64))
    assert torch.allclose(weights.abs(), strengths[cosines.argmax(1)].abs(), rtol=1e-5)
    fewer, _, rest = decompose(strengths[1:] @ powers(true[1:], degree), size, degree, 1e-10)
    assert fewer.shape == (size - 1, size) and rest < 1e-8
