"""Where candidates may lie, and how to stay there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from exhume.equation.tiles import Tiles
from exhume.errors import InputError

NEWTON_ROUNDS = 50  # at most; in practice fewer than ten are needed
HALVINGS = 60  # after which a bracket is as narrow as rounding in float64 (53 bits) allows


Projector = Callable[[Tensor], Tensor]  # of directions (n, d): symmetric, and linear in them


class Domain(Protocol):
    """A domain is a set of admissible inputs in R^d."""

    @property
    def name(self) -> str:
        """Say what it is, for a report."""

    def project(self, candidates: Tensor) -> Tensor:
        """Return the nearest admissible points, (n, d)."""

    def tangent(self, candidates: Tensor, descent: Tensor | None = None) -> Projector:
        """Return what takes the part of a direction that stays in the domain to first order.

        A bound that the descent (n, d) of the objective pushes against is held; without one no
        bound is.
        """

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Draw random admissible points (count, dim), float64 on the CPU."""


@dataclass(frozen=True, eq=False)
class _Constant:
    """A tensor with one copy for each device and dtype in which candidates ask for it."""

    value: Tensor
    copies: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)

    def like(self, candidates: Tensor) -> Tensor:
        where = (candidates.device, candidates.dtype)
        if where not in self.copies:
            self.copies[where] = self.value.to(*where)
        return self.copies[where]


@dataclass(frozen=True)
class Sphere:
    """‖x‖ = radius; the radius is √d unless given."""

    radius: float | None = None

    @property
    def name(self) -> str:
        """Give the radius."""
        return f"sphere of radius {'√d' if self.radius is None else format(self.radius, 'g')}"

    def length(self, dim: int) -> float:
        """Return the radius in R^dim."""
        return self.radius or math.sqrt(dim)

    def project(self, candidates: Tensor) -> Tensor:
        """Rescale rows to the radius."""
        return self.length(candidates.shape[1]) * torch.nn.functional.normalize(candidates, dim=1)

    def tangent(self, candidates: Tensor, descent: Tensor | None = None) -> Projector:
        """Take from each row of a direction its component along the candidate."""
        unit = torch.nn.functional.normalize(candidates, dim=1)
        return lambda direction: direction - (direction * unit).sum(1, keepdim=True) * unit

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Draw points uniform on the sphere."""
        return self.project(torch.randn(count, dim, generator=generator, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class Box:
    """low ≤ x ≤ high, finite numbers for all entries or for each."""

    low: float | Sequence[float] | Tensor
    high: float | Sequence[float] | Tensor
    bounds: _Constant = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse bounds between which nothing lies, or that do not bound."""
        low, high = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (self.low, self.high))
        if max(low.ndim, high.ndim) > 1 or (low.ndim == high.ndim == 1 and len(low) != len(high)):
            shapes = f"{tuple(low.shape)} and {tuple(high.shape)}"
            raise InputError(f"box: expected a number or one for each entry, got shapes {shapes}")
        both = torch.stack([low + 0 * high, high + 0 * low])  # one shape for both
        if not both.isfinite().all() or not (both[0] < both[1]).all():
            raise InputError("box: expected finite bounds with low < high everywhere")
        object.__setattr__(self, "bounds", _Constant(both))

    @property
    def name(self) -> str:
        """Give the bounds."""
        low, high = self.bounds.value
        range_ = f"[{low.min().item():g}, {high.max().item():g}]"
        same = (low == low.min()).all() and (high == high.max()).all()
        return f"box {range_}" if same else f"box with bounds for each entry in {range_}"

    def project(self, candidates: Tensor) -> Tensor:
        """Cut entries off at the bounds."""
        low, high = self.bounds.like(candidates).unbind()
        return torch.clamp(candidates, low, high)

    def shrunk(self, rows: Tensor) -> Tensor:
        """Return rows (k, ·) of any entries, made smaller until none is beyond the widest bounds.

        A bound that no factor leads to, such as a lower one of 0, is left alone.
        """
        low, high = self.bounds.like(rows)
        most = torch.ones_like(rows[:, 0])
        if high.max() > 0:
            most = torch.maximum(most, rows.amax(1) / high.max())
        if low.min() < 0:
            most = torch.maximum(most, rows.amin(1) / low.min())
        return rows / most[:, None]

    def side(self, candidates: Tensor) -> Tensor:
        """Return −1 where an entry is at its lower bound (to rounding), 1 at the upper, else 0."""
        low, high = self.bounds.like(candidates).unbind()
        slack = 64 * torch.finfo(candidates.dtype).eps * (low.abs() + high.abs())
        above, below = (candidates - high).abs() <= slack, (candidates - low).abs() <= slack
        return above.to(candidates.dtype) - below.to(candidates.dtype)

    def tangent(self, candidates: Tensor, descent: Tensor | None = None) -> Projector:
        """Set the entries to zero that are held."""
        held = self.held(candidates, descent)
        return lambda direction: direction.masked_fill(held, 0)

    def held(self, candidates: Tensor, descent: Tensor | None) -> Tensor:
        """Tell which entries are at a bound where the descent points outward, (n, d)."""
        if descent is None:
            return torch.zeros_like(candidates, dtype=torch.bool)
        return self.side(candidates) * descent > 0

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Draw points uniform in the box."""
        low, high = self.bounds.value.unbind()
        if low.ndim == 1 and len(low) != dim:
            raise InputError(f"box: has bounds for {len(low)} entries, but inputs have {dim}")
        return low + (high - low) * torch.rand(count, dim, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class SphereInBox:
    """The part of a sphere that lies in a box."""

    sphere: Sphere
    box: Box

    @property
    def name(self) -> str:
        """Name both."""
        return f"{self.sphere.name} ∩ {self.box.name}"

    def project(self, candidates: Tensor) -> Tensor:
        """Move each row to the nearest point in the box and on the sphere (or near, if none)."""
        return on_sphere_in_box(candidates, self.sphere.length(candidates.shape[1]), self.box)

    def tangent(self, candidates: Tensor, descent: Tensor | None = None) -> Projector:
        """Project to the directions that are tangent to the sphere and zero where held."""
        return self._within(candidates, self.held(candidates, descent))

    def _within(self, candidates: Tensor, held: Tensor) -> Projector:
        """P = Q − Qx xᵀQ / xᵀQx for each row x, where Q sets held entries to zero."""
        normal, tiny = candidates.masked_fill(held, 0), torch.finfo(candidates.dtype).tiny
        size = (candidates * normal).sum(1, keepdim=True).clamp_min(tiny)

        def projected(direction: Tensor) -> Tensor:
            share = (direction * normal).sum(1, keepdim=True) / size
            return direction.masked_fill(held, 0) - share * normal

        return projected

    def held(self, candidates: Tensor, descent: Tensor | None) -> Tensor:
        """Tell which entries are at a bound that the descent g would leave, (n, d).

        They are those where g − μx points outward, with μ, found by Newton's method, such that the
        rest of g − μx is tangent to the sphere; and whatever still points outward then.
        """
        held = torch.zeros_like(candidates, dtype=torch.bool)
        if descent is None or not (side := self.box.side(candidates)).any():
            return held
        held, tiny = side * descent > 0, torch.finfo(candidates.dtype).tiny
        for _ in range(NEWTON_ROUNDS):
            rest = candidates.masked_fill(held, 0)
            size = rest.square().sum(1, keepdim=True).clamp_min(tiny)
            share = (descent * rest).sum(1, keepdim=True) / size
            before, held = held, side * (descent - share * candidates) > 0
            if torch.equal(before, held):
                break
        while True:  # it ends after at most d rounds, because `held` only grows
            more = held | (side * self._within(candidates, held)(descent) > 0)
            if torch.equal(more, held):
                return held
            held = more

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Draw points uniform on the sphere and project them."""
        return self.project(self.sphere.start(count, dim, generator))


