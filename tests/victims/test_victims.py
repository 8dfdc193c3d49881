"""Random-features victims against dense oracles, and the folders they are kept in."""

import importlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exhume import data
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import residual_at_truth
from exhume.features.random import RandomFeatures
from exhume.features.weights import Mapped, Seeded, Stored
from exhume.models.folder import CARD, INITIAL, TRAINED, TRUTH, read_model
from exhume.victims import Victim, random_features, victim
from problems import ACTIVATIONS, dense_phi, gaussian

training = importlib.import_module("exhume.victims.random_features")  # the name is a function too


def several(dim: int = 12, samples: int = 5, outputs: int = 3, signs: bool = False) -> Data:
    """Sphere data with targets of several columns."""
    targets = gaussian(samples, outputs, seed=7)
    return Data(
        data.sphere(dim, samples).inputs, targets.sign() if signs else targets, (dim,), "several"
    )


def phi_of(victim: Victim, samples: Data | None = None) -> Tensor:
    """Φ at the training samples, (n, p) float64."""
    features = victim.problem.features
    assert isinstance(features, RandomFeatures)
    return dense_phi(features, (samples or victim.truth).inputs)


def theta_of(victim: Victim) -> Tensor:
    return victim.problem.target.double()


def penalty_of(phi: Tensor, ridge: float) -> float:
    """λ: the ridge is relative to the mean squared norm of the features."""
    return ridge * phi.square().sum(1).mean().item()


def far(given: Tensor, expected: Tensor) -> float:
    return ((given - expected).norm() / expected.norm()).item()


# The squared loss


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("known", [data.sphere(12, 5), several()], ids=["one", "three"])
def test_theta_is_the_interpolator_of_least_norm(name: str, known: Data) -> None:
    made = random_features(known, 80, name)
    phi = phi_of(made)
    oracle = torch.linalg.pinv(phi) @ known.targets
    assert made.problem.target.shape == (80, known.outputs)
    assert far(theta_of(made), oracle) < 1e-6
    assert far(phi @ theta_of(made), known.targets) < 1e-5
    assert made.training["fit"] < 1e-18


def test_no_other_interpolator_is_shorter() -> None:
    known = data.sphere(12, 5)
    made = random_features(known, 40)
    theta, phi = theta_of(made), phi_of(made)
    oracle = torch.linalg.lstsq(phi, known.targets, driver="gelsd").solution
    assert far(theta, oracle) < 1e-6
    _, _, rows = torch.linalg.svd(phi)
    unseen = rows[5:].T  # directions that change no output
    assert (unseen.T @ theta).norm() < 1e-6 * theta.norm()


def test_a_width_equal_to_the_samples_interpolates() -> None:
    known = data.sphere(12, 5)
    made = random_features(known, 5, "tanh")
    assert far(phi_of(made) @ theta_of(made), known.targets) < 1e-3


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("known", [data.sphere(12, 5), several()], ids=["one", "three"])
def test_ridge_regression_is_the_closed_form(ridge: float, known: Data) -> None:
    made = random_features(known, 60, "tanh", ridge=ridge)
    phi = phi_of(made)
    penalty = penalty_of(phi, ridge)
    primal = phi.T @ phi + penalty * torch.eye(60, dtype=torch.float64)
    assert far(theta_of(made), torch.linalg.solve(primal, phi.T @ known.targets)) < 1e-6
    theta = theta_of(made).clone().requires_grad_()
    loss = (phi @ theta - known.targets).square().sum() + penalty * theta.square().sum()
    (slope,) = torch.autograd.grad(loss, theta)
    assert slope.norm() < 1e-5 * (2 * phi.T @ known.targets).norm()


def test_a_ridge_shrinks_theta_and_is_paid_for_in_fit() -> None:
    known = data.sphere(12, 5)
    made = [random_features(known, 60, ridge=ridge) for ridge in (0.0, 0.01, 1.0)]
    norms = [theta_of(victim).norm().item() for victim in made]
    fits = [victim.training["fit"] for victim in made]
    assert norms == sorted(norms, reverse=True) and fits == sorted(fits)
    expected = (phi_of(made[2]) @ theta_of(made[2]) - known.targets).square().mean().item()
    assert fits[2] == pytest.approx(expected, rel=1e-4)


def test_the_rows_of_v_may_come_in_any_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    known = data.sphere(12, 5)
    whole = random_features(known, 80)
    monkeypatch.setattr(training, "ROWS", 7)
    assert far(theta_of(random_features(known, 80)), theta_of(whole)) < 1e-6


