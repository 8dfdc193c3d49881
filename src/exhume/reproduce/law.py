"""The law of data reconstruction in random features (Iurada et al. 2025)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from exhume import data, victims
from exhume.equation.objective import fitted
from exhume.experiments import Attack, Fit
from exhume.reproduce.curves import (
    ABOVE,
    NEAR,
    Curve,
    Row,
    Threshold,
    chosen,
    fallen,
    means,
    near,
    onset,
    percent,
    present,
    rows,
    values,
    whole,
)
from exhume.reproduce.drawing import bars, lines, phases, pictures, sheet
from exhume.reproduce.experiment import Experiment, Finding, Scale, judged, seeds, undecided
from exhume.sweep import Cell, Grid, Record
from exhume.theory import hermite

LAW = "Iurada et al., A Law of Data Reconstruction for Random Features (and Beyond), ICLR 2026"

FITTED, UNFITTED = 1e-6, 1e-2
"""Relative training error of labels that fit, and of labels that do not."""

SMALL = 0.05
"""Error, in the published measure, that counts as about 0."""

RATIOS = (0.3, 0.6, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0)
WIDTHS = (0.5, 0.75, 1.0, 1.5, 3.0)
"""Of label fitting, in units of n."""


def labels(fits: Sequence[Row]) -> tuple[bool, str] | None:
    """Whether labels fit from p = n on and not at p = n/2, and that in words; None if unmeasured.

    The middle one over sizes and seeds counts: at p = n, few features of ReLU may be dependent.
    """
    groups: dict[float, list[float]] = {}
    for row in whole(fits, "label_error"):
        groups.setdefault(row["width"] / row["samples"], []).append(row["label_error"])
    middle = {share: statistics.median(errors) for share, errors in groups.items()}
    wide = [error for share, error in middle.items() if share >= 1]
    narrow = [error for share, error in middle.items() if share <= 0.5]
    if not wide or not narrow:
        return None
    holds = max(wide) <= FITTED and min(narrow) >= UNFITTED
    return holds, (
        f"median label error {min(narrow):.1g} at p = n/2, at most {max(wide):.0e} from p = n on"
    )


# Both thresholds on sphere data of several sizes.


def _sphere_cells(scale: Scale) -> list[Cell]:
    sizes = {
        "small": ((20, 6), (30, 10), (60, 8)),
        "full": ((100, 20), (200, 20), (200, 50), (400, 50)),
    }[scale]
    cells: list[Cell] = []
    for dim, samples in sizes:
        common = {"dim": dim, "samples": samples, "seed": seeds(3)}
        widths = [max(1, int(share * samples)) for share in WIDTHS]
        cells += Grid(Fit, {**common, "width": widths})
        cells += Grid(Attack, {**common, "ratio": RATIOS, "products": 10_000})
    return cells


def _sphere_judge(records: Sequence[Record]) -> Finding:
    attacks, fits = rows(records, Attack), rows(records, Fit)
    found: dict[tuple[int, int], Threshold] = {}
    for dim in values(attacks, "dim"):
        for samples in values(chosen(attacks, dim=dim), "samples"):
            curve = means(chosen(attacks, dim=dim, samples=samples), "recovered")
            threshold = Threshold.of(curve)
            if threshold is None:
                return undecided(f"d = {dim}, n = {samples}")
            found[dim, samples] = threshold
    if len(found) < 2:
        return undecided("fewer than two sizes")
    fitted = labels(fits)
    if fitted is None:
        return undecided("label fitting")
    fit, words = fitted
    starts = [threshold.start for threshold in found.values() if threshold.start is not None]
    checks = zip(*(threshold.checks for threshold in found.values()), strict=True)
    reached, *rest = (all(check) for check in checks)
    collapse = bool(starts) and max(starts) <= 2 * min(starts)
    where = ", ".join(
        f"{'nowhere' if t.start is None else f'{t.start:.2g} dn'} (d = {d}, n = {n})"
        for (d, n), t in found.items()
    )
    return Finding(
        f"{words}; half of the samples come back from {where}",
        judged(reached, fit, collapse, *rest),
        "Counting puts the second threshold at 1; the search needs a little more than that.",
    )


# CIFAR-10.


def _cifar_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    images = {"data": "cifar10", "size": 8 if small else None, "samples": 10 if small else 100}
    drawn = seeds(2) if small else range(1)  # 0: the first images of each class, as published
    ratios = (0.03, 0.1, 0.3, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
    widths = [max(1, int(share * images["samples"])) for share in WIDTHS]  # type: ignore[operator]
    cells: list[Cell] = [*Grid(Fit, {**images, "width": widths, "seed": drawn})]
    for ratio in ratios:
        axes = {**images, "ratio": ratio, "products": 10_000 if small else 4_000}
        cells += Grid(Attack, {**axes, "seed": drawn, "keep": 6})
    return cells


def _cifar_judge(records: Sequence[Record]) -> Finding:
    attacks = rows(records, Attack)
    errors, fitted = means(attacks, "published_error"), labels(rows(records, Fit))
    if fitted is None:
        return undecided("label fitting")
    if not errors or min(errors) > 0.1 or max(errors) <= NEAR[1]:
        return undecided("errors far below and far above dn are needed")
    fit, words = fitted
    first, last = errors[min(errors)], errors[max(errors)]
    gone = fallen(errors, first)
    half = onset(gone)
    dn = min(errors, key=lambda ratio: abs(ratio - 1))
    recovered = means(attacks, "recovered").get(max(errors))
    return Finding(
        f"{words}; published error {first:.2f} at {min(errors):g} dn, {errors[dn]:.2f} at "
        f"{dn:g} dn, {last:.1g} at {max(errors):g} dn, half of the first from "
        + ("nowhere" if half is None else f"{half:.2g} dn"),
        judged(
            half is not None,
            fit,
            first >= 0.5,
            near(half),
            last <= SMALL,
            0.25 <= gone[dn] <= 0.75,
        ),
        "The published error compares absolute values of pixels, so that random images have about "
        f"0.75; of its first value {percent(1 - gone[dn])} are left at {dn:g} dn, where the source "
        "has half."
        + ("" if recovered is None else f" Recovered at {max(errors):g} dn: {percent(recovered)}."),
    )


def _shown(records: Sequence[Record]) -> dict[str, str]:
    """Pictures of the first seed that has one, at a few ratios, by title."""
    drawn = [row for row in whole(rows(records, Attack), "recovered") if row.get("picture")]
    if not drawn:
        return {}
    first = [row for row in drawn if row["seed"] == drawn[0]["seed"]]
    wanted = {min(first, key=lambda row: abs(row["ratio"] - at))["ratio"] for at in (0.3, 1.5, 10)}
    shown = sorted((row for row in first if row["ratio"] in wanted), key=lambda row: row["ratio"])
    return {
        f"p = {row['ratio']:g} dn, {percent(row['recovered'])} recovered": row["picture"]
        for row in shown
    }


def _cifar_draw(records: Sequence[Record]) -> Figure | None:
    attacks, fits = rows(records, Attack), rows(records, Fit)
    unknowns = [row["inputs"] * row["samples"] for row in whole(attacks, "inputs")]

    def errors(axes: Axes) -> None:
        curves = {
            "published error": means(attacks, "published_error", "width"),
            "label error": means(fits, "label_error", "width"),
        }
        lines(axes, curves, "p (dashed: dn)", "error", mark=max(unknowns, default=None))

    return pictures(_shown(records), errors)


# The span of the recovered features.


def _span_cells(scale: Scale) -> list[Cell]:
    sizes: dict[str, Any] = (
        {"dim": 40, "samples": 8} if scale == "small" else {"dim": 100, "samples": 20}
    )
    return [*Grid(Attack, {**sizes, "ratio": RATIOS, "products": 10_000, "seed": seeds(5)})]


def _span_judge(records: Sequence[Record]) -> Finding:
    attacks = rows(records, Attack)
    spans, fits = means(attacks, "span_residual"), means(attacks, "residual")
    low = {ratio: span for ratio, span in spans.items() if ratio <= NEAR[0]}
    if not low or max(spans) <= NEAR[1]:
        return undecided("ratios on both sides of 1 are needed")
    level, last = max(low.values()), spans[max(spans)]
    half = onset(fallen(spans, level))
    where = "nowhere" if half is None else f"{half:.2g} dn"
    return Finding(
        f"span residual {level:.2f} below {NEAR[0]:g} dn, half of it from {where}, {last:.0e} at "
        f"{max(spans):g} dn",
        judged(half is not None, near(half), last <= 0.01 * level),
        _explained({ratio: fits[ratio] for ratio in low if ratio in fits}),
    )


def _explained(residuals: Curve) -> str:
    """How well wrong data explain the weights, in a sentence; residuals are those below dn."""
    if not residuals:
        return ""
    least = min(residuals, key=lambda ratio: residuals[ratio])
    return (
        f"The attack's own residual is {residuals[least]:.0e} at {least:g} dn, with wrong data: "
        "that is no certificate."
    )


def _span_draw(records: Sequence[Record]) -> Figure:
    attacks = rows(records, Attack)
    figure, (axes,) = sheet("Span residual, and the residual that the attack sees")
    curves = {
        "features of the samples outside the span": means(attacks, "span_residual"),
        "weights outside the span": means(attacks, "residual"),
    }
    lines(axes, curves, "p / (dn)", "relative residual", "xy", mark=1.0)
    return figure


# Signs.


@dataclass(frozen=True)
class Flips:
    """What is left of the weights when samples are replaced by their negatives.

    With σ(−z) = σ(z) − z the weights change by −V Σ a_i x_i over the flipped, which two candidates
    ±u, u along that sum, make up for.

    Attributes:
        activation: σ.
        dim: d.
        samples: n; half of them are flipped.
        ratio: p/(d·n).
        seed: of data and model.
    """

    activation: str = "relu"
    dim: int = 30
    samples: int = 8
    ratio: float = 6.0
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Evaluate.

        Returns:
            `alone`, the residual with half of the samples flipped; `paired`, the same with ±u
            added; `odd`, the largest Hermite coefficient of σ of an odd order from 3 to 15.
        """
        known = data.sphere(self.dim, self.samples, self.seed)
        width = round(self.ratio * self.dim * self.samples)
        victim = victims.random_features(known, width, self.activation, self.seed)
        problem = victim.problem.to(device, torch.float64)
        coefficients = fitted(problem, known.inputs).coefficients.cpu()
        flipped = known.inputs.clone()
        chosen = slice(0, self.samples // 2)
        flipped[chosen] *= -1
        u = (coefficients[chosen] * known.inputs[chosen]).sum(0, keepdim=True)
        u *= self.dim**0.5 / u.norm()
        odd = hermite.coefficients(self.activation, 15).values[3::2]
        return {
            "alone": fitted(problem, flipped).value,
            "paired": fitted(problem, torch.cat([flipped, u, -u])).value,
            "odd": float(odd.abs().max()),
        }


RELU, TANH = "relu", "relu+tanh"


def _sign_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    sizes: dict[str, Any] = {"dim": 30, "samples": 8} if small else {"dim": 100, "samples": 20}
    axes = {**sizes, "activation": (RELU, TANH), "ratio": 6.0}
    told = (sizes["samples"], sizes["samples"] + 2)
    drawn = seeds(6 if small else 10)
    return [
        *Grid(Flips, {**axes, "seed": drawn}),
        *Grid(Attack, {**axes, "told": told, "products": 5000, "seed": drawn}),
        *Grid(
            Attack,
            {**axes, "told": told, "method": "iurada2025", "products": 1500, "seed": drawn},
        ),
    ]


def _sign_judge(records: Sequence[Record]) -> Finding:
    """A wrong sign with ReLU is observed or constructed, and none is observed with ReLU+tanh.

    That is the core. The rest: with ReLU it is observed, and the identity behind it (what the two
    functions' Hermite coefficients say) holds for ReLU and not for ReLU+tanh.
    """
    flips = whole(rows(records, Flips), "alone", "paired", "odd")
    attacks = whole(rows(records, Attack), "recovered", "recovered_flips")
    count: dict[str, tuple[int, int]] = {}
    for name in (RELU, TANH):
        own = chosen(attacks, activation=name)
        found = round(sum(row["recovered"] * row["samples"] for row in own))
        count[name] = (sum(row["recovered_flips"] for row in own), found)
        if not found or not chosen(flips, activation=name):
            return undecided(name)
    relu, tanh = chosen(flips, activation=RELU), chosen(flips, activation=TANH)
    free = max(row["paired"] for row in relu)
    held = min(row["paired"] for row in tanh)
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
        f"Largest odd Hermite coefficient of order 3 to 15: {relu[0]['odd']:.0e} and "
        f"{tanh[0]['odd']:.2g}. With exactly n candidates a flip alone costs "
        f"{min(row['alone'] for row in relu):.0e} of the weights and more with ReLU too.",
    )


