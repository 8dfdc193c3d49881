"""Data sets: what is drawn, what is remembered, what is refused."""

import gzip
import json
import math
import os
import pickle
import stat
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from exhume import data
from exhume.data import Data, Transform
from exhume.errors import InputError

REAL = Path(__file__).parents[3] / "shared" / "data"
BUNDLED = {"digits": (8, 8), "faces": (25, 25), "photos": (3, 32, 32)}


def pictures(count: int, *shape: int) -> NDArray[np.uint8]:
    """Random images 0..255."""
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def rows_of(images: NDArray[np.uint8]) -> Tensor:
    """What `Data.images` should give for images (n, ...) that have channels first already."""
    return torch.from_numpy(images / 255.0)


# Transform


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    samples=st.integers(1, 4),
    channels=st.integers(1, 3),
    shift=st.floats(-1, 1),
    scale=st.floats(0.1, 10),
    normalise=st.booleans(),
)
def test_undo_inverts_apply(
    seed: int, samples: int, channels: int, shift: float, scale: float, normalise: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(samples, 4 * channels, generator=generator, dtype=torch.float64)
    norms = torch.rand(samples, generator=generator, dtype=torch.float64) + 0.1
    shifts = tuple(shift + channel for channel in range(channels))
    scales = tuple(scale + channel for channel in range(channels))
    for transform in (Transform(shift, scale), Transform(shifts, scale), Transform(shifts, scales)):
        given_norms = norms if normalise else None
        inputs = transform.apply(pixels, given_norms)
        torch.testing.assert_close(transform.undo(inputs, given_norms), pixels)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), samples=st.integers(1, 4), normalise=st.booleans())
def test_mean_image_takes_the_place_of_the_shift(seed: int, samples: int, normalise: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    pixels, mean = torch.rand(samples, 6, generator=generator).double(), torch.arange(6.0).double()
    norms = pixels.sum(1) + 0.1 if normalise else None
    transform = Transform(2.5, 2.0, mean=mean)
    inputs = transform.apply(pixels, norms)
    torch.testing.assert_close(inputs, Transform(0.0, 2.0).apply(pixels - mean, norms))
    torch.testing.assert_close(transform.undo(inputs, norms), pixels)


def test_channels_are_blocks_of_a_row() -> None:
    pixels = torch.tensor([[1.0, 1.0, 5.0, 5.0]])
    assert Transform((1.0, 3.0), (1.0, 2.0)).apply(pixels).tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_norms_rescale_to_the_root_of_the_dimension() -> None:
    pixels = torch.tensor([[3.0, 4.0, 0.0, 0.0]])
    assert Transform().apply(pixels, torch.tensor([5.0])).norm().item() == pytest.approx(2.0)


def test_undo_without_norms_has_factor_one() -> None:
    transform = Transform(0.5, 2.0, norms=torch.tensor([7.0]))
    assert transform.undo(torch.tensor([[1.0, 0.0]])).tolist() == [[2.5, 0.5]]


@pytest.mark.parametrize("transform", [Transform(0.5, 0.2), Transform((0.1, 0.2, 0.3), 0.2)])
def test_card_goes_through_json_without_the_norms(transform: Transform) -> None:
    private = Transform(transform.shift, transform.scale, norms=torch.tensor([3.25]))
    card = json.loads(json.dumps(private.card()))
    assert set(card) == {"shift", "scale"}
    assert Transform.from_card(card) == transform
    assert Transform.from_card(card).norms is None
    assert "3.25" not in repr(private)


def test_card_says_that_there_is_a_mean_image_and_not_which() -> None:
    transform = Transform(0.5, mean=torch.full((3072,), 0.625))
    card = json.dumps(transform.card())
    assert json.loads(card) == {"shift": 0.5, "scale": 1.0, "centre": "pixels"}
    assert Transform.from_card(json.loads(card)).mean is None
    assert "0.625" not in card + repr(transform)


@pytest.mark.parametrize("card", [{}, {"shift": 0.0}, {"shift": "a", "scale": 1.0}])
def test_bad_card(card: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="shift and scale"):
        Transform.from_card(card)


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": 0.0},
        {"scale": -1.0},
        {"shift": math.nan},
        {"shift": ()},
        {"shift": (0.0, 0.0), "scale": (1.0, 1.0, 1.0)},
        {"norms": torch.tensor([0.0])},
        {"norms": torch.ones(2, 2)},
        {"mean": torch.ones(2, 2)},
        {"mean": torch.tensor([math.nan])},
    ],
)
def test_bad_transform(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Transform(**arguments)


def test_transform_that_does_not_fit_the_rows() -> None:
    with pytest.raises(InputError, match="3 channels"):
        Transform((0.0, 0.0, 0.0)).apply(torch.zeros(1, 4))
    with pytest.raises(InputError, match="1 rows but 2 norms"):
        Transform().undo(torch.zeros(1, 4), torch.ones(2))
    with pytest.raises(InputError, match="4 numbers, but a mean image of 3"):
        Transform(mean=torch.zeros(3)).undo(torch.zeros(1, 4))


# Data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": torch.full((2, 4), math.nan, dtype=torch.float64)}, "not finite"),
        ({"targets": torch.full((2, 1), math.inf, dtype=torch.float64)}, "not finite"),
        ({"targets": torch.zeros(3, 1, dtype=torch.float64)}, "2 samples but 3 targets"),
        ({"targets": torch.zeros(2, dtype=torch.float64)}, "targets of custom"),
        ({"inputs": torch.zeros(0, 4, dtype=torch.float64)}, "at least one row"),
        ({"inputs": torch.zeros(2, 4)}, "float32"),
        ({"shape": (3,)}, "does not hold 4"),
        ({"shape": (-2, -2)}, "does not hold 4"),
        ({"shape": ()}, "does not hold 4"),
        ({"transform": Transform(norms=torch.ones(3))}, "3 norms"),
        ({"transform": Transform((0.0, 0.0, 0.0))}, "3 channels"),
        ({"transform": Transform(mean=torch.zeros(2))}, "mean image of 2 numbers"),
    ],
)
def test_bad_data(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "inputs": torch.ones(2, 4, dtype=torch.float64),
        "targets": torch.ones(2, 1, dtype=torch.float64),
        "shape": (2, 2),
    }
    assert Data(**good).dim == 4
    with pytest.raises(InputError, match=message):
        Data(**good | changes)


