"""Where images come from: our dependencies, or a local folder in the published formats.

Nothing here runs code from a file: the one published format that is a pickle goes through an
unpickler that knows inert classes only.
"""

import gzip
import importlib
import io
import math
import os
import pickle
import pickletools
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exhume.errors import InputError, quoted
from exhume.files import regular

Images = NDArray[np.float64]
Rows = NDArray[np.int64]
Batch = tuple[NDArray[np.uint8], Rows]

# What counts as an image in a folder, and is decoded: others may start foreign programs
IMAGES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}
MOST = 1 << 31  # bytes of one array once decompressed: nearly twice those of Tiny-ImageNet
PIXELS = 1 << 24  # of one image whose size is not known before: those of a good camera
DEFLATE = 1032  # times smaller at most is what gzip and zip make of anything


@dataclass(frozen=True)
class Source:
    """A `Source` is a set of images to draw from, which decodes only the rows asked for."""

    labels: Rows | None  # class of each image, (N,); None where the set has no classes
    size: int  # the number of images N
    pixels: Callable[[Rows], Images]  # k row numbers to [0, 1], (k, H, W) or (k, 3, H, W)
    bundled: bool = False  # it comes with a dependency: its order was published by nobody

    @property
    def sides(self) -> tuple[int, int]:
        """Return height and width of the images."""
        *_, height, width = self.pixels(np.arange(1)).shape
        return height, width

    def shrunk(self, size: int, name: str) -> "Source":
        """Return the source with images of size × size, each pixel the mean of a square."""
        height, width = self.sides
        if size < 1 or height % size or width % size:
            raise InputError(f"size={size}: images of {name} are {height} × {width}: not divisible")
        squares = (size, height // size, size, width // size)

        def pixels(rows: Rows) -> Images:
            images = self.pixels(rows)
            means: Images = images.reshape(*images.shape[:-2], *squares).mean((-3, -1))
            return means

        return self if (height, width) == (size, size) else replace(self, pixels=pixels)


Reader = Callable[[Path], Source | None]


def open_source(name: str, root: str | os.PathLike[str] | None) -> Source:
    """Open a set by name: a bundled one, or from the folder, or from `EXHUME_DATA`."""
    if name in BUNDLED:
        return BUNDLED[name]()
    folder = root if root is not None else os.environ.get("EXHUME_DATA")
    path = Path(folder).expanduser().absolute() if folder else None
    arrays: Reader = partial(_arrays, f"{name}.npz")
    text = f"{name}.npz with arrays x (uint8, NHW or NHWC) and y (integers)"
    forms = (*FORMS[name], (text, arrays))
    for _, reader in forms:
        if path is not None and (source := reader(path)) is not None:
            return source
    listed = "".join(f"\n  - {text}" for text, _ in forms)
    raise InputError(
        f"{name} is not in {path or 'any folder'}: set EXHUME_DATA to the path of a folder, or "
        f"give root. Put one of these into it:{listed}"
    )


def channels_first(images: NDArray[Any]) -> NDArray[Any]:
    """Turn (N, H, W, C) into (N, C, H, W), without the axis where there is one channel only.

    Images that have their channels first already (1, 3 or 4 of them) are recognised;
    where both readings fit, channels are last.
    """
    if images.ndim != 4:
        return images
    if images.shape[3] in (1, 3, 4):
        images = np.moveaxis(images, 3, 1)
    elif images.shape[1] not in (1, 3, 4):
        raise InputError(f"images {images.shape}: expected 1, 3 or 4 channels, last or second")
    return images[:, 0] if images.shape[1] == 1 else images


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
    """Open tiles of 32 x 32 pixels, cut in rows and columns from scikit-learn's two photographs."""
    tiles = []
    for photo in _import("sklearn.datasets", "scikit-learn").load_sample_images().images:
        down, across = photo.shape[0] // 32, photo.shape[1] // 32
        grid = photo[: down * 32, : across * 32].reshape(down, 32, across, 32, 3)
        tiles.append(grid.swapaxes(1, 2).reshape(-1, 32, 32, 3))
    return replace(_from_bytes(np.concatenate(tiles), None), bundled=True)


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"this data set comes with {package}: pip install {package}") from error


# Readers of a folder return None where their files are not there


def _from_bytes(images: NDArray[np.uint8], labels: Rows | None) -> Source:
    """Open images 0..255 in memory, shape (N, H, W) or (N, H, W, C)."""
    return Source(labels, len(images), lambda rows: channels_first(images[rows]) / 255.0)


