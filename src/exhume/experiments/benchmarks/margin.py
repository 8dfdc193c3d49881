"""Networks trained to the margin: what the published recipes and ours find, in the same time."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from exhume import data, victims
from exhume.auditing.evidence import LEVEL
from exhume.checks import one_of
from exhume.data import Data
from exhume.device import usable_device
from exhume.equation.domain import Box
from exhume.equation.problem import Problem
from exhume.evaluate import recognised, score
from exhume.experiments.benchmarks.common import Watch, drawn, heading, say, show, training_shown
from exhume.methods import Reconstruction, reconstruct
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.exhume import Exhume
from exhume.methods.haim2022 import Haim2022
from exhume.methods.progress import Method
from exhume.methods.shen2026 import Shen2026
from exhume.search.tuning import FACTOR, rungs
from exhume.victims import Victim

COLUMNS = (
    "seed: {seed} | box: {box} | attack: {attack} | found in (s): {found.seconds:.0f} | "
    "candidates: {candidates} | steps: {found.steps:d} | residual: {found.residual:.1e} | "
    "SSIM > 0.4: {seen.ssim} ({seen.control.ssim}) | "
    "cos > 0.8: {seen.cosine80} ({seen.control.cosine80}) | "
    "cos > 0.9: {seen.cosine90} ({seen.control.cosine90}) | "
    "best cos: {best:.2f} | recovered: {recovered:.1%}"
)
PROBE = 3.0  # most seconds for finding out how many steps of a recipe there is time for


@dataclass(frozen=True)
class Case:
    """A case says what is trained on what, and which published attack is made on it."""

    data: Callable[[int], Data]  # by seed
    widths: tuple[int, ...]
    recipe: str
    steps: int = 6000  # of training


images = partial(data.load, centre="pixels")
parity = partial(images, classes="parity")
CASES = {
    "digits": Case(partial(parity, "digits", 20), (200, 200), "haim2022"),
    "mnist": Case(partial(parity, "mnist", 100), (500, 500), "haim2022"),
    "mnist_full": Case(partial(parity, "mnist", 500), (1000, 1000), "haim2022", 15_000),
    "cifar10": Case(
        partial(images, "cifar10", 500, classes="all"), (1000, 1000), "buzaglo2023", 30_000
    ),
}


def kkt(
    cases: tuple[str, ...] = ("digits",),
    seeds: int = 1,
    first_seed: int = 0,
    limit: float = 60.0,
    boxes: tuple[str, ...] = ("wide", "pixels"),
    device: str = "auto",
) -> None:
    """Reconstruct samples from the weights of networks trained to the margin.

    Every attack has the same time and begins with the same number of candidates, two for each
    sample; shen2026, which splits some, with fewer. Recipes spend a third of it on tuning. Behind
    each count of recognisable images stands the same of as many held-out images, in brackets.

    Args:
        cases: digits (odd/even, n = 20), mnist (odd/even, 784-500-500-1, n = 100), mnist_full
            (784-1000-1000-1, n = 500), cifar10 (10 classes, 3072-1000-1000-10, n = 500).
        seeds: how many.
        first_seed: of data, model and attack.
        limit: seconds an attack.
        boxes: what the attacker is told of the inputs: wide, the box [−1, 1], or pixels, the range
            of every pixel after the mean image was taken off.
        device: where to run.
    """
    chosen = drawn(seeds, first_seed, cases, CASES)
    for box in boxes:
        one_of("box", box, ("wide", "pixels"))
    device = usable_device(device)
    heading("kkt", device)
    for name in cases:
        rows = []
        for seed in chosen:
            case = CASES[name]
            victim = _trained(case.data(seed), case, seed, device)
            board = Board(victim.truth, data.held_out(victim.truth, seed=seed), seed, limit)
            _baselines(board, victim)
            for box in boxes:
                domain = victim.problem.domain if box == "wide" else _pixel_box(victim.truth)
                problem = replace(victim.problem, domain=domain).to(device)
                for method in _methods(case.recipe, problem, victim.truth.samples, seed, limit):
                    board.attack(box, method, problem)
            rows += board.rows
        show(COLUMNS, rows, title=name)
    say(f"in brackets: held-out images. {LEVEL}")


def _baselines(board: "Board", victim: Victim) -> None:
    """What counts as found without an attack: held-out images, rows of W₁, next to nothing."""
    known = victim.truth
    # The first n of the same seed are those of the control
    others = data.held_out(known, 3 * known.samples, board.seed).inputs[known.samples :]
    board.add("—", "held-out images", others)
    board.add("—", "rows of W₁", victim.trained["1.weight"].double())
    generator = torch.Generator().manual_seed(board.seed)
    blank = torch.randn(2 * known.samples, known.dim, generator=generator)
    board.add("—", "blank, noise of 0.001", 1e-3 * blank.double())


def _methods(
    name: str, problem: Problem, samples: int, seed: int, limit: float
) -> tuple[Method, ...]:
    """Ours, the recipe and the recipe with splits, the last two with the steps there is time for.

    A third of them goes into tuning, and splits come at quarters of the rest.
    """
    recipe = {"haim2022": Haim2022, "buzaglo2023": Buzaglo2023}[name]
    tried = reconstruct(problem, samples, seed, recipe(), time_limit=min(PROBE, limit / 10))
    steps = max(1, round(tried.steps * limit / tried.seconds))
    tuning = sum(FACTOR**rung * size for rung, size in enumerate(rungs(recipe().trials)))
    base = recipe(steps=10**9, probe=max(10, steps // (3 * tuning)))
    return Exhume(), base, Shen2026(base, max(10, steps // 6))


def _pixel_box(known: Data) -> Box:
    """Where pixels from 0 to 1 lie after the mean image was taken off."""
    mean = cast(Tensor, known.transform.mean)
    return Box(-mean, 1 - mean)


def _trained(known: Data, case: Case, seed: int, device: str) -> Victim:
    how: Any = {"steps": case.steps, "device": device, "show": training_shown()}
    victim = victims.kkt_mlp(known, case.widths, seed=seed, **how)
    record = victim.training
    say(
        f"  seed {seed}: trained in {record['seconds']:.0f} s; KKT violation "
        f"{record['violation']:.1e}, {record['stationarity']:.1e} with slopes at kinks; margins "
        f"{record['margins'][0]:.1f} to {record['margins'][1]:.1f}; {record['active']} of "
        f"{known.samples} samples active"
    )
    return victim


@dataclass(eq=False)
class Board:
    """A board holds attacks of `limit` seconds against one training set, a row each."""

    known: Data
    held_out: Data
    seed: int
    limit: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def attack(self, box: str, method: Method, problem: Problem, note: str = "") -> None:
        """Attack and add a row; what splits candidates begins with fewer."""
        samples = self.known.samples
        if isinstance(method, Shen2026):
            samples = max(1, 3 * samples // 4)
        budget: Any = {"time_limit": self.limit, "observe": Watch(None, f"{method.name} ", 10.0)}
        found = reconstruct(problem, samples, self.seed, method, **budget)
        self.add(box, note or method.name, found.samples, found)

    def add(
        self, box: str, attack: str, candidates: Tensor, found: Reconstruction | None = None
    ) -> None:
        """Score candidates and add a row."""
        seen = recognised(candidates, self.known, self.held_out)
        row = {"seed": self.seed, "box": box, "attack": attack, "candidates": len(candidates)}
        row |= {"found": found, "recovered": score(candidates, self.known.inputs).recall}
        row |= {"seen": seen, "best": float(seen.cosines.max())}
        self.rows.append(row)
        of = f"of {seen.samples} images over SSIM 0.4"
        say(f"  {attack} ({box}): {seen.ssim} {of}, {seen.control and seen.control.ssim} held-out")
