"""Where images come from: our dependencies, or a local folder in the published formats.

Nothing here runs code from a file: arrays are read with `allow_pickle=False`, and the one
published format that is a pickle goes through an unpickler that knows inert classes only.
"""

import gzip
import importlib
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exhume.data.pickles import load_inert
from exhume.errors import InputError

Images = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """A `Source` is a set of images to draw from, which decodes only the rows asked for.

    Attributes:
        labels: class of each image, shape (N,), or None where the set has no classes.
        size: the number of images N.
        pixels: maps k row numbers to values in [0, 1], shape (k, H, W) or (k, 3, H, W).
        bundled: it comes with a dependency, so that its order was published by nobody.
    """

    labels: Rows | None
    size: int
    pixels: Callable[[Rows], Images]
    bundled: bool = False

    @property
    def sides(self) -> tuple[int, int]:
        """Return height and width of the images."""
        *_, height, width = self.pixels(np.arange(1)).shape
        return height, width

    def shrunk(self, size: int, name: str) -> "Source":
        """Return the source with images of size × size, each pixel the mean of a square of theirs.

        Args:
            size: must divide both sides.
            name: of the set, for the error.
        """
        height, width = self.sides
        if size < 1 or height % size or width % size:
            raise InputError(
                f"size={size}: images of {name} are {height} × {width}; expected a number that "
                "divides both sides"
            )
        squares = (size, height // size, size, width // size)

        def pixels(rows: Rows) -> Images:
            images = self.pixels(rows)
            means: Images = images.reshape(*images.shape[:-2], *squares).mean((-3, -1))
            return means

        return self if (height, width) == (size, size) else replace(self, pixels=pixels)


def open_source(name: str, root: str | os.PathLike[str] | None) -> Source:
    """Open a set by name; one that is not bundled from the folder, or from `EXHUME_DATA`.

    Raises:
        InputError: it is not there (the message lists all accepted forms), or damaged.
    """
    if name in BUNDLED:
        return BUNDLED[name]()
    forms = "\n".join(f"  - {text}" for text, _ in FORMS[name])
    folder = root if root is not None else os.environ.get("EXHUME_DATA")
    if not folder:
        raise InputError(
            f"{name} is read from a local folder: set EXHUME_DATA to its path, or give root. "
            f"Put one of these into it:\n{forms}"
        )
    path = Path(folder).expanduser().absolute()
    for _, reader in FORMS[name]:
        source = reader(path)
        if source is not None:
            return source
    raise InputError(
        f"{name} is not in {path}, the folder that root or EXHUME_DATA names. "
        f"Put one of these into it:\n{forms}"
    )


def channels_first(images: NDArray[Any]) -> NDArray[Any]:
    """Turn (N, H, W, C) into (N, C, H, W), without the axis where there is one channel only.

    Images that have their channels first already (1, 3 or 4 of them) are recognised;
    where both readings fit, channels are last.

    Example:
        >>> channels_first(np.zeros((5, 32, 32, 3))).shape
        (5, 3, 32, 32)
        >>> channels_first(np.zeros((5, 1, 28, 28))).shape
        (5, 28, 28)
    """
    if images.ndim != 4:
        return images
    if images.shape[3] in (1, 3, 4):
        images = np.moveaxis(images, 3, 1)
    elif images.shape[1] not in (1, 3, 4):
        raise InputError(
            f"images of shape {images.shape}: expected 1, 3 or 4 channels in the last axis (NHWC) "
            "or the second (NCHW)"
        )
    return images[:, 0] if images.shape[1] == 1 else images


# What comes with our dependencies


def _digits() -> Source:
    """Open handwritten digits of 8 x 8 pixels, from scikit-learn."""
    digits = _import("sklearn.datasets", "scikit-learn").load_digits()
    images, labels = digits.images / 16.0, digits.target.astype(np.int64)
    return Source(labels, len(images), lambda rows: np.asarray(images[rows]), bundled=True)


def _faces() -> Source:
    """Open faces of 25 x 25 pixels from Labeled Faces in the Wild, from scikit-image."""
    faces = _import("skimage.data", "scikit-image").lfw_subset()[:100]  # the others are no faces
    return Source(None, len(faces), lambda rows: np.asarray(faces[rows], float), bundled=True)


def _photos() -> Source:
    """Open colour tiles of 32 x 32 pixels, cut from the two photographs of scikit-learn."""
    photos = _import("sklearn.datasets", "scikit-learn").load_sample_images().images
    tiles = np.concatenate([_tiles(photo, 32) for photo in photos])
    return replace(_from_bytes(tiles, None), bundled=True)


def _tiles(photo: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Cut a photograph (H, W, 3) into whole squares that do not overlap, (k, side, side, 3)."""
    down, across = photo.shape[0] // side, photo.shape[1] // side
    grid = photo[: down * side, : across * side].reshape(down, side, across, side, 3)
    return grid.swapaxes(1, 2).reshape(-1, side, side, 3)


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"this data set comes with {package}: pip install {package}") from error


# What is read from a folder; each reader returns None where its files are not there


def _from_bytes(images: NDArray[np.uint8], labels: Rows | None) -> Source:
    """Open images 0..255 in memory, shape (N, H, W) or (N, H, W, C)."""
    return Source(labels, len(images), lambda rows: channels_first(images[rows]) / 255.0)


def _arrays(file_name: str, root: Path) -> Source | None:
    """Open an .npz file with `x` uint8 (N, H, W) or (N, H, W, C) and `y` integers (N,)."""
    path = root / file_name
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            images, labels = arrays["x"], arrays["y"]
    except (AttributeError, KeyError, OSError, TypeError, ValueError, EOFError) as error:
        raise InputError(f"{path} is not an .npz file with arrays x and y: {error}") from error
    except (zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged or cut short: {error}") from error
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise InputError(
            f"{path}: x is {images.dtype} of shape {images.shape}; expected uint8, "
            "(N, H, W) or (N, H, W, C)"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise InputError(
            f"{path}: y is {labels.dtype} of shape {labels.shape}; expected {len(images)} integers"
        )
    return _from_bytes(images, labels.astype(np.int64))


Batch = tuple[NDArray[np.uint8], Rows]


def _cifar(folder_name: str, name: str, read: Callable[[Path], Batch], root: Path) -> Source | None:
    """Open CIFAR-10, of whose five batches some may be missing."""
    folder = root / folder_name
    paths = [path for k in range(1, 6) if (path := folder / name.format(k)).is_file()]
    if not paths:
        return None
    parts = zip(*map(read, paths), strict=True)
    images, labels = map(np.concatenate, parts)
    if labels.size == 0 or labels.min() < 0 or labels.max() > 9:
        raise InputError(f"{folder} holds no labels, or some outside 0..9: not CIFAR-10")
    planes = images.reshape(-1, 3, 32, 32)
    return Source(labels, len(labels), lambda rows: planes[rows] / 255.0)


def _binary_batch(path: Path) -> Batch:
    """Read records of one label byte and 3 x 32 x 32 pixel bytes."""
    raw = np.fromfile(path, np.uint8)
    if raw.size == 0 or raw.size % 3073:
        raise InputError(f"{path} is cut short: {raw.size} bytes, not a multiple of 3073")
    records = raw.reshape(-1, 3073)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _python_batch(path: Path) -> Batch:
    """Read a pickled dictionary with `data` and `labels`."""
    advice = "use the binary version (cifar-10-batches-bin) or cifar10.npz"
    try:
        with path.open("rb") as file:
            batch = load_inert(file)
        images = batch[b"data"].array.reshape(-1, 3072)
        labels = np.array(batch[b"labels"], np.int64).reshape(len(images))
    except Exception as error:  # a broken or hostile pickle may raise anything
        raise InputError(f"{path} cannot be read safely ({error}); {advice}") from error
    return images, labels


def _idx(folder: str, root: Path) -> Source | None:
    """Open MNIST's IDX files, compressed or not; Fashion-MNIST has the same."""
    images = _existing(root / folder / "train-images-idx3-ubyte")
    labels = _existing(root / folder / "train-labels-idx1-ubyte")
    if images is None or labels is None:
        return None
    pixels, classes = _read_bytes(images, axes=3), _read_bytes(labels, axes=1)
    if len(pixels) != len(classes):
        raise InputError(f"{images} has {len(pixels)} images, {labels} {len(classes)} labels")
    return _from_bytes(pixels, classes.astype(np.int64))


def _existing(path: Path) -> Path | None:
    candidates = (path, path.with_name(path.name + ".gz"))
    return next((p for p in candidates if p.is_file()), None)


def _read_bytes(path: Path, axes: int) -> NDArray[np.uint8]:
    """Read an IDX file of bytes: 0, 0, 8, number of axes, their lengths (big-endian), the data."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged or cut short: {error}") from error
    start = 4 + 4 * axes
    if len(raw) < start or raw[:4] != bytes([0, 0, 8, axes]):
        raise InputError(f"{path} is not an IDX file of bytes with {axes} axes")
    shape = struct.unpack(f">{axes}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        raise InputError(f"{path} is cut short: {len(raw) - start} bytes for shape {shape}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _tiny_imagenet(root: Path) -> Source | None:
    """Open Tiny-ImageNet's folder; labels count in the sorted class folders, files are sorted."""
    folder = root / "tiny-imagenet-200" / "train"
    classes = sorted(p for p in folder.glob("*") if (p / "images").is_dir())
    found = [(k, p) for k, c in enumerate(classes) for p in sorted((c / "images").glob("*.JPEG"))]
    if not found:
        return None
    labels = np.array([label for label, _ in found], np.int64)
    return Source(labels, len(found), lambda rows: _read_pictures([found[r][1] for r in rows]))


def _read_pictures(paths: list[Path]) -> Images:
    """Decode pictures in colour, (k, 3, H, W) in [0, 1]."""
    from PIL import Image

    pictures = []
    for path in paths:
        try:
            with Image.open(path) as image:
                pictures.append(np.asarray(image.convert("RGB")))
        except (OSError, SyntaxError, ValueError) as error:
            raise InputError(f"{path} cannot be decoded: {error}") from error
        if pictures[-1].shape != pictures[0].shape:
            raise InputError(
                f"{path} has shape {pictures[-1].shape}, {paths[0]} {pictures[0].shape}"
            )
    return np.asarray(channels_first(np.stack(pictures)) / 255.0, np.float64)


# The tables

Reader = Callable[[Path], Source | None]

BUNDLED = {"digits": _digits, "faces": _faces, "photos": _photos}
"""The sets that come with our dependencies."""


def _npz_form(name: str) -> tuple[str, Reader]:
    text = f"{name}.npz with arrays x (uint8, NHW or NHWC) and y (integers)"
    return text, partial(_arrays, f"{name}.npz")


def _idx_form(folder: str) -> tuple[str, Reader]:
    text = f"{folder}/train-images-idx3-ubyte and {folder}/train-labels-idx1-ubyte, or both as .gz"
    return text, partial(_idx, folder)


FORMS: dict[str, tuple[tuple[str, Reader], ...]] = {
    "cifar10": (
        (
            "cifar-10-batches-bin/data_batch_1.bin to data_batch_5.bin",
            partial(_cifar, "cifar-10-batches-bin", "data_batch_{}.bin", _binary_batch),
        ),
        (
            "cifar-10-batches-py/data_batch_1 to data_batch_5",
            partial(_cifar, "cifar-10-batches-py", "data_batch_{}", _python_batch),
        ),
        _npz_form("cifar10"),
    ),
    "mnist": (_idx_form("mnist"), _idx_form("MNIST/raw"), _npz_form("mnist")),
    "fashion_mnist": (
        _idx_form("fashion_mnist"),
        _idx_form("FashionMNIST/raw"),
        _npz_form("fashion_mnist"),
    ),
    "tiny_imagenet": (
        ("tiny-imagenet-200/train/<wnid>/images/*.JPEG", _tiny_imagenet),
        _npz_form("tiny_imagenet"),
    ),
}
"""For each set the accepted forms in order of preference: what to say, and how to read it."""
