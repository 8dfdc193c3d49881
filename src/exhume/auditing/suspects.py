"""Where no candidates make the run, as it was told, end at the weights, something is suspected."""

from dataclasses import replace
from typing import cast

from torch import Tensor

from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.errors import InputError
from exhume.features.replay import TrainingRun
from exhume.methods import Reconstruction
from exhume.methods.replay import recipe_of
from exhume.recipes import Recipe, one
from exhume.search.subspace import estimate
from exhume.solvers import Outcome
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt

# Evenness of changes: Adam's have 0.78 to 0.97, those of SGD 0.35 to 0.5, and normal ones 2/π
EVEN, UNEVEN = 0.7, 0.55
NEAR = 1e-2  # residual under which candidates are near enough for a rate to be told by them
FALLEN = 3.0  # times: among thousands of equations no unknown more lowers it so far by chance
SAME = 1e-2  # relative: a rate that comes out so near to what was told is the one that was told
EXPLAINED = 1e-9  # up to this residual weights are plainly explained; above, by chance perhaps
LONGER = 5  # times the steps that were told: nobody is further off, and a run costs their number
STEPS = 10  # of the solver, with the rate as told and free: where it is 20 % off, eight are enough
ASKED = 3  # recipes at most: all of them may take as many products as the search did
PRODUCTS = 60  # a step, at most: half of what the search allows, as candidates are near already
DAMPING = 0.1  # of the first step, as in the search


def suspects(problem: Problem, found: Reconstruction) -> list[str]:
    """Return what of a recipe the weights speak against most plainly: one sentence, or none.

    There is none where candidates were found that explain them, and none without a recipe.
    """
    met = found.outcome is Outcome.CONVERGED or found.residual <= EXPLAINED
    if problem.premise is not Premise.REPLAY or met:
        return []
    run = cast(TrainingRun, problem.features)
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
    clean = plain and not recipe.weight_decay and not run.network.batch_statistics
    layer = problem.first_layer if clean else None  # else it moves in other directions, or in fewer
    said = [] if layer is None else _of_the_span(layer, len(found.samples))
    if not said and recipe in run.recipe.choices():  # else its rate was found, or it is shorter
        said = _of_the_rate(problem, found, recipe)
    if said or layer is None:
        return said
    sought = "" if run.labels else " that were found (tell them with --labels)"
    return [
        "The first layer shows that the optimiser and the base model are as told, and as many "
        f"samples as were sought. So the labels{sought} are suspected, or what else the recipe "
        "says: the number of steps, their batches, momentum, schedule and loss; or the search "
        "failed."
    ]


def evenness(problem: Problem) -> float:
    """Return (mean |Δ|)² / mean Δ² over the weights that moved: 1 where all moved equally far."""
    sizes = problem.target.double().abs()
    sizes = sizes[sizes > 0]
    return float(sizes.mean().square() / sizes.square().mean())


def _of_the_span(layer: FirstLayer, count: int) -> list[str]:
    """Compare the directions in which the first layer changed with the number of samples."""
    try:
        rank = estimate(layer).rank
    except InputError:
        return [
            "The base model is suspected: the first layer changed in all directions, where SGD "
            "from the weights that training began at stays in the span of the samples. An "
            "optimiser other than SGD does this too, weight decay, or very many samples."
        ]
    if rank == count:
        return []
    return [
        f"The number of samples is suspected: the first layer changed in {rank} directions, and "
        f"{count} samples were sought."
    ]


def _of_the_rate(problem: Problem, found: Reconstruction, recipe: Recipe) -> list[str]:
    """Go on from what was found, with the rate as told and with it free, and compare."""
    start, most = (found.samples, found.coefficients), found.products // ASKED
    both = recipe, replace(recipe, lr=None)
    held, free = (refined(problem, *start, each, most) for each in both)
    told = cast(float, recipe.lr)
    rate = cast(float, cast(Recipe, recipe_of(free)).lr)
    there, falls = f"{rate:.3g} in the place of {told:g}", f"residual falls to {free.value:.1e}."
    open_ = "Leave the rate out, and it is found; give several numbers of steps, and each is tried."
    if abs(rate / told - 1) < SAME:
        fallen = free.value * FALLEN < found.residual
        return fallen * [
            "The search is suspected, and not the recipe: with the rate free it comes out as told, "
            f"and the {falls} Search longer, or leave the rate out."
        ]
    if free.value <= EXPLAINED:
        return [f"The rate is suspected: with {there}, the {falls} {open_}"]
    steps = round((one(recipe.steps) or 0) * rate / told)  # as far in all as with the free rate
    if steps != recipe.steps and 0 < steps <= LONGER * (one(recipe.steps) or 0):
        other = replace(recipe, steps=steps)
        value = refined(problem, free.candidates, free.coefficients, other, most).value
        if value <= EXPLAINED:
            there = f"{steps} in the place of {recipe.steps}, the residual falls to {value:.1e}"
            return [f"The number of steps is suspected: with {there}. {open_}"]
    if free.value > NEAR or not free.value * FALLEN < held.value:
        return []
    what = "The rate is suspected, or the number of steps, momentum or batches"
    return [f"{what}: with a rate of {there}, the {falls} {open_}"]


def refined(problem: Problem, candidates: Tensor, labels: Tensor, recipe: Recipe, most: int) -> Fit:
    """Return the fit some solver steps further, or so many products, by a recipe."""
    run = replace(cast(TrainingRun, problem.features), recipe=recipe)
    problem = replace(problem, features=run)
    solver = LevenbergMarquardt(tolerance=EXPLAINED, accuracy=1e-3, products=PRODUCTS)
    state = DampedState(fit=fitted_with(problem, candidates, labels), damping=DAMPING)
    while state.outcome is None and state.steps < STEPS and state.products < most:
        state = solver.step(problem, state)
    return state.fit
