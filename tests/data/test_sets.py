"""Sets by name and of one's own: what is drawn, held out, kept private, written, and refused."""

import json
import math
import os
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from exhume import data
from exhume.data import Data, Transform
from exhume.equation.pixels import Pixels
from exhume.errors import InputError
from problems import gaussian, pictures, refusals

SHAPES = [(4, 6, 5, 3), (4, 3, 6, 5), (4, 6, 5, 1), (4, 1, 6, 5), (4, 6, 5), (4, 30)]
BUNDLED = {"digits": (8, 8), "faces": (25, 25), "photos": (3, 32, 32)}
bundled = pytest.mark.parametrize("name", BUNDLED)


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


def test_images_are_shrunk_by_averaging_squares_and_every_one_is_drawn_once(monkeypatch) -> None:
    for name, size, shape in (("digits", 4, (4, 4)), ("photos", 8, (3, 8, 8))):
        whole, small = (data.load(name, 6, normalise=False, size=s) for s in (None, size))
        means = torch.nn.functional.avg_pool2d(whole.images(), whole.shape[-1] // size)
        torch.testing.assert_close(small.images(), means)
        assert small.shape == data.held_out(small).shape == shape
        assert data.load(name, 6, size=whole.shape[-1]).inputs.equal(data.load(name, 6).inputs)
    drawn = data.load("photos", 520)
    assert distinct(drawn.images()) == 520 and drawn.targets.sum() == 0
    photo = pytest.importorskip("sklearn.datasets").load_sample_images().images[1]
    tile = torch.from_numpy(photo[32:64, 96:128].transpose(2, 0, 1) / 255.0)
    assert (drawn.images() - tile).flatten(1).norm(dim=1).min() < 1e-9
    with monkeypatch.context() as without, pytest.raises(InputError, match="install scikit-learn"):
        without.setitem(sys.modules, "sklearn.datasets", None)
        data.load("digits")


def test_labels_belong_to_their_images() -> None:
    turns = [[-1.0], [1.0], [-1.0], [1.0], [-1.0]]
    for classes, labels, targets in (
        ((8, 3), [8, 3, 8, 3, 8], turns),
        ((1, 2, 3), [1, 2, 3, 1, 2], torch.eye(3).repeat(2, 1)[:5].tolist()),
        ("all", [0, 1, 2, 3, 4], torch.eye(10)[:5].tolist()),
        ("parity", [0, 1, 0, 1, 0], turns),
    ):
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_own_images(shape: tuple[int, ...]) -> None:
    images = pictures(*shape)
    expected = images.transpose(0, 3, 1, 2) if shape[3:] in ((1,), (3,)) else images
    expected = expected[:, 0] if expected.shape[1] == 1 else expected
    pixels = torch.from_numpy(expected / 255.0)
    for given_images in (images, torch.from_numpy(images)):
        own = data.from_arrays(given_images, np.arange(4))
        torch.testing.assert_close(own.images(), pixels)
        assert own.targets[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_own_rows_as_they_are_and_copied() -> None:
    plain = partial(data.from_arrays, normalise=False, standardise=False)
    rows, array = torch.randn(3, 7, requires_grad=True, dtype=torch.bfloat16), np.eye(2)
    own, copied = plain(rows, torch.eye(3), name="mine"), plain(array, array)
    assert own.inputs.equal(rows.detach().double()) and own.images().equal(own.inputs)
    assert (own.name, own.outputs, own.inputs.requires_grad) == ("mine", 3, False)
    array[:] = 7.0
    assert copied.inputs.tolist() == copied.targets.tolist() == [[1.0, 0.0], [0.0, 1.0]]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 3), st.floats(-1, 1), st.floats(0.1, 10), st.booleans())
