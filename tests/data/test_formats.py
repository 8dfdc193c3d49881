"""Sets in a local folder: the published formats, damaged and hostile files, real images."""

import gzip
import io
import os
import pickle
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from exhume import data
from exhume.data import Data
from exhume.errors import InputError
from problems import pictures

Patch = pytest.MonkeyPatch
REAL = Path(__file__).parents[3] / "shared" / "data"
PUBLISHED: list[tuple[str, tuple[int, ...], str, Any]] = [
    ("cifar10", (3, 32, 32), "vehicles", [6, 9] * 10),
    ("mnist", (28, 28), "parity", None),
    ("fashion_mnist", (28, 28), "all", [*range(10)] * 2),
    ("tiny_imagenet", (3, 64, 64), "random", None),
]
LABELS = np.array([6, 9, 0, 6, 9, 9, 6, 1])  # frogs at 0, 3, 6; trucks at 1, 4, 5
PY, BIN = "cifar-10-batches-py/data_batch_1", "cifar-10-batches-bin/data_batch_1.bin"


def assert_shows(drawn: Data, images: NDArray[np.uint8]) -> None:
    torch.testing.assert_close(drawn.images(), torch.from_numpy(images / 255.0))


def write(root: Path, name: str, content: bytes) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)


def saved(write: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
    file = io.BytesIO()
    write(file, *arrays, **named)
    return file.getvalue()


npz = partial(saved, np.savez)


def pickled(images: Any, labels: Any = (6,)) -> bytes:
    return pickle.dumps({b"data": images, b"labels": list(labels)}, protocol=2)


def idx(values: NDArray[np.uint8]) -> bytes:
    header = struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + values.tobytes()


def write_cifar_binary(root: Path, images: NDArray[np.uint8]) -> None:
    records = np.concatenate([LABELS[:, None].astype(np.uint8), images.reshape(8, -1)], axis=1)
    write(root, BIN, records[:3].tobytes())
    write(root, BIN.replace("_1", "_2"), records[3:].tobytes())


def write_cifar_python(root: Path, images: NDArray[np.uint8]) -> None:
    """One batch by Python 3's pickle and one by Python 2's, opcode by opcode, as published."""
    write(root, PY, pickled(images[:3].reshape(3, -1), LABELS[:3].tolist()))
    raw = images[3:].tobytes()
    parts = [
        b"\x80\x02}(U\x0bbatch_labelU\x15training batch 2 of 5U\x06labels](",
        *(b"K" + bytes([label]) for label in LABELS[3:]),
        b"eU\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR",
        b"(K\x01(K\x05M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR",
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tbu.",
    ]
    write(root, PY.replace("_1", "_2"), b"".join(parts))


def write_cifar_arrays(root: Path, images: NDArray[np.uint8]) -> None:
    """Channels last, beside arrays that are not needed."""
    write(root, "cifar10.npz", npz(x=images.transpose(0, 2, 3, 1), y=LABELS, index=LABELS))


@pytest.mark.parametrize("writer", [write_cifar_binary, write_cifar_python, write_cifar_arrays])
def test_cifar(writer: Any, tmp_path: Path) -> None:
    images = pictures(8, 3, 32, 32)
    writer(tmp_path, images)
    read = partial(data.load, "cifar10", root=tmp_path)
    drawn = read(4, normalise=False)
    everything, sides = (read(4, classes=classes) for classes in ("all", "vehicles"))
    assert_shows(drawn, images[[0, 1, 3, 4]])
    assert_shows(everything, images[[2, 7, 0, 1]])
    assert_shows(sides, images[[0, 1, 3, 2]])  # animal, vehicle
    assert everything.targets.equal(torch.eye(4, dtype=torch.float64))
    for made in (drawn, sides):
        assert made.targets[:, 0].tolist() == [-1.0, 1.0, -1.0, 1.0]
    others = [read(4, seed=seed).images() for seed in range(1, 6)]
    assert any(not torch.allclose(other, drawn.images()) for other in others)
    write_cifar_arrays(tmp_path, 255 - images)  # published files come before arrays
    assert read(4).images().allclose(drawn.images()) == (writer is not write_cifar_arrays)
    write(tmp_path / "ten", "cifar10.npz", npz(x=pictures(10, 4, 4, 3), y=np.arange(10)))
    drawn = data.load("cifar10", 8, classes="vehicles", root=tmp_path / "ten")
    assert_shows(drawn, pictures(10, 4, 4, 3)[[2, 0, 3, 1, 4, 8, 5, 9]].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "FashionMNIST/raw", "fashion_mnist"])
