"""Data sets to train on and to attack: synthetic, bundled, local folders, your own arrays.

A sample is a row of numbers. How its pixels became that row is a `Transform`:

    inputs_i = (pixels_i - shift) / scale · √d / norm_i

Shift and scale may be declared to an auditor. The norms are one number for each private sample,
and a mean image, where one was subtracted, is an average of private samples. So both are truth:
they never leave with the `card`, and norms are never used unless handed over.

Inside: `Data`, `Transform`, `sphere`, `subspace`, `load`, `held_out`, `from_arrays`, `save`,
`read`.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exhume.data import formats as _formats
from exhume.data import selection as _selection
from exhume.data.selection import DEFAULT_CLASSES, Classes
from exhume.equation.pixels import Pixels
from exhume.errors import InputError
from exhume.files import write_tensors

SUBSPACE = 0x5B5ACE
"""Tells the stream of the random subspace from that of the samples."""


@dataclass(frozen=True)
class Transform:
    """How pixels became inputs, so that pictures can be made of inputs again.

    Attributes:
        shift: subtracted from the pixels; a number, or one for each channel.
        scale: what is left is divided by it; positive; a number, or one for each channel.
        norms: norm of each sample before it was rescaled to √d, shape (n,); None if the rows
            were not rescaled. Not part of the card, nor of equality.
        mean: mean image, shape (d,), subtracted in the place of the shift, which is then its
            average: what a picture is made with where the mean image is not known. The card only
            says that there is one; not part of equality.

    Example:
        >>> half = Transform(shift=0.5, scale=0.25)
        >>> half.apply(torch.tensor([[0.5, 1.0]])).tolist()
        [[0.0, 2.0]]
        >>> half.undo(torch.tensor([[0.0, 2.0]])).tolist()
        [[0.5, 1.0]]
        >>> Transform.from_card(half.card()) == half
        True
    """

    shift: float | tuple[float, ...] = 0.0
    scale: float | tuple[float, ...] = 1.0
    norms: Tensor | None = field(default=None, repr=False, compare=False)
    mean: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse what could not be undone."""
        shift, scale = _as_tuple(self.shift), _as_tuple(self.scale)
        if not (shift and scale and all(map(math.isfinite, shift + scale)) and min(scale) > 0):
            raise InputError(
                f"shift {self.shift} and scale {self.scale} must be finite, the scale positive"
            )
        if len({len(shift), len(scale)} - {1}) > 1:
            raise InputError(f"{len(shift)} shifts but {len(scale)} scales: one for each channel")
        if self.norms is not None:
            _check_norms(self.norms)
        if self.mean is not None and not (self.mean.ndim == 1 and self.mean.isfinite().all()):
            raise InputError("the mean image must be one finite number for each entry of a sample")

    def apply(self, pixels: Tensor, norms: Tensor | None = None) -> Tensor:
        """Inputs of pixels, both (n, d), channels first; norms (n,) rescale the rows to √d."""
        scale = _spread(self.scale, pixels)
        return (pixels - self._subtracted(pixels)) / scale * _factors(pixels, norms)

    def undo(self, inputs: Tensor, norms: Tensor | None = None) -> Tensor:
        """Pixels of inputs, both (n, d), not clipped.

        Args:
            inputs: rows as the model sees them, or an attacker's candidates.
            norms: (n,) norms the rows had before rescaling. Without them √d is assumed, which
                changes the contrast of a picture and nothing else.
        """
        scale = _spread(self.scale, inputs)
        return inputs / _factors(inputs, norms) * scale + self._subtracted(inputs)

    def _subtracted(self, rows: Tensor) -> float | Tensor:
        """What is subtracted from pixels, to meet rows (n, d)."""
        if self.mean is None:
            return _spread(self.shift, rows)
        if len(self.mean) != rows.shape[1]:
            raise InputError(
                f"rows of {rows.shape[1]} numbers, but a mean image of {len(self.mean)}"
            )
        return self.mean.to(rows)

    def card(self) -> dict[str, float | list[float] | str]:
        """Shift and scale for JSON, without the norms; that there is a mean image, if so."""
        declared: dict[str, float | list[float] | str] = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in (("shift", self.shift), ("scale", self.scale))
        }
        return declared if self.mean is None else declared | {"centre": "pixels"}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> "Transform":
        """The inverse of `card`, without a mean image."""
        try:
            values = [card[key] for key in ("shift", "scale")]
            shift, scale = (
                tuple(map(float, v)) if isinstance(v, list | tuple) else float(v) for v in values
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"a transform needs numbers shift and scale, got {card}") from error
        return cls(shift, scale)