def _sign_draw(records: Sequence[Record]) -> Figure:
    figure, (left, right) = sheet("Half of the samples flipped, ±u added", "Flips among recovered")
    flips, attacks = rows(records, Flips), rows(records, Attack)
    paired = {
        name: max(left_over)
        for name in (RELU, TANH)
        if (left_over := present(chosen(flips, activation=name), "paired"))
    }
    bars(left, paired, "share of the weights unexplained", least=1e-16)
    heights: dict[str, float] = {}
    for name in (RELU, TANH):
        for method in values(attacks, "method"):
            own = chosen(attacks, activation=name, method=method)
            heights[f"{name}\n{method}"] = sum(present(own, "recovered_flips"))
    bars(right, heights, "samples")
    return figure


# Tiny-ImageNet.


def _tiny_cells(scale: Scale) -> list[Cell]:
    size, keep = (8, 10) if scale == "small" else (None, 5)
    axes = {"data": "tiny_imagenet", "size": size, "samples": 20, "ratio": 10.0, "keep": keep}
    return [*Grid(Attack, {**axes, "seed": seeds(2) if scale == "small" else range(1)})]


def _tiny_judge(records: Sequence[Record]) -> Finding:
    attacks = whole(rows(records, Attack), "inputs")
    share, error = (means(attacks, name).get(10.0) for name in ("recovered", "published_error"))
    if share is None or error is None:
        return undecided("no attack ended")
    return Finding(
        f"{percent(share)} of {attacks[0]['samples']} images of {attacks[0]['inputs']:,} numbers "
        f"recovered at p = 10dn, published error {error:.1g}",
        judged(share >= 0.5, share >= ABOVE, error <= SMALL),
    )


