"""What result.json and score.json must hold to be read; of the first, its JSON Schema says so."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exhume.checks import Form, count, shaped, sizes

MAYBE = float | int | None  # a number; what is not finite is written as null
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


def of_schema(schema: Mapping[str, Any], known: Mapping[str, Any]) -> Form:
    """Return the form of what a JSON Schema describes, with the `known` definitions it refers to.

    Kinds, and what must be there; words and ranges are the schema's own, as others may write more.
    """
    schema = known.get(schema.get("$ref", "").rpartition("/")[2], schema)
    kinds = schema.get("type", "string")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    some = kinds - {"null"}
    form: Form = Any  # where there are several kinds, any will do
    if some == {"array"}:
        form = [of_schema(schema["items"], known)]
    elif some == {"object"}:
        must, parts = schema.get("required", ()), schema.get("properties", {})
        form = {x if x in must else f"{x}?": of_schema(parts[x], known) for x in parts}
    elif len(some) == 1:
        form = {"string": str, "integer": count, "number": float, "boolean": bool}[some.pop()]
    return _maybe(form) if "null" in kinds or None in schema.get("enum", ()) else form


SCHEMA = json.loads(Path(__file__).with_name("result.schema.json").read_text(encoding="utf-8"))
RESULT: Any = of_schema(SCHEMA, SCHEMA["$defs"])
RESULT["problem"] |= {**dict.fromkeys(("dim", "width", "outputs"), _some), "shape": sizes}

_LEVEL = dict.fromkeys(("error", "signed_error", "cosine", "psnr", "ssim"), MAYBE)
_ROW = {"grade": str, "sample": count, "candidate": int | None, **_LEVEL}
_CHANCE = {f"{word}?": kind for word, kind in {**_LEVEL, "recovered": MAYBE}.items()}

SCORE = {
    "data": str,
    "inputs": INPUTS,
    "score": {
        "samples": _some,
        "candidates": count,
        "thresholds": {"recovered": float, "exact": float},
        **dict.fromkeys(("recovered", "exact", "recognisable", "recall", "precision"), float),
        "flips": count,
        **_LEVEL,
        "rows": [_ROW],
    },
    "chance": {"sphere": _CHANCE, "neighbour": _maybe(_CHANCE)},
    "recognised?": _seen,
    **dict.fromkeys(("residual_at_truth?", "span_residual?"), MAYBE),
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