@dataclass(frozen=True, eq=False)
class Data:
    """Samples with their targets, as a model is trained on them.

    Attributes:
        inputs: (n, d) float64, one flattened sample a row.
        targets: (n, m) float64: ±1, real numbers, or one-hot rows.
        shape: of one sample, with product d; (H, W) grey, (C, H, W) colour.
        name: of the set.
        transform: how pixels became inputs.
    """

    inputs: Tensor = field(repr=False)
    targets: Tensor = field(repr=False)
    shape: tuple[int, ...]
    name: str = "custom"
    transform: Transform = field(default_factory=Transform)

    def __post_init__(self) -> None:
        """Refuse what no model could be trained on."""
        for word, rows in (("inputs", self.inputs), ("targets", self.targets)):
            if rows.ndim != 2 or rows.numel() == 0 or rows.dtype != torch.float64:
                raise InputError(
                    f"{word} of {self.name}: shape {tuple(rows.shape)}, {rows.dtype}; expected "
                    "float64 with at least one row and one column"
                )
            if not rows.isfinite().all():
                raise InputError(f"{word} of {self.name} hold a value that is not finite")
        if len(self.inputs) != len(self.targets):
            raise InputError(f"{len(self.inputs)} samples but {len(self.targets)} targets")
        if not self.shape or min(self.shape) < 1 or math.prod(self.shape) != self.dim:
            raise InputError(f"shape {self.shape} does not hold {self.dim} numbers")
        if self.transform.norms is not None and len(self.transform.norms) != self.samples:
            raise InputError(f"{self.samples} samples but {len(self.transform.norms)} norms")
        channels = {len(_as_tuple(v)) for v in (self.transform.shift, self.transform.scale)} - {1}
        if channels - {self.shape[0]}:
            raise InputError(f"a transform for {channels.pop()} channels on shape {self.shape}")
        if self.transform.mean is not None and len(self.transform.mean) != self.dim:
            raise InputError(
                f"a mean image of {len(self.transform.mean)} numbers on shape {self.shape}"
            )

    @property
    def dim(self) -> int:
        """Numbers in one sample, d."""
        return self.inputs.shape[1]

    @property
    def samples(self) -> int:
        """Number of samples, n."""
        return self.inputs.shape[0]

    @property
    def outputs(self) -> int:
        """Numbers in one target, m."""
        return self.targets.shape[1]

    @property
    def display(self) -> Pixels | None:
        """How inputs become pixels, as an auditor may be told; None if samples are no images."""
        one = self.transform
        return Pixels(one.shift, one.scale) if len(self.shape) > 1 else None

    def images(self, inputs: Tensor | None = None, norms: Tensor | None = None) -> Tensor:
        """Pixel values of rows of inputs, (k, *shape); in [0, 1] for true images, not clipped.

        Args:
            inputs: (k, d) rows; the samples of this set, with their own norms, unless given.
            norms: (k,) norms before rescaling, where known; see `Transform.undo`.
        """
        if inputs is None:
            inputs, norms = self.inputs, self.transform.norms if norms is None else norms
        if inputs.ndim != 2 or inputs.shape[1] != self.dim:
            raise InputError(f"inputs of shape {tuple(inputs.shape)}, expected (k, {self.dim})")
        return self.transform.undo(inputs, norms).reshape(-1, *self.shape)


