"""Training against formulas and the optimizers of torch, and what can be relied on afterwards."""

import copy
import itertools
import json
import math
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exhume import data
from exhume.data import Data
from exhume.errors import InputError
from exhume.files import read_metadata, read_tensors, write_tensors
from exhume.models.architectures import initialise, mlp, resnet, two_layer, vit
from exhume.victims import checkpoint, training
from exhume.victims.descent import largest_eigenvalue
from exhume.victims.losses import LOSSES
from exhume.victims.training import WINDOW, Trained, Training, train
from problems import gaussian


def several(samples: int = 6, dim: int = 10, outputs: int = 3) -> Data:
    """Sphere data with one-hot targets."""
    targets = torch.eye(outputs, dtype=torch.float64).repeat(samples, 1)[:samples]
    return Data(data.sphere(dim, samples).inputs, targets, (dim,), "several")


def signs(samples: int = 6, dim: int = 10) -> Data:
    """Sphere data with targets of ±1."""
    known = data.sphere(dim, samples)
    return replace(known, targets=known.targets.sign())


def small(known: Data, width: int = 60, seed: int = 0, name: str = "relu") -> nn.Sequential:
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


def outside(delta: Tensor, known: Data) -> float:
    """The part of ΔW₁ outside of the span of the samples."""
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


