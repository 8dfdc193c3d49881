"""haim2022, buzaglo2023 and loo2023: every term against plain autograd; tuning; going on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exhume import methods
from exhume.auditing import run as run_folder
from exhume.auditing.run import Event, Opened, Settings
from exhume.equation.coefficients import Rule
from exhume.equation.domain import Box, Sphere, SphereInBox
from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.features.activations import softplus
from exhume.features.dense import DenseGradients
from exhume.features.gradient import ParameterGradients
from exhume.methods import Reconstruction, haim2022, loo2023, reconstruct
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.loo2023 import Loo2023
from exhume.methods.penalised import (
    STRIDE,
    Hyperparameters,
    Penalised,
    Terms,
    advanced,
    balanced_labels,
    margin_pattern,
    resting,
    sharpened,
    smoothed,
    stepped,
    terms,
    terms_of,
)
from exhume.methods.progress import Progress, stream
from exhume.search.tuning import Range, found_again, merit, next_trial, rungs
from exhume.solvers import Outcome
from nets import Net, make
from problems import THREAT, case, gaussian

# Problems by hand, and the published losses written with autograd


def net_of(outputs: int, seed: int = 0) -> Net:
    """ReLU, two hidden layers with biases; images of 2×3."""
    widths = {"shape": [2, 3], "widths": [6, 5], "activation": "relu"}
    return make("mlp", outputs, seed, step=0.3, **widths)


def flat(weights: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([weights[name].flatten() for name in names])[:, None]


def posed(net: Net, rule: Rule, point: str = "final", domain: object = None) -> Problem:
    """Target θ for the margin, θ − θ₀ otherwise."""
    names = tuple(name for name, _ in net.plain.named_parameters())
    target = flat(net.trained, names)
    if rule is Rule.FREE:
        target = target - flat(net.initial, names)
    points = tuple(net.points(point))
    features = DenseGradients(net.network, points, "gradients", block=names)
    box = domain or Sphere()
    premise = Premise.MARGIN if rule is Rule.MARGIN else Premise.CHANGE
    return Problem(target, features, THREAT, net.network.shape, box, premise=premise)  # type: ignore[arg-type]


class SmoothedRelu(torch.autograd.Function):
    """ReLU forward, sigmoid(αz) backward."""

    @staticmethod
    def forward(context: object, z: Tensor, alpha: float) -> Tensor:
        context.save_for_backward(z)  # type: ignore[attr-defined]
        context.alpha = alpha  # type: ignore[attr-defined]
        return torch.relu(z)

    @staticmethod
    def backward(context: object, slope: Tensor) -> tuple[Tensor, None]:
        (z,) = context.saved_tensors  # type: ignore[attr-defined]
        return slope * torch.sigmoid(context.alpha * z), None  # type: ignore[attr-defined]


Sigma = Callable[[Tensor], Tensor]


def smooth(alpha: float) -> Sigma:
    return lambda z: SmoothedRelu.apply(z, alpha)


def soft(beta: float) -> Sigma:
    return lambda z: torch.log1p(torch.exp(beta * z)) / beta


def forward(weights: Mapping[str, Tensor], sigma: Sigma, x: Tensor) -> Tensor:
    """The three layers, by hand."""
    layers = list(weights.values())
    for i in range(0, len(layers), 2):
        x = x @ layers[i].T + layers[i + 1]
        x = sigma(x) if i < len(layers) - 2 else x
    return x


def gradients(weights: Mapping[str, Tensor], sigma: Sigma, x: Tensor) -> list[list[Tensor]]:
    """∇θ f_c(x_j) by candidate and output, differentiable in x."""
    theta = {name: w.clone().requires_grad_() for name, w in weights.items()}
    rows = []
    for row in x:
        f = forward(theta, sigma, row)
        parts = [torch.autograd.grad(f_c, list(theta.values()), create_graph=True) for f_c in f]
        rows.append([torch.cat([part.flatten() for part in one]) for one in parts])
    return rows


@dataclass(frozen=True)
class Oracle:
    """A published loss as a function of x and λ."""

    net: Net
    problem: Problem
    sigma: Sigma
    points: Sequence[Mapping[str, Tensor]]
    labels: Tensor
    shares: Tensor
    divisor: float
    settings: Hyperparameters
    low: Tensor | float = -1.0
    high: Tensor | float = 1.0

    def residual(self, x: Tensor, multipliers: Tensor) -> Tensor:
        total = torch.zeros_like(self.problem.target[:, 0])
        rows = [gradients(weights, self.sigma, x) for weights in self.points]
        outputs = forward(self.points[-1], torch.relu, x)
        for j in range(len(x)):
            if self.problem.rule is Rule.FREE:
                mine = [g for one in rows for g in one[j]]
                for weight, g in zip(multipliers[j], mine, strict=True):
                    total = total + weight * g
            elif outputs.shape[1] == 1:
                total = total + multipliers[j, 0] * self.labels[j] * rows[0][j][0]
            else:
                y = int(self.labels[j])
                others = [k for k in range(outputs.shape[1]) if k != y]
                rival = max(others, key=lambda k, j=j: outputs[j, k].item())  # type: ignore[misc]
                total = total + multipliers[j, 0] * (rows[0][j][y] - rows[0][j][rival])
        return self.problem.target[:, 0] - total / self.divisor

    def __call__(self, x: Tensor, multipliers: Tensor) -> Tensor:
        loss = self.residual(x, multipliers).square().sum()
        s = self.settings
        for j, omega in enumerate(self.shares):
            box = torch.relu(x[j] - self.high).square() + torch.relu(self.low - x[j]).square()
            short = torch.relu(s.least - multipliers[j] / omega).square().sum()
            loss = loss + omega * (s.box * box.sum() + s.floor * short)
            if s.smoothness:
                image = x[j].reshape(1, 1, *self.problem.shape)
                kernel = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]]).to(x)[None, None] / 16
                padded = torch.nn.functional.pad(image, (1, 1, 1, 1), mode="replicate")
                rough = image - torch.nn.functional.conv2d(padded, kernel)
                loss = loss + omega * s.smoothness * rough.square().sum()
        return loss + s.sparsity * multipliers.abs().sum()


@dataclass(frozen=True)
class Place:
    """Candidates and multipliers somewhere, with the oracle of the loss there."""

    problem: Problem
    settings: Hyperparameters
    oracle: Oracle
    x: Tensor
    multipliers: Tensor
    labels: Tensor
    shares: Tensor
    divisor: float

    def terms(self) -> Terms:
        seen = smoothed(self.problem, self.settings, 0)
        return terms(seen, self.settings, *self.at())

    def at(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        return self.x, self.multipliers, self.labels, self.shares, self.divisor

    def memory(self) -> dict[str, Tensor]:
        return {
            "multipliers": self.multipliers,
            "labels": self.labels,
            "shares": self.shares,
            "divisor": torch.tensor(self.divisor),
            **resting(self.x, self.multipliers, self.settings.adam),
        }


LOW, HIGH = torch.linspace(-0.9, -0.2, 6).double(), torch.linspace(0.3, 1.1, 6).double()


def place(kind: str, count: int = 4) -> Place:
    outputs = {"one": 1, "several": 3, "decay": 2, "change": 2, "both": 2, "box": 1}[kind]
    net = net_of(outputs)
    rule = Rule.MARGIN if kind in ("one", "several", "box") else Rule.FREE
    point = "both" if kind == "both" else "final"
    domain = SphereInBox(Sphere(), Box(LOW, HIGH)) if kind == "box" else None
    problem = posed(net, rule, point, domain)
    x = 2 * gaussian(count, 6, seed=1)
    shares = torch.tensor([1.0, 0.5, 0.5, 0.25][:count], dtype=torch.float64)
    labels = balanced_labels(count, outputs)
    if kind in ("change", "both"):
        chosen = Loo2023(rate=0.02, smoothness=30.0, sparsity=0.01).hyperparameters(
            problem, {"rate": 0.02}
        )
        sigma, entries = soft(11.0), 4 if kind == "both" else 2
        multipliers = gaussian(count, entries, seed=2)
        divisor = Loo2023().divisor(problem, count)
    else:
        values = {"rate": 0.01, "scale": 1.0, "least": 0.4, "sharpness": 7.0}
        recipe: Penalised = Haim2022() if outputs == 1 else Buzaglo2023()
        if outputs > 1:
            values["multiplier_rate"] = 0.05
        chosen = recipe.hyperparameters(problem, values)
        free = rule is Rule.FREE
        sigma, divisor = smooth(7.0), float(count)
        multipliers = gaussian(count, 2, seed=2) if free else gaussian(count, 1, seed=2).abs()
    low, high = (LOW, HIGH) if kind == "box" else (-math.sqrt(6), math.sqrt(6))
    points = net.points(point)
    oracle = Oracle(net, problem, sigma, points, labels, shares, divisor, chosen, low, high)
    return Place(problem, chosen, oracle, x, multipliers, labels, shares, divisor)


KINDS = ["one", "several", "decay", "change", "both", "box"]


# The loss


def any_module(problem: Problem) -> Problem:
    """The same problem with the features of a module that need not be dense."""
    features = problem.features
    assert isinstance(features, DenseGradients)
    general = ParameterGradients(features.network, features.points, "", block=features.block)
    return replace(problem, features=general)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_slopes_are_the_published_ones(kind: str, dense: bool) -> None:
    there = place(kind)
    there = there if dense else replace(there, problem=any_module(there.problem))
    found = there.terms()
    x = there.x.clone().requires_grad_()
    multipliers = there.multipliers.clone().requires_grad_()
    value = there.oracle(x, multipliers)
    slopes = torch.autograd.grad(value, (x, multipliers))
    assert found.value == pytest.approx(value.item(), rel=1e-12)
    residual = there.oracle.residual(there.x, there.multipliers)
    torch.testing.assert_close(found.residual[:, 0], residual.detach())
    assert found.stationarity.item() == pytest.approx(residual.square().sum().item())
    torch.testing.assert_close(found.slope, slopes[0])
    torch.testing.assert_close(found.multiplier_slope, slopes[1])


def test_the_weights_of_the_published_losses() -> None:
    """What the terms above take from the recipe, by the papers' numbers."""
    one, change = place("one").settings, place("change").settings
    assert (one.box, one.floor, one.least, one.adam) == (1, 5, 0.4, False)
    assert place("several").settings.floor == 5 and place("decay").settings.floor == 0
    count, d = 4, 6
    assert change.box * count * d == pytest.approx(0.1 * count)  # 0.1·M·mean is a sum over M·d
    assert change.smoothness == pytest.approx(0.0015 * 30 / d)
    assert place("change").divisor == count * 2 and change.adam