def sphere(
    dim: int, samples: int, seed: int = 0, noise: float = 0.5, rank: int | None = None
) -> Data:
    """Gaussian rows rescaled to norm √d, with noisy linear targets.

    y = X g + noise · N(0, 1) with g ~ N(0, I/d): the synthetic set-up of Iurada 2025.

    Args:
        dim: numbers in one sample, d.
        samples: number of samples, n.
        seed: of numpy's generator, so that every platform draws the same.
        noise: standard deviation of the noise on the targets.
        rank: dimension r of a random subspace that the samples lie in (see `subspace`): rows are
            U z with Gaussian z. The whole space unless given.

    Example:
        >>> data = sphere(dim=9, samples=4, rank=2)
        >>> data.inputs.norm(dim=1).round(decimals=9).tolist()
        [3.0, 3.0, 3.0, 3.0]
        >>> torch.linalg.matrix_rank(data.inputs).item()
        2
    """
    _check_positive("dim", dim)
    _check_positive("samples", samples)
    if not (math.isfinite(noise) and noise >= 0):
        raise InputError(f"noise={noise}: expected a finite number, zero or more")
    basis = None if rank is None else subspace(dim, rank, seed).numpy()
    generator = _generator(seed)
    rows = generator.standard_normal((samples, dim if rank is None else rank))
    rows = rows if basis is None else rows @ basis.T
    rows *= math.sqrt(dim) / np.linalg.norm(rows, axis=1, keepdims=True)
    weights = generator.standard_normal(dim) / math.sqrt(dim)
    targets = rows @ weights + noise * generator.standard_normal(samples)
    return Data(torch.from_numpy(rows), torch.from_numpy(targets)[:, None], (dim,), "sphere")


def subspace(dim: int, rank: int, seed: int = 0) -> Tensor:
    """A basis of the subspace that `sphere` draws its samples from: (d, r), orthonormal, float64.

    Uniform among the subspaces of that dimension. It depends on the seed alone, not on the
    samples, so that an attacker may be told of it.

    Args:
        dim: numbers in one sample, d.
        rank: dimension of the subspace, r ≤ d.
        seed: as of the samples.

    Example:
        >>> basis = subspace(dim=9, rank=2)
        >>> data = sphere(dim=9, samples=4, rank=2)
        >>> bool((data.inputs - data.inputs @ basis @ basis.T).abs().max() < 1e-12)
        True
    """
    _check_positive("dim", dim)
    if not 1 <= rank <= dim:
        raise InputError(f"rank={rank}: expected a whole number from 1 to the dimension, {dim}")
    _check_seed(seed)
    generator = np.random.default_rng([seed, SUBSPACE])
    basis, _ = np.linalg.qr(generator.standard_normal((dim, rank)))
    return torch.from_numpy(basis)


