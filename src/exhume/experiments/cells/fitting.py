"""Random features alone: how labels fit, what flips explain, what exact solutions are."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exhume import data, victims
from exhume.equation.objective import fitted
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.experiments.cells.attack import Samples
from exhume.features.activations import activation as named_activation
from exhume.features.weights import Seeded, blocks, materialise
from exhume.methods.progress import stream
from exhume.models.folder import random_features_problem
from exhume.solvers import solve
from exhume.solvers.levenberg_marquardt import LevenbergMarquardt
from exhume.theory import hermite
from exhume.victims.random_features import ROWS

EXACT = 1e-11  # relative residual of an exact solution: a little above rounding in float64
SLACK = 1.001  # how far above the ceiling a coefficient may be: as far as rounding takes it


@dataclass(frozen=True)
class Failure:
    """Look for wrong exact solutions where `theory.width_bound` says that few exist."""

    samples: int = 2  # n
    dim: int = 2  # d
    width: int = 1000  # p
    activation: str = "erf"  # σ
    tolerance: float = 0.5  # ε, within which a sample counts as found
    separation: float = 1.1  # least distance over √d between two samples, up to sign
    floor: float = 1.0  # least size of a coefficient
    ceiling: float = 1.0  # largest
    starts: int = 8  # how many, each of Levenberg and Marquardt from random candidates
    steps: int = 200  # the most of each
    seed: int = 0  # of samples, coefficients, features and starts

    def run(self, device: str) -> dict[str, Any]:
        """Look for `exact` solutions.

        It `failed` if one within the ceiling misses a sample, and is `wrong` if any does.
        """
        truth = self.drawn()
        # random features whose last layer is Σ_i c_i φ(x_i), with coefficients of random sign
        generator = stream(self.seed, 10_000)
        seeded = Seeded(self.width, self.dim, self.seed)
        v = materialise(seeded.to(torch.device("cpu"), torch.float64))
        signs = torch.randn(self.samples, 1, generator=generator, dtype=torch.float64).sign()
        spread = torch.rand(self.samples, 1, generator=generator, dtype=torch.float64)
        coefficients = signs * (self.floor + (self.ceiling - self.floor) * spread)
        features = named_activation(self.activation).value(truth @ v.rows(0, self.width).T)
        target = features.T @ coefficients
        problem = random_features_problem(v, self.activation, target, (self.dim,), None)
        problem = problem.to(device, torch.float64)
        solver = LevenbergMarquardt(tolerance=EXACT / 10)
        worst, exact, failed, least = 0.0, 0, False, math.inf
        for start in range(self.starts):
            generator = stream(self.seed, 1 + start)
            begin = problem.domain.start(self.samples, self.dim, generator).to(problem.target)
            point = solve(solver, problem, begin, self.steps).fit
            least = min(least, point.value)
            if not point.value <= EXACT:
                continue
            exact += 1
            error = float(score(point.candidates.cpu(), truth).errors.max())
            within = float(point.coefficients.abs().max()) <= SLACK * self.ceiling
            failed = failed or (within and error > self.tolerance)
            worst = max(worst, error)
        return {
            "exact": exact,
            "failed": failed,
            "wrong": exact > 0 and worst > self.tolerance,
            "error": worst if exact else None,
            "residual": least,
        }

    def drawn(self) -> Tensor:
        """Samples (n, d) of norm √d, drawn until they are far enough apart."""
        generator = stream(self.seed, 0)
        for _ in range(10_000):
            x = torch.randn(self.samples, self.dim, generator=generator, dtype=torch.float64)
            x /= x.norm(dim=1, keepdim=True)
            nearest = (x @ x.T).abs().fill_diagonal_(0).max()
            if math.sqrt(max(0.0, 2 - 2 * float(nearest))) >= self.separation:
                return x * math.sqrt(self.dim)
        raise InputError(f"separation: no {self.samples} samples {self.separation:g} apart found.")


@dataclass(frozen=True)
class LabelFit(Samples):
    """Fit labels by least squares on random features, those of an `Attack` with the same seed."""

    width: int = 1  # p, from 1 on
    activation: str = "relu"  # σ

    def run(self, device: str) -> dict[str, Any]:
        """Fit the labels; `label_error` is ‖Φθ − y‖²/‖y‖² of the least-squares θ."""
        self.check()
        known = self.known()
        inputs, targets = known.inputs.to(device), known.targets.to(device)
        sigma = named_activation(self.activation)
        weights = Seeded(self.width, known.dim, self.seed).to(inputs.device, torch.float64)
        if self.width < known.samples:
            span = sigma.value(inputs @ weights.rows(0, self.width).T)
        else:  # that of the Gram matrix, which wide features add up to block by block
            span = inputs.new_zeros(known.samples, known.samples)
            for part in blocks(self.width, ROWS):
                phi = sigma.value(inputs @ weights.rows(part.start, part.stop).T)
                span += phi @ phi.T
        left, sizes, _ = torch.linalg.svd(span, full_matrices=False)
        left = left[:, sizes > sizes[:1] * max(span.shape) * torch.finfo(span.dtype).eps]
        rest = targets - left @ (left.T @ targets)
        error = float(rest.square().sum() / targets.square().sum())
        return {"inputs": known.dim, "outputs": known.outputs, "label_error": error}


@dataclass(frozen=True)
class Flips:
    """Explain random features by their samples with half of them negated.

    With σ(−z) = σ(z) − z the weights change by −V Σ a_i x_i over the flipped, which two candidates
    ±u, u along that sum, make up for. The ratio is p/(d·n).
    """

    activation: str = "relu"
    dim: int = 30
    samples: int = 8
    ratio: float = 6.0
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Return the residual `alone` and `paired` with ±u, and σ's largest `odd` Hermite term."""
        known = data.sphere(self.dim, self.samples, self.seed)
        width = round(self.ratio * self.dim * self.samples)
        victim = victims.random_features(known, width, self.activation, self.seed)
        problem = victim.problem.to(device, torch.float64)
        coefficients = fitted(problem, known.inputs).coefficients.cpu()
        flipped = known.inputs.clone()
        chosen = slice(0, self.samples // 2)
        flipped[chosen] *= -1
        u = (coefficients[chosen] * known.inputs[chosen]).sum(0, keepdim=True)
        u *= self.dim**0.5 / u.norm()
        odd = hermite.coefficients(self.activation, 15).values[3::2]
        return {
            "alone": fitted(problem, flipped).value,
            "paired": fitted(problem, torch.cat([flipped, u, -u])).value,
            "odd": float(odd.abs().max()),
        }