def test_idx_files(folder: str, suffix: str, tmp_path: Path, monkeypatch: Patch) -> None:
    images, labels = pictures(5, 28, 28), np.array([5, 0, 4, 1, 9], np.uint8)
    for file, values in (("images-idx3", images), ("labels-idx1", labels)):
        content = gzip.compress(idx(values)) if suffix else idx(values)
        write(tmp_path, f"{folder}/train-{file}-ubyte{suffix}", content)
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    if "ashion" in folder:
        drawn = data.load("fashion_mnist", samples=4)
        assert_shows(drawn, images[[1, 3, 2, 0]])
        assert drawn.targets.equal(torch.eye(5, dtype=torch.float64)[:4])
    else:  # even, odd
        drawn = data.load("mnist", samples=4)
        assert_shows(drawn, images[[1, 0, 2, 3]])
        assert drawn.targets[:, 0].tolist() == [-1.0, 1.0, -1.0, 1.0]
        with pytest.raises(InputError, match="has 4 in 2 equal parts"):
            data.load("mnist", samples=6)


def test_tiny_imagenet_decodes_only_what_is_drawn(tmp_path: Path) -> None:
    images = np.repeat(np.arange(6, dtype=np.uint8) * 40, 64 * 64 * 3).reshape(6, 64, 64, 3)
    train = tmp_path / "tiny-imagenet-200" / "train"
    for i, image in enumerate(images):
        folder = train / ("n02", "n01", "n03")[i % 3] / "images"
        folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image)
        (picture.convert("L") if i == 4 else picture).save(folder / f"{i}.JPEG", quality=100)
    broken, read = train / "n03/images/2.JPEG", partial(data.load, "tiny_imagenet", root=tmp_path)
    broken.write_bytes(b"no picture")
    drawn = read(4)  # n01: 1, 4; n02: 0, 3
    assert drawn.shape == (3, 64, 64) and drawn.targets.sum() == 0
    levels = drawn.images().mean((1, 2, 3)).mul(255).tolist()
    assert levels == pytest.approx([40.0, 160.0, 0.0, 120.0], abs=1.5)
    assert read(2, classes=(0, 1)).targets[:, 0].tolist() == [-1.0, 1.0]
    with pytest.raises(InputError, match=r"2.JPEG cannot be decoded"):
        read(2, classes=(0, 2))
    Image.fromarray(images[0, :32]).save(broken)
    with pytest.raises(InputError, match=r"2.JPEG has shape \(32, 64, 3\)"):
        read(2, classes=(0, 2))


FORMS = {
    "cifar10": ["cifar-10-batches-bin/data_batch_1.bin", "cifar-10-batches-py/data_batch_1 "],
    "mnist": ["mnist/train-images-idx3-ubyte", "MNIST/raw/train-labels-idx1-ubyte", ".gz"],
    "fashion_mnist": ["fashion_mnist/train-images-idx3-ubyte", "FashionMNIST/raw", ".gz"],
    "tiny_imagenet": ["tiny-imagenet-200/train/<wnid>/images/*.JPEG"],
}