# The logistic loss


def slope_of_logistic(theta: Tensor, phi: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """∂/∂θ of Σ log(1 + exp(−y f)) + ½ λ |θ|²."""
    theta = theta.clone().requires_grad_()
    loss = torch.nn.functional.softplus(-labels * (phi @ theta)).sum()
    (slope,) = torch.autograd.grad(loss + penalty / 2 * theta.square().sum(), theta)
    return slope


@pytest.mark.parametrize("ridge", [1e-8, 1e-4, 1e-2, 1.0, 100.0])
def test_newton_ends_where_the_regularised_loss_is_flat(ridge: float) -> None:
    known = data.sphere(12, 5)
    phi = phi_of(random_features(known, 80))
    penalty, labels = penalty_of(phi, ridge), known.targets[:, 0].sign()
    coefficients = training.logistic(phi @ phi.T, labels, penalty)
    theta = phi.T @ coefficients
    slope = slope_of_logistic(theta, phi, labels, penalty)
    assert slope.norm() < 1e-11 * (penalty * theta).norm()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_logistic_victim_is_at_the_minimum(name: str) -> None:
    known = data.sphere(12, 5)
    made = random_features(known, 80, name, loss="logistic", ridge=0.01)
    phi, theta, labels = phi_of(made), theta_of(made), known.targets.sign()
    slope = slope_of_logistic(theta, phi, labels, penalty_of(phi, 0.01))
    at_zero = slope_of_logistic(torch.zeros_like(theta), phi, labels, 0.0)
    assert slope.norm() < 1e-5 * at_zero.norm()
    assert ((phi @ theta).sign() == labels).all()


def test_every_output_is_a_problem_of_its_own() -> None:
    known = several(signs=True)
    made = random_features(known, 80, loss="logistic", ridge=0.01)
    for column in range(3):
        alone = Data(known.inputs, known.targets[:, [column]], known.shape, "alone")
        one = random_features(alone, 80, loss="logistic", ridge=0.01)
        assert far(theta_of(made)[:, [column]], theta_of(one)) < 1e-6


def test_only_the_sign_of_a_target_counts_for_the_logistic_loss() -> None:
    known = several()
    signs = Data(known.inputs, known.targets.sign(), known.shape, "signs")
    a, b = (random_features(d, 80, loss="logistic", ridge=0.01) for d in (known, signs))
    assert torch.equal(a.problem.target, b.problem.target)


def test_one_hot_targets_are_one_class_against_the_rest() -> None:
    inputs = data.sphere(12, 6).inputs
    one_hot = torch.eye(3, dtype=torch.float64).repeat(2, 1)
    hot, signs = (
        random_features(Data(inputs, targets, (12,), "hot"), 80, loss="logistic", ridge=0.01)
        for targets in (one_hot, 2 * one_hot - 1)
    )
    assert far(theta_of(hot), theta_of(signs)) < 1e-6
    assert ((phi_of(hot) @ theta_of(hot)).argmax(1) == one_hot.argmax(1)).all()


def test_newton_does_not_run_away_from_crowded_samples() -> None:
    crowded = data.sphere(2, 10, seed=19)
    phi = phi_of(random_features(crowded, 500))
    labels = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(5)
    penalty = penalty_of(phi, 1e-5)
    theta = phi.T @ training.logistic(phi @ phi.T, labels, penalty)
    slope = slope_of_logistic(theta, phi, labels, penalty)
    at_zero = slope_of_logistic(torch.zeros_like(theta), phi, labels, 0.0)
    assert slope.norm() < 1e-6 * at_zero.norm()


# What an attack relies on


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(
    "how", [{}, {"ridge": 0.1}, {"loss": "logistic", "ridge": 0.01}], ids=lambda how: str(how)
)
def test_theta_lies_in_the_span_of_the_features(name: str, how: dict[str, Any]) -> None:
    known = several(signs=True)
    made = random_features(known, 200, name, **how)
    assert residual_at_truth(made.problem, known) < 1e-12
    assert residual_at_truth(made.problem, data.sphere(12, 5, seed=1)) > 0.1


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_v_may_be_seeded_stored_or_mapped(loss: str, tmp_path: Path) -> None:
    known = data.sphere(12, 5)
    v = Seeded(300, 12, seed=3)
    dense = v.rows(0, 300)
    np.save(tmp_path / "v.npy", dense.numpy())
    made = [
        random_features(known, 300, seed=3, loss=loss, ridge=0.1, weights=weights)
        for weights in (None, v, Stored(dense), Stored(dense.double()), Mapped(tmp_path / "v.npy"))
    ]
    assert all(torch.equal(victim.problem.target, made[0].problem.target) for victim in made)
    other = random_features(known, 300, seed=4, loss=loss, ridge=0.1)
    assert far(theta_of(other), theta_of(made[0])) > 0.1


def test_training_leaves_the_data_alone() -> None:
    known = data.sphere(12, 5)
    inputs, targets = known.inputs.clone(), known.targets.clone()
    made = random_features(known, 80, loss="logistic", ridge=0.1)
    assert made.truth is known
    assert torch.equal(known.inputs, inputs) and torch.equal(known.targets, targets)


def test_a_half_precision_first_layer_does_not_round_the_last() -> None:
    known = data.sphere(12, 5)
    half = Seeded(300, 12, 0).rows(0, 300).half()
    made = random_features(known, 300, weights=Stored(half.float()))
    features, target = made.problem.features, made.problem.target
    assert isinstance(features, RandomFeatures)
    posed = training.random_features_problem(Stored(half), "relu", target, (12,))
    assert torch.equal(posed.to("cpu").target, target)


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 4}, ["width 4", "5"]),
        ({"width": 0}, ["width 0"]),
        ({"ridge": -1.0}, ["ridge", "-1.0"]),
        ({"ridge": float("nan")}, ["ridge", "nan"]),
        ({"ridge": float("inf")}, ["ridge", "inf"]),
        ({"loss": "hinge"}, ["hinge", "squared", "logistic"]),
        ({"loss": "logistic"}, ["ridge"]),
        ({"activation": "swish"}, ["swish", "relu"]),
        ({"activation": "polynomial:1"}, ["polynomial"]),
        ({"weights": Seeded(80, 11, 0)}, ["(80, 12)", "(80, 11)"]),
        ({"weights": Seeded(79, 12, 0)}, ["(80, 12)", "(79, 12)"]),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        random_features(data.sphere(12, 5), **{"width": 80, **changes})
    assert all(word in str(caught.value) for word in words)


