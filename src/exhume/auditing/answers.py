"""The first screen of a report: does the model leak, how sure is that, and what is to be done."""

from exhume.auditing.evidence import Record, counts, level, likely, unmeasured
from exhume.auditing.judgement import SURE
from exhume.wording import number, plural

QUESTIONS = ("Does the model leak?", "How sure is that?", "What to do")
HANDLE = (
    "Handle the weights as you do the training data, and do not release them as they are. "
    "Differential privacy in training bounds what they give up: exhume bound --epsilon."
)
UNSAFE = "Do not take this for safety: a better attack may find more."


def answers(result: Record, scored: Record | None) -> list[tuple[str, str]]:
    """Answer the three questions of somebody who reads nothing else."""
    told = _without_truth(result) if scored is None else _with_truth(result, scored)
    return list(zip(QUESTIONS, told, strict=True))


def _with_truth(result: Record, scored: Record) -> tuple[str, str, str]:
    graded, total = counts(scored["score"]), int(scored["score"]["samples"])
    found, compared = total - graded["not found"], "Candidates were compared with the training data"
    sure = f"{compared}: the mean error is {number(scored['score'].get('error'))}; {level(scored)}."
    if found:
        return f"Yes: {found} of {plural(total, 'training sample')} came back.", sure, HANDLE
    if unmeasured(scored):
        images = "Name images that the model never saw: exhume score RUN --held-out FILE."
        return "Not measured.", f"{compared}, and pictures with no others.", images
    tried = f"{compared}: none came back from this attack. {UNSAFE}"
    return "Not to this attack.", tried, _next(result)


def _without_truth(result: Record) -> tuple[str, str, str]:
    verdict, (sure, count) = result["verdict"], likely(result)
    counted = f"{sure} of {plural(count, 'candidate')}"
    if verdict in ("reconstructed", "partly"):
        every = "all" if verdict == "reconstructed" else "not all"
        chance = f"{counted} have a probability of {SURE} or more, by the weights alone"
        ended = [x for x in result["controls"] if x["why"] is None and not x["cut"]]
        alone = "" if ended else "No control was run to its end. "
        told = f"{chance}. {alone}To be sure, compare: exhume score RUN."
        advice = "" if verdict == "reconstructed" else f" {_next(result)}"
        return f"Yes, very likely: {every} of what was sought is found.", told, HANDLE + advice
    known = "This run does not show it." if verdict == "no evidence" else "This run cannot tell."
    none = f"{counted} have a probability of {SURE} or more. {UNSAFE}"
    return known, none, _next(result)


def _next(result: Record) -> str:
    """Return the first advice of a run, or that which is always right."""
    advice = result["advice"] or ["Compare it with the training data: exhume score RUN."]
    return str(advice[0])