@pytest.mark.parametrize("kind", ["one", "box"])
def test_the_curvature_of_the_box_is_that_of_the_oracle(kind: str) -> None:
    there = place(kind)
    low, high = there.oracle.low, there.oracle.high

    def outside(x: Tensor) -> Tensor:
        each = torch.relu(x - high).square() + torch.relu(low - x).square()
        return (there.shares[:, None] * each).sum()

    hessian = torch.autograd.functional.hessian(outside, there.x).reshape(24, 24)
    curvature = there.terms().prior_curvature.flatten()
    assert 0 < (curvature > 0).sum() < 24
    torch.testing.assert_close(torch.diag(curvature), hessian)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2), (1, 5)])
def test_the_blur_is_symmetric_and_leaves_what_is_even(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    matrix = sharpened(torch.eye(size).double(), shape)
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix.sum(1), torch.zeros(size).double())
    assert matrix.diagonal().min() >= 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_two_halves_of_a_candidate_are_as_good_as_the_whole(kind: str) -> None:
    there = place(kind)
    rows = torch.tensor([0, 1, 1, 2, 3, 3])
    half = torch.tensor([1, 0.5, 0.5, 1, 0.5, 0.5]).double()
    split = terms(
        smoothed(there.problem, there.settings, 0),
        there.settings,
        there.x[rows],
        there.multipliers[rows] * half[:, None],
        there.labels[rows],
        there.shares[rows] * half,
        there.divisor,
    )
    whole = there.terms()
    assert split.value == pytest.approx(whole.value, rel=1e-13)
    torch.testing.assert_close(split.residual, whole.residual)
    torch.testing.assert_close(split.slope, whole.slope[rows] * half[:, None])
    torch.testing.assert_close(split.multiplier_slope, whole.multiplier_slope[rows])


