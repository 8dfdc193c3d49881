"""The law of data reconstruction in random features (Iurada et al. 2025)."""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from exhume.experiments.cells.attack import Attack
from exhume.experiments.cells.fitting import Flips, LabelFit
from exhume.experiments.claims.claim import Finding, Scale, claim, judged, seeds, undecided
from exhume.experiments.law import FITTED, MOMENTUM, OURS, phases
from exhume.experiments.table import ABOVE, NEAR, Table, Threshold, fall, near, percent, place, rise
from exhume.report.plots import bars, lines, pictures, sheet
from exhume.sweep import Cell, Grid, Record

LAW = "Iurada et al., A Law of Data Reconstruction for Random Features (and Beyond), ICLR 2026"

UNFITTED = 1e-2  # relative training error of labels that do not fit
SMALL = 0.05  # error, in the published measure, that counts as about 0
RATIOS = (0.3, 0.6, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0)
WIDTHS = (0.5, 0.75, 1.0, 1.5, 3.0)  # at which labels are fitted, in units of n
RELU, TANH = "relu", "relu+tanh"


def _fits(samples: int, **axes: Any) -> Grid:
    widths = [max(1, int(share * samples)) for share in WIDTHS]
    return Grid(LabelFit, {**axes, "samples": samples, "width": widths})


def labels(fits: Table) -> tuple[bool, str] | None:
    """Say whether labels fit from p = n on and not at p = n/2, also in words; None if unmeasured.

    The middle one over sizes and seeds counts: at p = n, few features of ReLU may be dependent.
    """
    shares = Table({**row, "share": row["width"] / row["samples"]} for row in fits)
    middle = shares.curve("label_error", "share", statistics.median)
    wide = [error for share, error in middle.items() if share >= 1]
    narrow = [error for share, error in middle.items() if share <= 0.5]
    if not wide or not narrow:
        return None
    words = f"{min(narrow):.1g} at p = n/2, at most {max(wide):.0e} from p = n on"
    holds = max(wide) <= FITTED and min(narrow) >= UNFITTED
    return holds, f"median label error {words}"


def _sphere_cells(scale: Scale) -> list[Cell]:
    small, full = ((20, 6), (30, 10), (60, 8)), ((100, 20), (200, 20), (200, 50), (400, 50))
    cells: list[Cell] = []
    for dim, samples in small if scale == "small" else full:
        common: dict[str, Any] = {"dim": dim, "samples": samples, "seed": seeds(3)}
        cells += _fits(**common)
        cells += Grid(Attack, {**common, "ratio": RATIOS, "products": 10_000})
    return cells


@claim(
    f"{LAW}, synthetic data",
    "Labels fit from p = n on, and the samples come back from about p = dn on, whatever d and n "
    "are.",
    (1, 3),
    _sphere_cells,
    phases,
)
def sphere_thresholds(records: Sequence[Record]) -> Finding:
    """Both thresholds, on sphere data of several sizes."""
    attacks, fitted = Table.of(records, Attack), labels(Table.of(records, LabelFit))
    sizes = dict.fromkeys((row["dim"], row["samples"]) for row in attacks)
    found = [Threshold.of(attacks.where(dim=d, samples=n).curve("recovered")) for d, n in sizes]
    thresholds = [threshold for threshold in found if threshold is not None]
    if len(thresholds) < max(2, len(sizes)) or fitted is None:
        return undecided("label fitting and both sides of two sizes are needed")
    fit, words = fitted
    starts = [threshold.start for threshold in thresholds if threshold.start is not None]
    checks = zip(*(threshold.checks for threshold in thresholds), strict=True)
    reached, *rest = (all(check) for check in checks)
    collapse = bool(starts) and max(starts) <= 2 * min(starts)
    where = ", ".join(
        f"{place(threshold.start, ' dn')} (d = {d}, n = {n})"
        for (d, n), threshold in zip(sizes, thresholds, strict=True)
    )
    return Finding(
        f"{words}; half of the samples come back from {where}",
        judged(reached, fit, collapse, *rest),
        "Counting puts the second threshold at 1; the search needs a little more than that.",
    )


def _cifar_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    drawn = seeds(2) if small else range(1)  # 0: the first images of each class, as published
    samples = 10 if small else 100
    images: dict[str, Any] = {"data": "cifar10", "size": 8 if small else None, "samples": samples}
    axes = {"ratio": (0.03, 0.1, 0.3, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0), "seed": drawn, "keep": 6}
    attacks = Grid(Attack, {**images, **axes, "products": 10_000 if small else 4_000})
    return [*_fits(**images, seed=drawn), *attacks]


def _shown(records: Sequence[Record]) -> dict[str, str]:
    """Pictures of the first seed that has one, at a few ratios, by title."""
    attacks = Table.of(records, Attack).whole("recovered")
    drawn = Table(row for row in attacks if row.get("picture"))
    if not drawn:
        return {}
    first = drawn.where(seed=drawn[0]["seed"])
    wanted = {min(first, key=lambda row: abs(row["ratio"] - at))["ratio"] for at in (0.3, 1.5, 10)}
    return {
        f"p = {row['ratio']:g} dn, {percent(row['recovered'])} recovered": row["picture"]
        for row in sorted(first, key=lambda row: row["ratio"])
        if row["ratio"] in wanted
    }


def _cifar_draw(records: Sequence[Record]) -> Figure | None:
    attacks, fits = Table.of(records, Attack), Table.of(records, LabelFit)
    unknowns = [row["inputs"] * row["samples"] for row in attacks.whole("inputs")]
    curves = {
        "published error": attacks.curve("published_error", "width"),
        "label error": fits.curve("label_error", "width"),
    }
    mark = max(unknowns, default=None)
    return pictures(_shown(records), lines("", curves, "p (dashed: dn)", "error", mark=mark))


@claim(
    f"{LAW}, CIFAR-10, random features, n = 100",
    "The training loss is about 0 from p = n on; the reconstruction error is about 1.0 at p = n, "
    "0.5 at p = dn and 0 at p = 10dn.",
    (1, 5),
    _cifar_cells,
    _cifar_draw,
)
def cifar10_thresholds(records: Sequence[Record]) -> Finding:
    """The published curve: its ends, its fall at about dn, and half of it left there."""
    attacks = Table.of(records, Attack)
    errors, fitted = attacks.curve("published_error"), labels(Table.of(records, LabelFit))
    if fitted is None or not errors or min(errors) > 0.1 or max(errors) <= NEAR[1]:
        return undecided("label fitting and errors far below and far above dn are needed")
    fit, words = fitted
    first, last = errors[min(errors)], errors[max(errors)]
    gone = fall(errors, first)
    half = rise(gone)
    dn = min(errors, key=lambda ratio: abs(ratio - 1))
    there = 0.25 <= gone[dn] <= 0.75
    return Finding(
        f"{words}; published error {first:.2f} at {min(errors):g} dn, {errors[dn]:.2f} at "
        f"{dn:g} dn, {last:.1g} at {max(errors):g} dn, half of the first from {place(half, ' dn')}",
        judged(half is not None, fit, first >= 0.5, near(half), last <= SMALL, there),
        "The published error compares absolute values of pixels, so that random images have about "
        f"0.75; of its first value {percent(1 - gone[dn])} are left at {dn:g} dn.",
    )


def _span_cells(scale: Scale) -> list[Cell]:
    dim, samples = (40, 8) if scale == "small" else (100, 20)
    axes = {"dim": dim, "samples": samples, "ratio": RATIOS, "products": 10_000, "seed": seeds(5)}
    return [*Grid(Attack, axes)]


def _span_draw(records: Sequence[Record]) -> Figure:
    attacks = Table.of(records, Attack)
    curves = {
        "features of the samples outside the span": attacks.curve("span_residual"),
        "weights outside the span": attacks.curve("residual"),
    }
    title = "Span residual, and the residual that the attack sees"
    return sheet(lines(title, curves, "p / (dn)", "relative residual", "xy", mark=1.0))


