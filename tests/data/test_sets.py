"""Sets by name and of one's own: what is drawn, how it is prepared, what is held out."""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from exhume import data
from exhume.data import Data
from exhume.errors import InputError

BUNDLED = {"digits": (8, 8), "faces": (25, 25), "photos": (3, 32, 32)}
bundled = pytest.mark.parametrize("name", BUNDLED)


def pictures(count: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels_of(drawn: Data) -> list[int]:
    """Labels of digits, found by their pixels."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    labels = {tuple(row): int(y) for row, y in zip(digits.data, digits.target, strict=True)}
    return [labels[tuple(row)] for row in drawn.images().flatten(1).mul(16).round().tolist()]


def distinct(images: Tensor) -> int:
    return len(images.flatten(1).mul(1e6).round().unique(dim=0))


@settings(deadline=None, max_examples=30)
@given(dim=st.integers(1, 30), samples=st.integers(1, 10), seed=st.integers(0, 99))
def test_sphere_rows_have_norm_root_d(dim: int, samples: int, seed: int) -> None:
    drawn = data.sphere(dim, samples, seed)
    assert (drawn.dim, drawn.samples, drawn.outputs, drawn.shape) == (dim, samples, 1, (dim,))
    assert drawn.inputs.norm(dim=1).tolist() == pytest.approx([math.sqrt(dim)] * samples)
    own = np.array([dim, samples, seed])  # sizes may be numbers of numpy
    assert drawn.inputs.equal(data.sphere(*own).inputs)


def test_sphere_targets_are_linear_without_noise_and_a_seed_has_a_subspace_of_its_own() -> None:
    clean, noisy = data.sphere(10, 400, noise=0.0), data.sphere(10, 400, noise=0.5)
    fit = torch.linalg.lstsq(clean.inputs, clean.targets).solution
    torch.testing.assert_close(clean.inputs @ fit, clean.targets)
    assert (noisy.targets - clean.targets).std().item() == pytest.approx(0.5, rel=0.15)
    first = data.sphere(100, 20, seed=0).inputs[0, :3].tolist()  # the same everywhere
    assert first == pytest.approx([0.13021722, -0.13681936, 0.66327776], abs=1e-7)
    one, other = data.subspace(9, 2, seed=1), data.subspace(9, 2, seed=2)
    torch.testing.assert_close(one.T @ one, torch.eye(2, dtype=torch.float64))
    rows = data.sphere(9, 4, seed=1, rank=2).inputs
    torch.testing.assert_close(rows @ one @ one.T, rows)
    assert (rows - rows @ other @ other.T).norm() > 1


@bundled
def test_bundled(name: str) -> None:
    read = partial(data.load, name, 12, 3)
    plain, drawn, again, centred = read(normalise=False), read(), read(), read(centre="pixels")
    images, rescaled = plain.images(), read(centre="pixels", normalise=True)
    assert images.shape == (12, *BUNDLED[name]) and plain.name == name
    assert images.min() >= -1e-12 and 0.5 < images.max() <= 1 + 1e-12
    for made in (plain, centred):
        assert made.transform.shift == pytest.approx(images.mean().item())
        assert made.transform.norms is None
    assert plain.transform.scale == pytest.approx(images.std(correction=0).item())
    assert plain.inputs.mean().item() == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(centred.inputs, (images - images.mean(0)).flatten(1))
    for made in (drawn, rescaled):
        assert made.inputs.norm(dim=1).tolist() == pytest.approx([math.sqrt(made.dim)] * 12)
    for made in (drawn, rescaled, centred):
        torch.testing.assert_close(made.images(), images)
    assert drawn.inputs.equal(again.inputs) and drawn.targets.equal(again.targets)
    torch.testing.assert_close(data.load(name, 20, 3).images()[:12], images)  # a prefix stays
    assert not torch.allclose(data.load(name, 12, 1).images(), images)


def test_images_are_shrunk_by_averaging_squares() -> None:
    for name, size, shape in (("digits", 4, (4, 4)), ("photos", 8, (3, 8, 8))):
        whole = data.load(name, 6, normalise=False)
        small = data.load(name, 6, normalise=False, size=size)
        means = torch.nn.functional.avg_pool2d(whole.images(), whole.shape[-1] // size)
        torch.testing.assert_close(small.images(), means)
        assert small.shape == data.held_out(small).shape == shape
        assert data.load(name, 6, size=whole.shape[-1]).inputs.equal(data.load(name, 6).inputs)


def test_every_image_is_drawn_once() -> None:
    drawn = data.load("photos", 520)
    assert distinct(drawn.images()) == 520 and drawn.targets.sum() == 0
    photo = pytest.importorskip("sklearn.datasets").load_sample_images().images[1]
    tile = torch.from_numpy(photo[32:64, 96:128].transpose(2, 0, 1) / 255.0)
    assert (drawn.images() - tile).flatten(1).norm(dim=1).min() < 1e-9


IN_TURNS = [[-1.0], [1.0], [-1.0], [1.0], [-1.0]]


@pytest.mark.parametrize(
    ("classes", "labels", "targets"),
    [
        ((8, 3), [8, 3, 8, 3, 8], IN_TURNS),
        ((1, 2, 3), [1, 2, 3, 1, 2], torch.eye(3).repeat(2, 1)[:5].tolist()),
        ("all", [0, 1, 2, 3, 4], torch.eye(10)[:5].tolist()),
        ("parity", [0, 1, 0, 1, 0], IN_TURNS),
    ],
)
def test_labels_belong_to_their_images(classes: Any, labels: list[int], targets: Any) -> None:
    drawn = data.load("digits", 5, classes=classes)
    found = [y % 2 if classes == "parity" else y for y in labels_of(drawn)]
    assert found == labels and drawn.targets.tolist() == targets
    assert data.load("digits", 4, classes="random").targets.sum() == 0


@bundled
@pytest.mark.parametrize("centre", ["all", "pixels"])
def test_held_out_are_other_images_of_the_same_kind(name: str, centre: Any) -> None:
    known = data.load(name, samples=20, centre=centre)
    other, again, seeded = (data.held_out(known, seed=seed) for seed in (0, 0, 1))
    assert (other.samples, other.shape, other.name) == (20, known.shape, name)
    assert other.targets.equal(known.targets) and other.inputs.equal(again.inputs)
    assert not other.inputs.equal(seeded.inputs)
    images = other.images().flatten(1)
    assert torch.cdist(images, known.images().flatten(1)).min() > 1e-3
    assert (images.min() >= -1e-9) & (images.max() <= 1 + 1e-9)
    torch.testing.assert_close(known.transform.apply(images, other.transform.norms), other.inputs)


def test_held_out_have_the_labels_of_the_set_and_leave_out_doubles(tmp_path: Path) -> None:
    other = data.held_out(data.load("digits", 6, classes=(8, 3)), samples=9)
    assert labels_of(other) == [8, 3] * 4 + [8]
    known = data.load("faces", samples=97)
    left = data.held_out(known, samples=10).images()  # no more than there are
    assert len(left) == 3 and distinct(torch.cat([known.images(), left])) == 100
    images = pictures(8, 4, 4)
    images[5] = images[0]
    np.savez(tmp_path / "mnist.npz", x=images, y=np.zeros(8, np.int64))
    known = data.load("mnist", 2, classes="random", normalise=False, root=tmp_path)
    torch.testing.assert_close(known.images(), torch.from_numpy(images[:2] / 255.0))
    left = data.held_out(known, samples=9, root=tmp_path).images()
    rest = torch.from_numpy(images[[2, 3, 4, 6, 7]] / 255.0)
    assert len(left) == 5 and distinct(torch.cat([left, rest])) == 5
    for side, words in ((4, "2 of 2 images are not in mnist"), (5, "25 numbers, these")):
        np.savez(tmp_path / "mnist.npz", x=pictures(9, side, side), y=np.arange(9) % 2)
        with pytest.raises(InputError, match=words):
            data.held_out(known, root=tmp_path)


SHAPES = {(4, 6, 5, 3): (3, 6, 5), (4, 3, 6, 5): (3, 6, 5), (4, 6, 5, 1): (6, 5)}
SHAPES |= {(4, 1, 6, 5): (6, 5), (4, 6, 5): (6, 5), (4, 30): (30,)}


@pytest.mark.parametrize("given_shape", SHAPES, ids=str)
def test_own_images(given_shape: tuple[int, ...]) -> None:
    images = pictures(*given_shape)
    last = len(given_shape) == 4 and given_shape[3] in (1, 3)
    expected = images.transpose(0, 3, 1, 2) if last else images
    pixels = torch.from_numpy(expected / 255.0).reshape(4, *SHAPES[given_shape])
    for given_images in (images, torch.from_numpy(images)):
        own = data.from_arrays(given_images, np.arange(4))
        torch.testing.assert_close(own.images(), pixels)
        assert own.targets[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_own_rows_as_they_are_and_copied() -> None:
    rows = torch.randn(3, 7, requires_grad=True, dtype=torch.bfloat16)
    own = data.from_arrays(rows, torch.eye(3), normalise=False, standardise=False, name="mine")
    assert own.inputs.equal(rows.detach().double()) and own.images().equal(own.inputs)
    assert (own.name, own.outputs, own.inputs.requires_grad) == ("mine", 3, False)
    array = np.eye(2)
    own = data.from_arrays(array, array, normalise=False, standardise=False)
    array[:] = 7.0
    assert own.inputs.tolist() == own.targets.tolist() == [[1.0, 0.0], [0.0, 1.0]]


EYE, TWO = np.eye(2), np.ones(2)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: data.sphere(0, 2), "dim"),
    (lambda: data.sphere(2, 0), "samples"),
    (lambda: data.sphere(2, 2, -1), "seed"),
    (lambda: data.sphere(2, 2, noise=-1.0), "noise"),
    (lambda: data.sphere(2, 2, rank=3), "rank=3"),
    (lambda: data.load("digits"), "pip install scikit-learn"),
    (lambda: data.load("imagenet"), "there are digits, faces"),
    (lambda: data.load("digits", 0), "samples: expected"),
    (lambda: data.load("digits", classes=(1, 1)), "two or more different"),
    (lambda: data.load("digits", classes=(1, 11)), "no images with label 11"),
    (lambda: data.load("digits", classes="odd"), "parity"),  # type: ignore[arg-type]
    (lambda: data.load("digits", 400, classes=(8, 0)), "348 in 2 equal parts"),
    (lambda: data.load("faces", 101), "101 samples .* 100"),
    (lambda: data.load("faces", classes="all"), "no classes"),
    (lambda: data.load("digits", classes="vehicles"), "for cifar10, not for digits"),
    (lambda: data.load("digits", centre="image"), "centre: expected"),  # type: ignore[arg-type]
    (lambda: data.load("digits", 1, centre="pixels"), "two or more"),
    (lambda: data.load("digits", size=3), "8 × 8: not divisible"),
    (lambda: data.held_out(data.sphere(3, 2)), "no source"),
    (lambda: data.held_out(data.load("faces", samples=100)), "no other images"),
    (lambda: data.from_arrays(EYE, np.ones(3)), "2 samples but 3 targets"),
    (lambda: data.from_arrays(EYE, np.array(["a", "b"])), "y holds"),
    (lambda: data.from_arrays(EYE * 1j, TWO), "x holds complex"),
    (lambda: data.from_arrays(np.full((2, 2), np.nan), TWO), "x holds a value"),
    (lambda: data.from_arrays(EYE, np.array([1.0, np.inf])), "y holds a value"),
    (lambda: data.from_arrays(np.ones(3), np.ones(3)), "expected x"),
    (lambda: data.from_arrays(EYE, np.ones((2, 1, 1))), "expected x"),
    (lambda: data.from_arrays(np.zeros((0, 3)), np.zeros(0)), "neither empty"),
    (lambda: data.from_arrays(np.ones((2, 5, 5, 2)), TWO), "1, 3 or 4 channels"),
    (lambda: data.from_arrays(np.full((2, 3), 0.1), TWO), "pixels of custom are equal"),
    (lambda: data.from_arrays(np.array([[0.5, 0.5], [0.0, 1.0]]), TWO), "sample 0 .* is zero"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_refused(
    call: Callable[[], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "pip" in words:
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=words):
        call()