def test_the_floor_and_the_box_count_by_share() -> None:
    there = place("one")
    low = replace(there, multipliers=0.1 * there.multipliers, x=3 * there.x)
    full, quarter = low.terms(), replace(low, shares=there.shares / 4).terms()
    assert full.below > 0 and full.outside > 0
    assert quarter.outside.item() == pytest.approx(full.outside.item() / 4)
    alone = replace(low, multipliers=low.multipliers / 4, shares=there.shares / 4).terms()
    assert alone.below.item() == pytest.approx(full.below.item() / 4)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_labels_are_balanced(count: int, outputs: int) -> None:
    labels = balanced_labels(count, outputs)
    names = [-1, 1] if outputs == 1 else range(outputs)
    numbers = [int((labels == name).sum()) for name in names]
    assert sum(numbers) == count and max(numbers) - min(numbers) <= 1
    assert labels.tolist() == sorted(labels.tolist())


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(0, 1000))
def test_the_pattern_is_the_margin(classes: int, seed: int) -> None:
    outputs = gaussian(8, classes, seed=seed)
    labels = balanced_labels(8, classes)
    margins = (margin_pattern(labels, outputs) * outputs).sum(1)
    for y, f, margin in zip(labels.tolist(), outputs.tolist(), margins.tolist(), strict=True):
        assert margin == pytest.approx(f[y] - max(f[k] for k in range(classes) if k != y))