def load(
    name: str,
    samples: int = 20,
    seed: int = 0,
    normalise: bool | None = None,
    classes: Classes | None = None,
    root: str | os.PathLike[str] | None = None,
    centre: Literal["all", "pixels"] = "all",
    size: int | None = None,
) -> Data:
    """Real images, standardised by one mean and one deviation over all pixels drawn.

    ================ =========== ===================== ============================ ========
    name             shape       from                  where                        classes
    ================ =========== ===================== ============================ ========
    `digits`         8, 8        scikit-learn          bundled, 1,797 images        all
    `faces`          25, 25      scikit-image (LFW)    bundled, 100 images          random
    `photos`         3, 32, 32   scikit-learn, tiles   bundled, 520 from two photos random
    `cifar10`        3, 32, 32   binary, python, .npz  folder                       (6, 9)
    `mnist`          28, 28      IDX, .npz             folder                       parity
    `fashion_mnist`  28, 28      IDX, .npz             folder                       all
    `tiny_imagenet`  3, 64, 64   folder of JPEG, .npz  folder                       random
    ================ =========== ===================== ============================ ========

    Args:
        name: of the set, from the table.
        samples: number of samples, in equal parts from the classes (the first ones get one more
            where it does not divide), in turns, so that a prefix is balanced too.
        seed: draws the samples without replacement. For sets in a folder, 0 takes the first of
            each class in the order of the files, as published.
        normalise: rescale each sample to norm √d; yes unless given, but not with
            `centre="pixels"`.
        classes: two labels: the first is target -1, the second +1. More labels, or `"all"` that
            are there: one-hot. `"parity"`: even labels -1, odd ones +1. `"vehicles"`, for
            cifar10: animals -1, vehicles (0, 1, 8, 9) +1. `"random"`: labels are not looked at,
            as many -1 as +1 in random order; the only choice for faces and photos, which have
            none. The default is in the table; 6 and 9 are frog and truck.
        root: the folder; the environment variable `EXHUME_DATA` unless given.
        centre: `"pixels"` subtracts the mean image of the samples drawn, pixel by pixel, and
            divides by nothing: inputs are in [-1, 1], as in Haim 2022.
        size: side of the images, shrunk to it by averaging squares of pixels before all else; it
            must divide their own side.

    Raises:
        InputError: the set is not there (the message says what to put where), or too small.

    Example:
        >>> load("digits", samples=30, classes=(3, 8)).targets[:4, 0].tolist()
        [-1.0, 1.0, -1.0, 1.0]
        >>> load("digits", samples=30, centre="pixels").inputs.mean(0).abs().max().item() < 1e-12
        True
        >>> load("digits", samples=30, size=4).shape
        (4, 4)
    """
    if name not in DEFAULT_CLASSES:
        known = ", ".join(DEFAULT_CLASSES)
        raise InputError(f"unknown data set {name!r}; there are {known}, and sphere")
    if centre not in ("all", "pixels"):
        raise InputError(f'centre={centre!r}: expected "all" or "pixels"')
    _check_positive("samples", samples)
    source = _formats.open_source(name, root)
    source = source if size is None else _shrunk(source, size, name)
    groups = _selection.groups(source, DEFAULT_CLASSES[name] if classes is None else classes, name)
    generator = _generator(seed)
    if seed != 0 or source.bundled:
        groups = [generator.permutation(group) for group in groups]
    pixels = source.pixels(_selection.in_turns(groups, samples, name))
    targets = _selection.targets(samples, len(groups), generator)
    transform = (_centring if centre == "pixels" else _standardising)(pixels, name)
    normalise = centre != "pixels" if normalise is None else normalise
    return _prepare(pixels, targets, transform, normalise, name)


def held_out(
    known: Data,
    samples: int | None = None,
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
) -> Data:
    """Images of the same source that are not in a set that `load` drew, as its model sees them.

    They are what a control needs: the same kind of data, that the model was never trained on.
    Sample i has the label and the target of sample i of the set (modulo its size), and is prepared
    with the shift, the scale and the mean image of the set.

    Args:
        known: the set whose images are left out. It is looked up in the source by its pixels, so
            equal images are left out too.
        samples: the most to draw; as many as the set has unless given. There are fewer where the
            source has no more.
        seed: draws them without replacement.
        root: the folder; the environment variable `EXHUME_DATA` unless given.

    Raises:
        InputError: the source is not there, does not hold the set, or holds nothing else.

    Example:
        >>> known = load("digits", samples=30)
        >>> other = held_out(known, samples=60)
        >>> other.samples, bool(torch.cdist(known.inputs, other.inputs).min() > 0.1)
        (60, True)
    """
    if known.name not in DEFAULT_CLASSES:
        raise InputError(
            f"{known.name}: there is no source to draw from; make a set of your own held-out "
            "samples with from_arrays"
        )
    count = known.samples if samples is None else samples
    _check_positive("samples", count)
    source = _formats.open_source(known.name, root)
    height, width = _sides(source)
    if height % known.shape[-1] == width % known.shape[-1] == 0:
        source = _shrunk(source, known.shape[-1], known.name)
    rows, taken = _selection.look_up(source, known.images().flatten(1).cpu().numpy(), known.name)
    labels = np.zeros(source.size, np.int64) if source.labels is None else source.labels
    free = _generator(seed).permutation(np.setdiff1d(np.arange(source.size), taken))
    members = {label: iter(free[labels[free] == label]) for label in np.unique(labels[rows])}
    turns = np.arange(count) % known.samples
    drawn = [(next(members[labels[rows[turn]]], -1), turn) for turn in turns]
    kept = np.array([pair for pair in drawn if pair[0] >= 0], np.int64).reshape(-1, 2)
    if not len(kept):
        raise InputError(f"{known.name} has no other images with the labels of this set")
    pixels, targets = source.pixels(kept[:, 0]), known.targets[torch.from_numpy(kept[:, 1])]
    transform = replace(known.transform, norms=None)
    rescaled = known.transform.norms is not None
    return _prepare(pixels, targets.cpu().numpy(), transform, rescaled, known.name)


