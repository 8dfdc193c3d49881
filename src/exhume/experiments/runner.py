"""Run cells and write down what they measured, for `exhume law` and `exhume reproduce` alike.

`publish` writes docs/reproduction.md, from the results that are stored beside it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure

from exhume import __version__, data, sweep
from exhume.errors import InputError
from exhume.experiments.claims.claim import FAILED, Claim, Scale
from exhume.experiments.table import NEAR, percent
from exhume.files import finite, read_json, write_json, write_private
from exhume.report import plots
from exhume.sweep import Cell, Record

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


Drawn = TypeVar("Drawn", bound=Figure | None)


def measured(
    cells: Sequence[Cell], folder: Path, draw: Callable[[Any], Drawn], name: str, **options: Any
) -> tuple[list[Record], Drawn]:
    """Run the cells that are not in the folder yet, with the options of `exhume.sweep.run`.

    Table and figure are written there, the figure as PNG and SVG of that name, if there is one.
    """
    records = sweep.run(cells, folder=folder, **options)
    figure = draw(records)
    plain = [  # a table has no place for a picture
        replace(r, values=r.values and {k: v for k, v in r.values.items() if k != "picture"})
        for r in records
    ]
    sweep.write_csv(folder / "table.csv", plain)
    if figure is not None:
        write_private(folder / f"{name}.png", plots.png(figure))
        write_private(folder / f"{name}.svg", plots.svg(figure).encode())
    return records, figure


def missing(claim: Claim, scale: Scale) -> str | None:
    """Say why the data of a claim cannot be read here; None if they can."""
    for name in claim.data(scale):
        try:
            data.load(name, 2)
        except InputError as error:
            return str(error)
    return None


def perform(claim: Claim, scale: Scale, folder: Path, **options: Any) -> dict[str, Any]:
    """Judge a claim on its cells, run with the options of `exhume.sweep.run`.

    Returned is what result.json holds: the finding, with what it takes to find it again.
    """

    def draw(records: Sequence[Record]) -> Figure | None:
        return claim.draw(records) if any(r.values is not None for r in records) else None

    records, figure = measured(claim.cells(scale), folder, draw, "figure", **options)
    command = f"exhume reproduce {claim.name} --scale {scale}"
    result = {
        "name": claim.name,
        "scale": scale,
        "source": claim.source,
        "claim": claim.sentence,
        **asdict(claim.judge(records)),
        "command": f"EXHUME_DATA=… {command}" if claim.data(scale) else command,
        **{word: sweep.made(records, word) for word in ("hardware", "torch", "date")},
        "exhume": __version__,
        "seconds": round(sum(record.seconds for record in records), 1),
        "cells": len(records),
        "failed": sum(record.error is not None for record in records),
        "drawn": figure is not None,
    }
    write_json(folder / "result.json", result)
    return result