def test_weights_that_are_not_finite_are_refused() -> None:
    v = Seeded(80, 12, 0).rows(0, 80)
    v[3, 3] = torch.nan
    with pytest.raises(InputError, match=r"first layer|NaN"):
        random_features(data.sphere(12, 5), 80, weights=Stored(v))


# The folder


def digits(samples: int = 10) -> Data:
    return data.load("digits", samples)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("name", ["relu", "polynomial:0.5,1,-0.3,0.2"])
def test_a_saved_model_poses_the_same_problem(name: str, store: bool, tmp_path: Path) -> None:
    made = random_features(digits(), 300, name, seed=5)
    made.save(tmp_path / "model", store)
    assert (tmp_path / "model" / INITIAL).exists() == store
    problem = read_model(tmp_path / "model")
    assert torch.equal(problem.target, made.problem.target)
    assert problem.shape == (8, 8)
    assert problem.display is not None and problem.display == made.problem.display
    assert asdict(problem.display) == digits().transform.card()
    before, after = made.problem.features, problem.features
    assert isinstance(before, RandomFeatures) and isinstance(after, RandomFeatures)
    assert after.activation.name == before.activation.name
    assert torch.equal(after.weights.rows(0, 300), before.weights.rows(0, 300))
    assert isinstance(after.weights, Stored if store else Seeded)
    truth = data.read(tmp_path / "model" / TRUTH)
    assert torch.equal(truth.inputs, digits().inputs)
    assert residual_at_truth(problem, truth) < 1e-12


def test_a_polynomial_keeps_all_its_digits(tmp_path: Path) -> None:
    name = "polynomial:0.1234567890123,1,-0.3333333333333"
    made = random_features(data.sphere(12, 5), 80, name)
    made.save(tmp_path / "model")
    before, after = made.problem.features, read_model(tmp_path / "model").features
    assert isinstance(before, RandomFeatures) and isinstance(after, RandomFeatures)
    z = gaussian(100)
    assert torch.equal(after.activation.value(z), before.activation.value(z))


