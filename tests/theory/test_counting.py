"""The counts against the rank of dense Jacobians, and against each other."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exhume.errors import InputError
from exhume.theory import counting
from exhume.theory.counting import blocks, label_fitting, most_samples, reconstruction, safe_width
from problems import dense_v, gaussian, make_features, on_sphere


def rank_at(width: int, dim: int, samples: int, outputs: int, basis: torch.Tensor) -> bool:
    """Whether tangent directions of the sphere, in a subspace, and A are determined."""
    features = make_features(dim, width, "relu+tanh", seed=width)
    v, sigma = dense_v(features) @ basis, features.activation
    z = on_sphere(samples, basis.shape[1], seed=1) * math.sqrt(dim / basis.shape[1])
    a, axes = gaussian(samples, outputs, seed=2), torch.eye(outputs, dtype=torch.float64)
    columns = []
    for i in range(samples):
        moved = sigma.slope(v @ z[i])[:, None] * (v @ torch.linalg.svd(z[i : i + 1]).Vh[1:].T)
        columns += [torch.outer(column, a[i]).flatten() for column in moved.T]
        columns += [torch.outer(sigma.value(v @ z[i]), e).flatten() for e in axes]
    matrix = torch.stack(columns, 1)
    values = torch.linalg.svdvals(matrix / matrix.norm(dim=0))
    return len(values) == matrix.shape[1] and bool(values[-1] > 1e-9 * values[0])


@pytest.mark.parametrize("sizes", [(4, 3, 1), (4, 3, 2), (3, 4, 3), (5, 2, 4), (2, 5, 2)])
@pytest.mark.parametrize("subspace", [None, 2, "span"])
def test_the_threshold_is_where_the_jacobian_gets_full_rank(
    sizes: tuple[int, int, int], subspace: Any
) -> None:
    least, (dim, samples, _) = reconstruction(*sizes, subspace), sizes
    rank = min(samples, dim) if subspace == "span" else subspace or dim
    basis = torch.linalg.qr(gaussian(dim, rank)).Q
    assert rank_at(least, *sizes, basis)
    assert not rank_at(least - 1, *sizes, basis)


@given(*[st.integers(1, 60)] * 3, st.sampled_from([None, "span", 1]))
@settings(deadline=None, max_examples=50)
def test_thresholds_are_monotone_and_each_others_inverse(dim, samples, outputs, subspace) -> None:  # type: ignore[no-untyped-def]
    sizes = dim, samples, outputs
    least = reconstruction(*sizes, subspace)
    assert most_samples(least * outputs, dim, outputs, subspace) >= samples
    if least > 1:
        assert most_samples((least - 1) * outputs, dim, outputs, subspace) < samples
    assert safe_width(*sizes, subspace) == least - 1
    assert label_fitting(samples) <= least <= reconstruction(*sizes)
    assert reconstruction(dim, samples + 1, outputs, subspace) > least
    assert reconstruction(dim, samples, outputs + 1, subspace) <= least
    assert reconstruction(dim + 1, samples, outputs, subspace) >= least
    lost = counting.unknowns(*sizes, subspace, norm=False) - counting.unknowns(*sizes, subspace)
    assert lost == samples


def test_for_one_output_the_count_is_the_law() -> None:
    assert label_fitting(100) == 100 and reconstruction(3072, 100) == 3072 * 100
    assert reconstruction(3072, 100, subspace="span") == 100 * 100
    assert reconstruction(3072, 100, subspace=7) == 700
    assert reconstruction(20, 3, outputs=1000) == 20 + 3 - 1


def test_blocks_of_a_module() -> None:
    net = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))
    found = {block.name: block for block in blocks(net, 20, 10)}
    own, whole = ["0.weight", "0.bias", "2.weight", "2.bias"], 50 * 21 + 10 * 51
    assert list(found) == [*own, "first layer", "last layer", "all"]
    counts = {"first layer": 50 * 20 + 50, "last layer": 500, "all": whole}
    assert counts == {name: found[name].parameters for name in counts}
    assert found["0.weight"].shape == (50, 20) and found["all"].samples == whole // 29
    assert found["last layer"].samples == most_samples(500, 20, 10) == 500 // 29
    assert found["last layer"].spanned == most_samples(500, 20, 10, "span") == 18
    assert sum(found[name].share for name in own) == pytest.approx(1)
    assert found["2.bias"].samples == 0
    shapes = {"head.weight": (1, 40), "body.weight": (40, 5)}
    assert {b.name: b.parameters for b in blocks(shapes, 5, head="head")}["last layer"] == 40
    (alone,) = blocks({"last": (40, 1)}, 5)
    assert (alone.name, alone.samples, alone.spanned) == ("last", 8, 8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: reconstruction(0, 5), "dim"),
        (lambda: reconstruction(5, 5, 0), "outputs"),
        (lambda: reconstruction(5, 5, 1, 6), "subspace"),
        (lambda: label_fitting(True), "samples"),
        (lambda: most_samples(0, 5), "equations"),
        (lambda: blocks({}, 5), "no parameters"),
        (lambda: blocks({"a.weight": (2, 2)}, 5, head="b"), "head"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()
