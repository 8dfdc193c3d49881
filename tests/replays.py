"""Small networks that torch trained by a recipe, and the problems that their training runs pose."""

import torch
from torch import Tensor, nn

from exhume import data
from exhume.equation.domain import Domain
from exhume.equation.problem import Problem
from exhume.features.network import Weights
from exhume.models.formulation import Known, Told, replay_problem
from exhume.models.prepare import prepare
from exhume.recipes import Recipe
from exhume.victims.victim import follow


def small(seed: int = 0) -> nn.Module:
    """A dense network from six entries to three classes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 3))


def trained(
    module: nn.Module, x: Tensor, targets: Tensor, recipe: Recipe
) -> tuple[Weights, Weights]:
    """Weights before and after training on samples (n, …), in their precision."""
    known = data.from_arrays(x, targets, normalise=False, standardise=False)
    return follow(module, known, recipe, dtype=x.dtype)[:2]


def posed(
    module: nn.Module,
    weights: tuple[Weights, Weights],
    known: Known,
    shape: tuple[int, ...] = (6,),
    domain: Domain | None = None,
) -> Problem:
    """The problem in float64, as an audit on the CPU poses it."""
    network = prepare(module, shape, check=False).network
    problem = replay_problem(network, *weights, known, Told(domain))
    return problem.to("cpu", torch.float64)