def from_arrays(
    x: NDArray[Any] | Tensor,
    y: NDArray[Any] | Tensor,
    normalise: bool = True,
    standardise: bool = True,
    name: str = "custom",
) -> Data:
    """Your own samples, from numpy or torch.

    Args:
        x: images (n, H, W, C), (n, C, H, W) or (n, H, W), or rows (n, d). Bytes (uint8) are
            divided by 255, other numbers taken as they are.
        y: targets as the model was trained on, (n,) or (n, m); classes as one-hot rows.
        normalise: rescale each sample to norm √d.
        standardise: subtract the mean of all numbers in x and divide by their deviation.
        name: of the set.

    Example:
        >>> data = from_arrays(np.eye(2), np.array([1.0, -1.0]))
        >>> data.inputs.tolist(), data.shape
        ([[1.0, -1.0], [-1.0, 1.0]], (2,))
    """
    pixels, targets = _as_numbers(x, "x"), _as_numbers(y, "y")
    if not (pixels.size and targets.size and pixels.ndim in (2, 3, 4) and targets.ndim in (1, 2)):
        raise InputError(
            f"x of shape {pixels.shape} and y of shape {targets.shape}: expected x (n, d), "
            "(n, H, W) or with channels, and y (n,) or (n, m), neither empty"
        )
    pixels = _formats.channels_first(pixels / 255.0 if pixels.dtype == np.uint8 else pixels)
    transform = _standardising(pixels, name) if standardise else Transform()
    return _prepare(pixels, targets.reshape(len(targets), -1), transform, normalise, name)


def save(data: Data, path: str | os.PathLike[str]) -> None:
    """Write a set, with norms and mean image, to one safetensors file that only its owner can read.

    The file appears whole or not at all.
    """
    tensors = {"inputs": data.inputs, "targets": data.targets}
    if data.transform.norms is not None:
        tensors["norms"] = data.transform.norms
    if data.transform.mean is not None:
        tensors["mean"] = data.transform.mean
    metadata = {
        "name": data.name,
        "shape": json.dumps(data.shape),
        "transform": json.dumps(data.transform.card()),
    }
    write_tensors(Path(path), tensors, metadata)


