"""The method `exhume`: ours, by what the problem is."""

from exhume.equation.problem import Premise, Problem
from exhume.methods.exhume import Exhume
from exhume.methods.stationary import Stationary


def default_for(problem: Problem) -> Exhume | Stationary:
    """Return our search for a change of weights, or for weights that are the target themselves."""
    return Exhume() if problem.premise is Premise.CHANGE else Stationary()
