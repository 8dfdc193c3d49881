"""Training against formulas and plain loops, and what can be relied on afterwards."""

import copy
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exhume import data
from exhume.data import Data
from exhume.errors import InputError
from exhume.models.architectures import initialise, mlp, resnet, two_layer, vit
from exhume.victims import training
from exhume.victims.descent import LOSSES, largest_eigenvalue
from exhume.victims.training import WINDOW, Trained, Training, train
from problems import gaussian

ONE = data.sphere(10, 6)
SIGNS = replace(ONE, targets=ONE.targets.sign())
SEVERAL = Data(ONE.inputs, torch.eye(3, dtype=torch.float64).repeat(2, 1), (10,), "several")


def small(known: Data = ONE, width: int = 40, seed: int = 0, name: str = "relu") -> nn.Sequential:
    return initialise(two_layer(known.shape, width, known.outputs, name).double(), seed)


def loss_of(network: nn.Module, known: Data, loss: str = "squared") -> float:
    """Written out once more."""
    f, y = network(known.inputs.reshape(-1, *known.shape)).detach(), known.targets
    if loss == "squared":
        return ((f - y) ** 2).mean().item()
    if loss == "logistic" or known.outputs == 1:
        return torch.log1p(torch.exp(-torch.where(y > 0, 1.0, -1.0) * f)).mean().item()
    return nn.functional.cross_entropy(f, y.argmax(1)).item()


def after(network: nn.Module, result: Trained) -> nn.Module:
    """The trained network."""
    network = copy.deepcopy(network).to(next(iter(result.trained.values())).dtype)
    network.load_state_dict(result.trained)
    return network


def same(a: Trained, b: Trained) -> bool:
    return all(torch.equal(tensor, b.trained[name]) for name, tensor in a.trained.items())


def outside(result: Trained, known: Data) -> float:
    """The part of ΔW₁ outside of the span of the samples."""
    delta = result.trained["1.weight"] - result.initial["1.weight"]
    assert delta.norm() > 1e-3
    basis = torch.linalg.qr(known.inputs.T)[0]
    return ((delta - delta @ basis @ basis.T).norm() / delta.norm()).item()


# Losses


