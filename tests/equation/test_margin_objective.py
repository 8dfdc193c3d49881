"""Candidates held to the margin: value, gradient and Gauss-Newton matrix against dense algebra."""

from functools import cached_property

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor

from exhume.equation import objective
from exhume.equation.coefficients import RIVALS, Rule, eliminate, factor, margins
from exhume.equation.domain import Box
from exhume.equation.objective import (
    STIFFNESS,
    Fit,
    curvature,
    descent,
    fitted,
    fitted_with,
    gauss_newton,
    gradient,
)
from exhume.equation.problem import Premise, Problem
from exhume.features.dense import DenseGradients
from exhume.solvers.levenberg_marquardt import LevenbergMarquardt
from nets import Net, dense_rows, dense_slopes, make
from problems import THREAT, dense_complement, gaussian

COUNT, DIM = 6, 4

fast = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 10_000)


def net_of(outputs: int = 1, activation: str = "softplus", seed: int = 0) -> Net:
    widths = {"shape": [DIM], "widths": [7, 5], "activation": activation, "bias": "first"}
    return make("mlp", outputs, seed, step=0.3, **widths)


def names_of(net: Net) -> list[str]:
    return [name for name, _ in net.plain.named_parameters()]


def posed(net: Net, premise: Premise = Premise.MARGIN, target: Tensor | None = None) -> Problem:
    """All weights as the target, or another."""
    if target is None:
        target = torch.cat([net.trained[name].flatten() for name in names_of(net)])
    features = DenseGradients(net.network, (net.trained,), "", block=tuple(names_of(net)))
    return Problem(target[:, None], features, THREAT, (DIM,), Box(-9.0, 9.0), premise=premise)


class Oracle:
    """Everything at candidates X, from dense rows Φ (n, p) by autograd and scipy's multipliers."""

    def __init__(self, net: Net, target: Tensor, x: Tensor) -> None:
        self.rows = dense_rows(net, [net.trained], names_of(net), x)
        self.net, self.target, self.x = net, target, x
        outputs = self.rows @ target
        self.signs = torch.where(outputs < 0, -1.0, 1.0).double()
        self.margins = outputs.abs()
        signed = (self.signs[:, None] * self.rows).T.numpy()
        found, least = nnls(signed, target.numpy())
        self.coefficients = self.signs * torch.from_numpy(found)
        self.value = least**2 / float(target.square().sum())
        self.shares = self.coefficients.abs() / self.coefficients.abs().sum()
        self.level = self._median()

    def _median(self) -> float:
        """The least margin at and below which half of all multipliers lie."""
        below = [
            (float(m), float(self.shares[self.margins <= m].sum()))
            for m in self.margins.sort().values
        ]
        return next(m for m, share in below if share >= 0.5)

    @cached_property
    def slopes(self) -> Tensor:
        """∂φ/∂x, (n, p, d)."""
        return dense_slopes(self.net, [self.net.trained], names_of(self.net), self.x)[:, 0]

    @property
    def deviation(self) -> Tensor:
        return self.margins / self.level - 1

    @property
    def penalty(self) -> float:
        return float(STIFFNESS * (self.shares * self.deviation.square()).sum())

    @property
    def force(self) -> Tensor:
        """∂(m/γ)/∂x, (n, d), with γ held."""
        slope = torch.einsum("npd,p->nd", self.slopes, self.target)
        return self.signs[:, None] * slope / self.level

    @property
    def jacobian(self) -> Tensor:
        """Of ΦᵀA in the candidates, (p, n·d)."""
        return torch.einsum("n,npd->pnd", self.coefficients, self.slopes).flatten(1)

    @property
    def stiff(self) -> Tensor:
        """Gauss-Newton matrix of the penalty in units of ‖Δ‖², (n, d, n, d)."""
        weights = STIFFNESS * float(self.target.square().sum()) * self.shares
        blocks = torch.einsum("n,nd,ne->nde", weights, self.force, self.force)
        return torch.einsum("nde,nm->ndme", blocks, torch.eye(len(weights)).double())


