"""The report: from a run directory to one HTML file.

`auditing.evidence` decides what is said. Here it is put in its place, beside pictures, plots and
the settings of the run.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from exhume import wording
from exhume.auditing import evidence
from exhume.auditing.evidence import rank_of, ratio_of
from exhume.auditing.folder import RunFolder, read_run
from exhume.files import write_private
from exhume.report import figures
from exhume.report.gallery import gallery, grade
from exhume.wording import duration, finite, number, percent, plural

ROWS = 1000
"""Longer tables are cut here, so that a browser can still show them; score.json has every row."""

IN_PROBLEM = ("shape", "outputs")
"""Arguments of an architecture that the page gives with the problem already."""

WORDS = {
    "initial": "the initial weights",
    "final": "the trained weights",
    "midpoint": "the midpoint of training",
    "both": "the initial and the trained weights",
    "last": "the last layer",
    "first": "the first layer",
    "all": "all",
    "change": "the change of the weights in training",
    "margin": "trained to the margin: the trained weights alone",
    "decay": "at rest under weight decay: the trained weights alone",
}


class Card(NamedTuple):
    """A card shows one key number."""

    label: str
    value: str
    note: str


class Share(NamedTuple):
    """A share is a stretch of the bar of samples."""

    grade: str
    samples: int
    words: str


class Model(NamedTuple):
    """A model is what of a network was attacked, and what was done to it before."""

    facts: list[tuple[str, str]]
    changes: list[str]
    warnings: list[str]


def write(run: Path, redact: bool = False) -> Path:
    """Write a report into a run directory: one file, offline, readable by its owner only.

    The same directory gives the same bytes.

    Args:
        run: what `exhume audit` wrote, and `exhume score` where the truth is known.
        redact: leave out every picture and signal; the metrics stay. The file is then
            `report-redacted.html`, else `report.html`.

    Raises:
        InputError: a file is missing or does not hold what it should.
    """
    loaded = read_run(Path(run))
    name = "report-redacted.html" if redact else "report.html"
    return write_private(loaded.path / name, render(loaded, redact).encode())


def render(run: RunFolder, redact: bool = False) -> str:
    """Return the page as text."""
    result, scored, ratio = run.result, run.scored, ratio_of(run.result)
    extras = scored or {}
    as_published = extras.get("published")
    template = environment().get_template("report.html.jinja")
    return template.render(
        result=result,
        problem=result["problem"],
        config=run.config,
        redact=redact,
        scored=scored,
        verdict=evidence.headline(result, scored),
        cautions=evidence.cautions(result, scored),
        cards=cards(run),
        shares=shares(scored),
        gallery=None if redact else gallery(run),
        progress=figures.progress(run.events, finite(extras.get("residual_at_truth"))),
        ratio=ratio,
        law=figures.law(ratio) if ratio and ratio > 0 else None,
        counting=evidence.counting(result),
        model=model(run),
        floors=floors(run),
        span=evidence.first_layer(result, extras.get("subspace")),
        published=evidence.published_figures(as_published) if as_published else None,
        rows=ROWS,
        grade=grade,
        privacy_card=privacy_card(run),
    )


@cache
def environment() -> Environment:
    """Return the templates of this package, with its ways to write numbers."""
    found = Environment(
        loader=PackageLoader("exhume", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        name: getattr(wording, name)
        for name in ("number", "fixed", "percent", "plural", "duration", "moment")
    }
    return found


def cards(run: RunFolder) -> list[Card]:
    """Return six key numbers."""
    result, rank = run.result, rank_of(run.result)
    residual_note = "share of the weights left unexplained"
    ratio_note = "p·m / (d·n), the limit is 1"
    if rank is not None:
        ratio_note = f"p·m / (r·n) with r = {number(rank)}, the limit is 1"
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
        recovered, exact, total = evidence.counts(score)
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
        Card("Ratio", number(ratio_of(result)), ratio_note),
        Card("Time", duration(result["seconds"]), str(result["device_name"])),
    ]


def shares(scored: dict[str, Any] | None) -> list[Share]:
    """Group the samples by what became of them; the list is empty without a score."""
    if scored is None:
        return []
    recovered, exact, total = evidence.counts(scored["score"])
    parts = [
        Share("exact", exact, "exact"),
        Share("recovered", recovered - exact, "recovered, not exact"),
        Share("missed", total - recovered, "not recovered"),
    ]
    return [part for part in parts if part.samples]


def floors(run: RunFolder) -> list[tuple[str, float, bool]]:
    """List where features may be taken, the floor there, and whether the run took them there."""
    values = _mapping((run.scored or {}).get("floors"))
    return [
        (point, value, point == run.result.get("point"))
        for point, raw in values.items()
        if (value := finite(raw)) is not None
    ]


def model(run: RunFolder) -> Model | None:
    """Say what of a network was attacked; None for a run on other models, or an earlier version."""
    result, card, problem = run.result, run.card, run.result["problem"]
    prepared = _mapping(result.get("prepared"))
    architecture, training = (_mapping(card.get(key)) for key in ("architecture", "training"))
    laziness = _mapping(training.get("laziness"))
    facts = []
    if card.get("kind") == "network" and architecture:
        sizes = _mapping(architecture.get("arguments"))
        listed = [f"{name} {value}" for name, value in sizes.items() if name not in IN_PROBLEM]
        facts.append(("Architecture", ", ".join([str(architecture.get("name")), *listed])))
    if not (facts or result.get("point") or any(prepared.values())):
        return None
    for name, key in (
        ("Premise", "premise"),
        ("Parameters", "parameters"),
        ("Features at", "point"),
    ):
        if result.get(key) is not None:
            facts.append((name, WORDS.get(str(result[key]), str(result[key]))))
    measured = (
        (
            "At rest",
            training.get("stationarity"),
            "up to {} of the weights, as the model's card says",
        ),
        ("Laziness", laziness.get("first"), "the first layer moved by {} of its norm in training"),
        (
            "Subspace",
            rank_of(result),
            f"candidates sought in {{}} of {number(problem['dim'])} dimensions",
        ),
        ("Derivatives", prepared.get("derivative_error"), "{} from finite differences, relative"),
    )
    facts += [
        (name, words.format(number(value)))
        for name, value, words in measured
        if finite(value) is not None
    ]
    changes, warnings = (
        [str(item) for item in prepared[key]] if isinstance(prepared.get(key), list) else []
        for key in ("changes", "warnings")
    )
    return Model([("Features", str(problem["name"])), *facts], changes, warnings)


def privacy_card(run: RunFolder) -> str:
    """Return plain text to paste into a model card."""
    result, problem, told = run.result, run.result["problem"], run.result["threat_model"]
    lines = [
        "## Training-data reconstruction audit",
        "",
        f"- Tool: exhume {result['exhume']}, method {result['method']}, seed {result['seed']}, "
        f"{wording.moment(result['started'])}.",
        f"- Model: {problem['name']}; d = {number(problem['dim'])}, p = "
        f"{number(problem['width'])}, m = {number(problem['outputs'])}.",
        *_card_lines(model(run)),
        f"- The attacker knows: {'; '.join(map(str, told['knows'])) or 'nothing declared'}.",
        f"- The attacker assumes: {'; '.join(map(str, told['assumes'])) or 'nothing declared'}.",
        f"- Result: {evidence.headline(result, run.scored).sentence}",
    ]
    if run.scored is not None:
        lines += [
            f"- Recovery rate: {evidence.recovery_rate(run.scored['score'])}",
            f"- Null baseline: {evidence.baseline(run.scored['chance'])}",
        ]
        if at := [f"{point} {number(value)}" for point, value, _ in floors(run)]:
            lines.append(f"- Residual of the samples themselves, by point: {', '.join(at)}.")
        if run.scored.get("verdict"):
            lines.append(f"- Reading: {run.scored['verdict']}")
        if sentence := evidence.first_layer(result, run.scored.get("subspace")):
            lines.append(f"- Subspace: {sentence}")
    else:
        lines.append("- The training data were not given: this is no statement of recovery.")
    lines.append(
        f"- Evidence from the weights alone: residual {number(result['residual'])}, "
        f"p·m/({'d' if rank_of(result) is None else 'r'}·n) = {number(ratio_of(result))}."
    )
    lines += [f"- Limit: {limit}" for limit in result["limits"]]
    return "\n".join(lines).replace(wording.NO_BREAK, " ")


def _card_lines(attacked: Model | None) -> list[str]:
    """Put the model in a line of the card, and each thing done to it in another."""
    if attacked is None:
        return []
    facts = "; ".join(f"{name.lower()}: {text}" for name, text in attacked.facts[1:])
    return [
        *([f"- Attacked: {facts}."] if facts else []),
        *(f"- Changed before the audit: {change}" for change in attacked.changes),
        *(f"- Warning: {warning}" for warning in attacked.warnings),
    ]


def _mapping(value: object) -> dict[str, Any]:
    """Return a mapping, empty where a damaged or older file holds something else."""
    return value if isinstance(value, dict) else {}
