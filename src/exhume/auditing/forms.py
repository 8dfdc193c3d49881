"""What result.json and score.json must hold to be read: the one place that says so."""

from collections.abc import Callable
from typing import Any

from exhume.checks import Form, count, shaped, sizes

MAYBE = float | int | None  # a number; what is not finite is written as null
SENTENCES = [str]
INPUTS = [{"role": str, "file": str | None, "sha256": str}]


def _maybe(form: Form) -> Callable[[str, Any], None]:
    """Return the form of what may be null."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            shaped(name, value, form)

    return check


def _seen(name: str, value: Any) -> None:
    """Check what was recognised: of the samples, and of images that the model never saw."""
    if value is not None:
        shaped(name, value, RECOGNISED)
        if value["control"] is not None:
            shaped(f"p_value of {name}", value["p_value"], float)


def _some(name: str, value: Any) -> None:
    count(name, value, 1)


RESULT = {
    "exhume": str,
    "versions": {},
    "device": str,
    "device_name": str,
    "seed": count,
    "method": str,
    "started": str,
    "seconds": MAYBE,
    "outcome": str,
    "sentence": str,
    "residual": MAYBE,
    "candidates": count,
    "samples_given": int | None,
    "steps": _maybe(count),
    "products": _maybe(count),
    "premise?": str | None,
    "parameters?": str | None,
    "point?": str | None,
    "rank?": int | None,
    "model?": _maybe({"architecture?": str | None, "laziness?": MAYBE, "stationarity?": MAYBE}),
    "problem": {
        "name": str,
        "dim": _some,
        "width": _some,
        "outputs": _some,
        "shape": sizes,
        "ratio": MAYBE,
        "domain": str,
    },
    "threat_model": {"knows": SENTENCES, "assumes": SENTENCES},
    "prepared?": _maybe(
        {"changes?": SENTENCES, "warnings?": SENTENCES, "derivative_error?": MAYBE}
    ),
    "display": dict | None,
    "verdict?": str,
    "reason?": str,
    "advice?": SENTENCES,
    "probabilities?": [MAYBE],
    "support?": {"equations": count, "unknowns": count, "slack": [MAYBE], "errors": [MAYBE]},
    "claims": SENTENCES,
    "limits": SENTENCES,
    "inputs?": INPUTS,
}

_LEVEL = dict.fromkeys(("error", "signed_error", "cosine", "psnr", "ssim"), MAYBE)
_ROW = {"grade?": str, "sample": count, "candidate": int | None, **_LEVEL}
_CHANCE = {f"{word}?": kind for word, kind in {**_LEVEL, "recovered": MAYBE}.items()}

SCORE = {
    "data?": str,
    "inputs?": INPUTS,
    "score": {
        "samples": _some,
        "candidates": count,
        "thresholds": {"recovered": float, "exact": float},
        "recovered": float,
        "exact": float,
        "recognisable?": MAYBE,
        "recall": float,
        "precision": float,
        "flips": count,
        **_LEVEL,
        "rows": [_ROW],
    },
    "chance": {"sphere": _CHANCE, "neighbour": _maybe(_CHANCE)},
    "recognised?": _seen,
    "residual_at_truth?": MAYBE,
    "span_residual?": MAYBE,
    "floors?": dict,
    "verdict?": str | None,
    "subspace?": dict | str | None,
}

RECOGNISED = {
    **dict.fromkeys(("samples", "ssim", "cosine80", "cosine90"), count),
    "p_value": MAYBE,
    "ssims": [MAYBE],
    "cosines": [MAYBE],
    "control": _seen,
}
