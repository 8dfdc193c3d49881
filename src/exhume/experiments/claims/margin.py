"""Recognisable images from the weights alone (Haim et al. 2022, Buzaglo et al. 2023)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from exhume.auditing.evidence import CLEAR
from exhume.evaluate.recognition import by_chance
from exhume.experiments.cells.margin import CASES, WeightsAlone
from exhume.experiments.claims.claim import Finding, Scale, claim, judged, seeds, undecided
from exhume.experiments.table import Table
from exhume.report.plots import bars, sheet
from exhume.sweep import Cell, Grid, Record

HAIM = "Haim et al., Reconstructing Training Data from Trained Neural Networks"
BUZAGLO = (
    "Buzaglo et al., Deconstructing Data Reconstruction: Multiclass, Weight Decay and General "
    "Losses"
)
COUNTS = {"ssim": "over SSIM 0.4", "cosine80": "over cosine 0.8", "cosine90": "over cosine 0.9"}
FEW = 0.1  # share of held-out images that may look like a candidate
LENGTH = 50_000  # published steps, for 1000 candidates; small runs have 50 for each of theirs


def _cells(scale: Scale, small: dict[str, int], full: tuple[str, ...]) -> list[Cell]:
    lengths = small if scale == "small" else dict.fromkeys(full, LENGTH)
    return [
        cell
        for case, steps in lengths.items()
        for cell in Grid(WeightsAlone, {"case": case, "steps": steps, "seed": seeds(3)})
    ]


def _one_cells(scale: Scale) -> list[Cell]:
    return _cells(scale, {"faces": 2400}, ("cifar10", "cifar10_500", "mnist"))


def _beyond_cells(scale: Scale) -> list[Cell]:
    return _cells(scale, {"digits_ten": 4000, "faces_decay": 2400}, ("classes", "decay"))


def _pooled(records: Sequence[Record]) -> dict[str, dict[str, tuple[int, int, int]]]:
    """By case and count: training images that are recognised, held-out ones, and of how many."""
    found = Table.of(records, WeightsAlone)
    pooled = {}
    for case in found.values("case"):
        own = {}
        for count in COUNTS:
            rows = found.where(case=case).whole("samples", count, f"held_out_{count}")
            names = (count, f"held_out_{count}", "samples")
            seen, held, samples = (sum(row[name] for row in rows) for name in names)
            if samples:
                own[count] = seen, held, samples
        if own:
            pooled[case] = own
    return pooled


def _draw(records: Sequence[Record]) -> Figure | None:
    panels = []
    for case, own in _pooled(records).items():
        heights: dict[str, float] = {}
        for count, (seen, held, samples) in own.items():
            words = COUNTS[count].removeprefix("over ")
            heights |= {f"{words},\ntrained": seen / samples, f"{words},\nheld out": held / samples}
        panels.append(bars(case, heights, "share of images"))
    return sheet(*panels) if panels else None


def _finding(records: Sequence[Record], wanted: int) -> Finding:
    """Hold each case's counts against those of held-out images, by Fisher's exact test."""
    pooled = _pooled(records)
    if len(pooled) < wanted or any(len(own) < len(COUNTS) for own in pooled.values()):
        return undecided("counts of every case are needed")
    beyond, few, words = [], [], []
    for case, own in pooled.items():
        beyond.append(by_chance([(a, n, b, n) for a, b, n in own.values()]) < CLEAR)
        few.append(own["cosine80"][1] <= FEW * own["cosine80"][2])
        counts = ", ".join(f"{a} ({b}) {COUNTS[name]}" for name, (a, b, _) in own.items())
        recipe = f"{CASES[case].recipe}, {CASES[case].preset}"
        words.append(f"{case} ({recipe}): of {own['ssim'][2]} images {counts}")
    return Finding(
        "; ".join(words),
        judged(any(beyond), all(beyond), all(few)),
        "In brackets as many held-out images. Published pictures have cosines of 0.90 to 0.94.",
    )


@claim(
    f"{HAIM}, images from binary classifiers",
    "From the weights of a network trained to the margin, and nothing else, recognisable training "
    "images come back.",
    (1, 20),
    _one_cells,
    _draw,
)
def weights_alone(records: Sequence[Record]) -> Finding:
    """More training images are recognised than chance allows; the rest: few held-out ones are."""
    return _finding(records, 1)


@claim(
    f"{BUZAGLO}, several classes and weight decay",
    "From the weights alone of networks of several classes, and of those that weight decay holds, "
    "recognisable training images come back, too.",
    (3, 30),
    _beyond_cells,
    _draw,
)
def weights_alone_beyond(records: Sequence[Record]) -> Finding:
    """It does in one case at least; the rest: in both, and few held-out images are recognised."""
    return _finding(records, 2)
