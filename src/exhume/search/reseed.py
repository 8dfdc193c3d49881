"""Reseed: replace the candidates that matter least by new ones where the residual points."""

import torch
from torch import Tensor

from exhume.objective import Point, evaluate, removal_cost
from exhume.problem import Problem
from exhume.search.spectral import spectral_starts


def reseed(problem: Problem, point: Point, count: int, generator: torch.Generator) -> Tensor:
    """Drop the `count` candidates that are cheapest to drop and start as many new ones.

    Returns:
        Candidates (n, d), the kept ones first.
    """
    order = removal_cost(point).argsort(descending=True)
    kept = point.candidates[order[: len(order) - count]]
    return grow(problem, evaluate(problem, kept), count, generator)


def grow(problem: Problem, point: Point, count: int, generator: torch.Generator) -> Tensor:
    """Add `count` candidates where the residual points, without dropping any.

    Returns:
        Candidates (n + count, d), the old ones first.
    """
    new = spectral_starts(problem, point.residual, count, generator)
    return torch.cat([point.candidates, new.to(point.candidates)])