def read(path: str | os.PathLike[str]) -> Data:
    """A set that `save` wrote.

    Raises:
        InputError: the file is missing, cut short, or holds something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        card = json.loads(metadata["transform"])
        transform = Transform.from_card(card)
        mean = tensors["mean"] if "centre" in card else None
        return Data(
            tensors["inputs"],
            tensors["targets"],
            tuple(json.loads(metadata["shape"])),
            metadata["name"],
            replace(transform, norms=tensors.get("norms"), mean=mean),
        )
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except KeyError as error:
        raise InputError(f"{path} is not a data set: it has no {error}") from error
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a data set: {error}") from error


def _sides(source: _formats.Source) -> tuple[int, int]:
    """Height and width of the images of a source."""
    *_, height, width = source.pixels(np.arange(1)).shape
    return height, width


def _shrunk(source: _formats.Source, size: int, name: str) -> _formats.Source:
    """The source with images of size × size, each pixel the mean of a square of theirs."""
    height, width = _sides(source)
    if size < 1 or height % size or width % size:
        raise InputError(
            f"size={size}: images of {name} are {height} × {width}; expected a number that divides "
            "both sides"
        )
    squares = (size, height // size, size, width // size)

    def pixels(rows: _formats.Rows) -> _formats.Pixels:
        images = source.pixels(rows)
        means: _formats.Pixels = images.reshape(*images.shape[:-2], *squares).mean((-3, -1))
        return means

    return source if (height, width) == (size, size) else replace(source, pixels=pixels)


def _standardising(pixels: NDArray[Any], name: str) -> Transform:
    """One mean and one deviation over all numbers in pixels (n, *shape)."""
    if pixels.min() == pixels.max():
        raise InputError(f"all pixels of {name} are equal: they cannot be standardised")
    numbers = np.asarray(pixels, np.float64)
    return Transform(numbers.mean().item(), numbers.std().item())


def _centring(pixels: NDArray[Any], name: str) -> Transform:
    """The mean image of pixels (n, *shape)."""
    if len(pixels) < 2:
        raise InputError(
            f"samples={len(pixels)} of {name}: the mean image of a single sample is that sample, "
            "so nothing would be left of it; draw two or more"
        )
    mean = torch.from_numpy(np.asarray(pixels, np.float64)).flatten(1).mean(0)
    return Transform(mean.mean().item(), mean=mean)


def _prepare(
    pixels: NDArray[Any],
    targets: NDArray[Any],
    transform: Transform,
    normalise: bool,
    name: str,
) -> Data:
    """Transform and rescale pixels (n, *shape), and remember how."""
    rows = torch.from_numpy(np.array(pixels, np.float64)).flatten(1)
    norms = transform.apply(rows).norm(dim=1) if normalise else None
    if norms is not None and not norms.all():
        row = int(norms.argmin())
        raise InputError(f"sample {row} of {name} is zero: it cannot be rescaled to norm √d")
    return Data(
        transform.apply(rows, norms),
        torch.from_numpy(np.array(targets, np.float64)),
        tuple(pixels.shape[1:]),
        name,
        replace(transform, norms=norms),
    )


def _as_numbers(values: NDArray[Any] | Tensor, word: str) -> NDArray[Any]:
    """A finite array of real numbers."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise InputError(f"{word} holds {array.dtype}, expected real numbers")
    if not np.isfinite(array).all():
        raise InputError(f"{word} holds a value that is not finite")
    return array


def _as_tuple(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _spread(value: float | tuple[float, ...], rows: Tensor) -> float | Tensor:
    """A number as it is; one number for each channel as (d,), to meet rows (n, d)."""
    if not isinstance(value, tuple):
        return value
    if rows.shape[1] % len(value):
        raise InputError(f"rows of {rows.shape[1]} numbers do not have {len(value)} channels")
    return rows.new_tensor(value).repeat_interleave(rows.shape[1] // len(value))


def _factors(rows: Tensor, norms: Tensor | None) -> float | Tensor:
    """What rescales rows (n, d) of given norms to norm √d, (n, 1); 1 where norms are unknown."""
    if norms is None:
        return 1.0
    _check_norms(norms)
    if len(norms) != len(rows):
        raise InputError(f"{len(rows)} rows but {len(norms)} norms")
    return math.sqrt(rows.shape[1]) / norms.to(rows)[:, None]


def _check_norms(norms: Tensor) -> None:
    if norms.ndim != 1 or not (norms.isfinite() & (norms > 0)).all():
        raise InputError("norms must be one positive, finite number for each sample")


def _check_positive(word: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{word}={value}: expected 1 or more")


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise InputError(f"seed={seed}: expected 0 or more")


def _generator(seed: int) -> np.random.Generator:
    _check_seed(seed)
    return np.random.default_rng(seed)