def test_images_of_candidates() -> None:
    truth = data.load("faces", samples=3)
    assert truth.transform.norms is not None
    candidates = truth.inputs[:2].float()
    known = truth.images(candidates, truth.transform.norms[:2])
    assert known.dtype == torch.float32
    torch.testing.assert_close(known, truth.images()[:2].float())
    unknown = truth.images(candidates)
    assert unknown.shape == (2, 25, 25)
    assert isinstance(truth.transform.scale, float)
    assert isinstance(truth.transform.shift, float)
    pixels = candidates * truth.transform.scale + truth.transform.shift
    torch.testing.assert_close(unknown.flatten(1), pixels)
    with pytest.raises(InputError, match=r"expected \(k, 625\)"):
        truth.images(candidates[:, 1:])


def test_printing_does_not_show_samples() -> None:
    assert "tensor" not in repr(data.sphere(3, 2))


# Synthetic


@settings(deadline=None)
@given(dim=st.integers(1, 30), samples=st.integers(1, 10), seed=st.integers(0, 99))
def test_sphere_rows_have_norm_root_d(dim: int, samples: int, seed: int) -> None:
    drawn = data.sphere(dim, samples, seed)
    assert (drawn.dim, drawn.samples, drawn.outputs, drawn.shape) == (dim, samples, 1, (dim,))
    torch.testing.assert_close(
        drawn.inputs.norm(dim=1), torch.full((samples,), math.sqrt(dim), dtype=torch.float64)
    )
    assert drawn.inputs.equal(data.sphere(dim, samples, seed).inputs)


def test_sphere_targets_are_linear_without_noise() -> None:
    clean, noisy = data.sphere(10, 400, noise=0.0), data.sphere(10, 400, noise=0.5)
    fit = torch.linalg.lstsq(clean.inputs, clean.targets).solution
    torch.testing.assert_close(clean.inputs @ fit, clean.targets)
    assert (noisy.targets - clean.targets).std().item() == pytest.approx(0.5, rel=0.15)
    assert clean.inputs.equal(noisy.inputs)


def test_sphere_is_the_same_everywhere() -> None:
    first = data.sphere(100, 20, seed=0).inputs[0, :3].tolist()
    assert first == pytest.approx([0.13021722, -0.13681936, 0.66327776], abs=1e-7)


@pytest.mark.parametrize(
    "arguments",
    [{"dim": 0}, {"samples": 0}, {"samples": -1}, {"noise": -1.0}, {"noise": math.nan}],
)
def test_bad_sphere(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(arguments))):
        data.sphere(**{"dim": 2, "samples": 2} | arguments)


