"""The smallest share of equations that a wrong solution violates, looked for by a search.

With samples u_i and coefficients c_i, candidates û_j and coefficients ĉ_j, the equation of a
feature w is violated by G(w) = Σ_i c_i σ(w·u_i) − Σ_j ĉ_j σ(w·û_j). A *hit* is a w where |G| > τ.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.features.activations import Activation

ACTIVE = 4
"""Most samples, and candidates, that the search moves: the others would be matched exactly, and
cancel in G."""


@dataclass(frozen=True)
class Setting:
    """A setting says what a bound on the width assumes of samples and candidates.

    Attributes:
        samples: n, of samples and of candidates.
        rank: r, the dimension of where they lie.
        tolerance: ε, distance between unit vectors, up to sign, within which a sample is found.
        separation: least distance between two samples, up to sign.
        least: least |c_i|.
        largest: largest |c_i| and |ĉ_j|.
    """

    samples: int
    rank: int
    tolerance: float
    separation: float
    least: float = 1.0
    largest: float = 1.0


def smallest_hit(
    sigma: Activation, setting: Setting, tau: float, seed: int = 0, starts: int = 96,
    steps: int = 300,
) -> float:  # fmt: skip
    """Return the smallest probability of |G(w)| > τ that is found, over all that a setting allows.

    Samples, candidates and coefficients are moved by Adam to make |G| small on a fixed set of
    Gaussian w, from many starts; the best are measured on a larger set. This is no certificate,
    since a search can miss the worst case.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order would send the search elsewhere
    try:
        return _searched(sigma, setting, tau, seed, starts, steps)
    finally:
        torch.set_num_threads(threads)


def _searched(
    sigma: Activation, setting: Setting, tau: float, seed: int, starts: int, steps: int
) -> float:
    generator = torch.Generator().manual_seed(seed)
    count = min(setting.samples, ACTIVE)
    space = min(setting.rank, 2 * count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs, more = normal(1024, space), normal(32_768, space)
    others, candidates = _starts(normal, starts, count, space)
    sizes, signs = normal(starts, count), normal(starts, count).sign()
    fitted = 2 * signs + normal(starts, count)
    variables = [x.requires_grad_() for x in (others, candidates, sizes, fitted)]
    span = setting.largest - setting.least

    def violations(w: Tensor) -> Tensor:
        """G at w, (starts, number of w)."""
        first = torch.zeros(starts, 1, space, dtype=torch.float64)
        first[:, 0, 0] = 1
        true = torch.cat([first, apart(others, setting.separation)], 1)
        guess = apart(candidates, setting.tolerance)
        own = signs * (setting.least + span * torch.sigmoid(sizes))
        features = sigma.value(torch.cat([true, guess], 1) @ w.T)
        coefficients = torch.cat([own, -setting.largest * torch.tanh(fitted)], 1)
        return (coefficients[:, :, None] * features).sum(1)

    optimiser = torch.optim.Adam(variables, lr=0.1)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, 0.002)
    for step in range(steps):
        optimiser.zero_grad()
        g = violations(inputs)
        if step < steps // 3:
            loss = (g.square().mean(1) + 1e-12).log().sum()
        else:  # a soft step that becomes sharp
            soft = 2 * tau * 0.05 ** ((step - steps // 3) / (steps - steps // 3))
            loss = torch.sigmoid((g.abs() - tau) / soft).mean(1).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        decay.step()
    with torch.no_grad():
        share = (violations(more).abs() > tau).double().mean(1).min().item()
    return max(share - 3 * math.sqrt(share / len(more)), 0.0)


def _starts(
    normal: Callable[..., Tensor], starts: int, count: int, space: int
) -> tuple[Tensor, Tensor]:
    """Draw all samples but the first, which is e₁, and the candidates.

    Two thirds of the starts have a candidate close to each sample, as solutions that nearly fit
    have, and half of those lie in one plane, where the worst ones have been seen.
    """
    others = normal(starts, count - 1, space)
    candidates = normal(starts, count, space)
    own = torch.eye(space, dtype=torch.float64)[:1].expand(starts, 1, space)
    near = torch.cat([own, others], 1)
    near = near / near.norm(dim=2, keepdim=True) + 0.3 * normal(starts, count, space)
    third = starts // 3
    candidates[third:] = near[third:]
    for points in (others, candidates):
        points[2 * third :, :, 2:] = 0
    return others, candidates


def apart(vectors: Tensor, distance: float) -> Tensor:
    """Return unit vectors (…, r), turned away from ±e₁ to that distance where they are nearer."""
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    most = 1 - distance**2 / 2
    level = unit[..., :1].clamp(-most, most)
    rest = unit[..., 1:]
    rest = rest / rest.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.cat([level, (1 - level.square()).sqrt() * rest], -1)