# Steps


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_torch(kind: str) -> None:
    there = place(kind)
    x = there.x.clone().requires_grad_()
    multipliers = there.multipliers.clone().requires_grad_()
    chosen = there.settings
    groups = [
        {"params": [x], "lr": chosen.rate},
        {"params": [multipliers], "lr": chosen.multiplier_rate},
    ]
    optimiser: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=0.9)
    if chosen.adam:
        optimiser = torch.optim.Adam(groups)
    candidates, memory = there.x, there.memory()
    seen = smoothed(there.problem, chosen, 0)
    for _ in range(3):
        optimiser.zero_grad()
        loss = there.oracle(x, multipliers)
        x.grad, multipliers.grad = torch.autograd.grad(loss, (x, multipliers))
        optimiser.step()
        candidates, memory = stepped(seen, chosen, candidates, memory)
        torch.testing.assert_close(candidates, x.detach())
        torch.testing.assert_close(memory["multipliers"], multipliers.detach())
    assert not torch.allclose(candidates, there.x)


def test_softplus_sharpens_as_published() -> None:
    def beta(step: int) -> float:
        return float(loo2023.surrogate(step).name.removeprefix("softplus:"))

    assert [beta(0), beta(20_000)] == [11, 20]
    assert beta(45_000) == pytest.approx(10 + 10**2.25)
    assert beta(46_000) == beta(10**9) == 200
    problem = place("change").problem
    chosen = Loo2023().hyperparameters(problem, {"rate": 0.02})
    x = gaussian(3, 6)
    for step in (0, 20_000, 20_000 + STRIDE - 1):
        seen = smoothed(problem, chosen, step).features.linearize(x)
        near = problem.features.substituted(softplus(beta(step - step % STRIDE)))
        torch.testing.assert_close(seen.gram(), near.linearize(x).gram())


def test_the_start_is_the_published_one() -> None:
    one = Haim2022(rate=0.1, scale=1e-3, least=0.3, sharpness=50.0)
    state = one.init(posed(net_of(1), Rule.MARGIN), 200, 0).state
    x, multipliers = state.fit.candidates, state.memory["multipliers"]
    assert x.shape == (400, 6) and multipliers.shape == (400, 1)
    assert x.std().item() == pytest.approx(1e-3, rel=0.05)
    assert multipliers.min() >= 0 and multipliers.max() <= 1
    assert multipliers.mean().item() == pytest.approx(0.5, abs=0.05)
    assert state.memory["labels"].tolist() == [-1] * 200 + [1] * 200
    assert state.memory["divisor"].item() == 400

    several = Buzaglo2023().init(posed(net_of(3), Rule.MARGIN), 15, 0).state.memory
    assert several["labels"].bincount().tolist() == [10, 10, 10]
    assert several["multipliers"].shape == (30, 1) and several["multipliers"].min() >= 0
    decay = Buzaglo2023().init(posed(net_of(3), Rule.FREE), 200, 0).state.memory
    assert decay["multipliers"].shape == (400, 3)
    assert decay["multipliers"].std().item() == pytest.approx(1, abs=0.05)

    change = Loo2023(rate=0.02).init(posed(net_of(3), Rule.FREE), 200, 0).state
    assert change.fit.candidates.std().item() == pytest.approx(0.2, rel=0.05)
    duals = change.memory["multipliers"]
    assert duals.min() >= -0.5 and duals.max() <= 0.5 and duals.mean().abs() < 0.05
    assert change.memory["divisor"].item() == 1200
    assert (Haim2022().steps, Buzaglo2023().steps, Loo2023().steps) == (50_000, 50_000, 80_000)


