"""docs/reproduction.md, from the results that are stored beside it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exhume.errors import InputError
from exhume.experiments.claims.claim import FAILED, Claim
from exhume.experiments.table import NEAR, percent
from exhume.files import finite, read_json

LARGEST = 200_000  # bytes of a figure in the docs: a repository keeps every version of it

HEAD = f"""# Reproduction

Results of the sources as named experiments: what is claimed (in our words), what we measured, and
whether the one bears out the other. Verdicts follow from the results by rules in
`src/exhume/experiments/claims/`. This page is written by `exhume reproduce --document docs` from
what is in `docs/reproduction/`; `exhume reproduce --list` shows what there is. *Small* takes
minutes on two cores, *full* is for a GPU. A sample is *recovered* if its relative error, up to its
sign, is under 0.1. d is the number of entries of a sample, n the number of samples, p the number of
features (p_L of parameters of the last layer). Samples come back *from about dn on* if the place
from which on half of them are recovered has {NEAR[0]:g} to {NEAR[1]:g} equations for each unknown.
Where more than {percent(FAILED)} of the cells failed, nothing is decided.
"""


def publish(out: Path, docs: Path, claims: Mapping[str, Claim]) -> list[tuple[str, str | None]]:
    """Copy results and figures into docs/reproduction, then write docs/reproduction.md.

    Results there that are not among the new ones stay. Returned is what was copied, and why a
    figure was not.
    """
    results = {file: read_json(file) for file in sorted(out.glob("*/result.json"))}
    found = {
        file: result
        for file, result in results.items()
        if result.get("name") in claims
        and file.parent.name == f"{result['name']}-{result['scale']}"
    }
    if not found and not stored(docs):
        raise InputError(f"{out}: no results in this folder; exhume reproduce makes them.")
    target = docs / "reproduction"
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{docs}: expected a folder, for the docs ({error}).") from error
    copied: list[tuple[str, str | None]] = []
    for file, result in found.items():
        name, why = file.parent.name, None
        drawn = file.with_name("figure.svg").read_bytes() if result["drawn"] else b""
        if len(drawn) > LARGEST:
            why = f"{len(drawn):,} bytes, more than {LARGEST:,}"
            result["drawn"] = False
        elif drawn:
            (target / f"{name}.svg").write_bytes(drawn)
        text = json.dumps(finite(result), indent=2, ensure_ascii=False)
        (target / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        copied.append((name, why))
    page = document(stored(docs), list(claims))
    (docs / "reproduction.md").write_text(page, encoding="utf-8")
    return copied


def stored(docs: Path) -> list[dict[str, Any]]:
    """Return the results in docs/reproduction."""
    return [read_json(file) for file in sorted((docs / "reproduction").glob("*.json"))]


def document(results: Sequence[Mapping[str, Any]], order: Sequence[str]) -> str:
    """Write the page: a table of all results, then a section for each claim, in that order."""
    scales = ("small", "full")
    known = sorted(
        (result for result in results if result["name"] in order),
        key=lambda result: (order.index(result["name"]), scales.index(result["scale"])),
    )
    parts = [HEAD, "| experiment | claim | our figure | verdict | scale |", "|---|---|---|---|---|"]
    for result in known:
        name = f"[{result['name']}](#{result['name']})"
        words = (result["claim"], result["figure"], result["verdict"], result["scale"])
        cells = (word.replace("|", "\\|").replace("\n", " ") for word in (name, *words))
        parts.append(f"| {' | '.join(cells)} |")
    for name in order:
        found = [result for result in known if result["name"] == name]
        if found:
            latest = found[-1]
            parts += ["", f"## {name}", "", f"*{latest['source']}.* {latest['claim']}"]
            parts += map(_section, found)
    return "\n".join(parts) + "\n"


def _section(result: Mapping[str, Any]) -> str:
    """One scale of one claim."""
    name, scale, seconds = result["name"], result["scale"], result["seconds"]
    note = f"{result['note']}\n" if result["note"] else ""
    failed = f", {result['failed']} of which failed" if result["failed"] else ""
    time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.3g} min"
    drawn = f"\n\n![{name}, {scale}](reproduction/{name}-{scale}.svg)" if result["drawn"] else ""
    return f"""
    {result["command"]}

**{result["verdict"].capitalize()}** ({scale}): {result["figure"]}.
{note}
{result["hardware"]}; torch {result["torch"]}; exhume {result["exhume"]}; {result["date"]}; \
{result["cells"]} cells{failed}, {time} in all.{drawn}"""
