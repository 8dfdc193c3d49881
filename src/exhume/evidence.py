"""Evidence: what may be claimed without the truth, and what may not."""

from exhume.methods import Reconstruction
from exhume.problem import Problem
from exhume.solvers import Outcome

ENOUGH = 1.2
"""Equations over unknowns from which a residual of zero is taken to mean something."""


def claims(problem: Problem, found: Reconstruction) -> list[str]:
    """Sentences that hold whatever the training data was."""
    count = len(found.samples)
    ratio = problem.ratio(count)
    counted = (
        f"{count} candidates of dimension {problem.dim} were fitted to "
        f"{problem.target.numel():,} numbers: {ratio:.2f} equations for each unknown."
    )
    if ratio < ENOUGH:
        return [
            counted,
            "That is too few: candidates that are not training samples could explain the "
            "weights as well. Nothing can be claimed of any candidate.",
        ]
    if found.outcome is Outcome.CONVERGED:
        return [
            counted,
            f"They explain the weights to a relative residual of {found.residual:.1e}. So many "
            "equations are not met by chance: either these are the training samples, up to what "
            "the limits below leave open, or the weights came about in another way.",
        ]
    left = [
        counted,
        f"A relative residual of {found.residual:.1e} is left. Some candidates may be training "
        "samples and others not; without the truth they cannot be told apart.",
    ]
    if found.explained is not None and found.explained > count:
        left.append(
            f"On the way, {found.explained} candidates explained the weights, which {count} do "
            "not: there may be more samples than that. Leave the number out, and it is found."
        )
    return left


def limits(problem: Problem, found: Reconstruction) -> list[str]:
    """What the result does not show."""
    smallest = found.coefficients.norm(dim=1).min() / found.coefficients.norm(dim=1).max()
    return [
        *problem.features.undetermined,
        "Samples with a tiny coefficient leave a tiny trace and are the first to be missed; here "
        f"the smallest coefficient is {smallest:.2g} of the largest.",
        "If more samples were asked for than there are, the rest are duplicates or have a "
        "negligible coefficient.",
        "A failed attack does not show that the model is safe: a better one may succeed.",
    ]
