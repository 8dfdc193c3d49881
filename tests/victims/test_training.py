"""Training against formulas and plain loops, interrupted or not, and what it refuses."""

import copy
import itertools
import json
import math
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exhume import data, victims
from exhume.data import Data
from exhume.errors import InputError
from exhume.files import read_metadata, read_tensors, write_tensors
from exhume.models.architectures import initialise, mlp, resnet, two_layer, vit
from exhume.recipes import Recipe
from exhume.victims import training
from exhume.victims.descent import LOSSES, largest_eigenvalue
from exhume.victims.training import WINDOW, Trained, Training, train
from exhume.victims.victim import follow
from problems import gaussian, refusals

ONE = data.sphere(10, 6)
SIGNS = replace(ONE, targets=ONE.targets.sign())
SEVERAL = Data(ONE.inputs, torch.eye(3, dtype=torch.float64).repeat(2, 1), (10,), "several")
LONG = Training(until=0, steps=6 * WINDOW)


def small(known: Data = ONE, width: int = 40, seed: int = 0, name: str = "relu") -> nn.Sequential:
    return initialise(two_layer(known.shape, width, known.outputs, name).double(), seed)


def outputs_of(network: nn.Module, result: Trained) -> Tensor:
    return torch.func.functional_call(network, result.trained, (ONE.inputs,)).detach()


def same(a: Trained, b: Trained) -> bool:
    return all(torch.equal(tensor, b.trained[name]) for name, tensor in a.trained.items())


def outside(result: Trained) -> float:
    """The part of ΔW₁ outside of the span of the samples."""
    delta = result.trained["1.weight"] - result.initial["1.weight"]
    assert delta.norm() > 1e-3
    basis = torch.linalg.qr(ONE.inputs.T)[0]
    return ((delta - delta @ basis @ basis.T).norm() / delta.norm()).item()


