"""The samples' span from the change of a first layer: exact where theory says so, else refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import exhume
from exhume import data, victims
from exhume.equation.problem import FirstLayer
from exhume.errors import InputError
from exhume.search import subspace
from exhume.search.subspace import Subspace, estimate, shrinkage
from problems import gaussian, on_sphere

fast = settings(max_examples=20, deadline=None)


def outside(found: Subspace, inputs: Tensor) -> float:
    """Largest sine of an angle between the samples' span and the basis, by dense QR."""
    span = torch.linalg.qr(inputs.T).Q
    return float(torch.linalg.matrix_norm(span - found.basis @ (found.basis.T @ span), 2))


def layer_of(known: data.Data, **options: Any) -> FirstLayer:
    usual = {"width": 200, "seed": 100, "until": 1e-4, "steps": 400}
    return victims.two_layer(known, **usual | options).problem.first_layer


def made_up(
    d: int, n: int, h: int, kept: float = 1.0, size: float = 0.01, seed: int = 0
) -> tuple[FirstLayer, Tensor]:
    """W₁ = c·W₁(0) + Σ δ_i x_iᵀ with random δ."""
    x, initial = on_sphere(n, d, seed), gaussian(h, d, seed=seed + 1) / d**0.5
    change = size * gaussian(h, n, seed=seed + 2) @ x / d
    return FirstLayer(initial, kept * initial + change), x


@pytest.mark.parametrize(
    ("d", "n", "options"),
    [
        (20, 4, {"rate": 0.05, "momentum": 0.9}),
        (20, 4, {"optimizer": "sgd", "batch": 1, "momentum": 0.5}),
        (20, 4, {"bias": True, "loss": "logistic"}),
        (20, 4, {"lazy": 100.0}),
        (20, 4, {"activation": "gelu"}),
        (20, 4, {"decay": 1e-2}),
        (20, 18, {"decay": 1e-2}),
        (50, 5, {"decay": 1e-3, "momentum": 0.9}),
        (20, 4, {"decay": 3e-3, "optimizer": "sgd", "batch": 2}),
    ],
)
def test_the_span_is_exact_and_decay_corrected(d: int, n: int, options: dict[str, Any]) -> None:
    known = data.sphere(d, n, 100)
    layer = layer_of(known, **options)
    found = estimate(layer)
    assert found.rank == n and outside(found, known.inputs) < 1e-6
    torch.testing.assert_close(found.basis.T @ found.basis, torch.eye(n).double())
    if "decay" in options:
        vectors = torch.linalg.svd(layer.trained - layer.initial).Vh[:n].T  # nothing corrected
        assert found.kept < 1 and outside(replace(found, basis=vectors), known.inputs) > 1e-4
    else:
        assert found.kept == 1 and found.gap > 1e3 and outside(found, known.inputs) < 1e-9