# Refusals


@pytest.mark.parametrize(
    ("method", "rule", "outputs", "words"),
    [
        (Haim2022(), Rule.FREE, 1, "buzaglo2023 .* premise decay.* loo2023 .* premise change"),
        (Haim2022(), Rule.MARGIN, 3, "one output, but this has 3; use buzaglo2023"),
        (Loo2023(), Rule.MARGIN, 1, "premise margin.*haim2022 at the margin .* buzaglo2023"),
    ],
)
def test_a_problem_that_a_recipe_is_not_for(
    method: Penalised, rule: Rule, outputs: int, words: str
) -> None:
    with pytest.raises(InputError, match=words.replace(" .* ", ".*")):
        reconstruct(posed(net_of(outputs), rule), 2, method=method)


def test_smoothness_is_for_images() -> None:
    problem = replace(posed(net_of(1), Rule.FREE), shape=(6,))
    with pytest.raises(InputError, match=r"smoothness: is for images.*\(6,\)"):
        reconstruct(problem, 2, method=Loo2023(smoothness=0.05))


@pytest.mark.parametrize("name", ["haim2022", "buzaglo2023", "loo2023"])
def test_the_number_of_samples_is_needed(name: str) -> None:
    rule = Rule.FREE if name == "loo2023" else Rule.MARGIN
    with pytest.raises(InputError, match=f"{name} needs the number of samples"):
        reconstruct(posed(net_of(1), rule), method=name)


# Tuning


def simulated(trials: int, score: Callable[[int, int], float]) -> list[tuple[int, int, int]]:
    """All trials in turn, where score(rung, trial) is the residual."""
    scores = [[math.nan] * trials for _ in rungs(trials)]
    replicated = [math.nan] * trials
    done = []
    while (here := next_trial(scores, replicated)) is not None:
        assert len(done) < 10 * trials
        done.append(here)
        rung, trial, start = here
        if start == 0:
            scores[rung][trial] = score(rung, trial)
        else:
            replicated[trial] = 0.5
    return done


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.randoms(use_true_random=False), st.floats(0, 1))
def test_halving_tries_all_and_goes_on_with_the_best(
    trials: int, random: object, bad: float
) -> None:
    table = [
        [math.inf if random.random() < bad else random.random() for _ in range(trials)]
        for _ in rungs(trials)
    ]
    done = simulated(trials, lambda rung, trial: table[rung][trial])
    alive = set(range(trials))
    for rung, size in enumerate(rungs(trials)):
        firsts = [trial for r, trial, start in done if (r, start) == (rung, 0)]
        assert set(firsts) == alive and len(firsts) == len(alive) <= size
        finite = sorted((table[rung][trial], trial) for trial in alive if table[rung][trial] < 2)
        if size <= 2:
            again = {trial for r, trial, start in done if start == 1}
            assert again == {trial for _, trial in finite}
        else:
            alive = {trial for _, trial in finite[: rungs(trials)[rung + 1]]}
    assert [r for r, _, _ in done] == sorted(r for r, _, _ in done)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 1000))
def test_what_two_starts_share_is_counted_once(found: int, other: int, seed: int) -> None:
    basis = torch.linalg.qr(gaussian(40, 40, seed=seed)).Q
    first = basis[: found + other]
    again = torch.cat([3 * basis[:found], basis[25 : 25 + other]])
    order = torch.randperm(len(again), generator=torch.Generator().manual_seed(seed))
    share = found / (found + other)
    assert found_again(first, again[order]) == pytest.approx(share)
    doubled = found_again(torch.cat([first, first]), torch.cat([again, again]))
    assert doubled == pytest.approx(share / 2)  # copies prove nothing
    assert found_again(first, -again) == 0