@dataclass(frozen=True, eq=False)
class Span:
    """Inputs, or all tiles of inputs, that are combinations of some rows; bounds do not matter."""

    basis: Tensor  # orthonormal rows, (r, d), or (r, t) for tiles
    within: Domain  # where inputs are drawn from, to be projected
    tiles: Tiles | None = None  # how inputs are cut, if they are
    rows: _Constant = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Keep a copy of the basis wherever candidates are."""
        object.__setattr__(self, "rows", _Constant(self.basis))

    @property
    def name(self) -> str:
        """Give the dimension."""
        what = "inputs" if self.tiles is None else "their tiles"
        return f"{self.within.name}, {what} in a span of {len(self.basis)} directions"

    @property
    def every(self) -> Tensor:
        """Return orthonormal rows (c, d) that inputs combine: those of a tile at every place."""
        if self.tiles is None:
            return self.basis
        (r, t), places = self.basis.shape, self.tiles.places
        apart = self.basis.new_zeros(places, r, places, t)
        apart[torch.arange(places), :, torch.arange(places)] = self.basis
        return self.tiles.joined(apart.view(places * r, places, t))

    def project(self, candidates: Tensor) -> Tensor:
        """Return xUᵀU."""
        rows = self.rows.like(candidates)
        parts = candidates if self.tiles is None else self.tiles.cut(candidates)
        parts = (parts @ rows.T) @ rows
        return parts if self.tiles is None else self.tiles.joined(parts)

    def tangent(self, candidates: Tensor, descent: Tensor | None = None) -> Projector:
        """Take the part of a direction in the span."""
        return self.project

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Draw points of the domain and project them."""
        return self.project(self.within.start(count, dim, generator))