def place(seed: int = 0) -> tuple[Problem, Tensor, Fit, Oracle]:
    """A problem and candidates of which the rule leaves some without a multiplier."""
    net = net_of(seed=seed)
    problem, x = posed(net), 1.5 * gaussian(COUNT, DIM, seed=seed + 100)
    return problem, x, fitted(problem, x), Oracle(net, problem.target[:, 0], x)


PLACES = [0, 1, 2, 3]


def test_the_places_have_candidates_with_and_without_a_multiplier() -> None:
    used = [int((place(seed)[3].shares > 0).sum()) for seed in PLACES]
    assert max(used) >= 3 and min(used) < COUNT and min(used) >= 1


# Value


@fast
@given(seeds)
def test_the_cost_is_the_residual_and_what_is_off_the_margin(seed: int) -> None:
    _, _, fit, oracle = place(seed)
    assert fit.value == pytest.approx(oracle.value, rel=1e-6, abs=1e-12)
    assert fit.penalty == pytest.approx(oracle.penalty, rel=1e-5, abs=1e-12)
    assert fit.cost == fit.value + fit.penalty
    slack = fit.slack
    assert slack is not None
    size = float(oracle.target.square().sum())
    torch.testing.assert_close(slack.weights / size / STIFFNESS, oracle.shares, atol=1e-6, rtol=0)
    torch.testing.assert_close(slack.deviation, oracle.deviation)
    torch.testing.assert_close(slack.slope, oracle.force)
    assert slack.value.item() / size == pytest.approx(fit.penalty)


def test_off_by_its_whole_size_counts_as_the_stiffness() -> None:
    """Half of the multipliers at the level, half at twice that."""
    weights = STIFFNESS * torch.tensor([0.5, 0.5, 0.0]).double()
    slack = objective.Slack(weights, torch.tensor([0.0, 1.0, 7.0]).double(), torch.zeros(3, 2))
    assert slack.value.item() == pytest.approx(STIFFNESS / 2)