def test_a_candidate_stands_for_one_of_the_other_start_alone() -> None:
    turn = math.radians(20)
    first = torch.tensor(
        [[math.cos(turn), math.sin(turn), 0], [math.cos(turn), -math.sin(turn), 0]]
    )
    second = torch.tensor([[1.0, 0, 0], [0, 0, 1]])  # near to both of the first, which differ
    assert found_again(first, second) == found_again(second, first) == 0.5


@given(st.floats(1e-6, 1), st.floats(0, 1), st.integers(1, 100))
def test_merit_falls_with_the_residual_and_with_what_is_found_again(
    residual: float, share: float, count: int
) -> None:
    here = merit(residual, share, count)
    assert merit(residual / 2, share, count) < here
    assert merit(residual, share + 0.1, count) < here
    assert merit(math.inf, share, count) == math.inf


@dataclass(frozen=True)
class Few(Haim2022):
    """Two settings, one of them terrible."""

    trials: int = 2
    probe: int = 60
    steps: int = 150
    settings: tuple[Mapping[str, float], ...] = ()

    def published(self, problem: Problem) -> Sequence[Mapping[str, float]]:
        return self.settings


GOOD = {"rate": 0.05, "scale": 0.05, "least": 0.1, "sharpness": 50.0}
EXPLODES, STANDS_STILL = {**GOOD, "rate": 1e6}, {**GOOD, "rate": 1e-12, "scale": 1e-6}


@pytest.mark.parametrize("terrible", [EXPLODES, STANDS_STILL])
@pytest.mark.parametrize("turned", [False, True])
def test_tuning_takes_the_better_of_two(terrible: Mapping[str, float], turned: bool) -> None:
    order = (terrible, GOOD) if turned else (GOOD, terrible)
    method = Few(settings=order)
    moves: list[Progress] = []
    problem = posed(net_of(1), Rule.MARGIN)
    found = reconstruct(problem, 3, method=method, observe=lambda p, _: moves.append(p))
    last = moves[-1]
    assert (last.phase, found.outcome) == ("run", Outcome.BUDGET)
    assert method.settings_of(problem, 0, last.state.memory).rate == GOOD["rate"]
    assert not any(name.startswith("tune.") for name in last.state.memory)
    taken = found.steps - last.state.steps + 60  # the run went on from the trial's last step
    tried = 2 * 60 + (60 if terrible is STANDS_STILL else STRIDE)
    assert taken == tried + (60 if terrible is STANDS_STILL else 0)
    assert last.state.steps == 150


def test_a_trial_that_ends_above_its_start_is_dropped() -> None:
    worse = {**GOOD, "rate": 3.0, "scale": 1.0}
    method = Few(probe=2, settings=(worse, GOOD))
    problem = posed(net_of(1), Rule.MARGIN, domain=Box(-1.0, 1.0))
    first = method.init(problem, 3, 0)
    chosen = method.settings_of(problem, 0, first.state.memory)
    end = advanced(problem, chosen, first.state, 2)
    value = terms_of(problem, chosen, end.fit.candidates, end.memory).relative
    assert first.state.memory["start"].item() < value < math.inf
    after = method.advance(problem, first).state.memory
    assert after["tune.scores"][0, 0] == math.inf and after["trial"] == 1
    assert "tune.best.candidates" not in after


def test_the_run_goes_on_from_the_better_of_two_starts() -> None:
    problem, method = posed(net_of(1), Rule.MARGIN), Few(trials=1, settings=(GOOD,))
    better = set()
    for seed in range(6):
        ends = []
        for start in (0, 1):
            state = method.begin(problem, 6, seed, start=start)
            chosen = method.settings_of(problem, seed, state.memory)
            state = advanced(problem, chosen, state, 60)
            x = state.fit.candidates
            ends.append((terms_of(problem, chosen, x, state.memory).relative, start, x))
        moves: list[Progress] = []
        reconstruct(problem, 3, seed, method, observe=lambda p, _, moves=moves: moves.append(p))
        begun = next(p for p in moves if p.phase == "run")
        assert begun.state.steps == 60 and begun.total_steps == 120
        _, start, x = min(ends)
        torch.testing.assert_close(begun.state.fit.candidates, x)
        better.add(start)
    assert better == {0, 1}