# A wrong number of samples.


def _count_cells(scale: Scale) -> list[Cell]:
    sizes, told = (
        ({"dim": 20, "samples": 6}, (3, 4, 5, 6, 7, 8, 10))
        if scale == "small"
        else ({"dim": 100, "samples": 20}, (10, 15, 18, 19, 20, 21, 22, 25, 30))
    )
    axes = {**sizes, "ratio": 10.0, "told": told}
    return [
        *Grid(Attack, {**axes, "products": 5000, "seed": seeds(5)}),
        *Grid(Attack, {**axes, "products": 5000, "seed": seeds(3), "method": "iurada2025"}),
    ]


def _count_judge(records: Sequence[Record]) -> Finding:
    ours = chosen(rows(records, Attack), method="exhume")
    published = chosen(rows(records, Attack), method="iurada2025")
    if not ours or not published:
        return undecided("both methods are needed")
    n = ours[0]["samples"]
    left = _median(ours, "residual")
    recall, precision = means(ours, "recall", "told"), means(ours, "precision", "told")
    other = means(published, "precision", "told")
    over = [told for told in left if told >= n and told in recall]
    most = max(over, default=n)
    below_and_above = n - 1 in left and n - 1 in recall and n in over and most > n
    if not below_and_above or most not in precision or most not in other:
        return undecided("numbers below and above n are needed")
    under, extra, theirs = left[n - 1], precision[most], other[most]
    elbow = under >= 100 * max(left[told] for told in over)
    merged = recall[n - 1] < 1 and min(left[told] for told in left if told < n) > 1e-7
    kept = min(recall[told] for told in over) >= ABOVE
    return Finding(
        f"residual {under:.0e} with n − 1 candidates, {left[n]:.0e} with n, "
        f"{left[most]:.0e} with {most} for n = {n}; samples kept with too many: "
        f"{percent(min(recall[told] for told in over))}; candidates that are samples then: "
        f"{percent(extra)} ours, {percent(theirs)} published recipe",
        judged(elbow, merged, kept, max(extra, theirs) >= ABOVE),
        f"All {most} candidates would be samples if those too many were duplicates; "
        f"{percent(n / most)} if they were none.",
    )


