"""What may be said of a run, and what may not: the only place that decides it.

Without the truth: `claims` and `limits`, which result.json keeps beside the verdict of `judgement`.
With it, `hindsight` has the reading of score.json. The rest is for a reader of these two files:
whoever writes a page takes the sentences from here, and sets them.
"""

from collections.abc import Mapping
from itertools import count as whole
from math import comb
from typing import Any, cast

from exhume.auditing.judgement import SURE
from exhume.auditing.suspects import EXPLAINED
from exhume.equation.problem import Premise, Problem
from exhume.features.replay import TrainingRun
from exhume.methods import Reconstruction
from exhume.solvers import Outcome
from exhume.theory.support import ENOUGH, Support, support
from exhume.wording import finite, number, percent, plural

Record = Mapping[str, Any]

LOOSE = 0.1  # A candidate that may be this far off, relative to its norm, is not determined
GRADES = ("exact", "recovered", "recognisable", "not found")  # of a sample, the best first
CLEAR = 0.01  # Below this p-value, recognisable images are taken for more than chance
# Counts of recognisable images, each of which is compared with chance, and their words
COUNTS = {"ssim": "SSIM over 0.4", "cosine80": "cosine over 0.8", "cosine90": "cosine over 0.9"}
SSIM = 0.4  # An image is recognisable over this SSIM (Haim 2022)


# Without the truth


def not_by_chance(problem: Problem, found: Reconstruction, rests: Support) -> bool:
    """Tell whether candidates explain the weights, and no others near them do: the strong claim."""
    alone, enough = problem.premise.weights_alone, rests.enough and rests.measured
    return _explained(found) and enough and not alone and not bool((rests.slack >= LOOSE).any())


def _explained(found: Reconstruction) -> bool:
    return found.outcome is Outcome.CONVERGED and found.residual <= EXPLAINED


def claims(
    problem: Problem, found: Reconstruction, rests: Support | None = None, chance: str | None = None
) -> list[str]:
    """List sentences that hold whatever the training data was.

    The support is measured if None. `chance` names a control in which as much was found.
    """
    rests = support(problem, found) if rests is None else rests
    count, left = len(found.samples), f"A relative residual of {found.residual:.1e} is left."
    within = "" if found.rank is None else f" in a subspace of dimension {found.rank}"
    said = [
        f"{count} candidates of dimension {problem.dim}{within} were fitted to "
        f"{problem.target.numel():,} numbers: {rests.equations:,} independent equations beyond "
        f"those that the coefficients take up, {rests.ratio:.2f} equations for each unknown."
    ]
    if not rests.enough:
        said.append(
            "That is too few: candidates that are not training samples could explain the weights "
            "as well. Nothing can be claimed of any candidate."
        )
    elif problem.premise.weights_alone:
        said += [
            f"{left} With the premise {problem.premise.value} a small residual is weak "
            "evidence: very different sets of candidates explain the same weights, some of them "
            "better than the training samples do, and nothing but what is known of the inputs "
            "beforehand chooses between them.",
            "So no candidate can be called a training sample on the ground of the weights. A run "
            "with wrong bounds for the inputs shows how much of the result is owed to the bounds.",
        ]
    elif chance is not None:
        said.append(
            f"{left} The same attack found as much in a control ({chance}), where there is nothing "
            "to find. Nothing is claimed of any candidate."
        )
    elif _explained(found):
        said += _of_an_explanation(problem, found, rests)
    else:
        said += _of_a_rest(problem, found, left)
    return said


def _of_an_explanation(problem: Problem, found: Reconstruction, rests: Support) -> list[str]:
    """Say what candidates are worth that leave nothing."""
    explain = f"They explain the weights to a relative residual of {found.residual:.1e}"
    if not rests.measured:
        return [f"{explain}. Whether others do so too could not be measured: nothing is claimed."]
    if not not_by_chance(problem, found, rests):
        loose = int((rests.slack >= LOOSE).sum())
        return [
            f"{explain}, and so do others: {loose} of them may move by a tenth of their size or "
            "more, to first order, and the weights stay explained. Nothing is claimed of any "
            "candidate."
        ]
    said = [
        f"{explain}. So many equations are not met by chance: either these are the training "
        "samples, up to what the limits below leave open, or the weights came about in another way."
    ]
    if found.recipe is not None and (told := cast(TrainingRun, problem.features).recipe).open:
        values = (f"{word} {number(getattr(found.recipe, word))}" for word in told.open)
        said.append(f"What the recipe leaves open was found with them: {', '.join(values)}.")
    return said


def _of_a_rest(problem: Problem, found: Reconstruction, left: str) -> list[str]:
    """Say what candidates are worth that leave something."""
    count = len(found.samples)
    if found.outcome is Outcome.SETTLED:
        return [
            f"{left} Trials that dropped many of the candidates, with others to spare, found them "
            "again at the same residual: what is left is taken for the features' own movement in "
            "training.",
            "This is evidence and no proof: a sample that every trial misses would not show, and "
            "without the truth, candidates that are training samples and others cannot be told "
            "apart.",
        ]
    if problem.premise is Premise.REPLAY and found.outcome is Outcome.CONVERGED:
        return [
            f"{left} The precision in which weights are kept and steps are taken allows no less. "
            "That speaks for these candidates, and proves nothing: others may leave as little."
        ]
    if problem.premise is Premise.REPLAY:
        return [
            f"{left} The run that the recipe describes does not end at these weights with any "
            "candidates that were tried, so nothing is claimed of them. Either the search failed, "
            "or what it was told is not so: check the rate and the number of steps, the optimiser, "
            "the number of samples and their labels, and that training began at these weights.",
        ]
    said = [
        f"{left} Some candidates may be training samples and others not; the residual alone does "
        "not tell them apart."
    ]
    if found.explained is not None and found.explained > count:
        said.append(
            f"On the way, {found.explained} candidates explained the weights, which {count} do "
            "not as well: there may be more samples than that. Leave the number out, and it is "
            "found."
        )
    return said


AT_REST = (
    "The samples themselves leave a residual, since training ends before it is at rest, and rests "
    "on the kinks of ReLU, where a slope may be anything from 0 to 1. How much is not known "
    "without the truth: candidates that leave less are no better for it."
)
UNSEEN = {
    Premise.CHANGE: (),
    Premise.REPLAY: (
        "A sample that the network fitted from the beginning hardly moved it, and is the first to "
        "be off.",
    ),
    Premise.MARGIN: (
        "Only samples on the margin leave a trace: one that lies beyond it has the multiplier "
        "zero, and cannot be found by any search of this kind.",
        "A candidate's label is the one that the network, or the method, gives it; none was told.",
        AT_REST,
    ),
    Premise.DECAY: (
        "Only samples at which the loss still has a slope leave a trace: one that is fitted "
        "perfectly cannot be found by any search of this kind.",
        "Coefficients may have either sign, and say nothing of the labels.",
        AT_REST,
    ),
}
"""What each premise leaves unseen."""


def limits(problem: Problem, found: Reconstruction) -> list[str]:
    """List what the result does not show."""
    said = [*problem.features.undetermined, *UNSEEN[problem.premise]]
    if problem.premise is not Premise.REPLAY:  # where labels stand in the place of coefficients
        sizes = found.coefficients.reshape(len(found.samples), -1).norm(dim=1)  # k rows a candidate
        said += [
            "Samples with a tiny coefficient leave a tiny trace and are the first to be missed; "
            f"here the smallest coefficient is {sizes.min() / sizes.max():.2g} of the largest.",
            "If more samples were asked for than there are, the rest are duplicates or have a "
            "negligible coefficient.",
        ]
    if problem.premise.weights_alone:
        said.append(
            "There may be twice as many candidates as samples: of an image that was unmixed either "
            "sign is shown where the weights do not tell it, and published recipes seek two for "
            "each sample."
        )
    if problem.drift > 0 and problem.premise is Premise.CHANGE:
        said.append(
            "Features moved in training, so the samples themselves leave a residual, and how much "
            "is not known without the truth: a residual above zero does not show that a sample is "
            "missing, nor a smaller one that none is."
        )
    if found.counted is not None:
        said.append(
            f"The number of samples was not told: {found.counted} were sought, as many as the "
            "directions in which the first layer changed. There are more if some samples are "
            "combinations of others; give their number then."
        )
    if found.rank is not None:
        said.append(
            f"Candidates were sought in the {found.rank} directions in which the first layer "
            "changed; what a sample has outside of them may not be seen."
        )
    safe = "A failed attack does not show that the model is safe: a better one may succeed."
    return [*said, safe]


# For a reader of result.json and score.json


def controls(result: Record) -> str | None:
    """Say what the same attack found once more, and where there is nothing; None if not needed."""
    said, count, tried = [], int(result["candidates"]), result["controls"]
    known = [each for each in result["again"] if each is not None]
    other = [f"Found again from another start: {sum(known)} of {count}."] if known else []
    if known and len(known) < count:
        other += ["Its search failed elsewhere, which says nothing against the others."]
    if tried and len(why := {control["why"] for control in tried}) == 1 and None not in why:
        return " ".join([*other, f"No control was run: {why.pop()}."])
    for control in tried:
        if control["why"] is not None:
            said.append(f"{control['name']}: not run, {control['why']}")
            continue
        cut = ", cut off by the time limit" if control["cut"] else ""
        left = control["residual"]  # of held-out samples there is none
        rest = "" if left is None else f" (residual {number(left)}{cut})"
        said.append(f"{control['name']}: sure of {control['sure']} of {count}{rest}")
    if said:
        other.append(f"The same attack where there is nothing to find: {'; '.join(said)}.")
    return " ".join(other) or None