def test_where_every_setting_explodes_the_run_has_diverged() -> None:
    method = Few(settings=(EXPLODES, {**EXPLODES, "scale": 1.0}))
    found = reconstruct(posed(net_of(1), Rule.MARGIN), 3, method=method)
    assert found.outcome is Outcome.DIVERGED
    assert found.samples.isfinite().all() and math.isfinite(found.residual)


def test_a_run_that_explodes_ends_at_its_last_finite_look() -> None:
    method = Haim2022(steps=200, **EXPLODES)
    found = reconstruct(posed(net_of(1), Rule.MARGIN), 3, method=method)
    assert found.outcome is Outcome.DIVERGED
    assert found.samples.isfinite().all() and math.isfinite(found.residual)


class Blown(Haim2022):
    """A recipe that was stopped while its residual was huge and still finite."""

    def finish(self, problem: Problem, progress: Progress) -> Fit:
        return replace(super().finish(problem, progress), value=1e6)


def test_a_run_that_is_stopped_while_it_explodes_has_diverged() -> None:
    found = reconstruct(posed(net_of(1), Rule.MARGIN), 3, method=Blown(**GOOD), time_limit=0)
    assert found.outcome is Outcome.DIVERGED


def test_what_is_given_is_not_tuned_and_the_rest_lies_in_the_published_ranges() -> None:
    problem = posed(net_of(1), Rule.MARGIN)
    method = Haim2022(rate=0.123)
    for trial in range(30):
        chosen = method._settings(problem, trial, stream(0, trial))
        assert chosen.rate == 0.123
        sharpness = float(chosen.surrogate(0).name.removeprefix("smoothed_relu:"))
        if trial < len(haim2022.PUBLISHED):
            expected = haim2022.PUBLISHED[trial]
            assert (chosen.scale, chosen.least) == (expected["scale"], expected["least"])
            assert sharpness == expected["sharpness"]
        assert 1e-6 <= chosen.scale <= 0.1 and 0.01 <= chosen.least <= 0.5
        assert 10 <= sharpness <= 500
    assert method.init(problem, 2, 0).phase == "tune"
    whole = Haim2022(rate=0.1, scale=1e-3, least=0.3, sharpness=50.0)
    assert whole.init(problem, 2, 0).phase == "run"


@pytest.mark.parametrize(
    ("rule", "outputs", "names"),
    [
        (Rule.MARGIN, 1, {"rate", "scale", "least", "sharpness"}),
        (Rule.MARGIN, 3, {"rate", "scale", "least", "sharpness", "multiplier_rate"}),
        (Rule.FREE, 1, {"rate", "scale", "sharpness", "multiplier_rate"}),
    ],
)
def test_what_buzaglo_leaves_open(rule: Rule, outputs: int, names: set[str]) -> None:
    problem = posed(net_of(outputs), rule)
    method = Buzaglo2023()
    assert set(method.ranges(problem)) == names
    for published in method.published(problem):
        assert names - {"multiplier_rate"} <= published.keys() <= names
        for name, value in published.items():
            span = method.ranges(problem)[name]
            assert span.low <= value <= span.high


def test_with_one_output_at_the_margin_buzaglo_is_haim() -> None:
    problem = posed(net_of(1), Rule.MARGIN)
    options = {"steps": 40, "trials": 2, "probe": 10}
    one, other = (
        reconstruct(problem, 2, 3, method)
        for method in (Haim2022(**options), Buzaglo2023(**options))  # type: ignore[arg-type]
    )
    assert torch.equal(one.samples, other.samples)


def test_ranges_cover_their_ends() -> None:
    for span in (Range(1e-5, 1.0, logarithmic=True), Range(0.01, 0.5)):
        assert span.at(0) == pytest.approx(span.low) and span.at(1) == pytest.approx(span.high)


# The answer, and going on


