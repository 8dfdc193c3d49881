"""Where candidates may lie, and how to stay there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

ROUNDS = 50  # of whatever repeats until it agrees: far more than it takes
HALVINGS = 60  # of a bracket, down to rounding in float64


class Domain(Protocol):
    """A set of admissible inputs in R^d."""

    @property
    def name(self) -> str:
        """What it is, for a report."""
        ...

    def project(self, candidates: Tensor) -> Tensor:
        """The nearest admissible points, (n, d)."""
        ...

    def tangent(
        self, candidates: Tensor, direction: Tensor, descent: Tensor | None = None
    ) -> Tensor:
        """The part of a direction (n, d) that stays in the domain to first order.

        A symmetric projector, linear in the direction.

        Args:
            candidates: admissible points X, (n, d).
            direction: what to project, (n, d).
            descent: where the objective falls, (n, d): a bound that it pushes against is held.
                Without it no bound is.
        """
        ...

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Random admissible points (count, dim), float64 on the CPU."""
        ...


@dataclass(frozen=True, eq=False)
class _Constant:
    """A tensor that is at hand wherever the candidates are: one copy for each device and dtype."""

    value: Tensor
    copies: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)

    def like(self, candidates: Tensor) -> Tensor:
        where = (candidates.device, candidates.dtype)
        if where not in self.copies:
            self.copies[where] = self.value.to(*where)
        return self.copies[where]


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

    def length(self, dim: int) -> float:
        """The radius in R^dim."""
        return self.radius or math.sqrt(dim)

    def project(self, candidates: Tensor) -> Tensor:
        """Rows rescaled to the radius."""
        return self.length(candidates.shape[1]) * torch.nn.functional.normalize(candidates, dim=1)

    def tangent(
        self, candidates: Tensor, direction: Tensor, descent: Tensor | None = None
    ) -> Tensor:
        """Rows of the direction without their component along the candidate."""
        unit = torch.nn.functional.normalize(candidates, dim=1)
        return direction - (direction * unit).sum(1, keepdim=True) * unit

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Uniform points on the sphere."""
        return self.project(torch.randn(count, dim, generator=generator, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class Box:
    """low ≤ x ≤ high, entry by entry.

    Attributes:
        low: a finite number, or one for each entry.
        high: the same, above `low`.

    Example:
        >>> Box(0, 1).project(torch.tensor([[-2.0, 0.5, 3.0]])).tolist()
        [[0.0, 0.5, 1.0]]
    """

    low: float | Sequence[float] | Tensor
    high: float | Sequence[float] | Tensor
    bounds: _Constant = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse bounds between which nothing lies, or that do not bound."""
        low, high = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (self.low, self.high))
        if max(low.ndim, high.ndim) > 1 or (low.ndim == high.ndim == 1 and len(low) != len(high)):
            raise ValueError(
                "box: expected a number or one for each entry, got bounds of shapes "
                f"{tuple(low.shape)} and {tuple(high.shape)}"
            )
        both = torch.stack([low + 0 * high, high + 0 * low])  # one shape for both
        if not both.isfinite().all() or not (both[0] < both[1]).all():
            raise ValueError("box: expected finite bounds with low < high everywhere")
        object.__setattr__(self, "bounds", _Constant(both))

    @property
    def name(self) -> str:
        """With the bounds."""
        low, high = self.bounds.value
        range_ = f"[{low.min().item():g}, {high.max().item():g}]"
        same = (low == low.min()).all() and (high == high.max()).all()
        return f"box {range_}" if same else f"box with bounds for each entry in {range_}"

    def project(self, candidates: Tensor) -> Tensor:
        """Entries cut off at the bounds."""
        low, high = self.bounds.like(candidates).unbind()
        return torch.clamp(candidates, low, high)

    def side(self, candidates: Tensor) -> Tensor:
        """−1 where an entry is at its lower bound (to rounding), 1 at the upper, else 0, (n, d)."""
        low, high = self.bounds.like(candidates).unbind()
        slack = 64 * torch.finfo(candidates.dtype).eps * (low.abs() + high.abs())
        above, below = (candidates - high).abs() <= slack, (candidates - low).abs() <= slack
        return above.to(candidates.dtype) - below.to(candidates.dtype)

    def tangent(
        self, candidates: Tensor, direction: Tensor, descent: Tensor | None = None
    ) -> Tensor:
        """Zero for the entries at a bound where the descent points outward."""
        if descent is None:
            return direction
        return direction.masked_fill(self.side(candidates) * descent > 0, 0)

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Uniform points in the box."""
        low, high = self.bounds.value.unbind()
        if low.ndim == 1 and len(low) != dim:
            raise ValueError(f"box: has bounds for {len(low)} entries, but inputs have {dim}")
        return low + (high - low) * torch.rand(count, dim, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Subspace:
    """x = U c with c in R^r.

    Attributes:
        basis: U, (d, r) with orthonormal columns.

    Example:
        >>> Subspace(torch.eye(3)[:, :2]).project(torch.tensor([[1.0, 2.0, 3.0]])).tolist()
        [[1.0, 2.0, 0.0]]
    """

    basis: Tensor
    exact: _Constant = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what is no basis; make it orthonormal to float64, whatever it came in."""
        u = self.basis.detach().double().cpu()
        if u.ndim != 2 or not 1 <= u.shape[1] <= u.shape[0]:
            raise ValueError(f"subspace: expected a basis (d, r), r ≤ d, got {tuple(u.shape)}")
        gram = u.T @ u
        if not (gram - torch.eye(len(gram), dtype=gram.dtype)).abs().max() < 1e-5:
            raise ValueError("subspace: the columns of the basis are not orthonormal")
        q, r = torch.linalg.qr(u)
        object.__setattr__(self, "exact", _Constant(q * r.diagonal().sign()))

    @property
    def name(self) -> str:
        """With the dimension."""
        return f"subspace of dimension {self.basis.shape[1]}"

    def project(self, candidates: Tensor) -> Tensor:
        """X U Uᵀ."""
        u = self.exact.like(candidates)
        return candidates @ u @ u.T

    def tangent(
        self, candidates: Tensor, direction: Tensor, descent: Tensor | None = None
    ) -> Tensor:
        """The direction in the subspace."""
        return self.project(direction)

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Gaussian points in the subspace, with E‖x‖² = d."""
        d, r = self.basis.shape
        if d != dim:
            raise ValueError(f"subspace: lies in dimension {d}, but inputs have {dim}")
        inside = torch.randn(count, r, generator=generator, dtype=torch.float64)
        return math.sqrt(d / r) * inside @ self.exact.value.T


@dataclass(frozen=True)
class Composed:
    """All of several domains at once: at most one sphere, one box and one subspace.

    Attributes:
        domains: what is intersected; random starts are those of the first, projected.

    Example:
        >>> both = Composed((Sphere(), Box(-1.2, 1.2)))
        >>> both.name
        'sphere of radius √d ∩ box [-1.2, 1.2]'
        >>> both.project(torch.tensor([[0.0, 3.0, 4.0]]).double()).square().round(decimals=2)
        tensor([[0.1200, 1.4400, 1.4400]], dtype=torch.float64)
    """

    domains: tuple[Sphere | Box | Subspace, ...]
    sphere: Sphere | None = field(init=False, repr=False, default=None)
    box: Box | None = field(init=False, repr=False, default=None)
    subspace: Subspace | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Sort the domains by their kind."""
        kinds = {Sphere: "sphere", Box: "box", Subspace: "subspace"}
        found = [kinds.get(type(domain), "") for domain in self.domains]
        if not found or "" in found or len(set(found)) < len(found):
            raise ValueError(
                "composed domain: expected at most one sphere, one box and one subspace, got "
                f"{[type(domain).__name__ for domain in self.domains]}"
            )
        for kind, domain in zip(found, self.domains, strict=True):
            object.__setattr__(self, kind, domain)

    @property
    def name(self) -> str:
        """All names."""
        return " ∩ ".join(domain.name for domain in self.domains)

    def project(self, candidates: Tensor) -> Tensor:
        """The nearest points in all domains, or nearly so.

        Entries at a bound of the box stay there if the sphere is one of the domains, so that a
        step along a face ends on it. Box and subspace take turns (Douglas and Rachford's
        reflections) until they agree; with the sphere as the third domain the pull towards the
        candidates fades, as it has to where a domain is not convex. The result lies in the box
        and on the sphere exactly. Where these do not meet, it lies in the box, as near to the
        sphere as can be.
        """
        if self.subspace is None:
            return self._meet(candidates)
        inside = shadow = self.subspace.project(candidates)
        moved = self._meet(inside)
        if self.box is None:
            return moved
        pull, fade = 0.3, 0.9 if self.sphere else 1.0
        for _ in range(4 * ROUNDS):
            if not (moved - inside).norm() > 32 * torch.finfo(moved.dtype).eps * moved.norm():
                break
            shadow = shadow + moved - inside
            inside = self.subspace.project((shadow + pull * candidates) / (1 + pull))
            moved = self._meet(2 * inside - shadow)
            pull *= fade
        return moved

    def _meet(self, candidates: Tensor) -> Tensor:
        """Projection to sphere and box."""
        if self.box is None:
            return self.sphere.project(candidates) if self.sphere else candidates
        if self.sphere is None:
            return self.box.project(candidates)
        return on_sphere_in_box(candidates, self.sphere.length(candidates.shape[1]), self.box)

    def tangent(
        self, candidates: Tensor, direction: Tensor, descent: Tensor | None = None
    ) -> Tensor:
        """Projection to the intersection of the tangent spaces."""
        return self._within(candidates, direction, self._held(candidates, descent))

    def _within(self, candidates: Tensor, direction: Tensor, held: Tensor | None) -> Tensor:
        """P D with P = Q − Qx xᵀQ / xᵀQx for each row, and Q the projector of box and subspace."""
        inside = self._flat(direction, held)
        if self.sphere is None:
            return inside
        normal = self._flat(candidates, held)
        size = (candidates * normal).sum(1, keepdim=True)
        share = (direction * normal).sum(1, keepdim=True) / size.clamp_min(_tiny(size))
        return inside - share * normal

    def _flat(self, direction: Tensor, held: Tensor | None) -> Tensor:
        """Q D: in the subspace, and zero where held."""
        if self.subspace is None:
            return direction if held is None else direction.masked_fill(held, 0)
        u = self.subspace.exact.like(direction)
        if held is None or not held.any():
            return direction @ u @ u.T
        return in_subspace_with_zeros(direction, u, held)

    def _held(self, candidates: Tensor, descent: Tensor | None) -> Tensor | None:
        """Entries at a bound that the descent, kept to the other domains, would leave, (n, d).

        On the sphere an entry is held if g − μx points outward, with μ such that the rest of
        g − μx is tangent: Newton's method on μ, a few rounds. Whatever still points outward (it
        can where a subspace couples the entries) is held as well, perhaps more than need be.
        """
        if descent is None or self.box is None:
            return None
        side = self.box.side(candidates)
        if not side.any():
            return None
        pull = descent if self.subspace is None else self.subspace.project(descent)
        held = side * pull > 0
        for _ in range(ROUNDS if self.sphere else 0):
            rest = candidates.masked_fill(held, 0)
            size = rest.square().sum(1, keepdim=True)
            share = (pull * rest).sum(1, keepdim=True) / size.clamp_min(_tiny(size))
            before, held = held, side * (pull - share * candidates) > 0
            if torch.equal(before, held):
                break
        while True:  # at most d times, as it grows
            more = held | (side * self._within(candidates, descent, held) > 0)
            if torch.equal(more, held):
                return held
            held = more

    def start(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Starts of the first domain, projected."""
        return self.project(self.domains[0].start(count, dim, generator))


def on_sphere_in_box(candidates: Tensor, radius: float, box: Box) -> Tensor:
    """The nearest points on a sphere and in a box: clamp(t x) with the t that gives the norm.

    ‖clamp(t x)‖² grows with t, quadratic between the values where an entry meets its bound: t is
    found by Newton's method, kept in a bracket. Entries at a bound stay there if they can. Rows
    that are too short for every t, for they are zero or point away from the box, move on towards
    its farthest corner.
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
    return torch.where(short, _to_corner(found, radius, box), found) if short.any() else found


def _to_corner(candidates: Tensor, radius: float, box: Box) -> Tensor:
    """Where the way from each row, too short, to the farthest corner of the box has the norm."""
    bounds = box.bounds.like(candidates)
    corner = torch.where(bounds[1].abs() >= bounds[0].abs(), bounds[1], bounds[0])
    corner = corner.expand_as(candidates)
    low = torch.zeros_like(candidates[:, :1])
    high = torch.ones_like(low)
    for _ in range(HALVINGS):
        t = (low + high) / 2
        short = torch.lerp(candidates, corner, t).norm(dim=1, keepdim=True) < radius
        low, high = torch.where(short, t, low), torch.where(short, high, t)
    return box.project(torch.lerp(candidates, corner, high))


def in_subspace_with_zeros(direction: Tensor, basis: Tensor, zeros: Tensor) -> Tensor:
    """Projection to {U c : (U c)_i = 0 where zeros_i}, for each row by conjugate gradients.

    Least squares for the entries that should be zero, from Uᵀd on: steps in the row space of
    those rows of U leave what is orthogonal to it, and that is the projection.

    Args:
        direction: (n, d).
        basis: U, (d, r) with orthonormal columns.
        zeros: (n, d), boolean.
    """
    inside = direction @ basis
    first = inside.square().sum(1, keepdim=True)
    tolerance = (4 * torch.finfo(direction.dtype).eps) ** 2
    rest = (inside @ basis.T).masked_fill(~zeros, 0)
    slope = search = rest @ basis
    energy = slope.square().sum(1, keepdim=True)
    for _ in range(2 * min(ROUNDS, basis.shape[1])):
        if not (energy > tolerance * first).any():
            break
        image = (search @ basis.T).masked_fill(~zeros, 0)
        size = image.square().sum(1, keepdim=True)
        length = torch.where(energy > tolerance * first, energy / size.clamp_min(_tiny(size)), 0)
        inside = inside - length * search
        rest = rest - length * image
        slope = rest @ basis
        energy, before = slope.square().sum(1, keepdim=True), energy
        search = slope + energy / before.clamp_min(_tiny(before)) * search
    return inside @ basis.T


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny
