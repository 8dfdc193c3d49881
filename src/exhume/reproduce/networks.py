"""The threshold p_L ≈ dn beyond random features with squared loss (Iurada et al. 2025).

The law counts equations; features that move in training add a floor of their own. So the networks
here are trained lazily (`Training.lazy`), and what is left is the counting.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exhume.experiments import Attack
from exhume.reproduce.curves import Row, Threshold, means, percent, rows, whole
from exhume.reproduce.drawing import phases
from exhume.reproduce.experiment import Experiment, Finding, Scale, judged, seeds, undecided
from exhume.reproduce.law import LAW
from exhume.sweep import Cell, Grid, Record
from exhume.theory import local_identifiability

LOST = 10.0
"""How many times the residual at the truth an attack ends at whose search failed."""

RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
FEW = {"ratio": (0.5, 1.0, 2.0, 3.0, 4.0)}
DIGITS = {"data": "digits", "classes": "parity"}
CIFAR10 = {"data": "cifar10", "dtype": "float32"}


@dataclass(frozen=True)
class Determined:
    """Whether the equations determine the samples at the samples, to first order.

    That is the counting behind the threshold, without a search.

    Attributes:
        data: a set of images.
        classes: of them.
        samples: n.
        ratio: p_L/(d·n).
        architecture: of the network.
        lazy: α of its training.
        seed: of data and network.
    """

    data: str = "digits"
    classes: str = "parity"
    samples: int = 2
    ratio: float = 1.0
    architecture: str = "vit"
    lazy: float = 30.0
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Train, and take the rank at the truth: `rank` and `unknowns`."""
        attack = Attack(**asdict(self))
        known = attack.known()
        victim = attack.victim(known, attack.width(known), device)
        found = local_identifiability(victim.posed().to(device), known.inputs, within=True)
        return {"rank": found.rank, "unknowns": found.unknowns}


def threshold(records: Sequence[Record]) -> Finding:
    """Recovery against p_L/(dn): none below, from about one on, all at the top.

    An attack that diverged, or that ends far above the residual at the truth, has not found a
    minimum: a failure of the search, which does not speak against the law.
    """
    attacks = rows(records, Attack)
    shares = means(attacks, "recovered")
    found = Threshold.of(shares)
    if found is None:
        return undecided("ratios on both sides of 1 are needed")
    top = max(shares)
    floor, left = (means(attacks, name).get(top) for name in ("floor", "residual"))
    reached = left is not None and floor is not None and left <= LOST * floor
    lost = found.start is None and not reached
    notes = []
    if floor is not None:
        notes.append(
            f"The samples themselves leave {floor:.0e} of the weights at the top: features moved."
        )
    notes += _counted(rows(records, Determined))
    if lost:
        ended = "diverged" if left is None else f"ended at {left:.0e}"
        notes.append(
            f"The attack {ended} there: it did not find what explains the weights as well as the "
            "samples do, so that it says nothing on the threshold."
        )
    return Finding(
        f"of the samples {found.sentence('dn')} (p_L = {top:g} dn)",
        "not decided" if lost else judged(*found.checks),
        " ".join(notes),
    )


def _counted(found: Sequence[Row]) -> list[str]:
    """From where on the equations determine the samples, in a sentence, if they do."""
    known = whole(found, "rank", "unknowns")
    shares = {row["ratio"]: row["rank"] / row["unknowns"] for row in known}
    first = min((ratio for ratio in shares if shares[ratio] == 1), default=None)
    if first is None:
        return []
    below = ", ".join(f"{percent(shares[r])} at {r:g}" for r in shares if r < first)
    where = f"p_L = {first:g} dn on" + (f" ({below})" if below else "")
    return [f"To first order the equations determine all unknowns from {where}."]


def _cells(
    small: dict[str, Any], full: dict[str, Any], counted: tuple[float, ...]
) -> Callable[[Scale], list[Cell]]:
    """Attacks at the ratios above unless they are given, and ranks at ratios of their own."""

    def cells(scale: Scale) -> list[Cell]:
        axes = {"ratio": RATIOS, **(small if scale == "small" else full)}
        network = {word: axes[word] for word in ("samples", "architecture")}
        return [
            *Grid(Attack, axes),
            *(Grid(Determined, {**network, "ratio": counted}) if counted else ()),
        ]

    return cells


def _experiment(
    name: str,
    what: str,
    minutes: tuple[float, float],
    small: dict[str, Any],
    full: dict[str, Any],
    counted: tuple[float, ...] = (),
) -> Experiment:
    return Experiment(
        name,
        f"{LAW}, {what}",
        f"The samples of {what} come back from their last layer from about p_L = dn on.",
        _cells(small, full, counted),
        threshold,
        phases,
        minutes,
    )


TWO, RESNET, VIT = ({"architecture": name, "lazy": 30.0} for name in ("two_layer", "resnet", "vit"))

NETWORK_EXPERIMENTS = (
    _experiment(
        "two-layer",
        "two-layer networks",
        (1, 10),
        {**DIGITS, **TWO, "samples": 6, "products": 5000, "seed": seeds(3)},
        {**CIFAR10, **TWO, "samples": 20, "until": 1e-7},
    ),
    _experiment(
        "residual-net",
        "residual networks",
        (1, 15),
        {**DIGITS, **RESNET, **FEW, "samples": 2, "products": 1500, "seed": seeds(2)},
        {**CIFAR10, **RESNET, "samples": 4, "until": 1e-7, "products": 5000},
    ),
    _experiment(
        "transformer",
        "vision transformers",
        (1, 15),
        {**DIGITS, **VIT, **FEW, "samples": 2, "products": 400, "seed": seeds(1)},
        {**DIGITS, **VIT, "samples": 4, "until": 1e-7, "products": 20_000, "dtype": "float32"},
        counted=(0.5, 0.75, 1.0, 1.5, 2.0),
    ),
    _experiment(
        "logistic",
        "two-layer networks trained on the logistic loss",
        (1, 10),
        {**DIGITS, **TWO, "loss": "logistic", "samples": 6, "products": 8000, "seed": seeds(3)},
        {**CIFAR10, **TWO, "loss": "logistic", "size": 16, "samples": 20},
    ),
    _experiment(
        "cross-entropy",
        "two-layer networks trained on the cross-entropy of ten classes",
        (2, 10),
        {
            "data": "digits",
            "classes": "all",
            **TWO,
            "loss": "cross_entropy",
            "samples": 10,
            "products": 8000,
            "seed": seeds(3),
        },
        {**CIFAR10, "classes": "all", **TWO, "loss": "cross_entropy", "samples": 100},
    ),
)