@claim(
    f"{LAW}, span residual and Theorem 1",
    "The features of the samples come to lie in the span of the recovered ones as p passes dn.",
    (1, 2),
    _span_cells,
    _span_draw,
)
def span_residual(records: Sequence[Record]) -> Finding:
    """The span residual falls from its level below dn to next to nothing, at about dn."""
    attacks = Table.of(records, Attack)
    spans, residuals = attacks.curve("span_residual"), attacks.curve("residual")
    low = {ratio: span for ratio, span in spans.items() if ratio <= NEAR[0]}
    if not low or max(spans) <= NEAR[1]:
        return undecided("ratios on both sides of 1 are needed")
    level, last = max(low.values()), spans[max(spans)]
    half = rise(fall(spans, level))
    below = min((residuals[ratio] for ratio in low if ratio in residuals), default=level)
    return Finding(
        f"span residual {level:.2f} below {NEAR[0]:g} dn, half of it from {place(half, ' dn')}, "
        f"{last:.0e} at {max(spans):g} dn",
        judged(half is not None, near(half), last <= 0.01 * level),
        f"The attack's own residual falls to {below:.0e} there, with wrong data: no certificate.",
    )


def _sign_cells(scale: Scale) -> list[Cell]:
    dim, samples, count = (30, 8, 6) if scale == "small" else (100, 20, 10)
    axes: dict[str, Any] = {"dim": dim, "samples": samples, "activation": (RELU, TANH)}
    axes |= {"ratio": 6.0, "seed": seeds(count)}
    told = {**axes, "told": (samples, samples + 2)}
    return [
        *Grid(Flips, axes),
        *Grid(Attack, {**told, "products": 5000}),
        *Grid(Attack, {**told, "method": MOMENTUM, "products": 1500}),
    ]


def _sign_draw(records: Sequence[Record]) -> Figure:
    flips, attacks = Table.of(records, Flips), Table.of(records, Attack)
    paired = {str(name): y for name, y in flips.curve("paired", "activation", max).items()}
    heights = {
        f"{name}\n{method}": sum(
            attacks.where(activation=name, method=method).present("recovered_flips")
        )
        for name in (RELU, TANH)
        for method in attacks.values("method")
    }
    title, up = "Half of the samples flipped, ±u added", "share of the weights unexplained"
    flipped = bars("Flips among recovered", heights, "samples")
    return sheet(bars(title, paired, up, least=1e-16), flipped)


@claim(
    f"{LAW}, remark on signs",
    "With ReLU, whose odd Hermite coefficients from order 3 on are zero, recovered samples may "
    "have the wrong sign; with ReLU+tanh they never do.",
    (1, 4),
    _sign_cells,
    _sign_draw,
)
def signs(records: Sequence[Record]) -> Finding:
    """A wrong sign with ReLU is observed or constructed, and none is observed with ReLU+tanh.

    The rest: with ReLU it is observed, and what the Hermite coefficients say of both is measured.
    """
    flips = Table.of(records, Flips).whole("alone", "paired", "odd")
    attacks = Table.of(records, Attack).whole("recovered", "recovered_flips")
    count: dict[str, tuple[int, int]] = {}
    for name in (RELU, TANH):
        own = attacks.where(activation=name)
        found = round(sum(row["recovered"] * row["samples"] for row in own))
        count[name] = (sum(row["recovered_flips"] for row in own), found)
        if not found or not flips.where(activation=name):
            return undecided(name)
    relu, tanh = flips.where(activation=RELU), flips.where(activation=TANH)
    free, held = max(relu.present("paired")), min(tanh.present("paired"))
    observed, constructed = count[RELU][0] > 0, free <= 1e-8
    return Finding(
        f"among recovered samples {count[RELU][0]} of {count[RELU][1]} flipped with ReLU, "
        f"{count[TANH][0]} of {count[TANH][1]} with ReLU+tanh; half of all samples flipped, with "
        f"two candidates more, leave {free:.0e} of the weights with ReLU and {held:.0e} with "
        "ReLU+tanh",
        judged(
            (observed or constructed) and count[TANH][0] == 0,
            observed,
            constructed and held >= 1e-4,
            relu[0]["odd"] <= 1e-9 < 1e-3 <= tanh[0]["odd"],
        ),
        "With exactly n candidates a flip alone costs "
        f"{min(relu.present('alone')):.0e} of the weights and more with ReLU too.",
    )


def _tiny_cells(scale: Scale) -> list[Cell]:
    size, keep, drawn = (8, 10, seeds(2)) if scale == "small" else (None, 5, range(1))
    axes = {"data": "tiny_imagenet", "size": size, "samples": 20, "ratio": 10.0, "keep": keep}
    return [*Grid(Attack, {**axes, "seed": drawn})]