@pytest.mark.parametrize("outputs", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_slopes_and_curvatures_against_autograd(name: str, outputs: int) -> None:
    loss, f = LOSSES[name], gaussian(4, outputs)
    y = loss.labels(gaussian(4, outputs, seed=1))
    slope = torch.autograd.functional.jacobian(lambda g: loss.value(g, y), f)
    torch.testing.assert_close(loss.slope(f, y), slope)
    hessian = torch.autograd.functional.hessian(lambda g: loss.value(g, y), f)
    largest = torch.linalg.eigvalsh(hessian.reshape(f.numel(), -1)).max()
    assert largest <= loss.bend(f, y) / 4 * (1 + 1e-12)
    assert loss.bend(f, y) / 4 < 2 * largest


@pytest.mark.parametrize("name", ["logistic", "cross_entropy"])
def test_a_loss_that_has_nearly_vanished_keeps_its_digits_in_float32(name: str) -> None:
    loss, y = LOSSES[name], torch.eye(3, dtype=torch.float64)
    f = 30 * (2 * y - 1)
    y = loss.labels(y)
    exact, rounded = loss.slope(f, y), loss.slope(f.float(), y.float())
    torch.testing.assert_close(rounded.double(), exact, rtol=1e-4, atol=0)
    bends = loss.bend(f, y).item(), loss.bend(f.float(), y.float()).item()
    assert 0 < bends[0] < 1e-11 and bends[1] == pytest.approx(bends[0], rel=1e-4)


def test_labels() -> None:
    targets = torch.tensor([[0.0, 2.0], [1.0, -3.0]])
    assert LOSSES["logistic"].labels(targets).tolist() == [[-1, 1], [1, -1]]
    assert LOSSES["cross_entropy"].labels(targets).tolist() == [[0, 1], [1, 0]]
    assert torch.equal(LOSSES["squared"].labels(targets), targets)
    a, b = (
        train(small(SIGNS), SIGNS, Training(loss=loss, steps=WINDOW))
        for loss in ("logistic", "cross_entropy")
    )
    assert same(a, b)  # with one output


# Steps


def by_hand(network: nn.Module, known: Data, how: Training, rate: float) -> list[Tensor]:
    """The weights after `how.steps` steps over all samples, from the formulas alone."""
    name = "logistic" if known.outputs == 1 and how.loss != "squared" else how.loss
    labels = LOSSES[name].labels(known.targets)
    weights = [p.detach().clone() for p in network.parameters()]
    means, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    momentum = {"gd": 0.0, "sgd": 0.9, "adam": 0.9}[how.optimizer]
    names = [key for key, _ in network.named_parameters()]
    for step in range(1, how.steps + 1):
        leaves = {k: w.clone().requires_grad_() for k, w in zip(names, weights, strict=True)}
        outputs = torch.func.functional_call(network, leaves, (known.inputs,))
        slopes = torch.autograd.grad(LOSSES[name].value(outputs, labels), list(leaves.values()))
        for i, g in enumerate(slopes):
            if how.optimizer == "adam":
                weights[i] = weights[i] * (1 - rate * how.decay)
                means[i] = 0.9 * means[i] + 0.1 * g
                squares[i] = 0.999 * squares[i] + 0.001 * g**2
                size = (squares[i] / (1 - 0.999**step)).sqrt() + 1e-8
                weights[i] = weights[i] - rate * means[i] / (1 - 0.9**step) / size
            else:
                means[i] = momentum * means[i] + g + how.decay * weights[i]
                weights[i] = weights[i] - rate * means[i]
    return weights


@pytest.mark.parametrize("known", [SIGNS, SEVERAL], ids=["one", "three"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("optimizer", training.OPTIMIZERS)
def test_steps_are_those_of_a_plain_loop(
    optimizer: str, loss: str, decay: float, known: Data
) -> None:
    network = small(known, 20, name="tanh")
    how = Training(loss, optimizer, rate=0.01, decay=decay, steps=WINDOW + 3, until=0)
    result = train(network, known, how)
    for mine, weight in zip(
        result.trained.values(), by_hand(network, known, how, 0.01), strict=True
    ):
        torch.testing.assert_close(mine, weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("how", "within"),
    [
        ({"optimizer": "gd"}, True),
        ({"optimizer": "gd", "momentum": 0.9}, True),
        ({"optimizer": "gd", "decay": 1e-3}, False),
        ({"optimizer": "gd", "lazy": 10.0}, True),
        ({"optimizer": "sgd", "batch": 2}, True),
        ({"optimizer": "sgd", "batch": 4, "momentum": 0.0}, True),
        ({"optimizer": "adam"}, False),
        ({"optimizer": "adam", "batch": 4}, False),
    ],
    ids=str,
)
def test_every_optimizer_lowers_every_loss_and_some_stay_in_the_span_of_the_samples(
    how: dict[str, Any], within: bool, loss: str
) -> None:
    network = small(SEVERAL)
    until = 1e-3 if loss == "squared" else 0.1
    result = train(network, SEVERAL, Training(loss=loss, until=until, steps=3000, **how))
    assert result.record["reached"] and result.record["loss"] <= until
    assert result.record["undone"] == 0
    if "lazy" not in how:
        found = loss_of(after(network, result), SEVERAL, loss)
        assert result.record["loss"] == pytest.approx(found)
    assert outside(result, SEVERAL) < 1e-10 if within else outside(result, SEVERAL) > 1e-3


def test_minibatches_take_every_sample_once_an_epoch() -> None:
    known = data.sphere(10, 7)
    run = training._Run(small(known), known, Training(optimizer="sgd", batch=3, seed=4))
    epochs = []
    for epoch in range(3):
        rows = [run._rows(3 * epoch + turn) for turn in range(3)]
        epochs.append(torch.cat([part for part in rows if part is not None]).tolist())
        assert [len(part) for part in rows if part is not None] == [3, 3, 1]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    parts = [known.inputs[rows] for rows in map(run._rows, range(3)) if rows is not None]
    sizes = [largest_eigenvalue(run.network, part) / len(part) for part in parts]
    assert run._first_scale(1.0) == pytest.approx(max(sizes))

    def trained(**options: int | None) -> Trained:
        return train(small(known), known, Training("squared", "sgd", steps=20, until=0, **options))

    assert same(trained(batch=3, seed=1), trained(batch=3, seed=1))
    assert not same(trained(batch=3, seed=1), trained(batch=3, seed=2))
    assert same(trained(batch=None), trained(batch=100))


# The rate


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (mlp((10,), [20, 15], 2, "gelu", True), (10,)),
        (resnet((6, 6), 3, 2, blocks=1), (6, 6)),
        (vit((4, 4), 2, 8, 1, 2, 2), (4, 4)),
    ],
    ids=["mlp", "resnet", "vit"],
)
def test_the_largest_eigenvalue_against_the_dense_one(
    network: nn.Module, shape: tuple[int, ...]
) -> None:
    initialise(network.double())
    x, scale = gaussian(3, *shape), torch.tensor([[1.0], [2.0], [0.5]]).double()
    rows = []
    for out in network(x).flatten():
        slopes = torch.autograd.grad(out, list(network.parameters()), retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in slopes]))
    jacobian = torch.stack(rows)
    exact = torch.linalg.eigvalsh(jacobian @ jacobian.T).max().item()
    assert largest_eigenvalue(network, x, 200) == pytest.approx(exact, rel=1e-6)
    assert 0.8 * exact < largest_eigenvalue(network, x) <= exact * (1 + 1e-12)
    jacobian = scale.repeat_interleave(2, 0) * jacobian
    exact = torch.linalg.eigvalsh(jacobian @ jacobian.T).max().item()
    assert largest_eigenvalue(network, x, 200, scale) == pytest.approx(exact, rel=1e-6)


