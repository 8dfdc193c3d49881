"""Networks trained to the margin or held by decay: what the record says, by autograd and scipy."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from exhume import data, victims
from exhume.data import Data
from exhume.equation.problem import Premise
from exhume.errors import InputError
from exhume.models.folder import CARD, read_model, read_network
from exhume.victims import Victim, margin
from exhume.victims.margin import margins

WIDTH, STEPS = 40, 400


def parity(samples: int = 10) -> Data:
    return data.load("digits", samples, 0, classes="parity", centre="pixels")


def classes() -> Data:
    return data.load("digits", 9, 0, classes=(1, 4, 7), centre="pixels")


@dataclass(frozen=True)
class Watched:
    """A victim, and its weights before each of the last steps of its training."""

    victim: Victim
    last: list[list[Tensor]]


KINDS: dict[str, tuple[Callable[[], Data], dict[str, Any]]] = {
    "margin": (parity, {}),
    "deep": (parity, {"widths": (30, 20)}),
    "classes": (classes, {}),
    "decay": (parity, {"decay": 1e-2, "steps": 800}),
    "squared": (parity, {"decay": 1e-2, "steps": 800, "loss": "squared"}),
    "decay of classes": (classes, {"decay": 1e-2, "steps": 800}),
    "logistic of classes": (classes, {"decay": 1e-2, "steps": 800, "loss": "logistic"}),
}


def made(known: Data, **options: Any) -> Victim:
    sizes = {"widths": (WIDTH,), "steps": STEPS, "dtype": torch.float64} | options
    return victims.kkt_mlp(known, **sizes)


@pytest.fixture(scope="module")
def watched() -> Iterator[Callable[[str], Watched]]:
    """Victims by the names of KINDS, each trained once."""
    done: dict[str, Watched] = {}
    patch = pytest.MonkeyPatch()

    def get(kind: str) -> Watched:
        if kind not in done:
            known, options = KINDS[kind]
            path: list[list[Tensor]] = []
            move = margin._Rest.step

            def moved(self: Any, gradient: Any, rate: float) -> None:
                path.append([w.detach().clone() for w in self.weights])
                move(self, gradient, rate)

            with patch.context() as context:
                context.setattr(margin._Rest, "step", moved)
                victim = made(known(), **options)
            assert len(path) == victim.training["steps"]
            done[kind] = Watched(victim, path[-(options.get("steps", STEPS) // 10) :])
        return done[kind]

    yield get


# By hand


def plain(layers: list[Tensor], x: Tensor) -> Tensor:
    """W_L relu(… relu(W₁x + b₁)), from W₁, b₁, W₂, …"""
    h = x @ layers[0].T + layers[1]
    for weight in layers[2:]:
        h = torch.relu(h) @ weight.T
    return h


def layers_of(victim: Victim) -> list[Tensor]:
    return [w.double() for w in victim.trained.values()]


def loss_of(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if name == "squared":
        return nn.functional.mse_loss(outputs, targets)
    if name == "logistic":
        return torch.log1p(torch.exp(-signs_of(targets) * outputs)).mean()
    return nn.functional.cross_entropy(outputs, targets.argmax(1))


def signs_of(targets: Tensor) -> Tensor:
    return torch.where(targets > 0, 1.0, -1.0).double()


def true_margins(victim: Victim) -> Tensor:
    """By the loss: y f of every output, or f_y − f_k of every other class."""
    known = victim.truth
    outputs = plain(layers_of(victim), known.inputs)
    if victim.training["loss_name"] == "logistic":
        return (signs_of(known.targets) * outputs).amin(1)
    own = known.targets.argmax(1)
    rivals = [
        min(float(f[y] - f[k]) for k in range(len(f)) if k != y)
        for f, y in zip(outputs, own, strict=True)
    ]
    return torch.tensor(rivals, dtype=torch.float64)


def flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def slope_of(victim: Victim, layers: list[Tensor]) -> Tensor:
    """The gradient of the loss, or of its logarithm where it is driven to the margin, (p,)."""
    leaves = [w.clone().requires_grad_() for w in layers]
    loss = loss_of(
        victim.training["loss_name"], plain(leaves, victim.truth.inputs), victim.truth.targets
    )
    if victim.training["decay"] is None:
        loss = loss.log()
    return flat(list(torch.autograd.grad(loss, leaves)))


def rows_of(victim: Victim) -> Tensor:
    """∇θ f_c(x_i), (n, c, p)."""
    leaves = [w.clone().requires_grad_() for w in layers_of(victim)]
    rows = []
    for x in victim.truth.inputs:
        outputs = plain(leaves, x[None])[0]
        rows.append(
            torch.stack(
                [flat(list(torch.autograd.grad(f, leaves, retain_graph=True))) for f in outputs]
            )
        )
    return torch.stack(rows)


# What training promises


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_fitted(kind: str, watched: Callable[[str], Watched]) -> None:
    victim = watched(kind).victim
    outputs = plain(layers_of(victim), victim.truth.inputs)
    if victim.truth.outputs == 1:
        assert torch.equal(outputs.sign(), signs_of(victim.truth.targets))
    else:
        assert torch.equal(outputs.argmax(1), victim.truth.targets.argmax(1))
    loss = loss_of(victim.training["loss_name"], outputs, victim.truth.targets)
    assert victim.training["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert loss < 0.1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "squared"])
def test_the_margins_of_the_record(kind: str, watched: Callable[[str], Watched]) -> None:
    victim = watched(kind).victim
    found = true_margins(victim)
    expected = [found.min().item(), found.max().item()]
    assert victim.training["margins"] == pytest.approx(expected, rel=1e-9)


def test_squares_have_no_margins(watched: Callable[[str], Watched]) -> None:
    assert "margins" not in watched("squared").victim.training


@pytest.mark.parametrize("kind", KINDS)
def test_the_stationarity_of_the_record(kind: str, watched: Callable[[str], Watched]) -> None:
    """1 − cos² of θ and the mean of −∇L over the last tenth of the steps."""
    seen = watched(kind)
    theta = flat(layers_of(seen.victim))
    slopes = torch.stack([slope_of(seen.victim, layers) for layers in seen.last])
    mean = -slopes.mean(0)
    cosine = (theta @ mean / theta.norm() / mean.norm()).item()
    recorded = seen.victim.training["stationarity"]
    assert cosine > 0 and recorded == pytest.approx(1 - cosine**2, rel=1e-6, abs=1e-12)
    assert recorded < 5e-3
    one = -slopes[-1]
    alone = 1 - (theta @ one / theta.norm() / one.norm()).item() ** 2
    assert recorded < alone  # slopes at kinks are found by the mean alone


@pytest.mark.parametrize("kind", KINDS)
def test_the_violation_of_the_record(kind: str, watched: Callable[[str], Watched]) -> None:
    """‖θ − Σ A ∇f‖²/‖θ‖² for the best A that the premise allows, by scipy or least squares."""
    victim = watched(kind).victim
    theta, rows = flat(layers_of(victim)), rows_of(victim)
    n, c, _ = rows.shape
    if victim.training["premise"] == "decay":
        basis = rows.flatten(0, 1).T
        left = theta - basis @ torch.linalg.lstsq(basis, theta[:, None]).solution[:, 0]
        size = left.square().sum().item()
        active = n
    elif c == 1:
        signed = signs_of(victim.truth.targets) * rows[:, 0]
        multipliers, least = nnls(signed.T.numpy(), theta.numpy())
        size, active = least**2, int((multipliers > 1e-3 * multipliers.max()).sum())
    else:
        own = victim.truth.targets.argmax(1).tolist()
        pairs = [rows[i, y] - rows[i, k] for i, y in enumerate(own) for k in range(c) if k != y]
        multipliers, least = nnls(torch.stack(pairs).T.numpy(), theta.numpy())
        sizes = multipliers.reshape(n, c - 1).sum(1)
        size, active = least**2, int((sizes > 1e-3 * sizes.max()).sum())
    expected = size / float(theta.square().sum())
    assert victim.training["violation"] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert 1e-6 < expected < 0.2
    assert victim.training["active"] == active


@pytest.mark.parametrize(("kind", "layers"), [("margin", 2), ("classes", 2), ("deep", 3)])
def test_networks_are_homogeneous(
    kind: str, layers: int, watched: Callable[[str], Watched]
) -> None:
    victim = watched(kind).victim
    assert victim.model is not None
    x = 3 * torch.rand(5, 64, generator=torch.Generator().manual_seed(1)).double() - 1
    once = victim.model.network(victim.trained, x)
    scaled = victim.model.network({name: 1.7 * w for name, w in victim.trained.items()}, x)
    torch.testing.assert_close(scaled, 1.7**layers * once)
    torch.testing.assert_close(once, plain(layers_of(victim), x))
    assert list(victim.trained) == ["1.weight", "1.bias"] + [
        f"{2 * i + 1}.weight" for i in range(1, layers)
    ]


@pytest.mark.parametrize("level", [1e-2, 1e-4, 1e-6])
def test_weights_are_held_at_the_least_margin(level: float) -> None:
    found = made(parity(4), level=level).training["margins"]
    assert found[0] == pytest.approx(math.log(1 / level), rel=0.05)


@pytest.mark.parametrize(
    ("least", "factor"), [(9.21, 1.0), (9.3, 9.21 / 9.3), (20.0, 0.98**2), (1.0, 1.02**2)]
)
def test_shrinking_is_exact_and_slow(least: float, factor: float) -> None:
    """s² = wanted over least for two layers, no more than a fiftieth a layer."""
    known = parity(4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 1, bias=False))
    run = margin._Rest(net.double(), known, "logistic", margin.ToRest(level=math.exp(-9.21)))
    before = [w.detach().clone() for w in run.weights]
    outputs = run.labels * torch.tensor([[least], [30.0], [25.0], [least + 1]]).double()
    run._shrink(outputs)
    for old, new in zip(before, run.weights, strict=True):
        torch.testing.assert_close(new.detach(), factor**0.5 * old)


@pytest.mark.parametrize("kind", ["decay", "squared", "decay of classes", "logistic of classes"])
def test_decay_rests_where_it_balances_the_loss(
    kind: str, watched: Callable[[str], Watched]
) -> None:
    """θ = −∇L/decay in direction, to the stationarity recorded, and in size."""
    seen = watched(kind)
    theta = flat(layers_of(seen.victim))
    decay = seen.victim.training["decay"]
    slopes = torch.stack([slope_of(seen.victim, layers) for layers in seen.last])
    rest = -slopes.mean(0) / decay
    off = ((rest - theta).norm() / theta.norm()).item()
    stationarity = seen.victim.training["stationarity"]
    assert off < 3 * math.sqrt(stationarity) + 1e-2
    assert rest.norm().item() == pytest.approx(theta.norm().item(), rel=2e-2)


def test_more_steps_come_closer() -> None:
    few, many = (made(parity(), steps=steps).training["stationarity"] for steps in (100, 800))
    assert many < few / 3


# The start


@pytest.mark.parametrize("small", [1e-4, 1e-2])
def test_the_start_is_the_published_one(small: float) -> None:
    victim = made(parity(4), widths=(300, 50), small=small, steps=20)
    first, others = victim.initial["1.weight"], [victim.initial["3.weight"]]
    assert first.std().item() == pytest.approx(small, rel=0.03)
    assert victim.initial["1.bias"].std().item() == pytest.approx(small, rel=0.2)
    for weight in others:
        limit = 1 / math.sqrt(weight.shape[1])
        assert weight.abs().max() <= limit
        assert weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.03)


def test_a_seed_means_the_same_weights() -> None:
    def train(seed: int, state: int) -> Victim:
        torch.manual_seed(state)
        return made(parity(4), seed=seed, steps=60)

    one, again, other = train(3, 0), train(3, 1), train(4, 0)
    for name, w in one.trained.items():
        assert torch.equal(w, again.trained[name])
        assert torch.equal(one.initial[name], again.initial[name])
        assert not torch.equal(w, other.trained[name])


def test_single_precision_is_the_same_network_to_rounding() -> None:
    exact, rounded = made(parity(4), steps=60), made(parity(4), steps=60, dtype=torch.float32)
    for name, w in exact.trained.items():
        assert rounded.trained[name].dtype == torch.float32
        torch.testing.assert_close(rounded.trained[name].double(), w, rtol=0, atol=1e-3)


def test_progress_is_shown() -> None:
    seen: list[tuple[int, float]] = []
    victim = made(parity(4), steps=100, show=lambda step, loss: seen.append((step, loss)))
    steps = [step for step, _ in seen]
    assert steps == list(range(0, victim.training["steps"], margin.LOOK))
    assert seen[0][1] == pytest.approx(math.log(2), abs=1e-3) and seen[-1][1] < 1e-3


# What goes wrong


@pytest.mark.parametrize("options", [{}, {"decay": 1e-2}], ids=["margin", "decay"])
def test_steps_that_diverge_are_undone(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(margin, "STABLE", 200.0)
    monkeypatch.setattr(margin, "LARGEST_STEP", 200.0)
    undone: list[float] = []
    go_back = margin._Rest._go_back

    def noted(self: Any) -> None:
        go_back(self)
        undone.append(self.caution)
        for weight, kept, velocity in zip(self.weights, self.kept, self.moments[0], strict=True):
            assert torch.equal(weight, kept) and not velocity.any()

    monkeypatch.setattr(margin._Rest, "_go_back", noted)
    victim = made(parity(4), steps=600, **options)
    assert undone and undone == [0.5 ** (i + 1) for i in range(len(undone))]
    assert all(w.isfinite().all() for w in victim.trained.values())
    outputs = plain(layers_of(victim), victim.truth.inputs)
    assert torch.equal(outputs.sign(), signs_of(victim.truth.targets))


def test_training_that_only_diverges_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(margin, "WILD", 1e-9)  # no step is ever small enough
    with pytest.raises(InputError, match="however small the steps"):
        made(parity(4))


def test_a_start_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(InputError, match="not finite"):
        made(parity(4), small=math.nan)


def test_samples_that_cannot_be_fitted_are_refused() -> None:
    known = parity(4)
    twice = replace(known, inputs=known.inputs[:1].expand(4, -1).clone())
    with pytest.raises(InputError, match=r"the samples are not fitted.*wider layers"):
        made(twice, steps=5)


@pytest.mark.parametrize(
    ("known", "options", "words"),
    [
        (parity, {"loss": "squared"}, "1 outputs trained to the margin takes logistic"),
        (parity, {"loss": "cross_entropy", "decay": 1.0}, "takes logistic or squared"),
        (classes, {"loss": "logistic"}, "3 outputs trained to the margin takes cross_entropy"),
        (parity, {"loss": "hinge", "decay": 1.0}, "hinge"),
        (parity, {"decay": 0.0}, "decay: expected a number above 0"),
        (parity, {"decay": math.nan}, "decay: expected a number above 0"),
        (parity, {"level": 1.0}, "level: expected a number between 0 and 1"),
        (parity, {"level": 0.0}, "level: expected a number between 0 and 1"),
        (parity, {"widths": ()}, "widths"),
        (parity, {"device": "abacus"}, "abacus"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    known: Callable[[], Data], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        made(known(), **options)


def test_margins_by_hand() -> None:
    outputs = torch.tensor([[2.0, 5.0, 1.0], [0.0, -1.0, 3.0]])
    one_hot = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert margins(outputs, one_hot).tolist() == [-3.0, 3.0]
    assert margins(outputs[:, :1], torch.tensor([[-1.0], [1.0]])).tolist() == [-2.0, 0.0]
    assert margins(outputs, 2 * one_hot - 1).tolist() == [-5.0, 0.0]  # y f of every output


# The problem it poses


def test_a_victim_poses_the_problem_of_any_premise(watched: Callable[[str], Watched]) -> None:
    victim = watched("margin").victim
    theta = flat(list(victim.trained.values()))[:, None]
    assert victim.problem.premise is Premise.MARGIN
    for word in ("margin", "decay", Premise.DECAY):
        posed = victim.posed(premise=word)
        assert posed.premise is Premise(word)
        assert torch.equal(posed.target, theta)
        assert posed.first_layer is not None and not posed.first_layer.initial.any()
    change = victim.posed()
    assert change.premise is Premise.CHANGE
    moved = victim.trained["3.weight"] - victim.initial["3.weight"]
    assert torch.equal(change.target, moved.T)


@pytest.mark.parametrize("kind", ["margin", "decay of classes"])
def test_a_victim_is_read_as_it_was_written(
    kind: str, watched: Callable[[str], Watched], tmp_path: Path
) -> None:
    victim = watched(kind).victim
    victim.save(tmp_path / "model")
    card = json.loads((tmp_path / "model" / CARD).read_text())
    assert card["architecture"]["arguments"]["bias"] == "first"
    assert card["training"]["violation"] == victim.training["violation"]
    back = read_network(tmp_path / "model")
    assert list(back.trained) == ["1.weight", "1.bias", "3.weight"]
    for name, w in victim.trained.items():
        assert torch.equal(back.trained[name], w)
        assert torch.equal(back.initial[name], victim.initial[name])
    x = victim.truth.inputs
    outputs = back.network(back.trained, x)
    torch.testing.assert_close(outputs, plain(layers_of(victim), x), rtol=1e-12, atol=1e-12)
    problem = read_model(tmp_path / "model")
    assert problem.premise is victim.problem.premise
    assert torch.equal(problem.target, victim.problem.target)
    assert problem.domain.name == victim.problem.domain.name


def test_an_unknown_premise_is_refused() -> None:
    victim = victims.two_layer(data.sphere(4, 2), width=5, steps=1, until=0.0)
    with pytest.raises(InputError, match="premise"):
        victim.posed(premise="margins")