@dataclass(frozen=True)
class Simplex:
    """y ≥ 0 with Σ y = 1: the shares of a whole."""

    name: str = "simplex"

    def project(self, candidates: Tensor) -> Tensor:
        """Return max(y − t, 0) with the t that makes the sum 1: max over k of (Σ largest k − 1)/k.

        Example:
            >>> Simplex().project(torch.tensor([[0.5, 0.9, -1.0]])).tolist()
            [[0.30000001192092896, 0.699999988079071, 0.0]]
        """
        sums = candidates.sort(1, descending=True).values.cumsum(1) - 1
        counts = torch.arange(1, candidates.shape[1] + 1).to(candidates)
        return (candidates - (sums / counts).amax(1, keepdim=True)).clamp_min(0)

    def tangent(self, candidates: Tensor, descent: Tensor | None = None) -> Projector:
        """Take the mean off the entries that are not held, and set the others to zero."""
        free = torch.ones_like(candidates)
        for _ in range(candidates.shape[1]):  # each time fewer are free
            if descent is not None:
                free = free * ((candidates > 0) | (descent >= _mean(descent, free)))
        return lambda direction: free * (direction - _mean(direction, free))

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Draw points uniform on the simplex."""
        drawn = torch.rand(count, dim, generator=generator, dtype=torch.float64).log()
        return drawn / drawn.sum(1, keepdim=True)


def _mean(rows: Tensor, free: Tensor) -> Tensor:
    """The mean of each row (n, c) over the entries that are 1 and not 0 in `free`, (n, 1)."""
    return (free * rows).sum(1, keepdim=True) / free.sum(1, keepdim=True).clamp_min(1)


@dataclass(frozen=True, eq=False)
class Beside:
    """Rows (x, y) have an x of one domain, of so many entries, and a y of another."""

    first: Domain
    second: Domain
    entries: int

    @property
    def name(self) -> str:
        """Name both."""
        return f"{self.first.name} × {self.second.name}"

    def _halves(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, : self.entries], rows[:, self.entries :]

    def project(self, candidates: Tensor) -> Tensor:
        """Project each of the two."""
        x, y = self._halves(candidates)
        return torch.cat([self.first.project(x), self.second.project(y)], 1)

    def tangent(self, candidates: Tensor, descent: Tensor | None = None) -> Projector:
        """Take the tangent part of each of the two."""
        gx, gy = (None, None) if descent is None else self._halves(descent)
        x, y = self._halves(candidates)
        first, second = self.first.tangent(x, gx), self.second.tangent(y, gy)

        def both(direction: Tensor) -> Tensor:
            dx, dy = self._halves(direction)
            return torch.cat([first(dx), second(dy)], 1)

        return both

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Draw each of the two."""
        x = self.first.start(count, self.entries, generator)
        return torch.cat([x, self.second.start(count, dim - self.entries, generator)], 1)


def on_sphere_in_box(candidates: Tensor, radius: float, box: Box) -> Tensor:
    """Return the nearest points on a sphere and in a box: clamp(t x) with the t of the right norm.

    ‖clamp(t x)‖² grows with t and is quadratic between bounds, so Newton's method in a bracket
    finds t. Entries at a bound stay there if they can, so that a step along a face ends on it. A
    row that is too short for every t moves on towards the box's farthest corner.
    """
    at_bound = box.side(candidates) != 0
    shortest = box.project(candidates.masked_fill(~at_bound, 0))
    at_bound &= shortest.norm(dim=1, keepdim=True) <= radius
    unit = torch.nn.functional.normalize(candidates, dim=1)
    eps, aim = torch.finfo(unit.dtype).eps, radius**2

    def scaled(t: Tensor) -> Tensor:
        return box.project(torch.where(at_bound, candidates, t * unit))

    size = scaled(torch.zeros_like(unit[:, :1])).square().sum(1, keepdim=True)
    t = low = (aim - size).clamp_min(0).sqrt()  # as ‖clamp(t x)‖² ≤ ‖clamp(0)‖² + t²‖x‖²
    high = low * 2.0**40
    found = scaled(t)
    for _ in range(HALVINGS):
        size = found.square().sum(1, keepdim=True)
        wrong = (size - aim).abs() > 8 * eps * aim
        if not wrong.any():
            break
        low, high = torch.where(size < aim, t, low), torch.where(size < aim, high, t)
        slope = unit.masked_fill(at_bound | (found != t * unit), 0).square().sum(1, keepdim=True)
        newton = (t.square() + (aim - size) / slope).sqrt()
        inside = (newton > low) & (newton < high)
        t = torch.where(wrong, torch.where(inside, newton, (low * high).sqrt()), t)
        found = scaled(t)
    short = found.norm(dim=1, keepdim=True) < radius * (1 - eps**0.5)
    if not short.any():
        return found
    bottom, top = box.bounds.like(found)
    corner = torch.where(top.abs() >= bottom.abs(), top, bottom).expand_as(found)
    low, high = torch.zeros_like(found[:, :1]), torch.ones_like(found[:, :1])
    for _ in range(HALVINGS):
        t = (low + high) / 2
        below = torch.lerp(found, corner, t).norm(dim=1, keepdim=True) < radius
        low, high = torch.where(below, t, low), torch.where(below, high, t)
    return torch.where(short, box.project(torch.lerp(found, corner, high)), found)
