"""Samples to look at: `gallery` and `table` for the page, `gallery_png` for a README."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray
from torch import Tensor

from exhume.auditing.evidence import GRADES, by_recognition
from exhume.auditing.folder import MATCHED, RunFolder, read_run
from exhume.auditing.judgement import SURE
from exhume.equation.pixels import Pixels, displayed, encoded
from exhume.errors import InputError
from exhume.files import write_private
from exhume.wording import finite, fixed, number

Array = NDArray[np.float64]

LIMIT = 60  # The page shows this many samples at most, so that it stays a few megabytes
SIDE = 160  # Pixels of the longer side of a picture on the page: more than it is shown with
# A signal is drawn with this many points at most: more than its width on the page in pixels
POINTS = 240
COLUMNS = 40  # of a table, at most: more cannot be read side by side


class Item(NamedTuple):
    """An item is one sample: pictures as data URIs (None for no picture), or a polyline."""

    label: str
    note: str
    grade: str
    pictures: tuple[str | None, ...] = ()
    points: str = ""


class Gallery(NamedTuple):
    """A gallery holds groups of items under their headings, and says how many were left out."""

    kind: str
    groups: list[tuple[str, list[Item]]]
    left_out: int
    stride: int = 1


def gallery(run: RunFolder) -> Gallery | None:
    """Show pairs where the truth was given, otherwise the candidates; None if there is nothing."""
    matched = run.matched()
    if matched is not None and run.scored is not None and len(run.shape) > 1:
        if by_recognition(run.result, run.scored):
            return likenesses(run)
        return pairs(*matched, run.scored["score"]["rows"])
    samples, sizes, shape = run.samples, run.sizes.numpy(), run.shape
    if len(samples) == 0:
        return None
    order = np.argsort(-sizes, kind="stable")[:LIMIT].tolist()
    chances = [finite(chance) for chance in _each(run, "probabilities")]
    notes = [
        ", ".join(
            [number(size)] * bool(size)
            + ([] if p is None else [f"p = {p:.2f}"])
            + ["found again"] * bool(twice)
        )
        for size, p, twice in zip(sizes.tolist(), chances, _each(run, "again"), strict=True)
    ]
    marks = ["" if p is None else "sure" if p >= SURE else "unsure" for p in chances]
    items = [Item(f"{i + 1}", notes[i], marks[i]) for i in order]
    left_out, stride = len(samples) - len(order), -(-samples.shape[1] // POINTS)
    if len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3)):
        display = run.result["display"]
        pixels = samples if display is None else Pixels(**display).to_pixels(samples)
        shown = [data_uri(stretch(x)) for x in pixels[order].reshape(-1, *shape).numpy()]
        items = [item._replace(pictures=(x,)) for item, x in zip(items, shown, strict=True)]
        return Gallery("pictures", [("", items)], left_out)
    lines = [polyline(x) for x in samples[order, ::stride].numpy()]
    items = [item._replace(points=x) for item, x in zip(items, lines, strict=True)]
    return Gallery("signals", [("", items)], left_out, stride)


def _each(run: RunFolder, word: str) -> list[Any]:
    """Return what a result says of each candidate; None for all where they are not as many."""
    values, count = run.result[word], len(run.samples)
    return list(values) if len(values) == count else [None] * count


def pairs(originals: Tensor, found: Tensor, rows: Sequence[dict[str, Any]]) -> Gallery:
    """Show originals beside reconstructions, best first; of too many, the best and the worst."""
    errors = [row["error"] for row in rows]
    order, half, left_out = ranked(errors), LIMIT // 2, max(0, len(originals) - LIMIT)
    items = []
    for i in [*order[:half], *order[half + left_out :]]:
        picture = data_uri(found[i].numpy()) if found[i].isfinite().all() else None
        note = "no candidate" if picture is None else number(errors[i])
        shown = (data_uri(originals[i].numpy()), picture)
        items.append(Item(f"{i + 1}", note, grade(rows[i]), shown))
    if not left_out:
        return Gallery("pairs", [("", items)], 0)
    groups = [(f"The {half} best", items[:half]), (f"The {half} worst", items[half:])]
    return Gallery("pairs", groups, left_out)


def likenesses(run: RunFolder) -> Gallery:
    """Show the images that can best be recognised, then the best of the control."""
    groups, seen, half = [], (run.scored or {})["recognised"], LIMIT // 2
    for side, whose in ((seen, "training"), (seen["control"], "held-out")):
        shown = None if side is None else run.matched(control=side is not seen)
        if shown is None:
            continue
        items = []
        for i in ranked(side["ssims"], -1)[:half]:
            ssim, cosine = (fixed(side[name][i], 2) for name in ("ssims", "cosines"))
            picture = data_uri(shown[1][i].numpy()) if shown[1][i].isfinite().all() else None
            note = f"SSIM {ssim}, cosine {cosine}" if picture else "no candidate"
            items.append(Item(f"{i + 1}", note, "", (data_uri(shown[0][i].numpy()), picture)))
        count = f"{side['ssim']} of {side['samples']} over SSIM 0.4"
        groups.append((f"The best of the {whose} images: {count}", items))
    return Gallery("likenesses", groups, max(0, seen["samples"] - half))


def ranked(figures: Sequence[float | None], sign: int = 1) -> list[int]:
    """Return the order of samples by a figure, the least first, those without one last."""
    values = sign * np.array(figures, dtype=float)  # None becomes NaN, which is sorted last
    return [int(i) for i in np.argsort(values, kind="stable")]


def grade(row: dict[str, Any]) -> str:
    """Return what came back of a sample in a word: exact, recovered, recognisable or missed."""
    return "missed" if row["grade"] == GRADES[-1] else str(row["grade"])


def stretch(image: Array) -> Array:
    """Spread the middle 99 % of the values over [0, 1]."""
    return np.clip(_between(image, *np.quantile(np.nan_to_num(image), (0.005, 0.995))), 0.0, 1.0)


def data_uri(image: Array) -> str:
    """Encode a picture as an inline PNG, no side longer than 160 pixels."""
    return f"data:image/png;base64,{encoded(image, SIDE)}"


def polyline(signal: Array) -> str:
    """Return the points of a signal in a box of 100 by 40, the largest value on top.

    Example:
        >>> polyline(np.array([0.0, 1.0, 0.5]))
        '0.0,39.0 50.0,1.0 100.0,20.0'
    """
    x = np.linspace(0, 100, len(signal))
    y = _between(signal, np.nanmin(signal), np.nanmax(signal))
    return " ".join(f"{a:.1f},{39 - 38 * b:.1f}" for a, b in zip(x, y, strict=True))


def _between(values: Array, low: float, high: float) -> Array:
    """Move `low` to 0 and `high` to 1; what is not a number stands at 0."""
    values = np.nan_to_num(values)
    return np.asarray((values - low) / (high - low if high > low else 1.0))


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
        words = ["found again" if twice else "found" for twice in _each(run, "again")]
        lines = [(f"{i + 1}", "", words[i], _words(values[i])) for i in order]
    else:
        (true, found), total = (units.to_pixels(rows) for rows in matched), len(matched[0])
        grades = [grade(row) for row in run.scored["score"]["rows"]]
        for i in range(min(total, LIMIT)):
            lines.append((f"{i + 1}", grades[i], "true", _words(true[i])))
            lines.append(("", "", "found", _words(found[i])))
            lines.append(("", "", "difference", _words(found[i] - true[i])))
    left_out = {"left_out": max(0, total - LIMIT), "columns_left_out": len(names[COLUMNS:])}
    return {"columns": names[:COLUMNS], "lines": lines, **left_out}


def _words(values: Tensor) -> list[str]:
    return [number(x, "–") for x in values[:COLUMNS].tolist()]


def gallery_png(run: Path, out: Path, limit: int = 10) -> Path:
    """Draw the pairs of a run that was scored on images, `limit` of them at most.

    They are the first samples in their own order, or where images can be recognised at most
    (`evidence.by_recognition`), the best.
    """
    loaded = read_run(Path(run))
    matched = loaded.matched()
    if matched is None or len(matched[0]) == 0 or limit < 1:
        none = f"{run} has no pictures to draw ({Path(run) / MATCHED}, limit={limit})"
        raise InputError(f"{none}: run exhume score with image data, and ask for 1 or more")
    if not by_recognition(loaded.result, scored := loaded.scored or {}):
        notes = [f"error {number(row['error'])}" for row in scored["score"]["rows"]]
        return pairs_png(*matched, notes, out, limit)
    ssims = scored["recognised"]["ssims"]
    order = ranked(ssims, -1)
    notes = [f"SSIM {fixed(ssims[i], 2)}" for i in order]
    return pairs_png(matched[0][order], matched[1][order], notes, out, limit)


def pairs_png(
    originals: Tensor, found: Tensor, notes: Sequence[str], out: Path, limit: int = 10
) -> Path:
    """Draw the first `limit` originals above their reconstructions, with a note below each.

    Both are images in [0, 1], (n, *shape), NaN for none. The PNG file is private.
    """
    count, height = min(limit, len(originals)), originals.shape[-2] / originals.shape[-1]
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.0, hspace=0.0, compress=True)
    figure = Figure(figsize=(1.05 * count + 0.3, 2.1 * height + 0.3), dpi=160, layout=layout)
    grid = figure.subplots(2, count, squeeze=False)
    rows = (originals, "original"), (found, "from the weights")
    for row, (pictures, name) in zip(grid, rows, strict=True):
        for axes, picture in zip(row, pictures.numpy(), strict=False):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(visible=False)
            if np.isfinite(picture).all():
                shown = displayed(picture)
                axes.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            else:
                axes.set_facecolor("#eeeeee")
                axes.set_box_aspect(height)
                axes.text(0.5, 0.5, "none", ha="center", va="center", fontsize=7, color="#888888")
        row[0].set_ylabel(name, fontsize=8, color="#555555", labelpad=5)
    for axes, note in zip(grid[1], notes, strict=False):
        axes.set_xlabel(note, fontsize=7, color="#555555", labelpad=4)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return write_private(Path(out), buffer.getvalue())