def test_undo_inverts_apply(seed, channels, shift, scale, normalise) -> None:
    pixels, size = gaussian(3, 4 * channels, seed=seed), 4 * channels
    norms = gaussian(3, seed=seed).abs() + 0.1 if normalise else None
    factors = 1.0 if norms is None else math.sqrt(size) / norms[:, None]
    mean = torch.arange(float(size)).double()
    shifts, scales = (tuple(level + c for c in range(channels)) for level in (shift, scale))
    for transform, rows, left in (
        (Transform(shift, scale), pixels, shift),
        (Transform(shifts, scale), pixels, shifts),
        (Transform(shifts, scales), pixels, shifts),
        (Transform(2.5, scales, mean=mean), pixels - mean, 0.0),
    ):
        inputs = transform.apply(pixels, norms)
        torch.testing.assert_close(transform.undo(inputs, norms), pixels)
        plain = Pixels(left, transform.scale).to_inputs(rows)
        torch.testing.assert_close(inputs, plain * factors)
    kept = Transform(0.5, 2.0, norms=torch.tensor([7.0]))  # used only if handed over
    assert kept.undo(torch.tensor([[1.0, 0.0]])).tolist() == [[2.5, 0.5]]


def test_a_card_goes_through_json_without_what_is_private() -> None:
    plain, secret = {"shift": 0.5, "scale": 1.0}, torch.full((3072,), 3.25)
    for transform, card in (
        (Transform(0.5), plain),
        (Transform((0.1, 0.2), 0.2), {"shift": [0.1, 0.2], "scale": 0.2}),
        (Transform(0.5, norms=secret), plain),
        (Transform(0.5, mean=secret), {**plain, "centre": "pixels"}),
    ):
        written = json.dumps(transform.card())
        assert json.loads(written) == card and "3.25" not in written + repr(transform)


def test_images_of_candidates() -> None:
    truth = data.load("faces", samples=3)
    candidates = truth.inputs[:2].float()
    known, unknown = truth.images(candidates, truth.transform.norms[:2]), truth.images(candidates)
    torch.testing.assert_close(known, truth.images()[:2].float())
    torch.testing.assert_close(unknown.flatten(1), truth.display.to_pixels(candidates))
    assert unknown.shape == (2, 25, 25) and type(truth.display) is Pixels  # nothing private
    assert data.sphere(3, 2).display is None and "tensor" not in repr(truth)


def changed(**changes: Any) -> Data:
    good = {"inputs": torch.ones(2, 4).double(), "targets": torch.ones(2, 1).double()}
    return Data(**{**good, "shape": (2, 2)} | changes)


ROW = torch.zeros(1, 4)
NAN = torch.full((2, 4), math.nan, dtype=torch.float64)
VIEW = gaussian(4, 3).T
CHANNELS = Data(VIEW, VIEW[:, :1], (2, 2), transform=Transform((0.1, 0.2), (0.3, 0.4)))


@pytest.mark.parametrize("how", [{}, {"normalise": False}, {"centre": "pixels"}, None], ids=str)
def test_save_and_read(how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = CHANNELS if how is None else data.load("digits", 5, **how)
    path = tmp_path / "new" / "set.safetensors"
    data.save(before, path)
    after = data.read(path)
    assert after.inputs.equal(before.inputs) and after.targets.equal(before.targets)
    assert after.images().equal(before.images())
    assert after.images(before.inputs[:2]).equal(before.images(before.inputs[:2]))
    for word in ("shape", "name", "transform"):
        assert getattr(after, word) == getattr(before, word)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("disk full")))
    with pytest.raises(InputError, match="disk full"):  # it appears whole or not at all
        data.save(data.sphere(4, 2), path)
    assert path.read_bytes() == content and os.listdir(path.parent) == [path.name]
    for damaged in (b"", content[:4], content[:50], content[:-1], b"text" * 9):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"set.safetensors"):
            data.read(path)
    path.unlink()
    with pytest.raises(InputError, match=r"set.safetensors: no such file"):
        data.read(path)