def _arrays(file_name: str, root: Path) -> Source | None:
    """Open an .npz file with `x` uint8 (N, H, W) or (N, H, W, C) and `y` integers (N,)."""
    path = root / file_name
    if not path.is_file():
        return None
    try:
        with ZipFile(path) as archive:
            images, labels = (_entry(archive, f"{name}.npy") for name in "xy")
    except Exception as error:  # a damaged file can break its readers anywhere
        words = f"is damaged, or lacks arrays x and y: {quoted(error)}"
        raise InputError(f"{path} {words}") from error
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise InputError(f"{path}: x is {images.dtype} {images.shape}; expected uint8, NHW or NHWC")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        words = f"{labels.dtype} {labels.shape}; expected {len(images)} integers"
        raise InputError(f"{path}: y is {words}")
    return _from_bytes(images, labels.astype(np.int64))


def _entry(archive: ZipFile, name: str) -> NDArray[Any]:
    """Read an array of an .npz file, if its header asks for as many bytes as there are."""
    entry = archive.getinfo(name)
    with archive.open(entry) as file:
        header = io.BytesIO(file.read(1 << 16))  # numpy itself reads no longer ones
    version = np.lib.format.read_magic(header)
    one = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(header)
    size = math.prod(shape) * dtype.itemsize
    packed = entry.compress_size * DEFLATE
    if min(shape, default=0) < 0 or size + header.tell() != entry.file_size or dtype.hasobject:
        raise ValueError(f"{name} has {entry.file_size} bytes for {dtype} {shape}")
    if not size <= min(MOST, packed):
        raise ValueError(f"{name} asks for {size:,} bytes")
    with archive.open(entry) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _cifar(folder_name: str, name: str, read: Callable[[Path], Batch], root: Path) -> Source | None:
    """Open CIFAR-10, of whose five batches some may be missing."""
    folder = root / folder_name
    paths = [path for k in range(1, 6) if (path := folder / name.format(k)).is_file()]
    if not paths:
        return None
    images, labels = map(np.concatenate, zip(*map(read, paths), strict=True))
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
    try:
        raw = path.read_bytes()
        for code, value, _ in pickletools.genops(raw):  # numbers here are sizes of what is made
            index = value if "PUT" in code.name and isinstance(value, int) else 0
            if index >= len(raw) or "BYTEARRAY" in code.name:
                raise pickle.UnpicklingError("it asks for more memory than it holds")
        batch = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        images, labels = batch[b"data"].array.reshape(-1, 3072), batch[b"labels"]
        if len(labels) != len(images) or not all(type(label) is int for label in labels):
            raise ValueError(f"{len(images)} images, and other labels")
        labels = np.array(labels, np.int64)
    except Exception as error:  # a broken or hostile pickle may raise anything
        words = f"cannot be read safely ({error}); use the binary version or cifar10.npz"
        raise InputError(f"{path} {words}") from error
    return images, labels


class _PickledType:
    """Stands for a pickled numpy.dtype; keeps its code, e.g. "u1"."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        pass


class _PickledArray:
    """Stands for a pickled numpy.ndarray of bytes; any other type of array is refused."""

    def __init__(self, *_: object) -> None:
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, columns_first, raw = state
        if not isinstance(kind, _PickledType) or kind.code != "u1":
            raise pickle.UnpicklingError("an array that is not uint8")
        flat = np.frombuffer(raw, np.uint8)
        self.array = flat.reshape(shape, order="F" if columns_first else "C")


class _Unpickler(pickle.Unpickler):
    """Builds numbers, text, lists, dictionaries and uint8 arrays; refuses every other name."""

    known: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledType,
        ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # bytes of Python 3
    }

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the inert twin of a name, never the name itself."""
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which could run code")
        return self.known[module, name]


def _idx(folder: str, root: Path) -> Source | None:
    """Open MNIST's IDX files, compressed or not; Fashion-MNIST has the same."""
    found = []
    for axes, kind in ((3, "images"), (1, "labels")):
        path = root / folder / f"train-{kind}-idx{axes}-ubyte"
        path = path if path.is_file() else path.with_name(f"{path.name}.gz")
        if not path.is_file():
            return None
        found.append((path, axes))
    images, labels = (_read_bytes(path, axes) for path, axes in found)
    if len(images) != len(labels):
        raise InputError(f"{root / folder} has {len(images)} images, but {len(labels)} labels")
    return _from_bytes(images, labels.astype(np.int64))