@pytest.mark.parametrize("outputs", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_slopes_and_curvatures_against_autograd(name: str, outputs: int) -> None:
    loss, f = LOSSES[name], gaussian(4, outputs)
    y = loss.labels(gaussian(4, outputs, seed=1))
    value = lambda g: loss.value(g, y)  # noqa: E731
    torch.testing.assert_close(loss.slope(f, y), torch.autograd.functional.jacobian(value, f))
    hessian = torch.autograd.functional.hessian(value, f).reshape(f.numel(), -1)
    largest = torch.linalg.eigvalsh(hessian).max()
    assert largest / (1 + 1e-12) <= loss.bend(f, y) / 4 < 2 * largest
    if name != "squared":  # a loss that has nearly vanished keeps its digits in float32
        f, y = 60 * torch.eye(3).double() - 30, loss.labels(torch.eye(3).double())
        rounded = (f.float(), y.float())
        near = loss.slope(*rounded).double()
        torch.testing.assert_close(near, loss.slope(f, y), rtol=1e-4, atol=0)
        assert 0 < loss.bend(f, y) < 1e-11
        assert loss.bend(*rounded).item() == pytest.approx(loss.bend(f, y).item(), rel=1e-4)


def by_hand(network: nn.Module, known: Data, how: Training, rate: float) -> list[Tensor]:
    """The weights after `how.steps` steps over all samples, from the formulas alone."""
    loss = LOSSES["logistic" if known.outputs == 1 and how.loss != "squared" else how.loss]
    labels, network = loss.labels(known.targets), copy.deepcopy(network)
    weights = list(network.parameters())
    means, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(1, how.steps + 1):
        slopes = torch.autograd.grad(loss.value(network(known.inputs), labels), weights)
        for w, g, mean, square in zip(weights, slopes, means, squares, strict=True):
            if how.optimizer == "adam":
                mean.mul_(0.9).add_(0.1 * g)
                square.mul_(0.999).add_(0.001 * g**2)
                size = (square / (1 - 0.999**step)).sqrt() + 1e-8
                w.data.mul_(1 - rate * how.decay).sub_(rate * mean / (1 - 0.9**step) / size)
            else:
                mean.mul_(0.0 if how.optimizer == "gd" else 0.9).add_(g + how.decay * w.data)
                w.data -= rate * mean
    return [w.detach() for w in weights]


@pytest.mark.parametrize("known", [SIGNS, SEVERAL], ids=["one", "three"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("optimizer", training.OPTIMIZERS)
def test_steps_are_those_of_a_plain_loop(optimizer: str, loss: str, known: Data) -> None:
    network = small(known, 20, name="tanh")
    for decay in (0.0, 0.1):
        how = Training(loss, optimizer, rate=0.01, decay=decay, steps=WINDOW + 3, until=0)
        found = list(train(network, known, how).trained.values())
        expected = by_hand(network, known, how, 0.01)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


INSIDE: list[dict[str, Any]] = [{}, {"momentum": 0.9}, {"lazy": 10.0}]
INSIDE += [{"optimizer": "sgd", "batch": 2}, {"optimizer": "sgd", "batch": 4, "momentum": 0.0}]
OUTSIDE = [{"optimizer": "adam"}, {"optimizer": "adam", "batch": 4}, {"decay": 1e-3}]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("how", INSIDE + OUTSIDE, ids=str)
def test_every_optimizer_lowers_every_loss_and_some_stay_in_the_span(how: Any, loss: str) -> None:
    network, until = small(SEVERAL), 1e-3 if loss == "squared" else 0.1
    result = train(network, SEVERAL, Training(loss=loss, until=until, steps=3000, **how))
    assert result.record["reached"] and result.record["undone"] == 0
    f = outputs_of(network, result)
    f = 10 * (f - network(SEVERAL.inputs).detach()) if "lazy" in how else f
    found = LOSSES[loss].value(f, LOSSES[loss].labels(SEVERAL.targets)).item()
    assert result.record["loss"] == pytest.approx(found) and found <= until
    assert outside(result) < 1e-10 if how in INSIDE else outside(result) > 1e-3


def test_minibatches_take_every_sample_once_an_epoch() -> None:
    known = data.sphere(10, 7)
    run = training._Run(small(known), known, Training(optimizer="sgd", batch=3, seed=4))
    rows = [torch.as_tensor(run._rows(turn)).tolist() for turn in range(9)]
    assert [len(part) for part in rows] == [3, 3, 1] * 3
    epochs = [[*itertools.chain(*rows[i : i + 3])] for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and epochs[0] != epochs[1]
    sizes = [largest_eigenvalue(run.network, known.inputs[part]) / len(part) for part in rows[:3]]
    assert run._first_scale(1.0) == pytest.approx(max(sizes))
    one, again, other, whole, most = (
        train(small(known), known, Training("squared", "sgd", steps=20, until=0, **options))
        for options in ({"batch": 3}, {"batch": 3}, {"batch": 3, "seed": 1}, {}, {"batch": 100})
    )
    assert same(one, again) and not same(one, other) and same(whole, most)


NETWORKS = [
    (mlp((10,), [20, 15], 2, "gelu", True), (10,)),
    (resnet((6, 6), 3, 2, blocks=1), (6, 6)),
    (vit((4, 4), 2, 8, 1, 2, 2), (4, 4)),
]


@pytest.mark.parametrize(("network", "shape"), NETWORKS, ids=["mlp", "resnet", "vit"])
def test_the_largest_eigenvalue_against_the_dense_one(network: Any, shape: Any) -> None:
    initialise(network.double())
    x, scale = gaussian(3, *shape), torch.tensor([[1.0], [2.0], [0.5]]).double()
    weights = list(network.parameters())
    slopes = [torch.autograd.grad(f, weights, retain_graph=True) for f in network(x).flatten()]
    rows = torch.stack([torch.cat([g.flatten() for g in parts]) for parts in slopes])
    for factor in (torch.ones_like(scale), scale):
        jacobian = factor.repeat_interleave(2, 0) * rows
        exact = torch.linalg.matrix_norm(jacobian, 2).item() ** 2
        assert largest_eigenvalue(network, x, 200, factor) == pytest.approx(exact, rel=1e-6)
        assert 0.8 * exact < largest_eigenvalue(network, x, scale=factor) <= exact * (1 + 1e-12)


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


def test_the_loss_falls_and_a_rise_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    watch: Any = lambda *now: seen.append(now)  # noqa: E731
    result = train(small(SEVERAL), SEVERAL, Training(loss="logistic", until=1e-3), show=watch)
    assert all(after < before for (_, before), (_, after) in itertools.pairwise(seen))
    assert [step for step, _ in seen] == list(range(WINDOW, WINDOW * len(seen) + 1, WINDOW))
    assert seen[-1] == (result.record["steps"], result.record["loss"])
    assert seen[-1][1] <= 1e-3 < seen[-2][1]  # it stops at the first look that is low enough
    seen.clear()
    monkeypatch.setattr(training, "largest_eigenvalue", lambda *_: 1.0)  # far too small
    result = train(small(), ONE, show=watch)
    assert result.record["reached"] and result.record["undone"] >= 2 * WINDOW
    assert all(b <= a for (_, a), (_, b) in itertools.pairwise(seen)) and outside(result) < 1e-10


def test_when_training_ends_and_what_is_recorded() -> None:
    network = initialise(mlp(ONE.shape, [30, 20], bias=True).double())
    for steps in (1, 49, 130):
        result = train(network, ONE, Training(steps=steps, until=1e-24, rate=1e-3))
        record, laziness = result.record, result.record["laziness"]
        ended = {key: record[key] for key in ("rate", "undone", "steps", "reached")}
        assert ended == {"rate": 1e-3, "undone": 0, "steps": steps, "reached": False}
        loss = (outputs_of(network, result) - ONE.targets).square().mean()
        assert record["loss"] == pytest.approx(loss.item())
        for name in ("1.weight", "3.weight", "5.weight"):
            before, now = result.initial[name], result.trained[name]
            assert laziness[name] == pytest.approx(((now - before).norm() / before.norm()).item())
        assert len(laziness) == 4 and laziness["first"] == laziness["1.weight"] > 0
    fits = train(network, ONE, Training(until=1e3))  # such a network is left as it is
    assert fits.record["steps"] == 0 and fits.record["reached"]
    assert all(torch.equal(w, fits.trained[name]) for name, w in fits.initial.items())
    end = train(small(), ONE, Training(until=0, steps=1500), dtype=torch.float32)
    assert not end.record["reached"] and end.record["loss"] < 1e-11  # as far as precision goes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_caller_keeps_what_was_handed_over(dtype: torch.dtype) -> None:
    network = initialise(two_layer(ONE.shape, 30))
    how = Training("squared", "sgd", batch=3, steps=9)
    before, inputs = copy.deepcopy(network.state_dict()), ONE.inputs.clone()
    everyone, tf32 = torch.get_rng_state(), list[bool]()
    show: Any = lambda *_: tf32.append(torch.backends.cudnn.allow_tf32)  # noqa: E731
    result = train(network, ONE, how, dtype=dtype, show=show)
    assert torch.equal(everyone, torch.get_rng_state()) and torch.equal(ONE.inputs, inputs)
    assert tf32 == [False] and torch.backends.cudnn.allow_tf32
    for name, start in before.items():
        assert torch.equal(start, network.state_dict()[name])
        assert result.initial[name].dtype == result.trained[name].dtype == dtype
        assert torch.equal(result.initial[name], start.to(dtype))
    record = json.loads(json.dumps(result.record, allow_nan=False))
    keys = "settings dtype loss reached steps undone rate seconds laziness"
    assert record.keys() == set(keys.split()) and record["seconds"] > 0
    assert record["settings"] == {**vars(how), "momentum": 0.9}
    assert f"torch.{record['dtype']}" == str(dtype)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "training.safetensors"


def interrupt(path: Path, steps: int, how: Training = LONG) -> None:
    """Train, and interrupt after some steps, as a user would."""
    step, taken = training._Run.step, itertools.count()

    def interrupted(*given: Any) -> None:
        if next(taken) == steps:
            raise KeyboardInterrupt
        step(*given)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training._Run, "step", interrupted)
        train(small(), SIGNS, how, checkpoint=path)


INTERRUPTED: list[dict[str, Any]] = [
    {"loss": "logistic", "momentum": 0.5},
    {"optimizer": "sgd", "batch": 2},
    {"optimizer": "adam", "batch": 4, "decay": 0.01},
    {"lazy": 5.0},
    {"steps": 10 * WINDOW},
    {"steps": 10 * WINDOW, "optimizer": "adam"},
]


@pytest.mark.parametrize("how", INTERRUPTED, ids=str)
def test_training_goes_on_from_its_last_window(how: Any, path: Path, monkeypatch: Any) -> None:
    settings, seen = replace(LONG, **how), list[tuple[int, bool]]()
    if "steps" in how:  # begin at a rate that is far too large
        monkeypatch.setattr(training._Run, "_first_scale", lambda run, _: 100.0 if run.adam else 1)
    whole = train(small(), SIGNS, settings)
    for steps in (2 * WINDOW + 7, WINDOW):  # within a window, and at the end of one
        interrupt(path, steps, settings)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr(training, "SAVE_EVERY", -1.0)  # and it is written on the way
    show: Any = lambda step, _: seen.append((step, path.exists()))  # noqa: E731
    for first in ((4 * WINDOW, True), (WINDOW, False)):
        again = train(small(), SIGNS, settings, show=show, checkpoint=path)
        assert seen[0] == first and all(there for _, there in seen[1:])
        assert same(whole, again) and list(path.parent.iterdir()) == []
        for key in ("loss", "steps", "undone", "rate", "laziness"):
            assert again.record[key] == whole.record[key]
        seen.clear()
    assert (whole.record["undone"] > 0) == ("steps" in how)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"settings": replace(LONG, until=1e-9)}, "another until"),
    ({"settings": replace(LONG, rate=0.01)}, "another rate"),
    ({"dtype": torch.float32}, "another dtype"),
    ({"module": small(seed=1)}, "another initial weights"),
    ({"module": small(width=31)}, "another initial weights"),
    ({"data": replace(SIGNS, targets=-SIGNS.targets)}, "another data"),
]
PLACE = {"place": '{"loss": 1}'}
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_text("not a checkpoint"), ""),
    (lambda path: path.write_bytes(path.read_bytes()[:-10]), ""),
    (lambda path: write_tensors(path, {"1.weight": gaussian(3, 3)}), "no checkpoint"),
    (lambda p: write_tensors(p, read_tensors(p), read_metadata(p) | PLACE), "no checkpoint"),
]