def rank_of(result: Record) -> float | None:
    """Return the dimension of the subspace that candidates were sought in; None if in all."""
    return finite(result["rank"]) or None


def ratio_of(result: Record) -> float:
    """Return the independent equations for each unknown of a recorded run."""
    return float(result["support"]["equations"] / max(1, result["support"]["unknowns"]))


def likely(result: Record) -> tuple[int, int]:
    """Return how many candidates are very likely training samples, and how many there are."""
    chances = [finite(x) or 0.0 for x in result["probabilities"]]
    return sum(x >= SURE for x in chances), int(result["candidates"])


def weights_alone(result: Record) -> bool:
    """Tell whether the premise was margin or decay, under which many candidates fit alike."""
    return result["premise"] in {premise.value for premise in Premise if premise.weights_alone}


def counts(score: Record) -> dict[str, int]:
    """Return how many samples have each grade, the best first; all are there, with 0 for none.

    Example:
        >>> counts({"samples": 8, "exact": 0.25, "recovered": 0.5, "recognisable": 0.5})
        {'exact': 2, 'recovered': 2, 'recognisable': 0, 'not found': 4}
    """
    total, within, found = int(score["samples"]), 0, {}
    for grade in GRADES[:-1]:  # each share counts the grades before it, too
        reached = max(within, round((finite(score.get(grade)) or 0.0) * total))
        found[grade], within = reached - within, reached
    return found | {GRADES[-1]: total - within}


def fewest(samples: int) -> int:
    """Return how many held-out images it takes to show that n recognisable ones are no chance.

    The least m with 3 / C(n + m, n) < 0.01: Fisher's p-value of n of n images against 0 of m.

    Example:
        >>> [fewest(n) for n in (1, 3, 5, 6)]
        [300, 11, 6, 5]
    """
    return next(m for m in whole(1) if CLEAR * comb(samples + m, samples) > len(COUNTS))


def measured(seen: Record) -> bool:
    """Tell whether there were held-out images enough, of `recognised` in score.json."""
    control = seen["control"]
    return control is not None and control["samples"] >= fewest(max(1, seen["samples"]))


def unmeasured(scored: Record) -> int:
    """Count the samples that may be recognisable as pictures, which no control was there to tell.

    These are not found by their distance, and have an SSIM over 0.4 that nothing shows to be more
    than chance: there were no held-out images, or too few of them.
    """
    if (seen := scored.get("recognised")) is None or measured(seen):
        return 0
    pairs = zip(scored["score"]["rows"], seen["ssims"], strict=False)
    return sum(row["grade"] == GRADES[-1] and (x or 0.0) > SSIM for row, x in pairs)


def headline(result: Record, scored: Record | None) -> tuple[str, str, str]:
    """Say what came back, or all that may be said without the truth.

    The first sentence of a report comes with its meaning, and its tone: open, calm or exposed.
    """
    if scored is None:
        return _without_truth(result)
    graded, total = counts(scored["score"]), int(scored["score"]["samples"])
    bars, samples = scored["score"]["thresholds"], plural(total, "training sample")
    found, seen = total - graded["not found"], scored.get("recognised")
    parts = [f"{number(graded[grade])} {grade}" for grade in GRADES[:-1] if graded[grade]]
    meaning = (
        f"Exact is a relative error under {number(bars['exact'])}, recovered one under "
        f"{number(bars['recovered'])}, after a one-to-one match with the training data; "
        "recognisable is under a third of the way to the nearest other sample, or plainly the "
        f"picture. {baseline(scored['chance'])}"
    )
    if weights_alone(result) and not graded["exact"] + graded["recovered"]:
        meaning += f" {LEVEL}"
    open_ = unmeasured(scored)
    if found:
        more = f"; {open_} more may be recognisable, which was not measured" if open_ else ""
        came = f"{number(found)} of {samples} came back: {', '.join(parts)}{more}."
        return came, meaning, "exposed"
    if open_:
        said = f"Not measured: {open_} of {samples} may be recognisable, and none is recovered."
        return said, f"{meaning} {NO_CONTROL}", "open"
    meaning += " This says that this attack failed, not that the data are safe."
    if seen is None:
        return f"None of {samples} came back.", meaning, "calm"
    _, own, other = recognition_rows(seen)[0]
    like = f"{own} are alike in SSIM (held-out: {other})"
    return f"None of {samples} came back; {like}.", meaning, "calm"


