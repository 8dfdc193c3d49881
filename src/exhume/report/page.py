"""The report: from a run directory to one HTML file.

Everything that is said is put together here, in small functions; the template only sets it.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from exhume.auditing.evidence import ENOUGH
from exhume.files import write_private
from exhume.report import _format, figures
from exhume.report._format import duration, finite, number, percent, plural, wilson
from exhume.report._gallery import gallery, grade
from exhume.report._model import (
    card_lines,
    equations,
    floors,
    model,
    rank,
    span,
    weights_alone,
)
from exhume.report._run import Run, read
from exhume.solvers import Outcome

ROWS = 1000
SETTLED = Outcome.SETTLED.value


class Verdict(NamedTuple):
    """What comes first: a sentence, what it means, and its colour on the page."""

    sentence: str
    meaning: str
    tone: str


class Card(NamedTuple):
    """A key number."""

    label: str
    value: str
    note: str


class Share(NamedTuple):
    """A stretch of the bar of samples."""

    grade: str
    samples: int
    words: str


def write(run: Path, redact: bool = False) -> Path:
    """Write a report into a run directory: one file, offline, readable by its owner only.

    The same directory gives the same bytes.

    Args:
        run: what `exhume audit` wrote, and `exhume score` where the truth is known.
        redact: leave out every picture and signal; the metrics stay. The file is then
            `report-redacted.html`, else `report.html`.

    Returns:
        The file.

    Raises:
        InputError: a file is missing or does not hold what it should.
    """
    loaded = read(Path(run))
    name = "report-redacted.html" if redact else "report.html"
    return write_private(loaded.path / name, render(loaded, redact).encode())


def render(run: Run, redact: bool = False) -> str:
    """The page as text."""
    scored, ratio = run.scored, equations(run.result)
    floor = finite(scored.get("residual_at_truth")) if scored else None
    as_published = scored.get("published") if scored else None
    return _template().render(
        result=run.result,
        problem=run.result["problem"],
        config=run.config,
        redact=redact,
        scored=scored,
        verdict=verdict(run),
        cautions=cautions(run),
        cards=cards(run),
        shares=shares(run),
        gallery=None if redact else gallery(run),
        progress=figures.progress(run.events, floor),
        ratio=ratio,
        law=figures.law(ratio) if ratio and ratio > 0 else None,
        counting=counting(run.result["problem"], rank(run.result)),
        model=model(run),
        floors=floors(run),
        span=span(run),
        published=published_figures(as_published) if as_published else None,
        rows=ROWS,
        grade=grade,
        privacy_card=privacy_card(run),
    )


def _template() -> Template:
    return environment().get_template("report.html.jinja")


@cache
def environment() -> Environment:
    """The templates of this package, with its ways to write numbers."""
    found = Environment(
        loader=PackageLoader("exhume", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        name: getattr(_format, name)
        for name in ("number", "fixed", "percent", "plural", "duration", "moment")
    }
    return found


def verdict(run: Run) -> Verdict:
    """The first sentence: what was recovered, or all that may be said without the truth."""
    if run.scored is None:
        return _unproven(run.result)
    score = run.scored["score"]
    recovered, exact, total = _counts(score)
    limits = score["thresholds"]
    meaning = (
        f"A sample counts as recovered when its relative error is under "
        f"{number(limits['recovered'])}, and as exact under {number(limits['exact'])}, after a "
        f"one-to-one match with the training data. {_baseline(run.scored['chance'])}"
    )
    if recovered == 0:
        sentence = f"None of {plural(total, 'training sample')} recovered."
        meaning += " This says that this attack failed, not that the data are safe."
        return Verdict(sentence, meaning, "calm")
    sentence = f"{number(recovered)} of {plural(total, 'training sample')} recovered, "
    return Verdict(sentence + f"{number(exact) if exact else 'none'} exactly.", meaning, "exposed")


def _unproven(result: dict[str, Any]) -> Verdict:
    count, residual = plural(result["candidates"], "candidate"), number(result["residual"])
    if result["outcome"] == "converged":
        verb = "explains" if result["candidates"] == 1 else "explain"
        sentence = f"{count} {verb} the weights to a residual of {residual}."
    elif result["outcome"] == SETTLED:
        sentence = (
            f"Settled: {count}, found again by independent trials at a residual of {residual}."
        )
    else:
        sentence = f"Not converged: {count}, and a residual of {residual}."
    meaning = (
        "The training data were not given, so nobody may say “recovered”. What may be said is "
        "how well the candidates explain the weights, and whether the weights hold enough "
        "numbers to leave no other explanation."
    )
    if weights_alone(result):
        meaning = (
            "The training data were not given, so nobody may say “recovered”. What may be said is "
            "how well the candidates explain the weights; many other sets may do so as well."
        )
    return Verdict(sentence, meaning, "open")


def cautions(run: Run) -> list[str]:
    """What a reader must not overlook."""
    found = []
    if run.result["outcome"] == SETTLED:
        found.append(f"A residual is left. {run.result['sentence']}")
    elif run.result["outcome"] != "converged":
        found.append(f"The search did not converge. {run.result['sentence']}")
    ratio = equations(run.result)
    if ratio is not None and ratio < ENOUGH:
        found.append(
            f"The ratio of {number(ratio)} is under {ENOUGH}, near or below the counting limit of "
            "1: other samples could explain the same weights, so a small residual is no evidence."
        )
    if weights_alone(run.result) and run.scored is None:
        found.append(
            "The trained weights alone were explained, not what training changed: very different "
            "candidates can explain the same weights, so a small residual is weak evidence."
        )
    neighbour = (run.scored["chance"]["neighbour"] if run.scored else None) or {}
    if (share := finite(neighbour.get("recovered"))) is not None and share > 0:
        found.append(
            f"Look-alikes: for {percent(share)} of the training samples another one is as close "
            "as “recovered” asks for. Read the exact share instead."
        )
    return found


def cards(run: Run) -> list[Card]:
    """Six key numbers."""
    result, r = run.result, rank(run.result)
    residual_note = "share of the weights left unexplained"
    ratio_note = "p·m / (d·n), the limit is 1"
    if r is not None:
        ratio_note = f"p·m / (r·n) with r = {number(r)}, the limit is 1"
    if run.scored is None:
        given = result["samples_given"]
        found = "their number was found" if given is None else f"of {number(given)} asked for"
        head = [
            Card("Candidates", number(result["candidates"]), found),
            Card("Outcome", str(result["outcome"]), "says nothing about being right"),
            Card("Steps", number(result["steps"]), plural(result["products"], "product")),
        ]
    else:
        score, levels = run.scored["score"], run.scored["chance"]
        recovered, exact, total = _counts(score)
        level = (levels["neighbour"] or levels["sphere"]).get("error")
        if finite(run.scored.get("residual_at_truth")) is not None:
            residual_note = f"at the truth {number(run.scored['residual_at_truth'])}"
        head = [
            Card("Recovered", f"{number(recovered)} / {number(total)}", percent(recovered / total)),
            Card("Exact", f"{number(exact)} / {number(total)}", percent(exact / total)),
            Card("Mean error", number(score["error"]), f"chance level {number(level)}"),
        ]
    return [
        *head,
        Card("Residual", number(result["residual"]), residual_note),
        Card("Ratio", number(equations(result)), ratio_note),
        Card("Time", duration(result["seconds"]), str(result["device_name"])),
    ]


def shares(run: Run) -> list[Share]:
    """The samples by what became of them; empty without a score."""
    if run.scored is None:
        return []
    recovered, exact, total = _counts(run.scored["score"])
    parts = [
        Share("exact", exact, "exact"),
        Share("recovered", recovered - exact, "recovered, not exact"),
        Share("missed", total - recovered, "not recovered"),
    ]
    return [part for part in parts if part.samples]


def counting(problem: dict[str, Any], r: float | None = None) -> str:
    """Equations and unknowns in a sentence, with the n that the ratio stands for."""
    width, outputs, dim, ratio = (
        finite(problem[key]) for key in ("width", "outputs", "dim", "ratio")
    )
    if not (width and outputs and dim and ratio and ratio > 0):
        return "How many numbers the weights show for each unknown is not known."
    shown = width * outputs
    samples = max(1, round(shown / (dim * ratio)))
    if r is not None:
        return (
            f"The weights show p·m = {number(shown)} numbers. {plural(samples, 'sample')} of "
            f"{number(dim)} entries, sought in a subspace of dimension {number(r)}, hide "
            f"r·n = {number(r * samples)}."
        )
    return (
        f"The weights show p·m = {number(shown)} numbers. {plural(samples, 'sample')} of "
        f"{number(dim)} entries hide d·n = {number(dim * samples)}."
    )


def published_figures(figures: dict[str, Any]) -> str:
    """The figures of the papers on images, and what they are worth, in a few sentences.

    Args:
        figures: what score.json has under "published".
    """
    text = (
        "As published, with the nearest candidate for each image and its contrast stretched: mean "
        f"SSIM of the ten best {number(figures['top10_ssim'])}, "
        f"{figures['good']} of {plural(figures['samples'], 'image')} over 0.4."
    )
    chance, control = figures["chance"], figures["control"]
    if chance is None:
        return f"{text} No held-out images are at hand to tell what this is worth."
    return (
        f"{text} {plural(chance['candidates'], 'held-out image')} in the place of the candidates "
        f"would have {number(chance['top10_ssim'])} and {chance['good']}. Of the images that the "
        f"model never saw, {percent(control['good'][1])} are over 0.4; that training images are "
        f"nearer to the candidates than those has p = {number(control['ssim']['p_value'])}."
    )


def privacy_card(run: Run) -> str:
    """Plain text to paste into a model card."""
    result, problem, told = run.result, run.result["problem"], run.result["threat_model"]
    lines = [
        "## Training-data reconstruction audit",
        "",
        f"- Tool: exhume {result['exhume']}, method {result['method']}, seed {result['seed']}, "
        f"{_format.moment(result['started'])}.",
        f"- Model: {problem['name']}; d = {number(problem['dim'])}, p = "
        f"{number(problem['width'])}, m = {number(problem['outputs'])}.",
        *card_lines(model(run)),
        f"- The attacker knows: {'; '.join(map(str, told['knows'])) or 'nothing declared'}.",
        f"- The attacker assumes: {'; '.join(map(str, told['assumes'])) or 'nothing declared'}.",
        f"- Result: {verdict(run).sentence}",
    ]
    if run.scored is not None:
        recovered, _, total = _counts(run.scored["score"])
        low, high = map(percent, wilson(recovered, total))
        limit = number(run.scored["score"]["thresholds"]["recovered"])
        lines += [
            f"- Recovery rate: {percent(recovered / total)} (95 % interval {low} to {high}); "
            f"recovered is a relative error under {limit}.",
            f"- Null baseline: {_baseline(run.scored['chance'])}",
        ]
        if at := [f"{point} {number(value)}" for point, value, _ in floors(run)]:
            lines.append(f"- Residual of the samples themselves, by point: {', '.join(at)}.")
        if run.scored.get("verdict"):
            lines.append(f"- Reading: {run.scored['verdict']}")
        if sentence := span(run):
            lines.append(f"- Subspace: {sentence}")
    else:
        lines.append("- The training data were not given: this is no statement of recovery.")
    lines.append(
        f"- Evidence from the weights alone: residual {number(result['residual'])}, "
        f"p·m/({'d' if rank(result) is None else 'r'}·n) = {number(equations(result))}."
    )
    lines += [f"- Limit: {limit}" for limit in result["limits"]]
    return "\n".join(lines).replace(_format.NO_BREAK, " ")


def _counts(score: dict[str, Any]) -> tuple[int, int, int]:
    """How many samples were recovered, how many exactly, how many there were."""
    total = int(score["samples"])
    return round(score["recovered"] * total), round(score["exact"] * total), total


def _baseline(chance: dict[str, Any]) -> str:
    """The levels to beat, in a sentence."""
    levels = [f"{number(chance['sphere'].get('error'))} (random guesses)"]
    if chance["neighbour"]:
        nearest = number(chance["neighbour"].get("error"))
        levels.insert(0, f"{nearest} (the nearest other training sample)")
    return f"By chance the mean error would be {' or '.join(levels)}."