def _median(rows: Sequence[Row], value: str) -> Curve:
    """The middle one over seeds, by the number told; the upper of two in the middle."""
    return {
        told: statistics.median_high(found)
        for told in values(rows, "told")
        if (found := present(chosen(rows, told=told), value))
    }


def _count_draw(records: Sequence[Record]) -> Figure | None:
    attacks = rows(records, Attack)
    if not attacks:
        return None
    figure, (left, right) = sheet("The elbow", "What comes back")
    names = {"exhume": "exhume", "iurada2025": "published momentum"}
    n = attacks[0]["samples"]
    residuals = {
        word: _median(chosen(attacks, method=name), "residual") for name, word in names.items()
    }
    lines(left, residuals, "candidates told", "relative residual", "y", mark=n)
    ours = chosen(attacks, method="exhume")
    shares = {
        "samples that have a candidate": means(ours, "recall", "told"),
        "candidates that are a sample": means(ours, "precision", "told"),
    }
    lines(right, shares, "candidates told", "share", "", mark=n)
    return figure


LAW_EXPERIMENTS = (
    Experiment(
        "sphere-thresholds",
        f"{LAW}, synthetic data",
        "Labels fit from p = n on, and the samples come back from about p = dn on, whatever d and "
        "n are.",
        _sphere_cells,
        _sphere_judge,
        phases,
        (1, 3),
    ),
    Experiment(
        "cifar10-thresholds",
        f"{LAW}, CIFAR-10, random features, n = 100",
        "The training loss is about 0 from p = n on; the reconstruction error is about 1.0 at "
        "p = n, 0.5 at p = dn and 0 at p = 10dn.",
        _cifar_cells,
        _cifar_judge,
        _cifar_draw,
        (1, 5),
    ),
    Experiment(
        "span-residual",
        f"{LAW}, span residual and Theorem 1",
        "The features of the samples come to lie in the span of the recovered ones as p passes dn.",
        _span_cells,
        _span_judge,
        _span_draw,
        (1, 2),
    ),
    Experiment(
        "signs",
        f"{LAW}, remark on signs",
        "With ReLU, whose odd Hermite coefficients from order 3 on are zero, recovered samples may "
        "have the wrong sign; with ReLU+tanh they never do.",
        _sign_cells,
        _sign_judge,
        _sign_draw,
        (1, 4),
    ),
    Experiment(
        "tiny-imagenet",
        f"{LAW}, Tiny-ImageNet",
        "From p = 10dn random features 20 images of Tiny-ImageNet come back.",
        _tiny_cells,
        _tiny_judge,
        lambda records: pictures(_shown(records)),
        (1, 10),
    ),
    Experiment(
        "sample-count",
        f"{LAW}, n unknown",
        "With fewer candidates than samples, samples are merged and a residual is left; with more, "
        "all samples come back with duplicates beside them.",
        _count_cells,
        _count_judge,
        _count_draw,
        (1, 4),
    ),
)
