"""Sets of samples: drawn at random, from images by name, or made of your own arrays."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exhume.checks import number, one_of, whole_number
from exhume.data.formats import Rows, Source, channels_first, open_source
from exhume.data.samples import Data, Transform
from exhume.errors import InputError

# Labels, or a word for a choice of labels; `load` says what each means
Classes = Literal["all", "parity", "vehicles", "random"] | Sequence[int]

# The images that `load` knows, with the classes taken unless others are asked for
DEFAULT_CLASSES: dict[str, Classes] = {
    "digits": "all",  # bundled with scikit-learn: 1,797 images of 8 × 8
    "faces": "random",  # bundled with scikit-image, from LFW: 100 images of 25 × 25
    "photos": "random",  # bundled with scikit-learn: 520 tiles of two photos, 3 × 32 × 32
    "cifar10": (6, 9),  # in a folder as binary, python or .npz: 3 × 32 × 32
    "mnist": "parity",  # in a folder as IDX or .npz: 28 × 28
    "fashion_mnist": "all",  # the same
    "tiny_imagenet": "random",  # in a folder as JPEG or .npz: 3 × 64 × 64
}
VEHICLES = (0, 1, 8, 9)  # CIFAR-10's aeroplane, automobile, ship, truck; the others are animals
SAME = 1e-3  # images closer than this are equal: one pixel off by one of 255 levels is 0.004
PART = 1000  # images of a source that are looked at together: their distances fit into memory
SUBSPACE = 0x5B5ACE  # any number would do: it tells the subspace's stream from that of the samples


def sphere(
    dim: int, samples: int, seed: int = 0, noise: float = 0.5, rank: int | None = None
) -> Data:
    """Draw Gaussian rows, rescaled to norm √d, with noisy linear targets.

    y = X g + noise · N(0, 1) with g ~ N(0, I/d): the synthetic set-up of Iurada 2025, the same on
    every platform. With a rank r, rows are U z with Gaussian z, U the basis of a `subspace`.
    """
    whole_number("dim", dim)
    whole_number("samples", samples)
    number("noise", noise, least=0)
    basis = None if rank is None else subspace(dim, rank, seed).numpy()
    generator = np.random.default_rng(whole_number("seed", seed, least=0))
    rows = generator.standard_normal((samples, dim if rank is None else rank))
    rows = rows if basis is None else rows @ basis.T
    rows *= math.sqrt(dim) / np.linalg.norm(rows, axis=1, keepdims=True)
    weights = generator.standard_normal(dim) / math.sqrt(dim)
    targets = rows @ weights + noise * generator.standard_normal(samples)
    return Data(torch.from_numpy(rows), torch.from_numpy(targets)[:, None], (dim,), "sphere")


def subspace(dim: int, rank: int, seed: int = 0) -> Tensor:
    """Return a basis of the subspace that `sphere` draws its samples from: (d, r), orthonormal.

    It depends on the seed alone, not on the samples, so that an attacker may be told of it.
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
        name: of the set: digits, faces, photos, cifar10, mnist, fashion_mnist, tiny_imagenet.
        samples: number of samples, in equal parts from the classes (the first ones get one more
            where it does not divide), in turns, so that a prefix is balanced too.
        seed: draws the samples without replacement. For sets in a folder, 0 takes the first of
            each class in the order of the files, as published.
        normalise: rescale each sample to norm √d; unless given, not with `centre="pixels"`.
        classes: two labels: the first is target -1, the second +1. More labels, or `"all"` that
            are there: one-hot. `"parity"`: even labels -1, odd ones +1. `"vehicles"`, for
            cifar10: animals -1, vehicles (0, 1, 8, 9) +1. `"random"`: labels are not looked at,
            as many -1 as +1 in random order; the only choice for faces and photos, which have
            none. The default is in `DEFAULT_CLASSES`; 6 and 9 of cifar10 are frog and truck.
        root: the folder; the environment variable `EXHUME_DATA` unless given.
        centre: `"pixels"` subtracts the mean image of the samples drawn, pixel by pixel, and
            divides by nothing: inputs are in [-1, 1], as in Haim 2022.
        size: side of the images, shrunk to it by averaging squares of pixels before all else; it
            must divide their own side.
    """
    if name not in DEFAULT_CLASSES:
        raise InputError(f"data set {name!r}: there are {', '.join(DEFAULT_CLASSES)}, and sphere")
    one_of("centre", centre, ("all", "pixels"))
    whole_number("samples", samples)
    source = open_source(name, root)
    source = source if size is None else source.shrunk(size, name)
    groups = _groups(source, DEFAULT_CLASSES[name] if classes is None else classes, name)
    generator, count = np.random.default_rng(whole_number("seed", seed, least=0)), len(groups)
    if seed != 0 or source.bundled:
        groups = [generator.permutation(group) for group in groups]
    most = min(count * len(rows) + turn for turn, rows in enumerate(groups))
    if samples > most:
        raise InputError(f"{samples} samples asked for: {name} has {most} in {count} equal parts")
    rows = np.array([groups[i % count][i // count] for i in range(samples)])
    turns = np.arange(samples) % max(count, 2)
    if count == 1:  # labels are unused
        turns = generator.permutation(turns)
    targets = np.eye(count)[turns] if count > 2 else np.where(turns, 1.0, -1.0)[:, None]
    pixels = source.pixels(rows)
    transform = _centring(pixels, name) if centre == "pixels" else _standardising(pixels, name)
    rescaled = centre != "pixels" if normalise is None else normalise
    return _prepare(pixels, targets, transform, rescaled, name)


def _groups(source: Source, classes: Classes, name: str) -> list[Rows]:
    """Return the rows of each class, in the order of the set; one group if labels are unused."""
    if classes == "random":
        return [np.arange(source.size)]
    if source.labels is None:
        raise InputError(f'{name} has no classes: leave classes out, or say "random"')
    if classes == "parity":
        return [np.flatnonzero(source.labels % 2 == remainder) for remainder in (0, 1)]
    if classes == "vehicles":
        if name != "cifar10":
            raise InputError(f'classes="vehicles" is a choice for cifar10, not for {name}')
        return [np.flatnonzero(np.isin(source.labels, VEHICLES) == side) for side in (False, True)]
    if isinstance(classes, str) and classes != "all":
        raise InputError(f"classes={classes!r}: expected labels, all, parity, vehicles or random")
    labels = np.unique(source.labels).tolist() if classes == "all" else list(classes)
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise InputError(f"classes={labels} of {name}: expected two or more different labels")
    if absent := [label for label in labels if label not in source.labels]:
        raise InputError(f"{name} has no images with label {absent[0]}")
    return [np.flatnonzero(source.labels == label) for label in labels]


def held_out(
    known: Data,
    samples: int | None = None,
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
) -> Data:
    """Draw images of the same source that are not in a set of `load`, as its model sees them.

    They are what a control needs: the same kind of data, that the model was never trained on.
    Sample i has the label and the target of sample i of the set (modulo its size), and is prepared
    with the shift, the scale and the mean image of the set. Images that equal one of the set are
    left out too. There are as many as in the set unless `samples` is given, fewer where the source
    has no more; `root` is as in `load`.
    """
    if known.name not in DEFAULT_CLASSES:
        raise InputError(f"{known.name}: no source to draw from; see from_arrays")
    count = known.samples if samples is None else samples
    whole_number("samples", count)
    source = open_source(known.name, root)
    height, width = source.sides
    if height % known.shape[-1] == width % known.shape[-1] == 0:
        source = source.shrunk(known.shape[-1], known.name)
    rows, taken = _look_up(source, known.images().flatten(1).cpu().numpy(), known.name)
    labels = np.zeros(source.size, np.int64) if source.labels is None else source.labels
    free = np.random.default_rng(whole_number("seed", seed, least=0)).permutation(
        np.setdiff1d(np.arange(source.size), taken)
    )
    members = {label: iter(free[labels[free] == label]) for label in np.unique(labels[rows])}
    turns = np.arange(count) % known.samples
    places = [(next(members[labels[rows[turn]]], -1), turn) for turn in turns]
    kept = np.array([pair for pair in places if pair[0] >= 0], np.int64).reshape(-1, 2)
    if not len(kept):
        raise InputError(f"{known.name} has no other images with the labels of this set")
    pixels, targets = source.pixels(kept[:, 0]), known.targets[torch.from_numpy(kept[:, 1])]
    rescaled = known.transform.norms is not None
    drawn = _prepare(pixels, targets.cpu().numpy(), known.transform, rescaled, known.name)
    return replace(drawn, shape=known.shape)  # a user's images may have a channel of their own


def _look_up(source: Source, pixels: NDArray[np.float64], name: str) -> tuple[Rows, Rows]:
    """Return a row number for each image (n, d), and all rows that hold one, doubles included."""
    found, taken = np.full(len(pixels), -1), []
    for start in range(0, source.size, PART):
        rows = np.arange(start, min(start + PART, source.size))
        part = source.pixels(rows).reshape(len(rows), -1)
        if part.shape[1] != pixels.shape[1]:
            raise InputError(f"{name} has {part.shape[1]} numbers, these have {pixels.shape[1]}")
        apart = torch.cdist(torch.from_numpy(pixels), torch.from_numpy(part))
        image, row = np.nonzero(apart.numpy() < SAME)
        found[image] = rows[row]
        taken.append(rows[row])
    if missing := (found < 0).sum():
        words = f"{missing} of {len(found)} images are not in {name}"
        raise InputError(f"{words}: was it drawn from other files?")
    return found, np.unique(np.concatenate(taken))


def from_arrays(
    x: NDArray[Any] | Tensor,
    y: NDArray[Any] | Tensor,
    normalise: bool = True,
    standardise: bool = True,
    name: str = "custom",
) -> Data:
    """Make a set of your own samples, from numpy or torch.

    x are images (n, H, W, C), (n, C, H, W) or (n, H, W), or rows (n, d), where bytes (uint8) are
    divided by 255; y are targets as the model was trained on, (n,) or (n, m), classes as one-hot
    rows. `standardise` subtracts the mean of all numbers in x and divides by their deviation;
    `normalise` rescales each sample to norm √d.
    """
    pixels, targets = _as_numbers(x, "x"), _as_numbers(y, "y")
    if not (pixels.size and targets.size and pixels.ndim in (2, 3, 4) and targets.ndim in (1, 2)):
        raise InputError(
            f"x {pixels.shape}, y {targets.shape}: expected x (n, d), (n, H, W) or with channels, "
            "and y (n,) or (n, m), neither empty"
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
        raise InputError(f"samples={len(pixels)} of {name}: a mean image takes two or more")
    mean = torch.from_numpy(np.asarray(pixels, np.float64)).flatten(1).mean(0)
    return Transform(mean.mean().item(), mean=mean)


def _prepare(
    pixels: NDArray[Any], targets: NDArray[Any], transform: Transform, normalise: bool, name: str
) -> Data:
    """Transform and rescale pixels (n, *shape), and remember how."""
    rows = torch.from_numpy(np.array(pixels, np.float64)).flatten(1)
    norms = transform.apply(rows).norm(dim=1) if normalise else None
    if norms is not None and not norms.all():
        row = int(norms.argmin())
        raise InputError(f"sample {row} of {name} is zero: it cannot be rescaled to norm √d")
    values = torch.from_numpy(np.array(targets, np.float64))
    inputs, shape = transform.apply(rows, norms), tuple(pixels.shape[1:])
    return Data(inputs, values, shape, name, replace(transform, norms=norms))


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
