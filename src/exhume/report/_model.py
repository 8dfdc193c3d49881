"""The parts of a report on a network: what was attacked, and what of it the weights show."""

from typing import Any, NamedTuple

from exhume.report._format import finite, number, plural
from exhume.report._run import Run

IN_PROBLEM = ("shape", "outputs")
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
CHANGE = "change"


class Model(NamedTuple):
    """What of a network was attacked, and what was done to it before."""

    facts: list[tuple[str, str]]
    changes: list[str]
    warnings: list[str]


def equations(result: dict[str, Any]) -> float | None:
    """Equations for each unknown: the ratio p·m/(d·n), with r for d in a subspace of dimension r.

    Example:
        >>> equations({"problem": {"ratio": 0.5, "dim": 64}, "rank": 16})
        2.0
    """
    ratio, dim = (finite(result["problem"][key]) for key in ("ratio", "dim"))
    r = rank(result)
    return ratio if r is None or ratio is None or dim is None else ratio * dim / r


def weights_alone(result: dict[str, Any]) -> bool:
    """Whether the trained weights themselves were explained, and not their change."""
    return result.get("premise") not in (None, CHANGE)


def rank(result: dict[str, Any]) -> float | None:
    """The dimension of the subspace in which candidates were sought; None for the full space."""
    found = finite(result.get("rank"))
    return found if found is not None and found > 0 else None


def model(run: Run) -> Model | None:
    """What of a network was attacked; None for a run on other models, or of an earlier version."""
    result, card, problem = run.result, run.card, run.result["problem"]
    prepared = _mapping(result.get("prepared"))
    facts = []
    architecture = _mapping(card.get("architecture"))
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
    training = _mapping(card.get("training"))
    if finite(training.get("stationarity")) is not None:
        off = number(training["stationarity"])
        facts.append(("At rest", f"up to {off} of the weights, as the model's card says"))
    laziness = _mapping(training.get("laziness"))
    if finite(laziness.get("first")) is not None:
        moved = number(laziness["first"])
        facts.append(("Laziness", f"the first layer moved by {moved} of its norm in training"))
    if rank(result) is not None:
        within = f"{number(result['rank'])} of {number(problem['dim'])} dimensions"
        facts.append(("Subspace", f"candidates sought in {within}"))
    if finite(prepared.get("derivative_error")) is not None:
        error = number(prepared["derivative_error"])
        facts.append(("Derivatives", f"{error} from finite differences, relative"))
    changes, warnings = (_strings(prepared.get(key)) for key in ("changes", "warnings"))
    return Model([("Features", str(problem["name"])), *facts], changes, warnings)


def floors(run: Run) -> list[tuple[str, float, bool]]:
    """Where features may be taken, the residual at the truth there, and whether the run did so."""
    values = _mapping((run.scored or {}).get("floors"))
    return [
        (point, value, point == run.result.get("point"))
        for point, raw in values.items()
        if (value := finite(raw)) is not None
    ]


def span(run: Run) -> str | None:
    """How well the first layer shows the samples' span, in a sentence; None where not scored."""
    found = (run.scored or {}).get("subspace")
    if found is None or isinstance(found, str):
        return found
    found = _mapping(found)
    kept = finite(found.get("kept"))
    decay = (
        "" if kept in (None, 1.0) else f" Weight decay left {number(kept)} of the initial layer."
    )
    of = "" if weights_alone(run.result) else "change of the "
    return (
        f"The {of}first layer spans {plural(found.get('rank'), 'direction')}; the "
        "largest angle to the span of the samples is "
        f"{number(found.get('largest_angle'))}°, and at most {number(found.get('outside'))} of a "
        f"sample's norm lies outside.{decay}"
    )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def card_lines(attacked: Model | None) -> list[str]:
    """The model in a line of the card, and a line for each thing done to it."""
    if attacked is None:
        return []
    facts = "; ".join(f"{name.lower()}: {text}" for name, text in attacked.facts[1:])
    return [
        *([f"- Attacked: {facts}."] if facts else []),
        *(f"- Changed before the audit: {change}" for change in attacked.changes),
        *(f"- Warning: {warning}" for warning in attacked.warnings),
    ]
