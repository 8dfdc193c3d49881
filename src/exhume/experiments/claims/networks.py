"""The threshold p_L ≈ dn beyond random features with squared loss (Iurada et al. 2025).

The law counts equations; features that move in training add a floor of their own. So the networks
here are trained lazily (`Training.lazy`), and what is left is the counting.
"""

from collections.abc import Sequence
from typing import Any

from exhume.experiments.cells.attack import Attack
from exhume.experiments.cells.identifiability import Determined
from exhume.experiments.claims.claim import Claim, Finding, Scale, judged, seeds, undecided
from exhume.experiments.claims.law import LAW
from exhume.experiments.law import phases
from exhume.experiments.table import Table, Threshold, percent
from exhume.sweep import Cell, Grid, Record

LOST = 10.0  # a search that ends at more than so many times the residual at the truth has failed
RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
FEW = {"ratio": (0.5, 1.0, 2.0, 3.0, 4.0)}
DIGITS = {"data": "digits", "classes": "parity"}
CIFAR10 = {"data": "cifar10", "dtype": "float32"}
CLASSES = {"classes": "all", "loss": "cross_entropy"}


def threshold(records: Sequence[Record]) -> Finding:
    """Recovery against p_L/(dn): none below, from about one on, all at the top.

    An attack that diverged, or that ends far above the residual at the truth, has not found a
    minimum: a failure of the search, which does not speak against the law.
    """
    attacks = Table.of(records, Attack)
    shares = attacks.curve("recovered")
    found = Threshold.of(shares)
    if found is None:
        return undecided("ratios on both sides of 1 are needed")
    top = max(shares)
    floor, left = (attacks.curve(name).get(top) for name in ("floor", "residual"))
    reached = left is not None and floor is not None and left <= LOST * floor
    lost = found.start is None and not reached
    notes = _counted(Table.of(records, Determined))
    if floor is not None:
        notes.append(f"The samples themselves leave {floor:.0e} of the weights at the top.")
    if lost:
        ended = "diverged" if left is None else f"ended at {left:.0e}"
        notes.append(f"The attack {ended} there, which says nothing on the threshold.")
    return Finding(
        f"of the samples {found.sentence} (p_L = {top:g} dn)",
        "not decided" if lost else judged(*found.checks),
        " ".join(notes),
    )


def _counted(found: Table) -> list[str]:
    """From where on the equations determine the samples, in a sentence, if they do."""
    known = found.whole("rank", "unknowns")
    shares = {row["ratio"]: row["rank"] / row["unknowns"] for row in known}
    first = min((ratio for ratio in shares if shares[ratio] == 1), default=None)
    if first is None:
        return []
    below = ", ".join(f"{percent(shares[r])} at {r:g}" for r in shares if r < first)
    return [f"The equations determine all unknowns from p_L = {first:g} dn on ({below or 'all'})."]


Axes = dict[str, Any]


def _claim(
    name: str, what: str, minutes: tuple[float, float], small: Axes, full: Axes, counted: Any = ()
) -> Claim:
    """Attacks at the ratios above unless they are given, and ranks at ratios of their own."""

    def cells(scale: Scale) -> list[Cell]:
        axes = {"ratio": RATIOS, **(small if scale == "small" else full)}
        network = {word: axes[word] for word in ("samples", "architecture")}
        ranks = Grid(Determined, {**network, "ratio": counted}) if counted else ()
        return [*Grid(Attack, axes), *ranks]

    sentence = f"The samples of {what} come back from their last layer from about p_L = dn on."
    return Claim(name, f"{LAW}, {what}", sentence, minutes, cells, phases, threshold)


TWO, RESNET, VIT = ({"architecture": name, "lazy": 30.0} for name in ("two_layer", "resnet", "vit"))

two_layer = _claim(
    "two-layer",
    "two-layer networks",
    (1, 10),
    {**DIGITS, **TWO, "samples": 6, "products": 5000, "seed": seeds(3)},
    {**CIFAR10, **TWO, "samples": 20, "until": 1e-7},
)
residual_net = _claim(
    "residual-net",
    "residual networks",
    (1, 15),
    {**DIGITS, **RESNET, **FEW, "samples": 2, "products": 1500, "seed": seeds(2)},
    {**CIFAR10, **RESNET, "samples": 4, "until": 1e-7, "products": 5000},
)
transformer = _claim(
    "transformer",
    "vision transformers",
    (5, 15),
    # 2,000 to 4,500 products find patches, then their places, on other seeds at ratios of 2 to 4
    {**DIGITS, **VIT, **FEW, "samples": 2, "products": 5000, "seed": seeds(1)},
    {**DIGITS, **VIT, "samples": 4, "until": 1e-7, "products": 20_000, "dtype": "float32"},
    counted=(0.5, 0.75, 1.0, 1.5, 2.0),
)
logistic = _claim(
    "logistic",
    "two-layer networks trained on the logistic loss",
    (1, 10),
    {**DIGITS, **TWO, "loss": "logistic", "samples": 6, "products": 8000, "seed": seeds(3)},
    {**CIFAR10, **TWO, "loss": "logistic", "size": 16, "samples": 20},
)
cross_entropy = _claim(
    "cross-entropy",
    "two-layer networks trained on the cross-entropy of ten classes",
    (2, 10),
    {**DIGITS, **TWO, **CLASSES, "samples": 10, "products": 8000, "seed": seeds(3)},
    {**CIFAR10, **TWO, **CLASSES, "samples": 100},
)