@claim(
    f"{LAW}, Tiny-ImageNet",
    "From p = 10dn random features 20 images of Tiny-ImageNet come back.",
    (1, 10),
    _tiny_cells,
    lambda records: pictures(_shown(records)),
)
def tiny_imagenet(records: Sequence[Record]) -> Finding:
    """Most images are recovered, and the published error is about 0."""
    attacks = Table.of(records, Attack).whole("inputs")
    share, error = (attacks.curve(name).get(10.0) for name in ("recovered", "published_error"))
    if share is None or error is None:
        return undecided("no attack ended")
    return Finding(
        f"{percent(share)} of {attacks[0]['samples']} images of {attacks[0]['inputs']:,} numbers "
        f"recovered at p = 10dn, published error {error:.1g}",
        judged(share >= 0.5, share >= ABOVE, error <= SMALL),
    )


def _count_cells(scale: Scale) -> list[Cell]:
    small = {"dim": 20, "samples": 6, "told": (3, 4, 5, 6, 7, 8, 10)}
    full = {"dim": 100, "samples": 20, "told": (10, 15, 18, 19, 20, 21, 22, 25, 30)}
    axes = {**(small if scale == "small" else full), "ratio": 10.0, "products": 5000}
    return [
        *Grid(Attack, {**axes, "seed": seeds(5)}),
        *Grid(Attack, {**axes, "seed": seeds(3), "method": MOMENTUM}),
    ]


# By the number told, the middle one over seeds; of two in the middle the upper.
_residuals = partial(Table.curve, value="residual", by="told", of=statistics.median_high)


def _count_draw(records: Sequence[Record]) -> Figure | None:
    attacks = Table.of(records, Attack)
    if not attacks:
        return None
    ours, n = attacks.where(method=OURS), attacks[0]["samples"]
    published = _residuals(attacks.where(method=MOMENTUM))
    residuals = {"exhume": _residuals(ours), "published momentum": published}
    shares = {
        "samples that have a candidate": ours.curve("recall", "told"),
        "candidates that are a sample": ours.curve("precision", "told"),
    }
    return sheet(
        lines("The elbow", residuals, "candidates told", "relative residual", "y", mark=n),
        lines("What comes back", shares, "candidates told", "share", "", mark=n),
    )


@claim(
    f"{LAW}, n unknown",
    "With fewer candidates than samples, samples are merged and a residual is left; with more, all "
    "samples come back with duplicates beside them.",
    (1, 4),
    _count_cells,
    _count_draw,
)
def sample_count(records: Sequence[Record]) -> Finding:
    """The residual has an elbow at n; samples are merged below it, and duplicated above."""
    attacks = Table.of(records, Attack)
    ours, published = attacks.where(method=OURS), attacks.where(method=MOMENTUM)
    if not ours or not published:
        return undecided("both methods are needed")
    n = ours[0]["samples"]
    left: dict[float, float] = _residuals(ours)
    recall, precision = ours.curve("recall", "told"), ours.curve("precision", "told")
    other = published.curve("precision", "told")
    over = [told for told in left if told >= n and told in recall]
    most = max(over, default=n)
    below_and_above = n - 1 in left and n - 1 in recall and n in over and most > n
    if not below_and_above or most not in precision or most not in other:
        return undecided("numbers below and above n are needed")
    under, extra, theirs = left[n - 1], precision[most], other[most]
    elbow = under >= 100 * max(left[told] for told in over)
    merged = recall[n - 1] < 1 and min(left[told] for told in left if told < n) > 1e-7
    kept = min(recall[told] for told in over)
    return Finding(
        f"residual {under:.0e} with n − 1 candidates, {left[n]:.0e} with n, "
        f"{left[most]:.0e} with {most} for n = {n}; samples kept with too many: {percent(kept)}; "
        f"candidates that are samples then: {percent(extra)} ours, {percent(theirs)} published "
        "recipe",
        judged(elbow, merged, kept >= ABOVE, max(extra, theirs) >= ABOVE),
        f"All {most} candidates would be samples if those too many were duplicates; "
        f"{percent(n / most)} if they were none.",
    )