def test_other_files_are_refused_and_left_alone(path: Path) -> None:
    interrupt(path, WINDOW)
    left = path.read_bytes()
    usual = {"module": small(), "data": SIGNS, "settings": LONG, "checkpoint": path}
    for change, words in CHANGES + DAMAGES:
        path.write_bytes(left)
        if callable(change):
            change(path)
        content = path.read_bytes()
        with pytest.raises(InputError, match=f"{path.name}.*{words}"):
            train(**usual | ({} if callable(change) else change))
        assert path.read_bytes() == content


BROKEN, DEAD = small(), small()
BROKEN[1].weight.data[0, 0] = torch.nan
DEAD.load_state_dict({name: 0 * w for name, w in DEAD.state_dict().items()})


def test_what_norms_keep_is_of_the_steps_alone() -> None:
    network = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    after = follow(network, SEVERAL, Recipe(lr=0.1, steps=3, norms="train")).trained
    assert after["1.num_batches_tracked"] == 3


def test_below_a_frozen_last_layer_all_others_are_the_target() -> None:
    victim = victims.mlp(SEVERAL, [7], recipe=Recipe(lr=0.1, steps=3, frozen=("3.*",)))
    (hidden,) = (name for name, w in victim.trained.items() if not w.equal(victim.initial[name]))
    assert len(victim.problem.target) == victim.trained[hidden].numel()


