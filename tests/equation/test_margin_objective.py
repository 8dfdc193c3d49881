"""Candidates held to the margin: value, gradient and Gauss-Newton matrix against dense algebra."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor

from exhume.equation import objective
from exhume.equation.coefficients import Rule
from exhume.equation.domain import Box
from exhume.equation.objective import STIFFNESS, Fit, descent, fitted, gauss_newton, gradient
from exhume.equation.problem import Premise, Problem
from exhume.features.dense import DenseGradients
from exhume.solvers.levenberg_marquardt import LevenbergMarquardt
from nets import Net, dense, make, names_of
from problems import THREAT, close, dense_complement, gaussian

COUNT, DIM = 6, 4
fast = settings(max_examples=5, deadline=None)
seeds = st.integers(0, 10_000)
places = pytest.mark.parametrize("seed", [0, 1, 2])


def net_of(outputs: int = 1, seed: int = 0) -> Net:
    widths = {"shape": [DIM], "widths": [7, 5], "activation": "softplus", "bias": "first"}
    return make("mlp", outputs, seed, step=0.3, **widths)


def posed(net: Net, premise: Premise = Premise.MARGIN, target: Tensor | None = None) -> Problem:
    """All weights as the target, or another."""
    weights = torch.cat([net.trained[name].flatten() for name in names_of(net)])
    target = weights if target is None else target
    features = DenseGradients(net.network, (net.trained,), "", block=tuple(names_of(net)))
    return Problem(target[:, None], features, THREAT, (DIM,), Box(-9.0, 9.0), premise=premise)


class Oracle:
    """Everything at candidates X, from dense rows Φ (n, p) by autograd and scipy's multipliers."""

    def __init__(self, net: Net, target: Tensor, x: Tensor) -> None:
        self.net, self.target, self.size = net, target, float(target.square().sum())
        self.here = dense(net, "final", names_of(net)).linearize(x)
        self.rows, outputs = self.here.phi, self.here.phi @ target
        self.signs = torch.where(outputs < 0, -1.0, 1.0).double()
        self.margins = outputs.abs()
        found, least = nnls((self.signs[:, None] * self.rows).T.numpy(), target.numpy())
        self.coefficients = self.signs * torch.from_numpy(found)
        self.value = least**2 / self.size
        self.shares = self.coefficients.abs() / self.coefficients.abs().sum()
        below = ((m, self.shares[self.margins <= m].sum()) for m in self.margins.sort().values)
        self.level = next(float(m) for m, share in below if share >= 0.5)  # weighted median
        self.deviation = self.margins / self.level - 1
        self.penalty = float(STIFFNESS * (self.shares * self.deviation.square()).sum())

    @property
    def force(self) -> Tensor:
        """∂(m/γ)/∂x, (n, d), with γ held."""
        slope = torch.einsum("npd,p->nd", self.here.slopes[:, 0], self.target)
        return self.signs[:, None] * slope / self.level

    @property
    def stiff(self) -> Tensor:
        """Gauss-Newton matrix of the penalty in units of ‖Δ‖², (n, d, n, d)."""
        weights, eye = STIFFNESS * self.size * self.shares, torch.eye(len(self.shares)).double()
        return torch.einsum("n,nd,me,nm->ndme", weights, self.force, self.force, eye)


def place(seed: int = 0) -> tuple[Problem, Tensor, Fit, Oracle]:
    """The rule leaves some of the candidates without a multiplier."""
    net = net_of(seed=seed)
    problem, x = posed(net), 1.5 * gaussian(COUNT, DIM, seed=seed + 100)
    return problem, x, fitted(problem, x), Oracle(net, problem.target[:, 0], x)


@fast
@given(seeds, st.floats(1e-3, 1e3), st.sampled_from([-1, 1]))
def test_the_cost_is_the_residual_and_what_is_off_the_margin(
    seed: int, factor: float, sign: int
) -> None:
    problem, x, fit, oracle = place(seed)
    assert fit.value == pytest.approx(oracle.value, rel=1e-6, abs=1e-12)
    assert fit.penalty == pytest.approx(oracle.penalty, rel=1e-5, abs=1e-12)
    assert fit.cost == fit.value + fit.penalty and fit.slack is not None
    shares = fit.slack.weights / oracle.size / STIFFNESS
    torch.testing.assert_close(shares, oracle.shares, atol=1e-6, rtol=0)
    torch.testing.assert_close(fit.slack.deviation, oracle.deviation)
    torch.testing.assert_close(fit.slack.slope, oracle.force)
    assert fit.slack.value.item() / oracle.size == pytest.approx(fit.penalty)
    # Size and sign of the weights make no difference.
    scaled = fitted(posed(net_of(seed=seed), target=sign * factor * problem.target[:, 0]), x)
    assert scaled.value == pytest.approx(fit.value, rel=1e-9)
    assert scaled.penalty == pytest.approx(fit.penalty, rel=1e-6, abs=1e-12)


