"""What is suspected where no candidates make the run, as it was told, end at the weights."""

from dataclasses import replace
from typing import cast

from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.features.replay import TrainingRun
from exhume.methods import Reconstruction
from exhume.methods.replay import recipe_of
from exhume.recipes import Recipe
from exhume.search.subspace import estimate
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt

# Evenness of changes: Adam's have 0.78 to 0.97, those of SGD 0.35 to 0.5, and normal ones 2/π
EVEN, UNEVEN = 0.7, 0.55
FALLEN = 3.0  # times: a residual that falls so far if the rate is free speaks against the rate
SAME = 1e-2  # relative: a rate that comes out so near to what was told is the one that was told
EXPLAINED = 1e-9  # the residual at which weights are plainly explained
STEPS = 10  # of the solver, with the rate as told and free: where it is 20 % off, eight are enough
PRODUCTS = 60  # a step, at most
DAMPING = 0.1  # of the first step: candidates are near already


def suspects(problem: Problem, found: Reconstruction) -> list[str]:
    """Return what of a recipe the weights speak against, a sentence each, the plainest first."""
    run, count = cast(TrainingRun, problem.features), len(found.samples)
    recipe = found.recipe or run.recipe.choices()[0]
    even, plain = evenness(problem), recipe.optimizer == "sgd"
    if plain and even > EVEN:
        return [
            "The optimiser is suspected: nearly all weights changed by the same amount (evenness "
            f"{even:.2f}), as those that Adam trains do, and SGD's do not."
        ]
    if not plain and even < UNEVEN:
        return [
            f"The optimiser is suspected: weights changed by very different amounts (evenness "
            f"{even:.2f}), as those that SGD trains do, and Adam's do not."
        ]
    if plain and not recipe.weight_decay and problem.first_layer is not None:
        try:
            rank = estimate(problem.first_layer).rank
        except InputError:
            return [
                "The base model is suspected: the first layer changed in all directions, where SGD "
                "from the weights that training began at stays in the span of the samples. An "
                "optimiser other than SGD does this too, weight decay, or very many samples."
            ]
        if rank != count:
            return [
                f"The number of samples is suspected: the first layer changed in {rank} "
                f"directions, and {count} were sought."
            ]
    if recipe not in run.recipe.choices():  # its rate was found, or it is a shorter run
        return []
    return _of_the_rate(problem, found, recipe)


def evenness(problem: Problem) -> float:
    """Return (mean |Δ|)² / mean Δ² over the weights that moved: 1 where all moved equally far."""
    sizes = problem.target.double().abs()
    sizes = sizes[sizes > 0]
    return float(sizes.mean().square() / sizes.square().mean())


def _of_the_rate(problem: Problem, found: Reconstruction, recipe: Recipe) -> list[str]:
    """Go on from what was found, with the rate as told and with it free, and compare."""
    held, free = (refined(problem, found, each) for each in (recipe, replace(recipe, lr=None)))
    left, told = free.value, cast(float, recipe.lr)
    rate = cast(float, cast(Recipe, recipe_of(free)).lr)
    if not left * FALLEN < held.value:
        return []
    if left <= EXPLAINED and abs(rate / told - 1) < SAME:
        return [
            "The search is suspected, and not the recipe: with the rate free it comes out as told, "
            f"and the residual falls to {left:.1e}. Search longer, or leave the rate out."
        ]
    alone = "" if left <= EXPLAINED else ", or the number of steps"
    return [
        f"The rate is suspected{alone}: with a rate of {rate:.3g} in the place of {told:g}, the "
        f"residual falls to {left:.1e}. Leave the rate out, and it is found; give several numbers "
        "of steps, and each is tried."
    ]


def refined(problem: Problem, found: Reconstruction, recipe: Recipe) -> Fit:
    """Return the fit some steps further from the candidates that were found, by a recipe."""
    run = replace(cast(TrainingRun, problem.features), recipe=recipe)
    problem = replace(problem, features=run)
    solver = LevenbergMarquardt(tolerance=EXPLAINED, accuracy=1e-3, products=PRODUCTS)
    fit = fitted_with(problem, found.samples, found.coefficients)
    state = DampedState(fit=fit, damping=DAMPING)
    while state.outcome is None and state.steps < STEPS:
        state = solver.step(problem, state)
    return state.fit
