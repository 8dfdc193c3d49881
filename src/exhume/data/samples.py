"""A set of samples with its targets, how its pixels became inputs, and the file it is kept in."""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from exhume.equation.pixels import Pixels
from exhume.errors import InputError
from exhume.files import read_metadata, read_tensors, write_tensors


@dataclass(frozen=True)
class Transform(Pixels):
    """A `Transform` says how pixels became inputs, by a map that may be told and private numbers.

        inputs_i = (pixels_i - shift) / scale · √d / norm_i

    Norms and mean are private: not part of equality, and of the card only that there is a mean.
    A mean image stands in place of the shift, which is then its average, for pictures without it.
    """

    # of each sample before it was rescaled to √d, (n,); None if the rows were not rescaled
    norms: Tensor | None = field(default=None, repr=False, compare=False)
    mean: Tensor | None = field(default=None, repr=False, compare=False)  # image, (d,)

    def __post_init__(self) -> None:
        """Refuse what could not be undone."""
        super().__post_init__()
        if self.norms is not None:
            _check_norms(self.norms)
        if self.mean is not None and not (self.mean.ndim == 1 and self.mean.isfinite().all()):
            raise InputError("the mean image must be one finite number for each entry of a sample")

    def apply(self, pixels: Tensor, norms: Tensor | None = None) -> Tensor:
        """Return the inputs of pixels, both (n, d); norms (n,) rescale the rows to √d."""
        plain, mean = self._parts(pixels)
        return plain.to_inputs(pixels - mean) * _factors(pixels, norms)

    def undo(self, inputs: Tensor, norms: Tensor | None = None) -> Tensor:
        """Return the pixels of inputs, both (n, d), not clipped.

        Without the norms (n,) that the rows had before rescaling √d is assumed, which changes the
        contrast of a picture and nothing else.
        """
        plain, mean = self._parts(inputs)
        return plain.to_pixels(inputs / _factors(inputs, norms)) + mean

    def _parts(self, rows: Tensor) -> tuple[Pixels, Tensor | float]:
        """Return shift and scale, and the mean image in the place of the shift; for rows (n, d)."""
        if self.mean is None:
            return self, 0.0
        if len(self.mean) != rows.shape[1]:
            raise InputError(f"rows of {rows.shape[1]} numbers, mean image of {len(self.mean)}")
        return Pixels(0.0, self.scale), self.mean.to(rows)

    def card(self) -> dict[str, float | list[float] | str]:
        """Return shift and scale for JSON, without the norms; and that there is a mean image."""
        levels = {"shift": self.shift, "scale": self.scale}
        declared: dict[str, float | list[float] | str] = {
            key: list(level) if isinstance(level, tuple) else level for key, level in levels.items()
        }
        return declared if self.mean is None else declared | {"centre": "pixels"}