def test_frozen_weights_do_not_count_and_do_not_move() -> None:
    network = small()
    whole = largest_eigenvalue(network, ONE.inputs, 200)
    network[1].weight.requires_grad_(False)
    features = torch.relu(ONE.inputs @ network[1].weight.T)
    exact = torch.linalg.eigvalsh(features @ features.T).max().item()
    assert largest_eigenvalue(network, ONE.inputs, 200) == pytest.approx(exact, rel=1e-6)
    assert exact < whole
    result = train(network, ONE, Training(until=1e-4))
    assert result.record["reached"] and result.record["laziness"]["first"] == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_falls_and_falls_at_the_rate_chosen(loss: str) -> None:
    seen: list[tuple[int, float]] = []
    until = 1e-8 if loss == "squared" else 1e-3
    how = Training(loss=loss, until=until)
    result = train(small(SEVERAL), SEVERAL, how, show=lambda *now: seen.append(now))
    assert all(after < before for (_, before), (_, after) in itertools.pairwise(seen))
    assert [step for step, _ in seen] == list(range(WINDOW, WINDOW * len(seen) + 1, WINDOW))
    assert seen[-1] == (result.record["steps"], result.record["loss"])
    assert seen[-1][1] <= until < seen[-2][1]  # it stops at the first look that is low enough


def test_a_rise_is_undone_and_the_rate_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(training, "largest_eigenvalue", lambda *_: 1.0)  # far too small
    result = train(small(), ONE, show=lambda _, value: seen.append(value))
    assert result.record["reached"] and result.record["undone"] >= 2 * WINDOW
    assert all(b <= a for a, b in itertools.pairwise(seen))
    assert outside(result, ONE) < 1e-10


def test_training_ends_where_precision_does() -> None:
    result = train(small(), ONE, Training(until=0, steps=1500), dtype=torch.float32)
    assert not result.record["reached"] and result.record["loss"] < 1e-11


# What an attack relies on


