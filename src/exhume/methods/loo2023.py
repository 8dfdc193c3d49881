"""NTK reconstruction from the change of the weights, as published.

Loo et al., "Understanding Reconstruction Attacks with the Neural Tangent Kernel and Dataset
Distillation". In the lazy regime θ − θ₀ ≈ (1/MC) Σ_j Σ_c α_jc ∇f_c(x_j). Twice as many candidates
as samples, N(0, 0.2²), duals U(−½, ½); Adam with one step size for both; a weak box; for ReLU
a softplus that sharpens. Gradients of both ends are the problem's point `both`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.features.activations import softplus
from exhume.methods.penalised import Penalised, Sweep
from exhume.methods.penalties import Hyperparameters, outputs
from exhume.search.tuning import Range

SCALE, BOX, SMOOTHNESS = 0.2, 0.1, 0.0015  # published: of the start, and weights of penalties
RANGES = {"rate": Range(1e-3, 1e-1, logarithmic=True)}  # around the published step size
PUBLISHED = {"published": {"rate": 0.02}}  # which is tried first


def sharpness(step: int) -> float:
    """Return β = min(10 + 10^{i/20000}, 200) of softplus."""
    return min(10 + 10 ** (min(step, 80_000) / 20_000), 200.0)


@dataclass(frozen=True)
class Loo2023(Penalised):
    """The published recipe."""

    steps: int = 80_000
    rate: float | None = None  # step size; tuned if None
    smoothness: float = 0.0  # k of the published high-pass penalty, for images
    sparsity: float = 0.0  # weight of the duals' absolute values
    name: str = "loo2023"

    def check(self, problem: Problem) -> None:
        """Refuse all but a change of weights, and smoothness for what are no images."""
        if problem.premise is not Premise.CHANGE:
            raise InputError(
                f"loo2023 is for a change of weights, but this is premise {problem.premise.value}; "
                "use haim2022 at the margin with one output, or buzaglo2023."
            )
        if self.smoothness and len(problem.shape) < 2:
            raise InputError(f"smoothness: is for images, but the shape is {problem.shape}.")

    def sweep(self, problem: Problem) -> Sweep:
        """Return where the step size is looked for, and the published one."""
        return RANGES, tuple(PUBLISHED.values())

    def hyperparameters(self, problem: Problem, values: Mapping[str, float]) -> Hyperparameters:
        """Return them with the published penalties, which are means over a candidate's entries."""
        return Hyperparameters(
            values["rate"],
            values["rate"],
            SCALE,
            sharpness,
            softplus,
            box=BOX / problem.dim,
            smoothness=SMOOTHNESS * self.smoothness / problem.dim,
            sparsity=self.sparsity,
            adam=True,
            shift=-0.5,
            divisor=outputs(problem),
        )