def _without_truth(result: Record) -> tuple[str, str, str]:
    """Return the headline of a run whose training data were not given."""
    sure, count = likely(result)
    verdict, candidates = result["verdict"], plural(count, "candidate")
    measured = "The training data were not given: this is what the weights alone show"
    likely_samples, unknown = "are very likely training samples", f"whether any of {candidates}"
    sentence, tone = {
        "reconstructed": (f"Reconstructed: all {candidates} {likely_samples}.", "exposed"),
        "partly": (f"Partly: {sure} of {candidates} {likely_samples}.", "exposed"),
        "no evidence": (f"No evidence: none of {candidates} is pinned down.", "calm"),
    }.get(verdict, (f"Cannot tell {unknown} is a training sample.", "open"))
    return sentence, f"{result['reason']} {measured}, and how sure that is.", tone


def cautions(result: Record, scored: Record | None) -> list[str]:
    """List what a reader must not overlook."""
    found = []
    if result["outcome"] == Outcome.SETTLED.value:
        found.append(f"A residual is left. {result['sentence']}")
    elif result["outcome"] != Outcome.CONVERGED.value:
        found.append(f"The search did not converge. {result['sentence']}")
    if (enough := ratio_of(result)) < ENOUGH:
        found.append(
            f"The ratio of {number(enough)} is under {ENOUGH}, near or below the counting limit of "
            "1: other samples could explain the same weights, so a small residual is no evidence."
        )
    if weights_alone(result) and scored is None:
        found.append(
            f"With the premise {result['premise']} very different candidates can explain the same "
            "weights, so a small residual is weak evidence."
        )
    neighbour = (scored["chance"]["neighbour"] if scored else None) or {}
    if (share := finite(neighbour.get("recovered"))) is not None and share > 0:
        found.append(
            f"Look-alikes: for {percent(share)} of the training samples another one is as close "
            "as “recovered” asks for. Read the exact share instead."
        )
    return found


def level(scored: Record) -> str:
    """Say what the mean error is to be compared with, in a phrase."""
    sphere, neighbour = scored["chance"]["sphere"], scored["chance"]["neighbour"]
    if neighbour:  # samples of one kind resemble each other, so that chance would be too easy
        return f"the nearest other sample has {number(neighbour.get('error'))}"
    return f"random guesses have {number(sphere.get('error'))}"


def baseline(chance: Record) -> str:
    """Name the mean errors of what was not found in the weights."""
    levels = [f"{number(chance['sphere'].get('error'))} (random guesses)"]
    if chance["neighbour"]:
        nearest = number(chance["neighbour"].get("error"))
        levels.insert(0, f"{nearest} (the nearest other training sample)")
    return f"With nothing found the mean error would be {' or '.join(levels)}."


LEVEL = (
    "An error under 0.1 takes a cosine over 0.995. The images that the papers recover from weights "
    "alone have 0.90 to 0.94 at best: by this bar they are 0 %, too. Read how many can be "
    "recognised, against the control."
)
"""What 0 % recovered means for weights alone."""


NO_CONTROL = (
    "Too few held-out images are at hand to say how many can be recognised by chance: name some of "
    "the same kind that the model never saw, by --held-out."
)
"""What is said where nothing tells what recognisable images are worth."""


def by_recognition(result: Record, scored: Record) -> bool:
    """Tell whether pairs are shown by what can be recognised, and not one to one by their error.

    So they are where weights alone were explained, which do not show a sample's size, and where no
    image was recovered.
    """
    graded = counts(scored["score"])
    none = not graded["exact"] + graded["recovered"]
    return scored.get("recognised") is not None and (none or weights_alone(result))


def recognition_rows(seen: Record) -> list[tuple[str, str, str]]:
    """Return each count of recognisable images, and the same of held-out ones beside it."""

    def count(side: Record | None, name: str) -> str:
        return f"{side[name]} of {side['samples']}" if side else "none at hand"

    return [(text, count(seen, x), count(seen["control"], x)) for x, text in COUNTS.items()]


def recognition(seen: Record) -> str:
    """Say what the counts of recognisable images, `recognised` in score.json, are worth."""
    best = max((x for x in seen["cosines"] if x is not None), default=None)
    said = f"The best cosine of a training image with a candidate is {number(best)}."
    if not measured(seen):
        return f"{said} {NO_CONTROL}"
    as_many = f"chance gives so many more with a probability of {number(seen['p_value'])}"
    if seen["p_value"] < CLEAR:
        return f"{said} More training images can be recognised than held-out ones: {as_many}."
    alone = "Going by these counts, whatever the errors of candidates are, it may be chance"
    return f"{said} {alone}: {as_many}, {CLEAR} or less is clear."