def _read_bytes(path: Path, axes: int) -> NDArray[np.uint8]:
    """Read an IDX file of bytes: 0, 0, 8, number of axes, their lengths (big-endian), the data."""
    start, size = 4 + 4 * axes, regular(path).stat().st_size
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            head = file.read(start)
            if len(head) < start or head[:4] != bytes([0, 0, 8, axes]):
                raise InputError(f"{path} is not an IDX file of bytes with {axes} axes")
            shape = struct.unpack(f">{axes}I", head[4:])
            most = size * DEFLATE if path.suffix == ".gz" else size - start
            if (count := math.prod(shape)) > min(most, MOST):
                raise InputError(f"{path} is cut short: {size} bytes for shape {shape}")
            raw = file.read(count + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{path} is damaged or cut short: {error}") from error
    if len(raw) != count:
        raise InputError(f"{path} is cut short, or too long: {len(raw)} bytes for shape {shape}")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def read_images(folder: Path, shape: tuple[int, ...]) -> Tensor:
    """Read the images of a folder, in order of their names, as pixels in [0, 1], (N, d) float64."""
    files = sorted(p for p in folder.glob("*") if p.suffix.lower() in IMAGES)
    if not files:
        raise InputError(f"{folder}: holds no images ({', '.join(IMAGES)}).")
    colours = 3 if len(shape) == 3 and shape[0] == 3 else 1
    pixels = _decoded(files, "RGB" if colours == 3 else "L", math.prod(shape) // colours)
    if pixels[0].size != math.prod(shape):
        raise InputError(f"{folder}: images are {pixels.shape[1:]}, where {shape} is expected.")
    return torch.from_numpy(pixels.reshape(len(files), -1))


def _decoded(paths: Sequence[Path], mode: str = "RGB", most: int = PIXELS) -> Images:
    """Decode image files of one size, and of at most so many pixels, to [0, 1]."""
    from PIL import Image

    pictures: list[NDArray[np.uint8]] = []
    for path in map(regular, paths):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of odd files; what cannot be read is an error
                with Image.open(path, formats=sorted(set(IMAGES.values()))) as image:
                    if image.width * image.height > most:
                        size = f"{image.width} × {image.height} pixels"
                        raise InputError(f"it has {size}, where {most:,} are expected at most")
                    pictures.append(np.asarray(image.convert(mode)))
        except Exception as error:  # a damaged file can break its decoder anywhere
            raise InputError(f"{path} cannot be decoded: {quoted(error)}") from error
        if pictures[-1].shape != pictures[0].shape:
            raise InputError(f"{path} has shape {pictures[-1].shape}, not {pictures[0].shape}")
    return np.asarray(channels_first(np.stack(pictures)) / 255.0, np.float64)


def _tiny_imagenet(root: Path) -> Source | None:
    """Open Tiny-ImageNet's folder; labels count in the sorted class folders, files are sorted."""
    folder = root / "tiny-imagenet-200" / "train"
    classes = sorted(p for p in folder.glob("*") if (p / "images").is_dir())
    found = [(k, p) for k, c in enumerate(classes) for p in sorted((c / "images").glob("*.JPEG"))]
    if not found:
        return None

    def decoded(rows: Rows) -> Images:
        return _decoded([found[row][1] for row in rows])

    return Source(np.array([label for label, _ in found], np.int64), len(found), decoded)


def _idx_form(folder: str) -> tuple[str, Reader]:
    text = f"{folder}/train-images-idx3-ubyte and {folder}/train-labels-idx1-ubyte, or both as .gz"
    return text, partial(_idx, folder)


def _cifar_form(folder: str, name: str, read: Callable[[Path], Batch]) -> tuple[str, Reader]:
    text = f"{folder}/{name.format(1)} to {name.format(5)}"
    return text, partial(_cifar, folder, name, read)


BUNDLED = {"digits": _digits, "faces": _faces, "photos": _photos}

# For each set its published forms in order of preference: what to say, and how to read it
FORMS: dict[str, tuple[tuple[str, Reader], ...]] = {
    "cifar10": (
        _cifar_form("cifar-10-batches-bin", "data_batch_{}.bin", _binary_batch),
        _cifar_form("cifar-10-batches-py", "data_batch_{}", _python_batch),
    ),
    "mnist": (_idx_form("mnist"), _idx_form("MNIST/raw")),
    "fashion_mnist": (_idx_form("fashion_mnist"), _idx_form("FashionMNIST/raw")),
    "tiny_imagenet": (("tiny-imagenet-200/train/<wnid>/images/*.JPEG", _tiny_imagenet),),
}