@fast
@given(seeds, st.floats(1e-3, 1e3), st.sampled_from([-1, 1]))
def test_size_and_sign_of_the_weights_make_no_difference(seed: int, size: float, sign: int) -> None:
    problem, x, fit, _ = place(seed)
    scaled = fitted(posed(net_of(seed=seed), target=sign * size * problem.target[:, 0]), x)
    assert scaled.value == pytest.approx(fit.value, rel=1e-9)
    assert scaled.penalty == pytest.approx(fit.penalty, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", PLACES)
def test_samples_on_the_margin_cost_nothing(seed: int) -> None:
    net, x = net_of(seed=seed), 1.5 * gaussian(COUNT, DIM, seed=seed + 100)
    rows = dense_rows(net, [net.trained], names_of(net), x)
    labels = torch.tensor([1.0, -1, 1, -1, 1, -1]).double()
    gram = rows @ rows.T
    while not (labels * (exact := torch.linalg.solve(gram, labels)) > 0).all():
        gram = gram[:-1, :-1]  # no KKT fit: take one sample less
        labels, rows, x = labels[:-1], rows[:-1], x[:-1]
    assert len(x) >= 2
    problem = posed(net, target=rows.T @ exact)
    fit = fitted(problem, x)
    assert fit.value < 1e-12 and fit.penalty < 1e-12
    torch.testing.assert_close(fit.coefficients[:, 0], exact, rtol=1e-6, atol=1e-9)
    assert descent(fit).abs().max() < 1e-6 * problem.target.square().sum()
    assert fitted(problem, 1.1 * x).penalty > 1e-6


def test_without_any_multiplier_nothing_is_held() -> None:
    """At zero a network of ReLU without biases has no gradient at all."""
    net = make("mlp", 1, shape=[DIM], widths=[6], activation="relu", bias=False)
    fit = fitted(posed(net), torch.zeros(3, DIM).double())
    assert not fit.coefficients.any()
    assert (fit.value, fit.penalty) == (1.0, 0.0)
    assert not descent(fit).any() and curvature(fit).isfinite().all()
    assert not gauss_newton(fit, gaussian(3, DIM)).any()


# Derivatives


@pytest.mark.parametrize("seed", PLACES)
def test_gradient_is_that_of_the_cost_with_shares_and_level_held(seed: int) -> None:
    net = net_of(seed=seed)
    problem, x, fit, here = place(seed)

    def frozen(at: Tensor) -> float:
        there = Oracle(net, here.target, at)
        off = there.margins / here.level - 1
        return there.value + STIFFNESS * float((here.shares * off.square()).sum())

    h, slope = 1e-5, torch.zeros_like(x)
    for i in range(COUNT):
        for j in range(DIM):
            step = torch.zeros_like(x)
            step[i, j] = h
            slope[i, j] = (frozen(x + step) - frozen(x - step)) / (2 * h)
    found = gradient(problem, fit)
    torch.testing.assert_close(found, slope, rtol=1e-4, atol=1e-6 * slope.abs().max().item())
    half = -0.5 * float(here.target.square().sum())
    torch.testing.assert_close(descent(fit), half * found)
    residual_alone = fit.linearization.pull(fit.residual, fit.coefficients)
    assert (descent(fit) - residual_alone).norm() > 0.01 * residual_alone.norm()


@pytest.mark.parametrize("seed", PLACES)
def test_gauss_newton_is_that_of_dense_algebra(seed: int) -> None:
    _, _, fit, oracle = place(seed)
    used = oracle.shares > 0
    inner = dense_complement(oracle.rows[used])
    expected = oracle.jacobian.T @ inner @ oracle.jacobian + oracle.stiff.flatten(2).flatten(0, 1)
    products = [
        gauss_newton(fit, direction.reshape(COUNT, DIM)).flatten()
        for direction in torch.eye(COUNT * DIM).double()
    ]
    found = torch.stack(products, 1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8 * expected.abs().max().item())
    assert not found.view(COUNT, DIM, -1)[~used].any()


@pytest.mark.parametrize("seed", PLACES)
def test_curvature_is_the_mean_of_the_diagonal_of_dense_blocks(seed: int) -> None:
    _, _, fit, oracle = place(seed)
    jacobian = oracle.jacobian.view(-1, COUNT, DIM)
    blocks = torch.einsum("pnd,pmd->nm", jacobian, jacobian)
    blocks = blocks + torch.einsum("ndmd->nm", oracle.stiff)
    torch.testing.assert_close(
        curvature(fit), blocks / DIM, rtol=1e-6, atol=1e-8 * blocks.abs().max().item()
    )


def test_in_single_precision_the_products_are_the_same_to_rounding() -> None:
    problem, x, fit, _ = place(1)
    small = fitted(problem.to("cpu", torch.float32), x)
    direction = gaussian(COUNT, DIM, seed=5)
    assert descent(small).dtype == torch.float32
    torch.testing.assert_close(descent(small).double(), descent(fit), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(
        gauss_newton(small, direction.float()).double(),
        gauss_newton(fit, direction),
        rtol=1e-2,
        atol=1e-3,
    )


def test_steps_that_are_kept_lower_the_cost_and_not_the_residual_alone() -> None:
    solver, rose = LevenbergMarquardt(), False
    for seed in PLACES:
        problem, x, _, _ = place(seed)
        state = solver.init(problem, x)
        costs = [state.fit.cost]
        for _ in range(20):
            before, state = state, solver.step(problem, state)
            rose |= state.fit.value > before.fit.value
            costs.append(state.fit.cost)
        assert costs == sorted(costs, reverse=True) and costs[-1] < costs[0]
    assert rose  # else the slack made no difference anywhere


# Where nothing is held


@pytest.mark.parametrize("premise", [Premise.CHANGE, Premise.DECAY])
def test_free_problems_are_untouched(premise: Premise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "STIFFNESS", 1e9)
    problem = posed(net_of(), premise)
    assert problem.rule is Rule.FREE
    x, direction = 1.5 * gaussian(COUNT, DIM, seed=1), gaussian(COUNT, DIM, seed=2)
    fit = fitted(problem, x)
    assert (fit.slack, fit.penalty, fit.cost) == (None, 0.0, fit.value)
    rows = dense_rows(net_of(), [net_of().trained], names_of(net_of()), x)
    left = dense_complement(rows) @ problem.target
    assert fit.value == pytest.approx(float((left.norm() / problem.target.norm()) ** 2), rel=1e-9)
    a, line = fit.coefficients, fit.linearization
    assert torch.equal(descent(fit), line.pull(fit.residual, a))
    assert torch.equal(curvature(fit), line.curvature(a))
    pushed = line.push(direction, a)
    expected = line.pull(dense_complement(rows) @ pushed, a)
    torch.testing.assert_close(gauss_newton(fit, direction), expected, rtol=1e-6, atol=1e-9)


def test_with_several_outputs_or_coefficients_of_ones_own_nothing_is_held() -> None:
    x = gaussian(3, DIM, seed=1)
    several = fitted(posed(net_of(3)), x)
    assert several.rows == 3 and several.slack is None and several.cost == several.value
    mine = fitted_with(posed(net_of()), x, gaussian(3, 1, seed=2))
    assert mine.slack is None and mine.cost == mine.value and not mine.eliminated


# A start


@fast
@given(seeds, st.integers(0, 5))
def test_a_warm_start_gives_the_same_point(seed: int, other: int) -> None:
    problem, x, cold, _ = place(seed)
    near = fitted(problem, 1.5 * gaussian(COUNT, DIM, seed=other))
    for start in (near, cold):
        warm = fitted(problem, x, start)
        torch.testing.assert_close(warm.coefficients, cold.coefficients, rtol=1e-6, atol=1e-9)
        assert warm.cost == pytest.approx(cold.cost, rel=1e-7, abs=1e-12)
        torch.testing.assert_close(descent(warm), descent(cold), rtol=1e-5, atol=1e-7)


# Several outputs


def pairs(rows: Tensor, outputs: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """φ_y − φ_k for the classes k next to the largest, y, of each sample, by sorting."""
    n, classes = outputs.shape
    chosen = []
    for i in range(n):
        order = sorted(range(classes), key=lambda c: -float(outputs[i, c]))
        chosen += [(i * classes + order[0], i * classes + k) for k in order[1 : RIVALS + 1]]
    return torch.stack([rows[y] - rows[k] for y, k in chosen]), chosen


@fast
@given(st.integers(2, 7), st.integers(1, 5), seeds)
def test_several_outputs_have_the_multipliers_of_scipy(classes: int, count: int, seed: int) -> None:
    rows, target = gaussian(count * classes, 60, seed=seed), gaussian(60, seed=seed + 1)
    products = rows @ target
    gram = rows @ rows.T
    found, lower = eliminate(Rule.MARGIN, gram, products[:, None], classes)
    differences, chosen = pairs(rows, products.view(count, classes))
    multipliers, least = nnls(differences.T.numpy(), target.numpy())
    expected = torch.zeros(count * classes).double()
    for (y, k), multiplier in zip(chosen, multipliers, strict=True):
        expected[y] += float(multiplier)
        expected[k] -= float(multiplier)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-6, atol=1e-8)
    assert float((target - rows.T @ found[:, 0]).norm()) == pytest.approx(least, rel=1e-9)
    torch.testing.assert_close(lower, factor(gram))
    first, second = margins(products.view(count, classes))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == chosen


def test_a_network_of_several_outputs_is_explained_as_well_as_scipy_can() -> None:
    net = net_of(6)
    problem, x = posed(net), 1.5 * gaussian(COUNT, DIM, seed=3)
    rows = dense_rows(net, [net.trained], names_of(net), x)
    target = problem.target[:, 0]
    differences, _ = pairs(rows, (rows @ target).view(COUNT, 6))
    _, least = nnls(differences.T.numpy(), target.numpy())
    fit = fitted(problem, x)
    assert fit.value == pytest.approx(least**2 / float(target.square().sum()), rel=1e-9)
    everything = fitted(posed(net, Premise.DECAY), x).value
    assert everything < fit.value - 1e-3  # what only the rule forbids
