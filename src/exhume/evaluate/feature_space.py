"""What the features say of the truth: the floor of the objective, and the spans that were found."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from exhume.data import Data
from exhume.equation import objective
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.evaluate import metrics
from exhume.evaluate.metrics import check_vectors
from exhume.evaluate.scoring import true_inputs
from exhume.features import Features
from exhume.features.replay import TrainingRun
from exhume.methods.replay import choices
from exhume.models.formulation import POINTS

# A direction in which the samples have less than this share of their largest is rounding
ROUNDING = 1e-6


def residual_at_truth(problem: Problem, truth: Data | Tensor) -> float:
    """Return the floor, the objective at the true inputs: a residual below it says nothing more.

    It is above zero where features moved in training. A search that ends above it has not found
    the samples; one that ends below it fits more than the samples.
    """
    inputs = true_inputs(truth)[0]
    if problem.premise is not Premise.REPLAY:
        return float(objective.fitted(problem, inputs).value)
    if not isinstance(truth, Data):
        raise InputError("truth: a replay needs the labels of the samples, too; give them as Data.")
    loss = cast(TrainingRun, problem.features).recipe.loss
    targets = truth.targets.sign() if loss == "logistic" else truth.targets
    labels = targets.reshape(-1, 1)
    return min(objective.fitted_with(each, inputs, labels).value for each in choices(problem))


def floors(problem_at: Callable[[str], Problem], truth: Data | Tensor) -> dict[str, float]:
    """Return the floor for features at each point that `problem_at` does not refuse."""
    found: dict[str, float] = {}
    for point in POINTS:  # one problem at a time: each holds a model
        try:
            problem = problem_at(point)
        except InputError:
            continue
        found[point] = residual_at_truth(problem, truth)
    return found


def span_residual(features: Features, candidates: Tensor, truth: Data | Tensor) -> float:
    """Return how far the true features are from the span of the candidates' features.

    mean_i ‖P⊥_Φ̂ φ(x_i)‖ / √p, with P⊥_Φ̂ the projector off the rows of Φ̂ = φ(candidates). Zero
    means that the candidates explain every model trained on these samples, not only this one.

    With the Gram matrix [[A, B], [Bᵀ, C]] of candidates and true samples together, the squared
    distances are diag(C − Bᵀ A⁺ B): what is under about 1e-8 of the features' size is rounding.
    """
    x, _ = true_inputs(truth)
    y = check_vectors(candidates, "candidate", dim=x.shape[1])
    inputs = torch.cat([y, x]).to(features.device, features.dtype)
    gram = features.linearize(inputs).gram().detach().to("cpu", torch.float64)
    rows = len(gram) // len(inputs) * len(y)  # the rows of one input are adjacent
    squares = gram.diagonal()[rows:]
    if rows:
        values, vectors = torch.linalg.eigh(gram[:rows, :rows])
        kept = values > values[-1] * rows * torch.finfo(gram.dtype).eps
        products = vectors[:, kept].T @ gram[:rows, rows:]
        within = (products.square() / values[kept, None]).sum(0)
        squares = (squares - within).clamp(min=0)
    return float((squares / features.width).sqrt().mean())


def principal_angles(basis: Tensor, truth: Data | Tensor) -> Tensor:
    """Return the principal angles between a subspace and the span of the true samples, in degrees.

    sin θ are the singular values of (I − UUᵀ)Q, with U (d, r) the orthonormal basis and Q one of
    the samples' span (the roles exchanged where U has fewer columns): tiny angles are not lost, as
    they are in cos θ. Angles above 45° are taken from the cosines. The largest comes first.
    """
    _, sizes, rows = torch.linalg.svd(true_inputs(truth)[0], full_matrices=False)
    span = rows[sizes > ROUNDING * sizes[0]].T
    fewer, more = sorted((basis.detach().cpu().double(), span), key=lambda u: u.shape[1])
    products = more.T @ fewer  # scipy's subspace_angles loses a tiny angle beside a large one
    sines = torch.linalg.svdvals(fewer - more @ products).clamp(max=1)
    cosines = torch.linalg.svdvals(products).flip(0).clamp(max=1)
    return torch.where(sines < cosines, sines.asin(), cosines.acos()).rad2deg()


def outside(basis: Tensor, truth: Data | Tensor) -> Tensor:
    """Return the share of each sample's norm that a subspace leaves out, ‖x − UUᵀx‖ / ‖x‖.

    It bounds from below the error of any candidate that is kept in the subspace, which has the
    orthonormal basis U (d, r).
    """
    inputs, norms = true_inputs(truth)
    u = basis.detach().cpu().double()
    return metrics.norms(inputs - inputs @ u @ u.T) / norms