# Bundled


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("normalise", [True, False])
def test_bundled(name: str, normalise: bool) -> None:
    drawn = data.load(name, samples=12, seed=3, normalise=normalise)
    assert drawn.shape == BUNDLED[name]
    assert (drawn.samples, drawn.name) == (12, name)
    images = drawn.images()
    assert images.shape == (12, *drawn.shape)
    assert images.min() >= -1e-12
    assert 0.5 < images.max() <= 1 + 1e-12
    assert drawn.transform.shift == pytest.approx(images.mean().item())
    assert drawn.transform.scale == pytest.approx(images.std(correction=0).item())
    if normalise:
        root = torch.full((12,), math.sqrt(drawn.dim), dtype=torch.float64)
        torch.testing.assert_close(drawn.inputs.norm(dim=1), root)
    else:
        assert drawn.transform.norms is None
        assert drawn.inputs.mean().item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", BUNDLED)
def test_mean_image_is_subtracted(name: str) -> None:
    drawn = data.load(name, samples=12, seed=3, centre="pixels")
    plain = data.load(name, samples=12, seed=3)
    torch.testing.assert_close(drawn.images(), plain.images())
    pixels = plain.images().flatten(1)
    torch.testing.assert_close(drawn.inputs, pixels - pixels.mean(0))
    assert drawn.inputs.abs().max() <= 1
    assert drawn.transform.norms is None
    assert drawn.transform.shift == pytest.approx(pixels.mean().item())
    rescaled = data.load(name, samples=12, seed=3, centre="pixels", normalise=True)
    torch.testing.assert_close(
        rescaled.inputs.norm(dim=1), torch.full((12,), math.sqrt(drawn.dim)).double()
    )
    torch.testing.assert_close(rescaled.images(), plain.images())


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("centre", ["all", "pixels"])
def test_held_out_are_other_images_of_the_same_kind(name: str, centre: Any) -> None:
    known = data.load(name, samples=20, centre=centre)
    other, again, seeded = (data.held_out(known, seed=seed) for seed in (0, 0, 1))
    assert (other.samples, other.shape, other.name) == (20, known.shape, name)
    assert other.targets.equal(known.targets)
    assert other.inputs.equal(again.inputs)
    assert not other.inputs.equal(seeded.inputs)
    images = other.images().flatten(1)
    assert torch.cdist(images, known.images().flatten(1)).min() > 1e-3
    assert (images.min() >= -1e-9) & (images.max() <= 1 + 1e-9)
    torch.testing.assert_close(known.transform.apply(images, other.transform.norms), other.inputs)


def test_held_out_have_the_labels_of_the_set() -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    labels = {tuple(row): int(y) for row, y in zip(digits.data, digits.target, strict=True)}
    other = data.held_out(data.load("digits", 6, classes=(8, 3)), samples=9)
    found = [labels[tuple(row)] for row in other.images().flatten(1).mul(16).round().tolist()]
    assert found == [8, 3] * 4 + [8]


def test_held_out_are_at_most_what_is_left() -> None:
    known = data.load("faces", samples=97)
    left = data.held_out(known, samples=10).images()
    assert len(left) == 3
    everything = torch.cat([known.images(), left]).flatten(1)
    assert len({tuple(row) for row in everything.mul(1e6).round().tolist()}) == 100
    with pytest.raises(InputError, match="no other images"):
        data.held_out(data.load("faces", samples=100))


def test_held_out_leaves_out_doubles(tmp_path: Path) -> None:
    images = pictures(8, 4, 4)
    images[5] = images[0]
    np.savez(tmp_path / "mnist.npz", x=images, y=np.zeros(8, np.int64))
    known = data.load("mnist", 2, classes="random", normalise=False, root=tmp_path)
    torch.testing.assert_close(known.images(), rows_of(images[:2]))
    other = data.held_out(known, samples=9, root=tmp_path).images()
    assert {tuple(row) for row in other.flatten(1).mul(255).round().int().tolist()} == {
        tuple(row) for row in images[[2, 3, 4, 6, 7]].reshape(5, -1).tolist()
    }