@pytest.mark.parametrize("kept", [1.0, 0.9])
def test_a_narrow_layer_is_looked_at_along_its_rows(
    kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, (layer, _) = 5, made_up(90, 5, 40, kept)
    found = estimate(layer, n)
    monkeypatch.setattr(subspace, "_axes", lambda layer: None)
    dense = estimate(layer, n)
    assert found.kept == pytest.approx(dense.kept) and found.basis.shape == (90, n)
    torch.testing.assert_close(found.spectrum, dense.spectrum, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.basis @ found.basis.T, dense.basis @ dense.basis.T)


def test_deeper_networks_have_it_too_and_single_precision_shows_the_rank() -> None:
    known = data.sphere(20, 4, 100)
    deep = victims.mlp(known, widths=[60, 50], until=1e-3, steps=400).problem.first_layer
    single = layer_of(known, width=400, dtype=torch.float32)
    assert single.trained.dtype == torch.float32
    for found, error in ((estimate(deep), 1e-9), (estimate(single), 1e-2)):
        assert found.rank == 4 and outside(found, known.inputs) < error
        assert found.basis.dtype == torch.float64


@fast
@given(st.integers(2, 12), st.integers(1, 12), st.integers(1, 30), st.integers(0, 10**6))
def test_a_made_up_change_is_found_or_refused_never_wrong(
    d: int, n: int, h: int, seed: int
) -> None:
    plain, x = made_up(d, n, h, seed=seed)
    scale = 10.0 ** (seed % 13 - 6)  # which does not matter
    layer = FirstLayer(scale * plain.initial, scale * plain.trained)
    spectrum = torch.linalg.svdvals(layer.trained - layer.initial)
    if n < min(d, h):
        assume(spectrum[n - 1] > 1e-3 * spectrum[0])
        found = estimate(layer, n)
        assert found.rank == n and outside(found, x) < 1e-6
        assert n == min(d, h) - 1 or estimate(layer).rank == n
    else:  # as many samples as directions, or as units: the span is not shown
        with pytest.raises(InputError, match="spans all directions"):
            estimate(layer)


@fast
@given(st.floats(0.2, 0.9999), st.integers(1, 6), st.floats(1e-4, 1.0), st.integers(0, 10**6))
def test_what_is_left_of_the_initial_weights_is_found(
    kept: float, n: int, size: float, seed: int
) -> None:
    layer, x = made_up(8, n, 40, kept, size, seed)
    w, change = layer.initial, layer.trained - layer.initial
    assert shrinkage(w.T @ w, w.T @ change) == pytest.approx(kept, abs=1e-9)
    spectrum = torch.linalg.svdvals(layer.trained - kept * layer.initial)
    assume(spectrum[n - 1] > 0.05 * spectrum[0] and size > 0.01)
    found = estimate(layer)
    assert (found.rank, found.kept) == (n, pytest.approx(kept, abs=1e-6))
    assert outside(found, x) < 1e-4


def test_a_narrow_layer_a_dead_input_or_no_initial_weights_do_no_harm() -> None:
    with pytest.raises(InputError, match="spans all directions"):  # decay is not looked for
        estimate(made_up(20, 3, 15, kept=0.9)[0])
    layer, x = made_up(8, 3, 30, kept=0.9, size=0.1)
    initial, trained = layer.initial.clone(), layer.trained.clone()
    trained[:, 2] -= 0.9 * initial[:, 2]
    initial[:, 2] = 0
    assert outside(estimate(FirstLayer(initial, trained)), x) < 1e-6
    change = trained - 0.9 * initial
    found = estimate(FirstLayer(torch.zeros_like(change), change))
    assert found.rank == 3 and outside(found, x) < 1e-6


@pytest.mark.parametrize(
    ("d", "n", "options"),
    [
        (20, 4, {"optimizer": "adam", "until": 1e-3}),
        (40, 5, {"optimizer": "adam", "until": 1e-3}),
        (10, 10, {}),  # the last singular values are far apart by chance; that is no gap
        (10, 13, {}),
        (20, 40, {}),
    ],
)
def test_adam_and_as_many_samples_as_dimensions_are_refused(
    d: int, n: int, options: dict[str, Any]
) -> None:
    layer = layer_of(data.sphere(d, n, 100), **options)
    with pytest.raises(InputError, match=r"no gap.*Adam.*as many samples.*'exhume', or force"):
        estimate(layer)
    if options:  # a rank is taken where the rule refuses
        assert estimate(layer, 4).rank == 4 and estimate(layer, "energy").rank > 10
    for rank, words in ((0, f"from 1 to {d}"), (d + 1, f"from 1 to {d}"), ("elbow", "got 'elbow'")):
        with pytest.raises(InputError, match=words):
            estimate(layer, rank)


def test_the_energy_rule_leaves_out_a_millionth() -> None:
    x, initial = torch.linalg.qr(gaussian(20, 5)).Q.T, gaussian(60, 20, seed=1)
    left = torch.linalg.qr(gaussian(60, 5, seed=2)).Q
    sizes = torch.tensor([1.0, 0.5, 1e-2, 2e-3, 3e-4], dtype=torch.float64)
    layer = FirstLayer(initial, initial + (left * sizes) @ x)
    found = estimate(layer, "energy")
    assert found.rank == 4 and estimate(layer, "gap").rank == 5  # which has 7e-8 of the energy
    assert outside(found, x[:4]) < 1e-6
    torch.testing.assert_close(found.spectrum[:5], sizes, rtol=1e-6, atol=1e-9)


def test_as_many_samples_are_sought_as_the_first_layer_has_directions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    before = {name: w.clone() for name, w in model.state_dict().items()}
    x, y = torch.randn(4, 12), torch.arange(4) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    told = {"product_limit": 5, "device": "cpu", "norm": "sqrt_d"}
    found = exhume.audit(model, before, model.state_dict(), (12,), **told)
    assert found.found.counted == len(found.samples) == 4
    assert any("was not told: 4 were sought" in sentence for sentence in found.limits)
    noisy = {name: w + 1e-3 * torch.randn(w.shape) for name, w in model.state_dict().items()}
    other = exhume.audit(model, before, noisy, (12,), **told)  # no span ends there
    assert other.found.counted is None and "was not told" not in " ".join(other.limits)
