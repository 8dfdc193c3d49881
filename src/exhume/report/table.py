"""Rows of a table as values under the names of their columns, beside the truth where that is."""

from typing import Any

from torch import Tensor

from exhume.auditing.folder import RunFolder
from exhume.errors import InputError
from exhume.report.gallery import LIMIT, grade
from exhume.wording import number

COLUMNS = 40  # The page shows this many at most: more cannot be read side by side


def table(run: RunFolder) -> dict[str, Any] | None:
    """Show candidates in the units of the data, with truth and difference; None for other data.

    A line has the number and grade of its sample (empty but for the first), a word, and values.
    """
    try:
        card = run.settings.card
    except InputError:  # damaged, and shown as it is
        return None
    if card is None or card.table is None or card.dim != run.samples.shape[1]:
        return None
    (names, units), matched, lines = card.table, run.matched(), []
    if matched is None or run.scored is None:
        order = run.sizes.argsort(descending=True, stable=True)[:LIMIT].tolist()
        values, total = units.to_pixels(run.samples), len(run.samples)
        lines = [(f"{i + 1}", "", "found", _words(values[i])) for i in order]
    else:
        (true, found), total = (units.to_pixels(rows) for rows in matched), len(matched[0])
        score = run.scored["score"]
        grades = [grade(row, score["thresholds"]) for row in score["rows"]]
        for i in range(min(total, LIMIT)):
            lines.append((f"{i + 1}", grades[i], "true", _words(true[i])))
            lines.append(("", "", "found", _words(found[i])))
            lines.append(("", "", "difference", _words(found[i] - true[i])))
    left_out = {"left_out": max(0, total - LIMIT), "columns_left_out": len(names[COLUMNS:])}
    return {"columns": names[:COLUMNS], "lines": lines, **left_out}


def _words(values: Tensor) -> list[str]:
    return [number(x, "–") for x in values[:COLUMNS].tolist()]
