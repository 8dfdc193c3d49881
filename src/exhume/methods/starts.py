"""Where trials begin: what kinds of starts there are, and the choice of one among many."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Problem
from exhume.methods.labels import rows_of, run_of
from exhume.search.photographs import photographs

# How far from the middle of the domain random starts are: what the weights hardly show stays as it
# was at the start, so little noise is best where that is much, and all of it where there are traps
SPREADS = (0.1, 1.0)
STARTS = {  # what trials begin with, one kind after the other, for each set of labels
    "alone": ("lazy", "random", "renewed", "random"),
    "public": ("public", "lazy", "renewed", "means"),
    "costly": ("lazy", "public", "renewed", "means"),  # trials of convolutions and large networks
    "images": ("lazy", "random", "renewed", "public"),  # others of their kind are far from them
    "adam": ("public", "lazy", "renewed", "public"),  # the lazy solution of Adam is far from them
}
POOL = 12  # public inputs of a class that are tried in each sample's place: with more, all trials
# would begin with the same
FEWER = 4  # of a class where each class is tried
SWEEPS = 2  # over the samples: a third changes little
STRIDES = (16, 8, 4)  # how many times longer the steps of a first run may be: less gains nothing
SHORTEST = 8  # steps of it: with fewer it is another run
APART = 0.5  # share of the change by which it may end elsewhere, or the long steps are not stable
# Public inputs of a class in a mean: means of thirty end in traps more often, and with that of all
# two samples of a class would begin with the same, and stay so
FEW = 6


def kinds_of(problem: Problem) -> tuple[str, ...]:
    """Return the kinds of starts, in the order in which they are tried."""
    run = run_of(problem)
    if photographs(problem.shape, problem.target):
        return STARTS["images"]
    if run.public is None:
        return STARTS["alone"]
    if run.recipe.optimizer != "sgd":
        return STARTS["adam"]
    small = problem.first_layer is not None and run.dense(run.public[:1])
    return STARTS["public" if small else "costly"]


def random_start(problem: Problem, count: int, generator: torch.Generator, spread: float) -> Tensor:
    """Draw candidates (count, d) of the domain, that far from its middle; a share of 1 is all.

    Those of images are as smooth as photographs.
    """
    drawn = problem.domain.start(max(count, 64), problem.dim, generator).to(problem.target)
    middle, metric = drawn.mean(0), photographs(problem.shape, problem.target)
    noise = drawn[:count] - middle
    if metric is not None:
        noise = metric.power(noise, 0.5)
    return problem.domain.project(middle + spread * noise)


def drawn_start(problem: Problem, labels: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Draw a start (n, d) for samples with these labels (n, c), of a kind.

    Public inputs that the network gives the labels are taken, or for `means` the mean of a few of
    them each; for `random`, and where there are none, candidates are random.
    """
    public = run_of(problem).public
    if public is None or kind == "random":
        several = kind == "random"  # spreads, in turn; what is to be filled in keeps the first
        spread = SPREADS[int(torch.randint(len(SPREADS), (1,), generator=generator)) * several]
        return random_start(problem, len(labels), generator, spread)
    scores = labels.double().cpu() @ classes_of(problem).T
    order = (scores + torch.rand(scores.shape, generator=generator)).argsort(1, descending=True)
    if kind != "means":
        return public[order[:, 0].to(public.device)]
    return public[order[:, :FEW].to(public.device)].mean(1)


def classes_of(problem: Problem) -> Tensor:
    """Return the label that the network gives each public input, (N, c); none without any."""
    run = run_of(problem)
    if run.public is None:
        return torch.zeros(0, run.outputs, dtype=torch.float64)
    outputs = run.predict(run.public)
    given = outputs.argmax(1) if run.outputs > 1 else outputs[:, 0] > 0
    return rows_of(given, run.outputs).double().cpu()


def picked(
    problem: Problem,
    start: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    kept: Tensor,
    sure: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the start (n, d) with public inputs that leave the least, chosen one after the other.

    For each sample that is not kept (n,), inputs that the network gives its label (n, c) are tried,
    all runs side by side. Where labels are not sure, each class is tried, with inputs of its own
    and with the input that is there; labels are returned, too.
    """
    run, given = run_of(problem), classes_of(problem)
    if run.public is None and sure:
        return start, labels
    public, most = start[:0] if run.public is None else run.public, POOL if sure else FEWER
    every = torch.eye(labels.shape[1]).to(labels)
    for _ in range(SWEEPS):
        for i in torch.randperm(len(start), generator=generator).tolist():
            if kept[i]:
                continue
            sets, tried = [], []
            for row in labels[i : i + 1] if sure else every:
                scores = given @ row.double().cpu()
                fits = (scores >= scores.max()).nonzero()[:, 0] if len(scores) else scores.long()
                few = fits[torch.randperm(len(fits), generator=generator)[:most]]
                sets.append(start.repeat(len(few) + 1, 1, 1))
                tried.append(labels.repeat(len(few) + 1, 1, 1))
                sets[-1][1:, i], tried[-1][:, i] = public[few.to(public.device)], row
            these, told = torch.cat(sets), torch.cat(tried)
            left = problem.target[:, 0] - run.ends(these, labels if sure else told)
            best = left.square().sum(1).nan_to_num(math.inf).argmin()
            start, labels = these[best], told[best]
    return start, labels


def longer(problem: Problem, stride: int) -> Problem:
    """Return the problem of a run whose steps are so many times longer, and as many times fewer."""
    run = run_of(problem)
    if stride == 1:
        return problem
    length = run.recipe.length(1)  # of whole batches, however many samples they have
    recipe = run.recipe.in_steps(length // stride, length)
    return replace(problem, features=replace(run, recipe=recipe))


def stride_of(problem: Problem, fit: Fit) -> int:
    """Return how many times longer the first steps of training may be; 1 if none may.

    Their run has to end near the recipe's own from where a fit begins, which it does where the
    rate is small. Adam, which has rungs for that, and mini-batches have no longer steps.
    """
    recipe = run_of(problem).recipe
    if recipe.optimizer != "sgd" or recipe.batch_size is not None:
        return 1
    for stride in STRIDES:
        if recipe.length(1) // stride >= SHORTEST:
            other = fitted_with(longer(problem, stride), fit.candidates, fit.coefficients)
            if (other.residual - fit.residual).norm() < APART * problem.target.norm():
                return stride
    return 1
