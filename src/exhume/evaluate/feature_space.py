"""What the features say of the truth: the floor of the objective, and the span that was found."""

from collections.abc import Callable

import torch
from torch import Tensor

from exhume.data import Data
from exhume.equation import objective
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate.matching import check_vectors
from exhume.evaluate.scoring import true_inputs
from exhume.features import Features
from exhume.models.formulation import POINTS


def residual_at_truth(problem: Problem, truth: Data | Tensor) -> float:
    """Return the floor, the objective at the true inputs: a residual below it says nothing more.

    Zero where the model is exactly a combination of its samples' features; above zero where
    features moved in training. A search that ends above it has not found the samples; one that ends
    below it fits more than the samples.

    Args:
        problem: what the attack was given.
        truth: the training data, or its (n, d) inputs.
    """
    inputs, _ = true_inputs(truth)
    return float(objective.fitted(problem, inputs).value)


def floors(problem_at: Callable[[str], Problem], truth: Data | Tensor) -> dict[str, float]:
    """Return the floor for features at each point of the way from initial to trained.

    Args:
        problem_at: the problem with features at a point: initial, final, midpoint or both. It may
            refuse one, as where initial weights are missing that it needs; that one is left out.
        truth: the training data, or its (n, d) inputs.
    """
    found = {}
    for point in POINTS:
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

    It is the Schur complement of one Gram matrix over candidates and true samples together, so
    nothing of length p is stored. Squared norms are subtracted, so what is under about 1e-8 of the
    features' size is rounding. Directions of Φ̂ whose share of the largest eigenvalue of Φ̂Φ̂ᵀ is
    under numpy's rank tolerance do not count as spanned.

    Args:
        features: the feature map; with several rows an input, the rows of an input are adjacent.
        candidates: (k, d).
        truth: the training data, or its (n, d) inputs.

    Returns:
        The mean over the rows of the true features.
    """
    x, _ = true_inputs(truth)
    y = check_vectors(candidates, "candidate", dim=x.shape[1])
    inputs = torch.cat([y, x]).to(features.device, features.dtype)
    gram = features.linearize(inputs).gram().detach().to("cpu", torch.float64)
    rows = len(gram) // len(inputs) * len(y)
    squares = off_span_squares(gram, rows)
    return float((squares / features.width).sqrt().mean())


def off_span_squares(gram: Tensor, rows: int) -> Tensor:
    """Return the squared distances of the last vectors of a Gram matrix from the span of the first.

    With G = [[A, B], [Bᵀ, C]], A of size rows × rows: diag(C − Bᵀ A⁺ B).

    Args:
        gram: (r, r), float64, symmetric, positive semi-definite.
        rows: how many vectors span.

    Returns:
        (r − rows,), at least 0.

    Example:
        >>> vectors = torch.tensor([[2.0, 0.0], [2.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
        >>> round(off_span_squares(vectors @ vectors.T, rows=2).item(), 9)
        16.0
    """
    squares = gram.diagonal()[rows:]
    if rows == 0:
        return squares
    values, vectors = torch.linalg.eigh(gram[:rows, :rows])
    kept = values > values[-1] * rows * torch.finfo(gram.dtype).eps
    products = vectors[:, kept].T @ gram[:rows, rows:]
    within: Tensor = (products.square() / values[kept, None]).sum(0)
    return (squares - within).clamp(min=0)
