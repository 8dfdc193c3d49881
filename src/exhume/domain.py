"""Where candidates may lie, and how to stay there."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Domain(Protocol):
    """A set of admissible inputs in R^d."""

    @property
    def name(self) -> str:
        """What it is, for a report."""
        ...

    def project(self, candidates: Tensor) -> Tensor:
        """The nearest admissible points, (n, d)."""
        ...

    def tangent(self, candidates: Tensor, direction: Tensor) -> Tensor:
        """The part of a direction (n, d) that stays in the domain to first order."""
        ...

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Random admissible points (count, dim), float64 on the CPU."""
        ...


@dataclass(frozen=True)
class Sphere:
    """‖x‖ = radius; the radius is √d unless given.

    Example:
        >>> Sphere(5.0).project(torch.tensor([[3.0, 4.0]])).tolist()
        [[3.0, 4.0]]
    """

    radius: float | None = None

    @property
    def name(self) -> str:
        """With the radius."""
        return f"sphere of radius {'√d' if self.radius is None else format(self.radius, 'g')}"

    def project(self, candidates: Tensor) -> Tensor:
        """Rows rescaled to the radius."""
        radius = self.radius or math.sqrt(candidates.shape[1])
        return radius * torch.nn.functional.normalize(candidates, dim=1)

    def tangent(self, candidates: Tensor, direction: Tensor) -> Tensor:
        """Rows of the direction without their component along the candidate."""
        unit = torch.nn.functional.normalize(candidates, dim=1)
        return direction - (direction * unit).sum(1, keepdim=True) * unit

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Uniform points on the sphere."""
        return self.project(torch.randn(count, dim, generator=generator, dtype=torch.float64))
