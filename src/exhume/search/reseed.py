"""Reseed: replace the candidates that matter least by new ones where the residual points."""

import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted
from exhume.equation.problem import Problem
from exhume.search.prune import without
from exhume.search.spectral import spectral_starts


def reseed(problem: Problem, fit: Fit, drop: int, count: int, generator: torch.Generator) -> Tensor:
    """Drop the candidates that are cheapest to drop, then fill up where the residual points.

    Args:
        problem: what the weights show.
        fit: the candidates to begin with.
        drop: how many to drop; none of those that are left will be.
        count: how many there shall be in the end.
        generator: of random signs.

    Returns:
        Candidates (count, d), the kept ones first.
    """
    kept, residual = fit.candidates, fit.residual
    if drop > 0:
        kept = without(problem, fit, drop)
        residual = fitted(problem, kept).residual if len(kept) else problem.target
    new = spectral_starts(problem, residual, count - len(kept), generator)
    return torch.cat([kept, new.to(kept)])