def test_read_refuses_other_files(tmp_path: Path) -> None:
    path, whole = tmp_path / "set.safetensors", {"name": "x", "shape": "[3]"}
    whole |= {"transform": '{"shift": 0, "scale": 1}', "inputs": torch.ones(2, 3).double()}
    for changes, words in (
        *(({key: None}, f"no '{key}'") for key in ("inputs", "targets", "name", "transform")),
        ({"transform": "{"}, "cannot be read"),
        ({"transform": "{}"}, "no 'shift'"),
        ({"transform": '{"shift": "a", "scale": 1}'}, "shift: expected"),
        ({"shape": "7"}, "cannot be read"),
        ({"shape": "[7]"}, "does not hold 3"),
        ({"inputs": NAN[:, :3].clone()}, "not finite"),
        ({"norms": torch.ones(5)}, "5 norms"),
        ({"transform": '{"shift": 0, "scale": 1, "centre": "pixels"}'}, "no 'mean'"),
    ):
        parts = whole | {"targets": torch.ones(2, 1).double()} | changes
        tensors = {key: value for key, value in parts.items() if isinstance(value, Tensor)}
        metadata = {key: value for key, value in parts.items() if isinstance(value, str)}
        save_file(tensors, path, metadata)
        with pytest.raises(InputError, match=f"{path}.*{words}"):
            data.read(path)


EYE, TWO, SPHERE = np.eye(2), np.ones(2), {"dim": 2, "samples": 2}
BAD = {"dim": 0, "samples": 0, "seed": -1, "noise": -1.0, "rank": 3}
test_what_is_refused = refusals(
    (lambda: Transform(scale=0.0), "scale"),
    *((partial(Transform, norms=bad), "norms must be") for bad in (torch.zeros(1), torch.eye(2))),
    *((partial(Transform, mean=bad), "mean image must be") for bad in (NAN[0], torch.eye(2))),
    (lambda: Transform((0.0, 0.0, 0.0)).apply(ROW), "3 channels"),
    (lambda: Transform().undo(ROW, torch.ones(2)), "1 rows but 2 norms"),
    (lambda: Transform(mean=torch.zeros(3)).undo(ROW), "4 numbers, mean image of 3"),
    (lambda: changed(inputs=NAN), "not finite"),
    (lambda: changed(targets=torch.full((2, 1), math.inf).double()), "not finite"),
    (lambda: changed(targets=torch.zeros(3, 1).double()), "2 samples but 3 targets"),
    (lambda: changed(targets=torch.zeros(2).double()), "targets of custom"),
    (lambda: changed(inputs=torch.zeros(0, 4).double()), "at least one row"),
    (lambda: changed(inputs=torch.zeros(2, 4)), "float32"),
    *((partial(changed, shape=bad), "does not hold 4") for bad in ((3,), (-2, -2))),
    (lambda: changed(transform=Transform(norms=torch.ones(3))), "3 norms"),
    (lambda: changed(transform=Transform((0.0, 0.0, 0.0))), "3 channels"),
    (lambda: changed(transform=Transform(mean=torch.zeros(2))), "mean image of 2 numbers"),
    (lambda: changed().images(torch.ones(2, 3)), r"expected \(k, 4\)"),
    *((partial(data.sphere, **SPHERE | {word: bad}), word) for word, bad in BAD.items()),
    (lambda: data.load("imagenet"), "there are digits, faces"),
    (lambda: data.load("digits", 0), "samples: expected"),
    (lambda: data.load("digits", classes=(1, 1)), "two or more different"),
    (lambda: data.load("digits", classes=(1, 11)), "no images with label 11"),
    (lambda: data.load("digits", classes="odd"), "parity"),
    (lambda: data.load("digits", 400, classes=(8, 0)), "348 in 2 equal parts"),
    (lambda: data.load("faces", 101), "101 samples .* 100"),
    (lambda: data.load("faces", classes="all"), "no classes"),
    (lambda: data.load("digits", classes="vehicles"), "for cifar10, not for digits"),
    (lambda: data.load("digits", centre="image"), "centre: expected"),
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
)