@places
def test_samples_on_the_margin_cost_nothing(seed: int) -> None:
    net, x = net_of(seed=seed), 1.5 * gaussian(COUNT, DIM, seed=seed + 100)
    rows = dense(net, "final", names_of(net)).linearize(x).phi
    labels = torch.tensor([1.0, -1, 1, -1, 1, -1]).double()
    while not (labels * (exact := torch.linalg.solve(rows @ rows.T, labels)) > 0).all():
        labels, rows, x = labels[:-1], rows[:-1], x[:-1]  # no KKT point: take one sample less
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
    assert not descent(fit).any() and objective.curvature(fit).isfinite().all()
    assert not gauss_newton(fit, gaussian(3, DIM)).any()


@places
def test_gradient_is_that_of_the_cost_with_shares_and_level_held(seed: int) -> None:
    problem, x, fit, here = place(seed)

    def frozen(at: Tensor) -> float:
        there = Oracle(here.net, here.target, at)
        off = there.margins / here.level - 1
        return there.value + STIFFNESS * float((here.shares * off.square()).sum())

    h, found = 1e-5, gradient(problem, fit)
    for direction in (gaussian(COUNT, DIM, seed=k) for k in range(4)):
        slope = (frozen(x + h * direction) - frozen(x - h * direction)) / (2 * h)
        assert (found * direction).sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(descent(fit), -0.5 * here.size * found)
    residual_alone = fit.linearization.pull(fit.residual, fit.coefficients)
    assert (descent(fit) - residual_alone).norm() > 0.01 * residual_alone.norm()


@places
def test_gauss_newton_and_curvature_are_those_of_dense_algebra(seed: int) -> None:
    problem, x, fit, oracle = place(seed)
    used, jacobian = oracle.shares > 0, oracle.here.jacobian(oracle.coefficients)[:, 0]
    assert 1 <= used.sum() < COUNT
    flat, inner = jacobian.flatten(1), dense_complement(oracle.rows[used])
    expected = flat.T @ inner @ flat + oracle.stiff.flatten(2).flatten(0, 1)
    directions = torch.eye(COUNT * DIM).double().view(-1, COUNT, DIM)
    found = torch.stack([gauss_newton(fit, along).flatten() for along in directions], 1)
    close(found, expected, 1e-6)
    assert not found.view(COUNT, DIM, -1)[~used].any()
    blocks = torch.einsum("pnd,pmd->nm", jacobian, jacobian)
    close(objective.curvature(fit), (blocks + torch.einsum("ndmd->nm", oracle.stiff)) / DIM, 1e-6)
    single = fitted(problem.to("cpu", torch.float32), x)
    assert descent(single).dtype == torch.float32
    close(descent(single), descent(fit), 1e-3)
    close(gauss_newton(single, directions[0].float()), gauss_newton(fit, directions[0]), 1e-3)


def test_steps_that_are_kept_lower_the_cost_and_not_the_residual_alone() -> None:
    solver, rose = LevenbergMarquardt(), False
    for seed in range(4):
        problem, x, _, _ = place(seed)
        state = solver.init(problem, x)
        costs = [state.fit.cost]
        for _ in range(20):
            before, state = state, solver.step(problem, state)
            rose |= state.fit.value > before.fit.value
            costs.append(state.fit.cost)
        assert costs == sorted(costs, reverse=True) and costs[-1] < costs[0]
    assert rose  # else the slack made no difference anywhere


@fast
@given(seeds, st.integers(0, 5))
def test_a_warm_start_gives_the_same_fit(seed: int, other: int) -> None:
    problem, x, cold, _ = place(seed)
    near = fitted(problem, 1.5 * gaussian(COUNT, DIM, seed=other))
    for warm in (fitted(problem, x, near), fitted(problem, x, cold)):
        torch.testing.assert_close(warm.coefficients, cold.coefficients, rtol=1e-6, atol=1e-9)
        assert warm.cost == pytest.approx(cold.cost, rel=1e-7, abs=1e-12)
        torch.testing.assert_close(descent(warm), descent(cold), rtol=1e-5, atol=1e-7)


def test_other_premises_outputs_and_coefficients_are_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objective, "STIFFNESS", 1e9)
    x = 1.5 * gaussian(COUNT, DIM, seed=1)
    for premise in (Premise.CHANGE, Premise.DECAY):
        fit = fitted(posed(net_of(), premise), x)
        assert posed(net_of(), premise).rule is Rule.FREE
        assert (fit.slack, fit.penalty, fit.cost) == (None, 0.0, fit.value)
    several, free = (fitted(posed(net_of(3), p), x[:3]) for p in (Premise.MARGIN, Premise.DECAY))
    assert several.rows == 3 and several.slack is None and several.cost == several.value
    assert free.value < several.value - 1e-3  # what only the rule forbids
    mine = objective.fitted_with(posed(net_of()), x[:3], gaussian(3, 1, seed=2))
    assert mine.slack is None and mine.cost == mine.value and not mine.eliminated