@pytest.mark.parametrize("name", FORMS)
def test_missing_files_are_listed(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    words = ["EXHUME_DATA", f"{name}.npz", *FORMS[name]]
    for variable, root in (("", None), ("", tmp_path), (str(tmp_path), None)):
        monkeypatch.setenv("EXHUME_DATA", variable)
        with pytest.raises(InputError) as error:
            data.load(name, root=root)
        assert all(text in str(error.value) for text in words)
        assert (str(tmp_path) in str(error.value)) == bool(variable or root)


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, ("mark",)  # in the folder one is in


TWO, ONE, BOTH = pictures(2, 28, 28), np.zeros((1, 3072), np.uint8), np.array([0, 1])
ARRAYS, NO_BATCH = npz(x=TWO, y=BOTH), (pickle.dumps([1, 2], protocol=2), pickled(b"abc", []))
FLIPPED = ARRAYS[:150] + bytes([ARRAYS[150] ^ 255]) + ARRAYS[151:]
NO_ARRAYS = (b"", b"text", ARRAYS[:100], ARRAYS[:-10], FLIPPED, saved(np.save, np.zeros(3)))
SIZES = (pickled(np.zeros((2, 3072), np.uint8)), pickled(np.zeros((0, 3072), np.uint8), []))
UNSAFE = (b"", b"no pickle", *NO_BATCH, *SIZES, pickled(ONE)[:-99], pickled((1, 1)))
IMAGES, OF = "mnist/train-images-idx3-ubyte", "mnist/train-labels-idx1-ubyte"
DAMAGED: list[tuple[str, bytes, str]] = [
    (PY, pickled(Hostile()), "mkdir, which could run code.*binary version"),
    (PY, pickled(np.zeros((1, 3072))), "cannot be read safely.*not uint8"),
    *((PY, content, "data_batch_1 cannot be read safely") for content in UNSAFE),
    (PY, pickled(ONE, [10]), "not CIFAR-10"),
    (BIN, bytes([200]) + bytes(3072), "not CIFAR-10"),
    *((BIN, bytes(size), "data_batch_1.bin is cut short") for size in (0, 3072)),
    *((IMAGES, content, "not an IDX file") for content in (b"", b"\0\0\x0d\3" + bytes(12))),
    (IMAGES, idx(TWO)[:16], "cut short"),
    (OF, idx(np.array([1], np.uint8)), "2 images.*1 labels"),
    *((f"{IMAGES}.gz", content, "damaged") for content in (b"no gzip", gzip.compress(TWO)[:-9])),
    *(("mnist.npz", npz(x=TWO, y=y), "expected 2 integers") for y in (np.arange(3), BOTH / 1.0)),
    *(("mnist.npz", npz(x=x, y=BOTH), "expected uint8") for x in (TWO / 255.0, TWO[0, :2])),
    ("mnist.npz", npz(x=pictures(2, 5, 5, 2), y=BOTH), "1, 3 or 4 channels"),
    ("mnist.npz", npz(x=TWO, y=np.array([0, None])), "arrays x and y"),
    ("mnist.npz", npz(x=TWO), "arrays x and y"),
    *(("mnist.npz", content, "mnist.npz") for content in NO_ARRAYS),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED)
def test_damaged_and_hostile_files_are_refused(name, content, words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name.startswith("mnist/"):
        write(tmp_path, OF, idx(np.array([0, 1], np.uint8)))
        write(tmp_path, IMAGES if name == OF else OF + ".not", idx(TWO))
    write(tmp_path, name, content)
    with pytest.raises(InputError, match=words):
        data.load("cifar10" if name.startswith("cifar") else "mnist", samples=2, root=tmp_path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.skipif(not (REAL / "mnist.npz").is_file(), reason=f"no real images in {REAL}")
@pytest.mark.parametrize(("name", "shape", "classes", "expected"), PUBLISHED)
def test_real_images(name: str, shape: tuple[int, ...], classes: Any, expected: Any) -> None:
    drawn = data.load(name, samples=20, root=REAL)
    assert drawn.shape == shape
    with np.load(REAL / f"{name}.npz") as arrays:
        pool = {image.tobytes(): int(y) for image, y in zip(arrays["x"], arrays["y"], strict=True)}
    pixels = drawn.images().mul(255).round().to(torch.uint8).numpy()
    pixels = pixels.transpose(0, 2, 3, 1) if pixels.ndim == 4 else pixels
    found = [pool[np.ascontiguousarray(image).tobytes()] for image in pixels]
    assert expected is None or found == expected
    assert name != "mnist" or [y % 2 for y in found] == [0, 1] * 10
    centred = data.load(name, 200, classes=classes, centre="pixels", root=REAL)  # as in the papers
    assert centred.targets.sum(0).unique().tolist() == [20.0 if classes == "all" else 0.0]
    assert centred.inputs.mean(0).abs().max() < 1e-12 and centred.inputs.abs().max() <= 1
    other = data.held_out(centred, root=REAL)
    assert other.targets.equal(centred.targets)
    assert torch.cdist(other.inputs, centred.inputs).min() > 0.1