def short(kind: str) -> Penalised:
    options = {"steps": 95, "trials": 3, "probe": 15}
    recipes = {"one": Haim2022, "several": Buzaglo2023, "decay": Buzaglo2023, "change": Loo2023}
    return recipes[kind](**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["one", "several", "decay", "change"])
def test_the_answer_has_the_recipes_own_coefficients(kind: str) -> None:
    there, method = place(kind), short(kind)
    moves: list[Progress] = []
    found = reconstruct(there.problem, 3, method=method, observe=lambda p, _: moves.append(p))
    state = moves[-1].state
    assert found.samples.shape == (6, 6) and found.outcome is Outcome.BUDGET
    assert torch.equal(found.samples, state.fit.candidates)
    net = replace(there.oracle, sigma=torch.relu, labels=state.memory["labels"])
    net = replace(net, divisor=state.memory["divisor"].item())
    residual = net.residual(found.samples, state.memory["multipliers"])
    expected = residual.square().sum() / there.problem.target.square().sum()
    assert found.residual == pytest.approx(expected.item())
    again = fitted_with(there.problem, found.samples, found.coefficients)
    assert again.value == found.residual and not again.eliminated
    counted = [p.total_steps for p in moves]
    assert counted == sorted(counted) and found.steps == counted[-1]


def test_out_of_time_while_tuning_the_best_trial_so_far_is_the_answer() -> None:
    method = Few(settings=(GOOD, STANDS_STILL))
    problem = posed(net_of(1), Rule.MARGIN)
    moves: list[Progress] = []
    reconstruct(problem, 3, method=method, observe=lambda p, _: moves.append(p))
    second = next(p for p in moves if p.phase == "tune" and p.state.memory["trial"] == 1)
    best = second.state.memory["tune.best.candidates"]
    late = reconstruct(problem, 3, method=method, resume=(second, 9.0), time_limit=1.0)
    assert late.outcome is Outcome.BUDGET
    assert torch.equal(late.samples, best)
    assert not torch.equal(best, second.state.fit.candidates)


def same(a: Reconstruction, b: Reconstruction) -> bool:
    numbers = [(r.residual, r.outcome, r.steps, r.products) for r in (a, b)]
    return (
        torch.equal(a.samples, b.samples)
        and torch.equal(a.coefficients, b.coefficients)
        and numbers[0] == numbers[1]
    )


@pytest.mark.parametrize("kind", ["one", "several", "decay", "change"])
def test_an_interrupted_recipe_goes_on_to_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a run folder, in every phase."""
    monkeypatch.setattr(run_folder, "EVENT_SECONDS", 0.0)
    method = short(kind)
    monkeypatch.setitem(methods.METHODS, method.name, lambda: method)
    opened = Opened(place(kind).problem)
    asked = Settings(None, 3, method=method.name)
    events: list[Event] = []
    whole, _ = run_folder.run(asked, opened, tmp_path / "whole", show=events.append)
    phases = [event.phase for event in events]
    assert phases == sorted(phases, reverse=True) and set(phases) == {"tune", "run"}
    middle = phases.index("run")
    for stop in {middle // 2, middle - 1, (middle + len(events)) // 2}:
        left = [stop]

        def interrupt(event: Event, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        out = tmp_path / f"{stop}"
        with pytest.raises(KeyboardInterrupt):
            run_folder.run(asked, opened, out, show=interrupt)
        resumed, _ = run_folder.run(asked, opened, out, resume=True)
        assert same(resumed, whole), f"interrupted at move {stop} of {len(events)}"


def test_nothing_but_the_problem_and_the_seed_decides() -> None:
    there = place("one")
    results = []
    for state in (1, 2):
        torch.manual_seed(state)
        results.append(reconstruct(there.problem, 3, 5, short("one")))
    assert same(*results)
    other = reconstruct(there.problem, 3, 6, short("one"))
    assert not torch.equal(other.samples, results[0].samples)


def test_features_that_are_not_a_networks_can_be_fitted_too() -> None:
    truth = case(10, 2, 8, outputs=2)
    found = reconstruct(truth.problem, 2, method=Loo2023(steps=400, rate=0.05))
    assert found.samples.shape == (4, 10) and found.coefficients.shape == (4, 2)
    assert found.residual < 0.5
