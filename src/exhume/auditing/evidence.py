"""Evidence: what may be claimed without the truth, and what may not."""

from exhume.equation.problem import Premise, Problem
from exhume.methods import Reconstruction
from exhume.solvers import Outcome

PLAIN = 1e-9
"""Residual up to which the weights are plainly explained; above it, chance fits may come close."""

ENOUGH = 1.2
"""Equations over unknowns from which a residual of zero is taken to mean something."""


def ratio(problem: Problem, found: Reconstruction) -> float:
    """Equations for each unknown: p·m/(d·n), or p·m/(r·n) for candidates in a subspace."""
    return problem.target.numel() / ((found.rank or problem.dim) * len(found.samples))


def claims(problem: Problem, found: Reconstruction) -> list[str]:
    """Sentences that hold whatever the training data was."""
    count, enough = len(found.samples), ratio(problem, found)
    within = "" if found.rank is None else f" in a subspace of dimension {found.rank}"
    counted = (
        f"{count} candidates of dimension {problem.dim}{within} were fitted to "
        f"{problem.target.numel():,} numbers: {enough:.2f} equations for each unknown."
    )
    if enough < ENOUGH:
        return [
            counted,
            "That is too few: candidates that are not training samples could explain the "
            "weights as well. Nothing can be claimed of any candidate.",
        ]
    if problem.premise is not Premise.CHANGE:
        return [
            counted,
            f"A relative residual of {found.residual:.1e} is left. Where the trained weights alone "
            "are explained, a small residual is weak evidence: very different sets of candidates "
            "explain the same weights, some of them better than the training samples do, and "
            "nothing but what is known of the inputs beforehand chooses between them.",
            "So no candidate can be called a training sample on the ground of the weights. A run "
            "with wrong bounds for the inputs shows how much of the result is owed to the bounds.",
        ]
    if found.outcome is Outcome.CONVERGED and found.residual <= PLAIN:
        return [
            counted,
            f"They explain the weights to a relative residual of {found.residual:.1e}. So many "
            "equations are not met by chance: either these are the training samples, up to what "
            "the limits below leave open, or the weights came about in another way.",
        ]
    if found.outcome is Outcome.SETTLED:
        return [
            counted,
            f"A relative residual of {found.residual:.1e} is left. Trials that dropped many of the "
            "candidates, with others to spare, found them again at the same residual: what is left "
            "is taken for the features' own movement in training.",
            "This is evidence and no proof: a sample that every trial misses would not show, and "
            "without the truth, candidates that are training samples and others cannot be told "
            "apart.",
        ]
    return [
        counted,
        f"A relative residual of {found.residual:.1e} is left. Some candidates may be training "
        "samples and others not; without the truth they cannot be told apart.",
        *_more(found),
    ]


def _more(found: Reconstruction) -> list[str]:
    """A hint that more samples were there than asked for."""
    count = len(found.samples)
    if found.explained is None or found.explained <= count:
        return []
    return [
        f"On the way, {found.explained} candidates explained the weights, which {count} do not as "
        "well: there may be more samples than that. Leave the number out, and it is found."
    ]


def _of_premise(premise: Premise) -> list[str]:
    """What cannot be seen where the trained weights alone are the target."""
    if premise is Premise.CHANGE:
        return []
    unseen = {
        Premise.MARGIN: [
            "Only samples on the margin leave a trace: one that lies beyond it has the multiplier "
            "zero, and cannot be found by any search of this kind.",
            "A candidate's label is the one that the network, or the method, gives it; none was "
            "told.",
        ],
        Premise.DECAY: [
            "Only samples at which the loss still has a slope leave a trace: one that is fitted "
            "perfectly cannot be found by any search of this kind.",
            "Coefficients may have either sign, and say nothing of the labels.",
        ],
    }
    return [
        *unseen[premise],
        "The samples themselves leave a residual, since training ends before it is at rest, and "
        "rests on the kinks of ReLU, where a slope may be anything from 0 to 1. How much is not "
        "known without the truth: candidates that leave less are no better for it.",
    ]


def limits(problem: Problem, found: Reconstruction) -> list[str]:
    """What the result does not show."""
    sizes = found.coefficients.reshape(len(found.samples), -1).norm(dim=1)  # k rows a candidate
    sentences = [
        *problem.features.undetermined,
        *_of_premise(problem.premise),
        "Samples with a tiny coefficient leave a tiny trace and are the first to be missed; here "
        f"the smallest coefficient is {sizes.min() / sizes.max():.2g} of the largest.",
        "If more samples were asked for than there are, the rest are duplicates or have a "
        "negligible coefficient.",
    ]
    if problem.drift > 0 and problem.premise is Premise.CHANGE:
        sentences.append(
            "Features moved in training, so the samples themselves leave a residual, and how much "
            "is not known without the truth: a residual above zero does not show that a sample is "
            "missing, nor a smaller one that none is."
        )
    if found.rank is not None:
        sentences.append(
            f"Candidates were sought in the {found.rank} directions in which the first layer "
            "changed; what a sample has outside of them may not be seen."
        )
    return [
        *sentences,
        "A failed attack does not show that the model is safe: a better one may succeed.",
    ]