def test_held_out_needs_the_source(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no source"):
        data.held_out(data.sphere(3, 2))
    np.savez(tmp_path / "mnist.npz", x=pictures(8, 4, 4), y=np.arange(8) % 2)
    known = data.load("mnist", 2, normalise=False, root=tmp_path)
    np.savez(tmp_path / "mnist.npz", x=pictures(9, 4, 4), y=np.arange(9) % 2)
    with pytest.raises(InputError, match="2 of 2 images are not in mnist"):
        data.held_out(known, root=tmp_path)
    np.savez(tmp_path / "mnist.npz", x=pictures(9, 5, 5), y=np.arange(9) % 2)
    with pytest.raises(InputError, match="25 numbers, but these have 16"):
        data.held_out(known, root=tmp_path)


@pytest.mark.parametrize("name", BUNDLED)
def test_seed_decides_and_a_prefix_stays(name: str) -> None:
    first, again, other = (data.load(name, 10, seed=seed) for seed in (0, 0, 1))
    assert first.inputs.equal(again.inputs)
    assert first.targets.equal(again.targets)
    assert not torch.allclose(first.images(), other.images())
    torch.testing.assert_close(data.load(name, 20, seed=0).images()[:10], first.images())


@pytest.mark.parametrize(("name", "most"), [("faces", 100), ("photos", 520)])
def test_every_image_is_drawn_once(name: str, most: int) -> None:
    drawn = data.load(name, most)
    assert len({tuple(row) for row in drawn.images().flatten(1).tolist()}) == most
    assert drawn.targets.sum() == 0
    with pytest.raises(InputError, match=f"{most + 1} samples .* only {most}"):
        data.load(name, most + 1)


def test_photos_are_tiles() -> None:
    photo = pytest.importorskip("sklearn.datasets").load_sample_images().images[1]
    tile = rows_of(photo[32:64, 96:128].transpose(2, 0, 1))
    distances = (data.load("photos", 520).images() - tile).flatten(1).norm(dim=1)
    assert distances.min() < 1e-9


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match="pip install scikit-learn"):
        data.load("digits")


def test_digits_classes() -> None:
    drawn = data.load("digits", samples=25)
    assert drawn.targets.shape == (25, 10)
    assert drawn.targets.sum(0).tolist() == [3.0] * 5 + [2.0] * 5
    assert data.load("digits", 6, classes=(1, 2, 3)).targets[:3].equal(torch.eye(3).double())
    pair = data.load("digits", samples=5, classes=(8, 3))
    assert pair.targets[:, 0].tolist() == [-1.0, 1.0, -1.0, 1.0, -1.0]
    assert data.load("digits", 4, classes="random").targets.sum() == 0
    with pytest.raises(InputError, match="only 348 in equal parts from 2"):
        data.load("digits", samples=400, classes=(8, 0))