def test_a_mapped_first_layer_is_found_again(tmp_path: Path) -> None:
    known = data.sphere(12, 5)
    np.save(tmp_path / "v.npy", gaussian(80, 12, seed=4).float().numpy())
    made = random_features(known, 80, weights=Mapped(tmp_path / "v.npy"))
    made.save(tmp_path / "model")
    problem = read_model(tmp_path / "model")
    assert torch.equal(problem.target, made.problem.target)
    assert residual_at_truth(problem, known) < 1e-12


def test_a_stored_model_is_whole_without_the_mapped_file(tmp_path: Path) -> None:
    known = data.sphere(12, 5)
    np.save(tmp_path / "v.npy", gaussian(80, 12, seed=4).float().numpy())
    made = random_features(known, 80, weights=Mapped(tmp_path / "v.npy"))
    made.save(tmp_path / "model", store=True)
    (tmp_path / "v.npy").unlink()
    assert residual_at_truth(read_model(tmp_path / "model"), known) < 1e-12


def test_a_first_layer_of_ones_own_is_written(tmp_path: Path) -> None:
    known, v = data.sphere(12, 5), gaussian(80, 12, seed=4).float()
    random_features(known, 80, weights=Stored(v)).save(tmp_path / "model")
    assert torch.equal(load_file(tmp_path / "model" / INITIAL)["first"], v)
    assert residual_at_truth(read_model(tmp_path / "model"), known) < 1e-12


def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


@pytest.mark.parametrize("store", [False, True])
def test_the_truth_is_in_its_own_file_and_nowhere_else(store: bool, tmp_path: Path) -> None:
    known = data.load("digits", 10, seed=123)
    random_features(known, 300).save(tmp_path, store)
    others = {CARD, TRAINED, *([INITIAL] if store else [])}
    assert {path.name for path in tmp_path.iterdir()} == {TRUTH, *others}
    assert load_file(tmp_path / TRAINED).keys() == {"last"}
    assert load_file(tmp_path / TRAINED)["last"].shape == (300, 10)
    card = json.loads((tmp_path / CARD).read_text())
    assert card.keys() == {
        *("schema", "kind", "activation", "width", "dim", "outputs", "shape"),
        *("first", "display", "training"),
    }
    assert card["display"].keys() == {"shift", "scale"}
    assert card["training"].keys() == {"data", "loss", "ridge", "seed", "fit"}
    assert 123 not in numbers(card), "the seed of the samples would give all of them away"
    norms = known.transform.norms
    assert norms is not None
    told = torch.tensor(list(numbers(card)), dtype=torch.float64)
    assert ((told[:, None] - norms).abs() > 1e-6).all()
    raw = b"".join((tmp_path / name).read_bytes() for name in others)
    for secret in (known.inputs, known.inputs.float(), known.images(), known.images().float()):
        for row in secret.flatten(1):
            assert row[20:28].contiguous().numpy().tobytes() not in raw
    for norm in norms.tolist():
        assert f"{norm:.6g}" not in (tmp_path / CARD).read_text()


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_the_folder_is_private_whatever_the_umask(
    exists: bool, store: bool, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        folder = tmp_path / "model"
        if exists:
            folder.mkdir(mode=0o777)
        random_features(data.sphere(12, 5), 80).save(folder, store)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_new_folders_on_the_way_are_made(tmp_path: Path) -> None:
    random_features(data.sphere(12, 5), 80).save(tmp_path / "a" / "b" / "model")
    assert residual_at_truth(read_model(tmp_path / "a" / "b" / "model"), data.sphere(12, 5)) < 1e-12


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("exists", [False, True])
def test_a_save_that_fails_leaves_nothing(
    exists: bool, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = random_features(data.sphere(12, 5), 80)
    folder = tmp_path / "model"
    if exists:
        folder.mkdir()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(victim, "save", fail)  # the truth comes last
    with pytest.raises(type(error)):
        made.save(folder)
    assert list(tmp_path.rglob("*")) == ([folder] if exists else [])


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    made = random_features(data.sphere(12, 5), 80)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        made.save(tmp_path)
    with pytest.raises(InputError, match="notes"):
        made.save(tmp_path / "notes")
    with pytest.raises(InputError, match="notes"):
        made.save(tmp_path / "notes" / "model")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_the_folder_one_is_in_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    try:
        random_features(data.sphere(12, 5), 80).save(Path())
    except InputError:
        assert list(tmp_path.rglob("*")) == [tmp_path / "here"]
    else:
        assert read_model(tmp_path / "here").dim == 12
