"""Sets of samples: drawn at random, from images by name, or made of your own arrays.

The images that `load` knows:

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
"""

import math
import os
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exhume.checks import number, one_of, whole_number
from exhume.data import selection
from exhume.data.formats import channels_first, open_source
from exhume.data.samples import Data, Transform
from exhume.data.selection import DEFAULT_CLASSES, Classes
from exhume.errors import InputError

SUBSPACE = 0x5B5ACE
"""Any fixed number would do: it tells the stream of the subspace from that of the samples."""


def sphere(
    dim: int, samples: int, seed: int = 0, noise: float = 0.5, rank: int | None = None
) -> Data:
    """Draw Gaussian rows, rescaled to norm √d, with noisy linear targets.

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
    whole_number("dim", dim)
    whole_number("samples", samples)
    number("noise", noise, least=0)
    basis = None if rank is None else subspace(dim, rank, seed).numpy()
    generator = _generator(seed)
    rows = generator.standard_normal((samples, dim if rank is None else rank))
    rows = rows if basis is None else rows @ basis.T
    rows *= math.sqrt(dim) / np.linalg.norm(rows, axis=1, keepdims=True)
    weights = generator.standard_normal(dim) / math.sqrt(dim)
    targets = rows @ weights + noise * generator.standard_normal(samples)
    return Data(torch.from_numpy(rows), torch.from_numpy(targets)[:, None], (dim,), "sphere")


def subspace(dim: int, rank: int, seed: int = 0) -> Tensor:
    """Return a basis of the subspace that `sphere` draws its samples from: (d, r), orthonormal.

    It is uniform among the subspaces of that dimension, and depends on the seed alone, not on the
    samples, so that an attacker may be told of it.

    Example:
        >>> basis = subspace(dim=9, rank=2)
        >>> data = sphere(dim=9, samples=4, rank=2)
        >>> bool((data.inputs - data.inputs @ basis @ basis.T).abs().max() < 1e-12)
        True
    """
    whole_number("dim", dim)
    whole_number("seed", seed, least=0)
    if not 1 <= rank <= dim:
        raise InputError(f"rank={rank}: expected a whole number from 1 to the dimension, {dim}")
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
    """Draw real images, standardised by one mean and one deviation over all pixels drawn.

    Args:
        name: of the set, from the table above.
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
    one_of("centre", centre, ("all", "pixels"))
    whole_number("samples", samples)
    source = open_source(name, root)
    source = source if size is None else source.shrunk(size, name)
    wanted = DEFAULT_CLASSES[name] if classes is None else classes
    groups = selection.groups(source, wanted, name)
    generator = _generator(seed)
    if seed != 0 or source.bundled:
        groups = [generator.permutation(group) for group in groups]
    pixels = source.pixels(selection.in_turns(groups, samples, name))
    targets = selection.targets(samples, len(groups), generator)
    transform = (_centring if centre == "pixels" else _standardising)(pixels, name)
    normalise = centre != "pixels" if normalise is None else normalise
    return _prepare(pixels, targets, transform, normalise, name)


def held_out(
    known: Data,
    samples: int | None = None,
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
) -> Data:
    """Draw images of the same source that are not in a set of `load`, as its model sees them.

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
    whole_number("samples", count)
    source = open_source(known.name, root)
    height, width = source.sides
    if height % known.shape[-1] == width % known.shape[-1] == 0:
        source = source.shrunk(known.shape[-1], known.name)
    rows, taken = selection.look_up(source, known.images().flatten(1).cpu().numpy(), known.name)
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
    """Make a set of your own samples, from numpy or torch.

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
    pixels = channels_first(pixels / 255.0 if pixels.dtype == np.uint8 else pixels)
    transform = _standardising(pixels, name) if standardise else Transform()
    return _prepare(pixels, targets.reshape(len(targets), -1), transform, normalise, name)


def _standardising(pixels: NDArray[Any], name: str) -> Transform:
    """Return one mean and one deviation over all numbers in pixels (n, *shape)."""
    if pixels.min() == pixels.max():
        raise InputError(f"all pixels of {name} are equal: they cannot be standardised")
    numbers = np.asarray(pixels, np.float64)
    return Transform(numbers.mean().item(), numbers.std().item())


def _centring(pixels: NDArray[Any], name: str) -> Transform:
    """Return the mean image of pixels (n, *shape)."""
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
    """Return a finite array of real numbers."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise InputError(f"{word} holds {array.dtype}, expected real numbers")
    if not np.isfinite(array).all():
        raise InputError(f"{word} holds a value that is not finite")
    return array


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(whole_number("seed", seed, least=0))