@pytest.mark.parametrize("classes", [(8, 3), "parity", "all"])
def test_labels_belong_to_their_images(classes: Any) -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    labels = {tuple(row): int(y) for row, y in zip(digits.data, digits.target, strict=True)}
    drawn = data.load("digits", 20, classes=classes)
    found = [labels[tuple(row)] for row in drawn.images().flatten(1).mul(16).round().tolist()]
    if classes == "all":
        assert found == list(range(10)) * 2
    elif classes == "parity":
        assert [y % 2 for y in found] == [0, 1] * 10
    else:
        assert found == [8, 3] * 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "imagenet"}, "there are digits, faces"),
        ({"name": "digits", "samples": 0}, "samples: expected"),
        ({"name": "digits", "classes": (1,)}, "two or more different"),
        ({"name": "digits", "classes": (1, 1)}, "two or more different"),
        ({"name": "digits", "classes": (1, 11)}, "no images with label 11"),
        ({"name": "digits", "classes": "odd"}, "parity"),
        ({"name": "faces", "classes": "all"}, "no classes"),
        ({"name": "photos", "classes": (0, 1)}, "no classes"),
        ({"name": "digits", "classes": "vehicles"}, "for cifar10, not for digits"),
        ({"name": "digits", "centre": "image"}, "centre: expected"),
        ({"name": "digits", "samples": 1, "centre": "pixels"}, "two or more"),
    ],
)
def test_bad_load(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        data.load(**arguments)


# Folders

LABELS = np.array([6, 9, 0, 6, 9, 9, 6, 1])  # frogs at 0, 3, 6; trucks at 1, 4, 5
IN_TURNS = [0, 1, 3, 4]


def write_cifar_binary(root: Path, images: NDArray[np.uint8]) -> None:
    """Two batches, records of label and planes."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    records = np.concatenate([LABELS[:, None].astype(np.uint8), images.reshape(8, -1)], axis=1)
    (folder / "data_batch_1.bin").write_bytes(records[:3].tobytes())
    (folder / "data_batch_2.bin").write_bytes(records[3:].tobytes())


def write_cifar_python(root: Path, images: NDArray[np.uint8]) -> None:
    """One batch by Python 3's pickle and one by Python 2's, opcode by opcode, as published."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    first = {b"data": images[:3].reshape(3, -1), b"labels": LABELS[:3].tolist()}
    (folder / "data_batch_1").write_bytes(pickle.dumps(first, protocol=2))
    raw = images[3:].tobytes()
    second = b"".join(
        [
            b"\x80\x02}(U\x0bbatch_labelU\x15training batch 2 of 5U\x06labels](",
            *(b"K" + bytes([label]) for label in LABELS[3:]),
            b"eU\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR",
            b"(K\x01(K\x05M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tbu.",
        ]
    )
    (folder / "data_batch_2").write_bytes(second)


def write_cifar_arrays(root: Path, images: NDArray[np.uint8]) -> None:
    """Channels last, beside arrays that are not needed."""
    np.savez(root / "cifar10.npz", x=images.transpose(0, 2, 3, 1), y=LABELS, index=LABELS)


@pytest.mark.parametrize("write", [write_cifar_binary, write_cifar_python, write_cifar_arrays])
def test_cifar(write: Any, tmp_path: Path) -> None:
    images = pictures(8, 3, 32, 32)
    write(tmp_path, images)
    drawn = data.load("cifar10", samples=4, normalise=False, root=tmp_path)
    assert drawn.shape == (3, 32, 32)
    torch.testing.assert_close(drawn.images(), rows_of(images[IN_TURNS]))
    assert drawn.targets[:, 0].tolist() == [-1.0, 1.0, -1.0, 1.0]
    everything = data.load("cifar10", samples=4, classes="all", root=tmp_path)
    torch.testing.assert_close(everything.images(), rows_of(images[[2, 7, 0, 1]]))
    assert everything.targets.equal(torch.eye(4, dtype=torch.float64))
    sides = data.load("cifar10", samples=4, classes="vehicles", root=tmp_path)
    torch.testing.assert_close(sides.images(), rows_of(images[[0, 1, 3, 2]]))
    assert sides.targets[:, 0].tolist() == [-1.0, 1.0, -1.0, 1.0]  # animal, vehicle


def test_other_seeds_draw(tmp_path: Path) -> None:
    images = pictures(8, 3, 32, 32)
    write_cifar_binary(tmp_path, images)
    draws = [data.load("cifar10", 4, seed=seed, root=tmp_path).images() for seed in range(6)]
    torch.testing.assert_close(draws[0], rows_of(images[IN_TURNS]))
    assert any(not torch.allclose(draw, draws[0]) for draw in draws[1:])


def test_published_files_come_before_arrays(tmp_path: Path) -> None:
    images = pictures(8, 3, 32, 32)
    write_cifar_binary(tmp_path, images)
    write_cifar_arrays(tmp_path, 255 - images)
    drawn = data.load("cifar10", 4, root=tmp_path)
    torch.testing.assert_close(drawn.images(), rows_of(images[IN_TURNS]))


class Hostile:
    """Leaves a mark if it is ever unpickled for real."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def test_hostile_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "cifar-10-batches-py", tmp_path / "mark"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": Hostile(mark)}, protocol=2))
    with pytest.raises(InputError, match=r"mkdir, which could run code.*binary version"):
        data.load("cifar10", root=tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1, 2], protocol=2),
        pickle.dumps({b"data": b"abc", b"labels": []}, protocol=2),
        pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [6]}, protocol=2),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [6]}, protocol=2),
        pickle.dumps({b"data": np.zeros((0, 3072), np.uint8), b"labels": []}, protocol=2),
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [6]}, protocol=2)[:-99],
        pickle.dumps({b"data": np.array([[os]], object).shape, b"labels": [6]}, protocol=2),
    ],
)
def test_broken_pickle(content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(content)
    with pytest.raises(InputError, match="cifar-10-batches-py"):
        data.load("cifar10", root=tmp_path)


def test_broken_cifar_binary(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(bytes(3072))
    with pytest.raises(InputError, match=r"data_batch_1.bin is cut short"):
        data.load("cifar10", root=tmp_path)
    (folder / "data_batch_1.bin").write_bytes(bytes([200]) + bytes(3072))
    with pytest.raises(InputError, match="not CIFAR-10"):
        data.load("cifar10", root=tmp_path)


def write_idx(folder: Path, images: NDArray[np.uint8], labels: list[int], suffix: str) -> None:
    """Images and labels as MNIST has them."""
    folder.mkdir(parents=True)
    header = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape)
    parts = {
        "train-images-idx3-ubyte": header + images.tobytes(),
        "train-labels-idx1-ubyte": struct.pack(">4BI", 0, 0, 8, 1, len(labels)) + bytes(labels),
    }
    for name, raw in parts.items():
        (folder / (name + suffix)).write_bytes(gzip.compress(raw) if suffix else raw)


@pytest.mark.parametrize(
    ("folder", "suffix"), [("mnist", ".gz"), ("mnist", ""), ("MNIST/raw", ".gz")]
)
def test_mnist(folder: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(5, 28, 28)
    write_idx(tmp_path / folder, images, [5, 0, 4, 1, 9], suffix)
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    drawn = data.load("mnist", samples=4)
    assert drawn.shape == (28, 28)
    torch.testing.assert_close(drawn.images(), rows_of(images[[1, 0, 2, 3]]))
    assert drawn.targets[:, 0].tolist() == [-1.0, 1.0, -1.0, 1.0]  # even, odd
    with pytest.raises(InputError, match="has only 4 in equal parts"):
        data.load("mnist", samples=6)


def test_fashion_mnist_is_one_hot(tmp_path: Path) -> None:
    write_idx(tmp_path / "FashionMNIST/raw", pictures(6, 28, 28), [0, 1, 2, 0, 1, 2], ".gz")
    drawn = data.load("fashion_mnist", samples=6, root=tmp_path)
    assert drawn.targets.equal(torch.eye(3, dtype=torch.float64).repeat(2, 1))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"", "not an IDX file"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\3" + bytes(12), "not an IDX file"),
        ("train-images-idx3-ubyte", struct.pack(">4B3I", 0, 0, 8, 3, 2, 28, 28), "cut short"),
        ("train-labels-idx1-ubyte", struct.pack(">4BI", 0, 0, 8, 1, 1) + b"\1", "1 labels"),
        ("train-images-idx3-ubyte.gz", b"no gzip", "damaged"),
        ("train-images-idx3-ubyte.gz", gzip.compress(bytes(99), mtime=0)[:-9], "damaged"),
    ],
)
def test_broken_idx(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    write_idx(folder, pictures(2, 28, 28), [0, 1], Path(name).suffix)
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        data.load("mnist", samples=2, root=tmp_path)


def test_tiny_imagenet_decodes_only_what_is_drawn(tmp_path: Path) -> None:
    from PIL import Image

    images = np.repeat(np.arange(6, dtype=np.uint8) * 40, 64 * 64 * 3).reshape(6, 64, 64, 3)
    train = tmp_path / "tiny-imagenet-200" / "train"
    for i, image in enumerate(images):
        folder = train / ("n02", "n01", "n03")[i % 3] / "images"
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image)
        (picture.convert("L") if i == 4 else picture).save(folder / f"{i}.JPEG", quality=100)
    (train / "n03" / "images" / "2.JPEG").write_bytes(b"no picture")
    drawn = data.load("tiny_imagenet", samples=4, root=tmp_path)  # n01: 1, 4; n02: 0, 3
    assert drawn.shape == (3, 64, 64)
    levels = drawn.images().mean((1, 2, 3)).mul(255)
    torch.testing.assert_close(
        levels, torch.tensor([40.0, 160.0, 0.0, 120.0]).double(), atol=1.5, rtol=0
    )
    assert drawn.targets.sum() == 0
    pair = data.load("tiny_imagenet", samples=2, classes=(0, 1), root=tmp_path)
    assert pair.targets[:, 0].tolist() == [-1.0, 1.0]
    with pytest.raises(InputError, match=r"2.JPEG cannot be decoded"):
        data.load("tiny_imagenet", samples=2, classes=(0, 2), root=tmp_path)
    Image.fromarray(images[0, :32]).save(train / "n03" / "images" / "2.JPEG")
    with pytest.raises(InputError, match=r"2.JPEG has shape \(32, 64, 3\)"):
        data.load("tiny_imagenet", samples=2, classes=(0, 2), root=tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": pictures(2, 4, 4)}, "arrays x and y"),
        ({"x": pictures(2, 4, 4), "y": np.array([0, 1, 2])}, "expected 2 integers"),
        ({"x": pictures(2, 4, 4), "y": np.array([0.0, 1.0])}, "expected 2 integers"),
        ({"x": pictures(2, 4, 4) / 255.0, "y": np.array([0, 1])}, "expected uint8"),
        ({"x": pictures(2, 16), "y": np.array([0, 1])}, "expected uint8"),
        ({"x": pictures(2, 5, 5, 2), "y": np.array([0, 1])}, "1, 3 or 4 channels"),
        ({"x": pictures(2, 4, 4), "y": np.array([0, None])}, "arrays x and y"),
    ],
)
def test_bad_arrays_file(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", **arrays)
    with pytest.raises(InputError, match=message):
        data.load("mnist", samples=2, root=tmp_path)


def test_broken_arrays_file(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez(path, x=pictures(2, 4, 4), y=np.array([0, 1]))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[150] ^= 255
    for content in (b"", b"text", whole[:100], whole[:-10], bytes(damaged), pickle.dumps({})):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"mnist.npz"):
            data.load("mnist", samples=2, root=tmp_path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(InputError, match=r"mnist.npz"):
        data.load("mnist", samples=2, root=tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "mnist", "fashion_mnist", "tiny_imagenet"])
def test_missing_files_are_listed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = {
        "cifar10": ["cifar-10-batches-bin/data_batch_1.bin", "cifar-10-batches-py/data_batch_1 "],
        "mnist": ["mnist/train-images-idx3-ubyte", "MNIST/raw/train-labels-idx1-ubyte", ".gz"],
        "fashion_mnist": ["fashion_mnist/train-images-idx3-ubyte", "FashionMNIST/raw", ".gz"],
        "tiny_imagenet": ["tiny-imagenet-200/train/<wnid>/images/*.JPEG"],
    }[name]
    monkeypatch.delenv("EXHUME_DATA", raising=False)
    with pytest.raises(InputError) as unset:
        data.load(name)
    with pytest.raises(InputError) as given_root:
        data.load(name, root=tmp_path)
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    with pytest.raises(InputError) as from_variable:
        data.load(name)
    for error in (unset, given_root, from_variable):
        for text in ["EXHUME_DATA", f"{name}.npz", *forms]:
            assert text in str(error.value)
    assert str(tmp_path) in str(given_root.value)
    assert str(tmp_path) in str(from_variable.value)


@pytest.mark.skipif(not (REAL / "mnist.npz").is_file(), reason=f"no real images in {REAL}")
@pytest.mark.parametrize(
    ("name", "shape", "outputs"),
    [
        ("cifar10", (3, 32, 32), 1),
        ("mnist", (28, 28), 1),
        ("fashion_mnist", (28, 28), 10),
        ("tiny_imagenet", (3, 64, 64), 1),
    ],
)
def test_real_images(name: str, shape: tuple[int, ...], outputs: int) -> None:
    drawn = data.load(name, samples=20, root=REAL)
    assert (drawn.shape, drawn.outputs) == (shape, outputs)
    with np.load(REAL / f"{name}.npz") as arrays:
        images, labels = arrays["x"], arrays["y"]
    pool = {image.tobytes(): int(label) for image, label in zip(images, labels, strict=True)}
    pixels = drawn.images().mul(255).round().to(torch.uint8).numpy()
    pixels = pixels.transpose(0, 2, 3, 1) if pixels.ndim == 4 else pixels
    found = [pool[np.ascontiguousarray(image).tobytes()] for image in pixels]
    if name == "cifar10":
        assert found == [6, 9] * 10
    if name == "mnist":
        assert [y % 2 for y in found] == [0, 1] * 10
    if name == "fashion_mnist":
        assert found == drawn.targets.argmax(1).tolist()


@pytest.mark.skipif(not (REAL / "mnist.npz").is_file(), reason=f"no real images in {REAL}")
@pytest.mark.parametrize(
    ("name", "classes"),
    [("mnist", "parity"), ("cifar10", "vehicles"), ("cifar10", "all"), ("fashion_mnist", "all")],
)
def test_real_images_as_in_the_papers(name: str, classes: Any) -> None:
    drawn = data.load(name, 500, classes=classes, centre="pixels", root=REAL)
    sums = [50.0] * 10 if classes == "all" else [0.0]
    assert drawn.targets.sum(0).tolist() == sums
    assert drawn.inputs.mean(0).abs().max() < 1e-12
    assert drawn.inputs.abs().max() <= 1
    other = data.held_out(drawn, root=REAL)
    assert other.targets.equal(drawn.targets)
    assert torch.cdist(other.inputs, drawn.inputs).min() > 0.1


# Own arrays


@pytest.mark.parametrize(
    ("given_shape", "shape"),
    [
        ((4, 6, 5, 3), (3, 6, 5)),
        ((4, 3, 6, 5), (3, 6, 5)),
        ((4, 6, 5, 1), (6, 5)),
        ((4, 1, 6, 5), (6, 5)),
        ((4, 6, 5), (6, 5)),
        ((4, 30), (30,)),
    ],
)
@pytest.mark.parametrize("as_torch", [True, False])
def test_own_images(given_shape: tuple[int, ...], shape: tuple[int, ...], as_torch: bool) -> None:
    images = pictures(*given_shape)
    own = data.from_arrays(torch.from_numpy(images) if as_torch else images, np.arange(4))
    assert own.shape == shape
    last = len(given_shape) == 4 and given_shape[3] in (1, 3)
    expected = images.transpose(0, 3, 1, 2) if last else images
    torch.testing.assert_close(own.images(), rows_of(expected).reshape(4, *shape))
    assert own.targets[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_own_rows_as_they_are() -> None:
    rows = torch.randn(3, 7, requires_grad=True, dtype=torch.bfloat16)
    own = data.from_arrays(rows, torch.eye(3), normalise=False, standardise=False, name="mine")
    assert own.inputs.equal(rows.detach().double())
    assert own.images().equal(own.inputs)
    assert (own.name, own.outputs, own.inputs.requires_grad) == ("mine", 3, False)


def test_own_arrays_are_copied() -> None:
    rows = np.eye(2)
    own = data.from_arrays(rows, rows, normalise=False, standardise=False)
    rows[:] = 7.0
    assert own.inputs.tolist() == own.targets.tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.eye(2), np.ones(3), "2 samples but 3 targets"),
        (np.eye(2), np.array(["a", "b"]), "y holds"),
        (np.eye(2) * 1j, np.ones(2), "x holds complex"),
        (np.full((2, 2), np.nan), np.ones(2), "x holds a value"),
        (np.eye(2), np.array([1.0, np.inf]), "y holds a value"),
        (np.ones(3), np.ones(3), "expected x"),
        (np.eye(2), np.ones((2, 1, 1)), "expected x"),
        (np.zeros((0, 3)), np.zeros(0), "neither empty"),
        (np.ones((2, 5, 5, 2)), np.ones(2), "1, 3 or 4 channels"),
        (np.full((2, 3), 0.1), np.ones(2), "pixels of custom are equal"),
        (np.array([[0.5, 0.5], [0.0, 1.0]]), np.ones(2), "sample 0 of custom is zero"),
    ],
)
def test_bad_arrays(x: NDArray[Any], y: NDArray[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        data.from_arrays(x, y)


# Files


@pytest.mark.parametrize("normalise", [True, False])
def test_save_and_read(normalise: bool, tmp_path: Path) -> None:
    before = data.load("digits", samples=5, normalise=normalise)
    path = tmp_path / "new" / "truth.safetensors"
    data.save(before, path)
    after = data.read(path)
    assert after.inputs.equal(before.inputs)
    assert after.targets.equal(before.targets)
    assert after.images().equal(before.images())
    assert (after.shape, after.name, after.transform) == ((8, 8), "digits", before.transform)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_mean_image_is_saved_and_read(tmp_path: Path) -> None:
    before, path = data.load("digits", samples=5, centre="pixels"), tmp_path / "truth.safetensors"
    data.save(before, path)
    after = data.read(path)
    assert after.transform.mean is not None
    assert before.transform.mean is not None
    assert after.transform.mean.equal(before.transform.mean)
    assert after.transform == before.transform
    assert after.images().equal(before.images())
    candidates = torch.randn(3, 64, dtype=torch.float64)
    assert after.images(candidates).equal(before.images(candidates))


def test_save_takes_views_and_channels(tmp_path: Path) -> None:
    rows = torch.randn(4, 3, dtype=torch.float64).T
    transform = Transform((0.1, 0.2), (0.3, 0.4))
    data.save(Data(rows, rows[:, :1], (2, 2), transform=transform), tmp_path / "a")
    after = data.read(tmp_path / "a")
    assert after.inputs.equal(rows)
    assert after.transform == transform


def test_save_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "set.safetensors"
    data.save(data.sphere(3, 2), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(InputError, match="disk full"):
            data.save(data.sphere(4, 2), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
    data.save(data.sphere(4, 2), path)
    assert data.read(path).dim == 4


def test_read_names_the_file_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    with pytest.raises(InputError, match=r"set.safetensors: no such file"):
        data.read(path)
    data.save(data.sphere(3, 2), path)
    whole = path.read_bytes()
    for content in (b"", whole[:4], whole[:50], whole[:-1], b"text" * 9):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"set.safetensors"):
            data.read(path)
    with pytest.raises(InputError, match=str(tmp_path)):
        data.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": None}, "no 'inputs'"),
        ({"targets": None}, "no 'targets'"),
        ({"name": None}, "no 'name'"),
        ({"transform": None}, "no 'transform'"),
        ({"transform": "{"}, "cannot be read"),
        ({"transform": "{}"}, "shift and scale"),
        ({"shape": "7"}, "cannot be read"),
        ({"shape": "[7]"}, "does not hold 3"),
        ({"inputs": torch.full((2, 3), math.nan, dtype=torch.float64)}, "not finite"),
        ({"norms": torch.ones(5)}, "5 norms"),
        ({"transform": '{"shift": 0, "scale": 1, "centre": "pixels"}'}, "no 'mean'"),
    ],
)
def test_read_refuses_other_files(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "inputs": torch.ones(2, 3, dtype=torch.float64),
        "targets": torch.ones(2, 1, dtype=torch.float64),
        "name": "x",
        "shape": "[3]",
        "transform": '{"shift": 0, "scale": 1}',
    } | changes
    tensors = {key: value for key, value in parts.items() if isinstance(value, Tensor)}
    metadata = {key: value for key, value in parts.items() if isinstance(value, str)}
    path = tmp_path / "set.safetensors"
    save_file(tensors, path, metadata)
    with pytest.raises(InputError, match=message) as error:
        data.read(path)
    assert str(path) in str(error.value)