@dataclass(frozen=True, eq=False)
class Data:
    """A `Data` holds samples with their targets, as a model is trained on them."""

    inputs: Tensor = field(repr=False)  # (n, d) float64, one flattened sample a row
    targets: Tensor = field(repr=False)  # (n, m) float64: ±1, real numbers, or one-hot rows
    shape: tuple[int, ...]  # of one sample, with product d; (H, W) grey, (C, H, W) colour
    name: str = "custom"  # of the set
    transform: Transform = field(default_factory=Transform)  # how pixels became inputs

    def __post_init__(self) -> None:
        """Refuse what no model could be trained on."""
        shape, norms, mean = self.shape, self.transform.norms, self.transform.mean
        for word, rows in (("inputs", self.inputs), ("targets", self.targets)):
            if rows.ndim != 2 or rows.numel() == 0 or rows.dtype != torch.float64:
                raise InputError(
                    f"{word} of {self.name}: {rows.dtype} {tuple(rows.shape)}; expected float64 "
                    "with at least one row and one column"
                )
            if not rows.isfinite().all():
                raise InputError(f"{word} of {self.name} hold a value that is not finite")
        if len(self.inputs) != len(self.targets):
            raise InputError(f"{len(self.inputs)} samples but {len(self.targets)} targets")
        if not shape or min(shape) < 1 or math.prod(shape) != self.dim:
            raise InputError(f"shape {shape} does not hold {self.dim} numbers")
        if norms is not None and len(norms) != self.samples:
            raise InputError(f"{self.samples} samples but {len(norms)} norms")
        if mean is not None and len(mean) != self.dim:
            raise InputError(f"a mean image of {len(mean)} numbers on shape {shape}")
        for levels in (self.transform.shift, self.transform.scale):
            if isinstance(levels, tuple) and len(levels) not in (1, shape[0]):
                raise InputError(f"a transform for {len(levels)} channels on shape {shape}")

    @property
    def dim(self) -> int:
        """Return the number of entries of one sample, d."""
        return self.inputs.shape[1]

    @property
    def samples(self) -> int:
        """Return the number of samples, n."""
        return self.inputs.shape[0]

    @property
    def outputs(self) -> int:
        """Return the number of entries of one target, m."""
        return self.targets.shape[1]

    @property
    def display(self) -> Pixels | None:
        """Return what an auditor may be told of the pixels; None if samples are no images."""
        declared = Pixels(self.transform.shift, self.transform.scale)
        return declared if len(self.shape) > 1 else None

    def images(self, inputs: Tensor | None = None, norms: Tensor | None = None) -> Tensor:
        """Return pixel values of rows of inputs, (k, *shape), not clipped; true ones are in [0, 1].

        They are the samples of this set, with their own norms, unless rows (k, d) are given, and
        norms (k,) where known; see `Transform.undo`.
        """
        if inputs is None:
            inputs, norms = self.inputs, self.transform.norms if norms is None else norms
        if inputs.ndim != 2 or inputs.shape[1] != self.dim:
            raise InputError(f"inputs of shape {tuple(inputs.shape)}, expected (k, {self.dim})")
        return self.transform.undo(inputs, norms).reshape(-1, *self.shape)


def save(data: Data, path: str | os.PathLike[str]) -> None:
    """Write a set, with norms and mean image, to one safetensors file private to its owner."""
    private = {"norms": data.transform.norms, "mean": data.transform.mean}
    tensors = {key: tensor for key, tensor in private.items() if tensor is not None}
    tensors |= {"inputs": data.inputs, "targets": data.targets}
    transform, shape = json.dumps(data.transform.card()), json.dumps(data.shape)
    metadata = {"name": data.name, "shape": shape, "transform": transform}
    write_tensors(Path(path), tensors, metadata)


def read(path: str | os.PathLike[str]) -> Data:
    """Read a set that `save` wrote."""
    tensors, metadata = read_tensors(Path(path)), read_metadata(Path(path))
    try:
        card, shape = json.loads(metadata["transform"]), tuple(json.loads(metadata["shape"]))
        mean = tensors["mean"] if "centre" in card else None
        transform = Transform(card["shift"], card["scale"], tensors.get("norms"), mean)
        return Data(tensors["inputs"], tensors["targets"], shape, metadata["name"], transform)
    except KeyError as error:
        raise InputError(f"{path} is not a data set: it has no {error}") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a data set: {error}") from error


def _factors(rows: Tensor, norms: Tensor | None) -> float | Tensor:
    """Return what rescales rows (n, d) of given norms to norm √d, (n, 1); 1 without norms."""
    if norms is None:
        return 1.0
    _check_norms(norms)
    if len(norms) != len(rows):
        raise InputError(f"{len(rows)} rows but {len(norms)} norms")
    return math.sqrt(rows.shape[1]) / norms.to(rows)[:, None]


def _check_norms(norms: Tensor) -> None:
    if norms.ndim != 1 or not (norms.isfinite() & (norms > 0)).all():
        raise InputError("norms must be one positive, finite number for each sample")