BAD = {"rate": 0.0, "momentum": 1.0, "decay": -0.1, "until": math.inf, "steps": 0, "lazy": 0}
test_what_is_refused = refusals(
    (lambda: Training(loss="hinge"), "loss: expected one of squared, logistic.*hinge"),
    (lambda: Training(optimizer="lion"), "optimizer: expected one of gd, sgd, adam.*lion"),
    *((partial(Training, **{word: bad}), f"{word}: .*{bad}") for word, bad in BAD.items()),
    (lambda: Training(momentum=-0.1), "momentum: .*-0.1"),
    (lambda: Training(seed=-1), "seed: .*-1"),
    (lambda: Training(momentum=0.9, optimizer="adam"), "momentum: adam has its own"),
    (lambda: Training(batch=3), "batch: .*choose sgd"),
    (lambda: Training(batch=0, optimizer="sgd"), "batch: .*0"),
    (lambda: train(small(), ONE, Training(rate=10.0)), "diverged .* rate of 10: .* Lower the rate"),
    (lambda: train(small(), ONE, Training("squared", "sgd", rate=10.0)), "diverged .* rate of 10"),
    (lambda: train(two_layer((10,), 9, outputs=2), ONE), r"\(6, 2\).*\(6, 1\).*outputs=1"),
    (lambda: train(two_layer((11,), 9), ONE), r"cannot take samples of shape \(10,\)"),
    (lambda: train(small().requires_grad_(False), ONE), "no weights to train"),
    (lambda: train(DEAD, ONE), "do not change with the weights"),
    (lambda: train(BROKEN, ONE), "loss at the start is nan"),
    (lambda: train(small(), ONE, device="nowhere"), "device 'nowhere'"),
    (lambda: train(small(), ONE, dtype=torch.float16), "float16"),
    (lambda: follow(small(), ONE, Recipe(steps=3)), "does not say its rate"),
)