def test_decay_ends_where_its_gradient_vanishes() -> None:
    decay = 0.2
    network = small(ONE, 15, name="tanh")
    result = train(network, ONE, Training(decay=decay, until=0, steps=1500))
    plain = train(network, ONE, Training(until=1e-4))
    assert not result.record["reached"]
    sizes = [sum(w.square().sum() for w in r.trained.values()) for r in (result, plain)]
    assert sizes[0] < sizes[1] / 2
    network = after(network, result)
    loss = LOSSES["squared"].value(network(ONE.inputs), ONE.targets)
    for parameter in network.parameters():
        (slope,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        assert (slope + decay * parameter).norm() < 1e-3 * (decay * parameter).norm()


def test_lazy_training_fits_the_scaled_change_and_moves_less() -> None:
    network = small()
    moved = []
    for alpha in (1.0, 10.0, 100.0):
        result = train(network, ONE, Training(lazy=alpha, until=1e-6))
        change = after(network, result)(ONE.inputs) - network(ONE.inputs)
        assert (alpha * change - ONE.targets).square().mean() <= 1e-6
        moved.append(result.record["laziness"]["first"])
    assert moved[0] > 9 * moved[1] > 80 * moved[2]


def test_laziness_is_how_far_each_weight_went() -> None:
    network = initialise(mlp(ONE.shape, [30, 20], bias=True).double())
    result = train(network, ONE, Training(until=1e-4))
    laziness = result.record["laziness"]
    assert laziness.keys() == {"first", "1.weight", "3.weight", "5.weight"}
    for name in laziness.keys() - {"first"}:
        before, now = result.initial[name], result.trained[name]
        assert laziness[name] == pytest.approx(((now - before).norm() / before.norm()).item())
    assert laziness["first"] == laziness["1.weight"] > 0


# When to stop, and what is told


@pytest.mark.parametrize(("steps", "until"), [(1, 1e-24), (49, 1e-24), (130, 1e-24), (9, 1e3)])
def test_no_more_steps_than_asked_for(steps: int, until: float) -> None:
    network = small()
    result = train(network, ONE, Training(steps=steps, until=until, rate=1e-3))
    record = result.record
    assert record["rate"] == 1e-3 and record["undone"] == 0
    assert record["loss"] == pytest.approx(loss_of(after(network, result), ONE))
    if until < 1:
        assert record["steps"] == steps and record["reached"] is False
    else:  # a network that fits already is left as it is
        assert record["steps"] == 0 and record["reached"]
        assert all(torch.equal(w, result.trained[name]) for name, w in result.initial.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_caller_keeps_what_was_handed_over(dtype: torch.dtype) -> None:
    network, how = (
        initialise(two_layer(ONE.shape, 30)),
        Training("squared", "sgd", batch=3, steps=9),
    )
    before, inputs = copy.deepcopy(network.state_dict()), ONE.inputs.clone()
    everyone = torch.get_rng_state()
    tf32: list[bool] = []
    result = train(
        network, ONE, how, dtype=dtype, show=lambda *_: tf32.append(torch.backends.cudnn.allow_tf32)
    )
    assert torch.equal(everyone, torch.get_rng_state()) and torch.equal(ONE.inputs, inputs)
    assert tf32 == [False] and torch.backends.cudnn.allow_tf32
    for name, start in before.items():
        assert torch.equal(start, network.state_dict()[name])
        assert result.initial[name].dtype == result.trained[name].dtype == dtype
        assert torch.equal(result.initial[name], start.to(dtype))
    record = json.loads(json.dumps(result.record, allow_nan=False))
    assert record["settings"] == {**vars(how), "momentum": 0.9}
    assert record["dtype"] == str(dtype).removeprefix("torch.") and record["seconds"] > 0
    assert record.keys() == {
        *("settings", "dtype", "loss", "reached", "steps", "undone", "rate", "seconds", "laziness")
    }


# What is refused


def altered(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    network = small()
    with torch.no_grad():
        change(network)
    return network


BROKEN = altered(lambda network: network[1].weight[0, 0].fill_(torch.nan))
DEAD = altered(lambda network: [parameter.zero_() for parameter in network.parameters()])
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Training(loss="hinge"), "loss: expected one of squared, logistic.*hinge"),
    (lambda: Training(optimizer="lion"), "optimizer: expected one of gd, sgd, adam.*lion"),
    (lambda: Training(rate=0.0), "rate: .*0.0"),
    (lambda: Training(momentum=1.0), "momentum: .*1.0"),
    (lambda: Training(momentum=-0.1), "momentum: .*-0.1"),
    (lambda: Training(momentum=0.9, optimizer="adam"), "momentum: adam has its own"),
    (lambda: Training(batch=3), "batch: .*choose sgd"),
    (lambda: Training(batch=0, optimizer="sgd"), "batch: .*0"),
    (lambda: Training(decay=-1e-3), "decay: .*-0.001"),
    (lambda: Training(until=math.inf), "until: .*inf"),
    (lambda: Training(steps=0), "steps: .*0"),
    (lambda: Training(seed=-1), "seed: .*-1"),
    (lambda: Training(lazy=0), "lazy: .*0"),
    (lambda: train(small(), ONE, Training(rate=10.0)), "diverged .* rate of 10: .* Lower the rate"),
    (lambda: train(small(), ONE, Training("squared", "sgd", rate=10.0)), "diverged .* rate of 10"),
    (lambda: train(two_layer((10,), 9, outputs=2), ONE), r"\(6, 2\).*\(6, 1\).*outputs=1"),
    (lambda: train(two_layer((11,), 9), ONE), r"cannot take samples of shape \(10,\)"),
    (lambda: train(small().requires_grad_(False), ONE), "no weights to train"),
    (lambda: train(DEAD, ONE), "do not change with the weights"),
    (lambda: train(BROKEN, ONE), "loss at the start is nan"),
    (lambda: train(small(), ONE, device="nowhere"), "device 'nowhere'"),
    (lambda: train(small(), ONE, dtype=torch.float16), "float16"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