@pytest.mark.parametrize("known", [signs(), several()], ids=["one", "three"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "how",
    [
        {"optimizer": "gd"},
        {"optimizer": "gd", "momentum": 0.9},
        {"optimizer": "sgd", "batch": 2},
        {"optimizer": "sgd", "batch": 4, "momentum": 0.0},
        {"optimizer": "adam"},
        {"optimizer": "adam", "batch": 4},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
def test_every_optimizer_lowers_every_loss(how: dict[str, Any], loss: str, known: Data) -> None:
    network = small(known)
    until = 1e-4 if loss == "squared" else 1e-2
    result = train(network, known, Training(loss=loss, until=until, steps=3000, **how))
    assert result.record["reached"] and result.record["loss"] <= until
    assert result.record["loss"] == pytest.approx(loss_of(after(network, result), known, loss))
    assert result.record["undone"] == 0


def test_cross_entropy_with_one_output_is_the_logistic_loss() -> None:
    known = signs()
    a, b = (
        train(small(known), known, Training(loss=loss, until=1e-2))
        for loss in ("logistic", "cross_entropy")
    )
    assert same(a, b)


# Steps against the optimizers of torch


@pytest.mark.parametrize("known", [signs(), several()], ids=["one", "three"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("how", "oracle"),
    [
        ({"optimizer": "gd"}, torch.optim.SGD),
        ({"optimizer": "sgd"}, torch.optim.SGD),
        ({"optimizer": "adam"}, torch.optim.AdamW),
    ],
    ids=["gd", "sgd", "adam"],
)
def test_steps_are_those_of_torch(
    how: dict[str, Any], oracle: Any, loss: str, decay: float, known: Data
) -> None:
    network = small(known, name="tanh")
    settings = Training(loss=loss, rate=0.01, decay=decay, steps=60, until=0, **how)
    result = train(network, known, settings)
    extra = {"momentum": 0.9} if how["optimizer"] == "sgd" else {}
    optimizer = oracle(network.parameters(), lr=0.01, weight_decay=decay, **extra)
    name = "logistic" if known.outputs == 1 and loss != "squared" else loss
    for _ in range(60):
        optimizer.zero_grad()
        LOSSES[name].value(network(known.inputs), LOSSES[name].labels(known.targets)).backward()
        optimizer.step()
    for key, weight in network.state_dict().items():
        torch.testing.assert_close(result.trained[key], weight, rtol=1e-9, atol=1e-12)


def test_minibatches_take_every_sample_once_an_epoch() -> None:
    known = data.sphere(10, 7)
    how = Training(optimizer="sgd", batch=3, seed=4)
    run = training._Run(small(known), known, how)
    epochs = []
    for epoch in range(3):
        rows = [run._rows(3 * epoch + turn) for turn in range(3)]
        epochs.append(torch.cat([part for part in rows if part is not None]).tolist())
        assert [len(part) for part in rows if part is not None] == [3, 3, 1]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_seed_is_that_of_the_minibatches() -> None:
    known = data.sphere(10, 7)
    a, b, c = (
        train(small(known), known, Training(optimizer="sgd", batch=3, steps=50, until=0, seed=seed))
        for seed in (1, 1, 2)
    )
    assert same(a, b) and not same(a, c)


def test_a_batch_of_everything_is_everything() -> None:
    known = data.sphere(10, 7)
    a, b = (
        train(small(known), known, Training(optimizer="sgd", batch=batch, steps=50, until=0))
        for batch in (None, 100)
    )
    assert same(a, b)


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
    x = gaussian(3, *shape)
    rows = []
    for index in range(6):
        out = network(x).flatten()[index]
        slopes = torch.autograd.grad(out, list(network.parameters()))
        rows.append(torch.cat([g.flatten() for g in slopes]))
    jacobian = torch.stack(rows)
    exact = torch.linalg.eigvalsh(jacobian @ jacobian.T).max().item()
    assert largest_eigenvalue(network, x, 200) == pytest.approx(exact, rel=1e-6)
    assert 0.8 * exact < largest_eigenvalue(network, x) <= exact * (1 + 1e-12)


def test_frozen_weights_do_not_count_and_do_not_move() -> None:
    known = data.sphere(10, 6)
    network = small(known)
    whole = largest_eigenvalue(network, known.inputs, 200)
    network[1].weight.requires_grad_(False)
    features = torch.relu(known.inputs @ network[1].weight.T)
    exact = torch.linalg.eigvalsh(features @ features.T).max().item()
    assert largest_eigenvalue(network, known.inputs, 200) == pytest.approx(exact, rel=1e-6)
    assert exact < whole
    result = train(network, known, Training(until=1e-6))
    assert result.record["reached"] and result.record["laziness"]["first"] == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_falls_and_falls_at_the_rate_chosen(loss: str) -> None:
    known, seen = several(), []
    how = Training(loss=loss, until=1e-6)
    result = train(small(known), known, how, show=lambda step, value: seen.append((step, value)))
    assert all(after < before for (_, before), (_, after) in itertools.pairwise(seen))
    assert [step for step, _ in seen] == list(range(WINDOW, WINDOW * len(seen) + 1, WINDOW))
    assert seen[-1] == (result.record["steps"], result.record["loss"])


def test_a_rise_is_undone_and_the_rate_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    known, seen = data.sphere(10, 6), []
    monkeypatch.setattr(training, "largest_eigenvalue", lambda *_: 1.0)  # far too small
    result = train(small(known), known, show=lambda _, value: seen.append(value))
    assert result.record["reached"] and result.record["undone"] >= 2 * WINDOW
    assert all(b <= a for a, b in itertools.pairwise(seen))
    delta = result.trained["1.weight"] - result.initial["1.weight"]
    assert outside(delta, known) < 1e-10


@pytest.mark.parametrize("how", [{"optimizer": "sgd", "batch": 2}, {"optimizer": "adam"}], ids=str)
def test_others_come_back_from_far_too_large_a_rate(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = data.sphere(10, 6)
    monkeypatch.setattr(training, "largest_eigenvalue", lambda *_: 0.1)
    monkeypatch.setattr(training._Run, "_adam_rate", lambda *_: 100.0)
    result = train(small(known), known, Training(until=1e-5, steps=10_000, **how))
    assert result.record["reached"] and result.record["undone"] >= WINDOW


def test_training_ends_where_precision_does() -> None:
    known = data.sphere(10, 6)
    result = train(small(known), known, Training(until=0, steps=5000), dtype=torch.float32)
    assert not result.record["reached"] and result.record["loss"] < 1e-11


def test_a_rate_that_is_given_is_kept() -> None:
    known = data.sphere(10, 6)
    result = train(small(known), known, Training(rate=1e-3, steps=200))
    assert result.record["rate"] == 1e-3 and result.record["undone"] == 0


@pytest.mark.parametrize("optimizer", ["gd", "sgd"])
def test_a_rate_that_is_too_large_is_told(optimizer: str) -> None:
    known = data.sphere(10, 6)
    with pytest.raises(InputError, match=r"diverged .* rate of 10: .* Lower the rate"):
        train(small(known), known, Training(optimizer=optimizer, rate=10.0))


# What an attack relies on


@pytest.mark.parametrize("known", [data.sphere(12, 5), several(5, 12)], ids=["one", "three"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"momentum": 0.9},
        {"optimizer": "sgd", "batch": 2},
        {"loss": "logistic", "until": 1e-3},
        {"lazy": 10.0},
    ],
    ids=str,
)
def test_gradient_descent_moves_the_first_layer_within_the_span_of_the_samples(
    how: dict[str, Any], known: Data
) -> None:
    result = train(small(known), known, Training(**how))
    delta = result.trained["1.weight"] - result.initial["1.weight"]
    assert result.record["reached"] and delta.norm() > 1e-3
    assert outside(delta, known) < 1e-10


@pytest.mark.parametrize("how", [{"optimizer": "adam"}, {"decay": 0.01, "steps": 500}], ids=str)
def test_adam_and_decay_leave_the_span(how: dict[str, Any]) -> None:
    known = data.sphere(12, 5)
    result = train(small(known), known, Training(**how))
    assert outside(result.trained["1.weight"] - result.initial["1.weight"], known) > 0.01


def test_decay_ends_where_its_gradient_vanishes() -> None:
    known, decay = data.sphere(10, 6), 0.2
    network = small(known, 20, name="tanh")
    result = train(network, known, Training(decay=decay, until=0, steps=3000))
    plain = train(network, known)
    assert not result.record["reached"]
    sizes = [sum(w.square().sum() for w in r.trained.values()) for r in (result, plain)]
    assert sizes[0] < sizes[1] / 2
    network = after(network, result)
    loss = LOSSES["squared"].value(network(known.inputs), known.targets)
    for parameter in network.parameters():
        (slope,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        assert (slope + decay * parameter).norm() < 1e-4 * (decay * parameter).norm()


def test_lazy_training_fits_the_scaled_change_and_moves_less() -> None:
    known = data.sphere(10, 6)
    network = small(known)
    moved = []
    for alpha in (1.0, 10.0, 100.0):
        result = train(network, known, Training(lazy=alpha))
        change = after(network, result)(known.inputs) - network(known.inputs)
        assert (alpha * change - known.targets).square().mean() <= 1e-8
        assert result.record["reached"]
        moved.append(result.record["laziness"]["first"])
    assert moved[0] > 9 * moved[1] > 80 * moved[2]


def test_laziness_is_how_far_each_weight_went() -> None:
    known = data.sphere(10, 6)
    network = initialise(mlp(known.shape, [30, 20], bias=True).double())
    result = train(network, known)
    laziness = result.record["laziness"]
    assert laziness.keys() == {"first", "1.weight", "3.weight", "5.weight"}
    for name in laziness.keys() - {"first"}:
        before, now = result.initial[name], result.trained[name]
        assert laziness[name] == pytest.approx(((now - before).norm() / before.norm()).item())
    assert laziness["first"] == laziness["1.weight"] > 0


def test_wide_networks_move_less() -> None:
    known = data.sphere(10, 6)
    moved = [
        train(small(known, width), known).record["laziness"]["first"] for width in (50, 200, 800)
    ]
    assert moved[0] > 1.5 * moved[1] > 2 * moved[2]


def test_images_go_through_convolutions_and_attention() -> None:
    known = data.load("digits", 4, classes=(3, 8))
    for network in (resnet(known.shape, 6, blocks=1), vit(known.shape, 4, 8, 1, 2)):
        result = train(initialise(network), known, Training(until=1e-4), dtype=torch.float32)
        assert result.record["reached"]
        assert loss_of(after(network, result).double(), known) == pytest.approx(
            result.record["loss"], rel=1e-2
        )


# When to stop, and what is told


def test_training_stops_at_the_first_look_that_is_low_enough() -> None:
    known, seen = data.sphere(10, 6), []
    result = train(
        small(known), known, Training(until=1e-12), show=lambda _, value: seen.append(value)
    )
    assert result.record["reached"] and result.record["loss"] == seen[-1] <= 1e-12 < seen[-2]


def test_a_network_that_fits_already_is_left_as_it_is() -> None:
    known = data.sphere(10, 6)
    result = train(small(known), known, Training(until=1e3))
    assert result.record["steps"] == 0 and result.record["reached"]
    assert all(torch.equal(result.initial[name], result.trained[name]) for name in result.initial)


@pytest.mark.parametrize("steps", [1, 49, 130])
def test_no_more_steps_than_asked_for(steps: int) -> None:
    known = data.sphere(10, 6)
    network = small(known)
    result = train(network, known, Training(steps=steps, until=1e-24))
    assert result.record["steps"] == steps and result.record["reached"] is False
    assert result.record["loss"] == pytest.approx(loss_of(after(network, result), known))


def test_the_record_is_json_and_holds_every_setting() -> None:
    known = data.sphere(10, 6)
    how = Training(optimizer="sgd", batch=3, until=1e-3)
    record = json.loads(json.dumps(train(small(known), known, how).record, allow_nan=False))
    assert record["settings"] == {**vars(how), "momentum": 0.9}
    assert record.keys() == {
        *("settings", "dtype", "loss", "reached", "steps", "undone", "rate", "seconds", "laziness")
    }
    assert record["dtype"] == "float64" and record["seconds"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_caller_keeps_what_was_handed_over(dtype: torch.dtype) -> None:
    known = data.sphere(10, 6)
    network = initialise(two_layer(known.shape, 30))
    before, inputs = copy.deepcopy(network.state_dict()), known.inputs.clone()
    everyone = torch.get_rng_state()
    result = train(network, known, Training(until=1e-4), dtype=dtype)
    assert torch.equal(everyone, torch.get_rng_state())
    assert all(torch.equal(before[name], now) for name, now in network.state_dict().items())
    assert torch.equal(known.inputs, inputs)
    for name, start in before.items():
        assert result.initial[name].dtype == result.trained[name].dtype == dtype
        assert torch.equal(result.initial[name], start.to(dtype))


def test_tensor_cores_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    known, seen = data.sphere(10, 6), []

    def look(*_: object) -> None:
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for tf32 in (False, True):
        train(small(known), known, Training(steps=50, tf32=tf32), show=look)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    assert seen == [("highest", False), ("high", True)]


# Checkpoints


class Interrupted:
    """Interrupts after some windows, as a user would."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, step: int, loss: float) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"loss": "logistic", "until": 1e-12},
        {"momentum": 0.5},
        {"optimizer": "sgd", "batch": 2},
        {"optimizer": "adam", "batch": 4, "decay": 0.01, "steps": 400, "until": 0},
        {"lazy": 5.0},
    ],
    ids=str,
)
def test_an_interrupted_training_ends_as_if_it_had_not_been(
    how: dict[str, Any], tmp_path: Path
) -> None:
    known, path = signs(), tmp_path / "folder" / "training.safetensors"
    settings = Training(**{"until": 1e-24, **how})
    whole = train(small(known), known, settings)
    for windows in (2, 1):
        with pytest.raises(KeyboardInterrupt):
            train(small(known), known, settings, show=Interrupted(windows), checkpoint=path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    steps: list[int] = []
    resumed = train(
        small(known), known, settings, show=lambda step, _: steps.append(step), checkpoint=path
    )
    assert steps[0] == 4 * WINDOW
    assert same(whole, resumed)
    for key in ("loss", "steps", "undone", "rate", "laziness"):
        assert resumed.record[key] == whole.record[key]
    assert not path.exists()


def test_an_interruption_within_a_window_goes_back_to_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, path = signs(), tmp_path / "training.safetensors"
    exact = Training(until=1e-24)
    whole = train(small(known), known, exact)
    step, taken = training._Run.step, itertools.count()

    def interrupted(*given: Any) -> None:
        if next(taken) == 2 * WINDOW + 7:
            raise KeyboardInterrupt
        step(*given)

    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(small(known), known, exact, checkpoint=path)
    assert same(whole, train(small(known), known, exact, checkpoint=path))


def test_undone_windows_survive_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, path = data.sphere(10, 6), tmp_path / "training.safetensors"
    monkeypatch.setattr(training, "largest_eigenvalue", lambda *_: 1.0)
    whole = train(small(known), known)
    with pytest.raises(KeyboardInterrupt):
        train(small(known), known, show=Interrupted(3), checkpoint=path)
    resumed = train(small(known), known, checkpoint=path)
    assert same(whole, resumed) and resumed.record["undone"] == whole.record["undone"] > 0


def test_checkpoints_are_written_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, path = signs(), tmp_path / "training.safetensors"
    monkeypatch.setattr(checkpoint, "SAVE_EVERY", -1.0)
    written: list[Path] = []
    write = write_tensors

    def counted(target: Path, *rest: Any) -> None:
        written.append(target)
        write(target, *rest)

    monkeypatch.setattr(checkpoint, "write_tensors", counted)
    train(small(known), known, Training(steps=200, until=0), checkpoint=path)
    assert written and set(written) == {path}
    assert list(tmp_path.iterdir()) == []


def interrupted(path: Path, known: Data) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(small(known), known, show=Interrupted(2), checkpoint=path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda k: (small(k), k, Training(until=1e-9)), "until"),
        (lambda k: (small(k), k, Training(rate=0.01)), "rate"),
        (lambda k: (small(k, seed=1), k, Training()), "initial weights"),
        (lambda k: (small(k, width=61), k, Training()), "initial weights"),
        (lambda k: (small(k), replace(k, targets=-k.targets), Training()), "data"),
    ],
    ids=["until", "rate", "seed", "width", "data"],
)
def test_a_checkpoint_of_another_training_is_refused(
    change: Callable[[Data], tuple[nn.Module, Data, Training]], word: str, tmp_path: Path
) -> None:
    known, path = signs(), tmp_path / "training.safetensors"
    interrupted(path, known)
    content = path.read_bytes()
    with pytest.raises(InputError, match=f"{path.name}.*another {word}"):
        train(*change(known), checkpoint=path)
    assert path.read_bytes() == content


def test_a_checkpoint_in_another_precision_is_refused(tmp_path: Path) -> None:
    known, path = signs(), tmp_path / "training.safetensors"
    interrupted(path, known)
    with pytest.raises(InputError, match="another dtype"):
        train(small(known), known, dtype=torch.float32, checkpoint=path)


@pytest.mark.parametrize("what", ["text", "cut", "weights", "numbers"])
def test_files_that_are_no_checkpoint_are_refused(what: str, tmp_path: Path) -> None:
    known, path = signs(), tmp_path / "training.safetensors"
    interrupted(path, known)
    if what == "text":
        path.write_text("not a checkpoint")
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif what == "weights":
        write_tensors(path, {"1.weight": gaussian(3, 3)})
    else:
        kept, metadata = read_tensors(path), read_metadata(path)
        write_tensors(path, kept, {**metadata, "place": '{"loss": 1}'})
    with pytest.raises(InputError, match=path.name):
        train(small(known), known, checkpoint=path)


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "hinge"}, ["hinge", "squared", "logistic"]),
        ({"optimizer": "lion"}, ["lion", "gd", "adam"]),
        ({"rate": 0.0}, ["rate", "0.0"]),
        ({"rate": -1.0}, ["rate", "-1.0"]),
        ({"rate": math.nan}, ["rate", "nan"]),
        ({"rate": "fast"}, ["rate", "fast"]),
        ({"momentum": 1.0}, ["momentum", "1.0"]),
        ({"momentum": -0.1}, ["momentum", "-0.1"]),
        ({"momentum": 0.9, "optimizer": "adam"}, ["momentum", "adam"]),
        ({"batch": 3}, ["batch", "sgd"]),
        ({"batch": 0, "optimizer": "sgd"}, ["batch", "0"]),
        ({"batch": 2.5, "optimizer": "sgd"}, ["batch", "2.5"]),
        ({"decay": -1e-3}, ["decay", "-0.001"]),
        ({"until": math.inf}, ["until", "inf"]),
        ({"until": None}, ["until", "None"]),
        ({"steps": 0}, ["steps", "0"]),
        ({"steps": 1e5}, ["steps", "100000.0"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"lazy": 0}, ["lazy", "0"]),
        ({"lazy": True}, ["lazy", "True"]),
    ],
    ids=str,
)
def test_settings_that_are_none(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Training(**changes)
    assert all(word in str(caught.value) for word in words)


def test_a_network_must_fit_the_data() -> None:
    known = data.sphere(10, 6)
    with pytest.raises(InputError, match=r"\(6, 2\).*\(6, 1\).*outputs=1"):
        train(two_layer(known.shape, 20, outputs=2), known)
    with pytest.raises(InputError, match=r"cannot take samples of shape \(10,\)"):
        train(two_layer((11,), 20), known)


def test_networks_that_cannot_be_trained() -> None:
    known = data.sphere(10, 6)
    with pytest.raises(InputError, match="no weights to train"):
        train(small(known).requires_grad_(False), known)
    dead, broken = small(known), small(known)
    with torch.no_grad():
        for parameter in dead.parameters():
            parameter.zero_()
        broken[1].weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="do not change with the weights"):
        train(dead, known)
    with pytest.raises(InputError, match="loss at the start is nan"):
        train(broken, known)


def test_devices_and_precisions_that_are_none() -> None:
    known = data.sphere(10, 6)
    with pytest.raises(InputError, match="device 'nowhere'"):
        train(small(known), known, device="nowhere")
    with pytest.raises(InputError, match="float16"):
        train(small(known), known, dtype=torch.float16)
