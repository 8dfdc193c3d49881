"""Networks trained to the margin: what the published recipes and ours find, in the same time."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.table import Table
from torch import Tensor

from exhume import data, victims
from exhume.bench.common import check_count, console, heading, training_shown
from exhume.data import Data
from exhume.device import usable_device
from exhume.equation.domain import Box
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import chance_level, other_data, published_score, score, wrong_prior
from exhume.methods import reconstruct
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.exhume import Exhume
from exhume.methods.haim2022 import Haim2022
from exhume.methods.progress import Method, Progress
from exhume.methods.shen2026 import Shen2026
from exhume.search.tuning import FACTOR, rungs
from exhume.victims import Victim

COLUMNS = (
    "seed", "box", "attack", "found in (s)", "candidates", "steps", "residual", "recovered",
    "cos > 0.9", "cos > 0.97", "SSIM > 0.4", "top-10 SSIM", "top-10 L2", "against held-out",
)  # fmt: skip

CLOSE, CLOSER = 0.9, 0.97
"""Cosines with a training sample that are counted."""

PROBE = 3.0
"""Most seconds in which it is found out how many steps of a recipe there is time for."""

SHIFT = 2.0
"""By what the box of the wrong prior is moved: no sample lies in it."""


@dataclass(frozen=True)
class Case:
    """A network and its data.

    Attributes:
        data: the training set for a seed.
        widths: of the hidden layers.
        recipe: the published one for it.
        steps: of the training.
    """

    data: Callable[[int], Data]
    widths: tuple[int, ...]
    recipe: str
    steps: int = 6000


CASES = {
    "digits": Case(
        lambda seed: data.load("digits", 20, seed, classes="parity", centre="pixels"),
        (200, 200),
        "haim2022",
    ),
    "mnist": Case(
        lambda seed: data.load("mnist", 100, seed, classes="parity", centre="pixels"),
        (500, 500),
        "haim2022",
    ),
    "mnist_full": Case(
        lambda seed: data.load("mnist", 500, seed, classes="parity", centre="pixels"),
        (1000, 1000),
        "haim2022",
        15_000,
    ),
    "cifar10": Case(
        lambda seed: data.load("cifar10", 500, seed, classes="all", centre="pixels"),
        (1000, 1000),
        "buzaglo2023",
        30_000,
    ),
}


def kkt(
    cases: tuple[str, ...] = ("digits",),
    seeds: int = 1,
    first_seed: int = 0,
    limit: float = 60.0,
    boxes: tuple[str, ...] = ("wide", "pixels"),
    controls: bool = True,
    device: str = "auto",
) -> None:
    """Reconstruction from the weights of networks trained to the margin.

    Every attack has the same time and begins with the same number of candidates, two for each
    sample; shen2026, which splits some, with fewer. Recipes spend a third of it on tuning.

    Args:
        cases: digits (odd/even, n = 20), mnist (odd/even, 784-500-500-1, n = 100), mnist_full
            (784-1000-1000-1, n = 500), cifar10 (10 classes, 3072-1000-1000-10, n = 500).
        seeds: how many.
        first_seed: of data, model and attack.
        limit: seconds an attack.
        boxes: what the attacker is told of the inputs: wide, the box [−1, 1], or pixels, the range
            of every pixel after the mean image was taken off.
        controls: attack with a wrong prior too, and a network trained on other data.
        device: where to run.
    """
    check_count("seeds", seeds)
    for word, given, known in (("case", cases, CASES), ("box", boxes, ("wide", "pixels"))):
        unknown = [one for one in given if one not in known]
        if unknown:
            raise InputError(f"{word} {unknown[0]!r}: expected some of {', '.join(known)}.")
    device = usable_device(device)
    heading("kkt", device)
    for name in cases:
        table = Table(*COLUMNS, title=name)
        for seed in range(first_seed, first_seed + seeds):
            _attack_all(table, CASES[name], seed, limit, boxes, controls, device)
        console.print(table)


def _attack_all(
    table: Table,
    case: Case,
    seed: int,
    limit: float,
    boxes: tuple[str, ...],
    controls: bool,
    device: str,
) -> None:
    known = case.data(seed)
    held_out = data.held_out(known)
    victim = _trained(known, case, seed, device)
    chance = chance_level(known, data.held_out(known, 2 * known.samples))
    console.print(
        f"  twice as many held-out images in place of candidates: SSIM > 0.4 {chance.good} of "
        f"{known.samples}, top-10 SSIM {chance.top10_ssim:.3f}, top-10 L2 {chance.top10_l2:.2f}"
    )
    row = _Row(table, known, held_out, seed)
    row.add("—", "rows of W₁", victim.trained["1.weight"].double(), None)
    blank = torch.randn(2 * known.samples, known.dim, generator=torch.Generator().manual_seed(seed))
    row.add("—", "blank, noise of 0.001", 1e-3 * blank.double(), None)
    for box in boxes:
        domain = victim.problem.domain if box == "wide" else _pixel_box(known)
        problem = replace(victim.problem, domain=domain).to(device)
        for method in _methods(case.recipe, problem, known.samples, seed, limit):
            row.attack(box, method, problem, limit)
    if not controls:
        return
    prior = wrong_prior(victim.problem, SHIFT).to(device)
    row.attack(f"[−1, 1] + {SHIFT:g}", Exhume(), prior, limit)
    stranger = _trained(held_out, case, seed, device)
    other = replace(stranger.problem, domain=_pixel_box(held_out)).to(device)
    row.attack("pixels", Exhume(), other, limit, "trained on the held-out, exhume")


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
    mean = known.transform.mean
    assert mean is not None
    return Box(-mean, 1 - mean)


def _trained(known: Data, case: Case, seed: int, device: str) -> Victim:
    victim = victims.kkt_mlp(
        known, case.widths, seed, steps=case.steps, device=device, show=training_shown()
    )
    record = victim.training
    console.print(
        f"  seed {seed}: trained in {record['seconds']:.0f} s; KKT violation "
        f"{record['violation']:.1e}, {record['stationarity']:.1e} with slopes at kinks; margins "
        f"{record['margins'][0]:.1f} to {record['margins'][1]:.1f}; {record['active']} of "
        f"{known.samples} samples active"
    )
    return victim


class _Row:
    """Rows of one table against one training set."""

    def __init__(self, table: Table, known: Data, held_out: Data, seed: int) -> None:
        self.table, self.known, self.held_out, self.seed = table, known, held_out, seed

    def attack(
        self, box: str, method: Method, problem: Problem, limit: float, note: str = ""
    ) -> None:
        """Attack and add a row."""
        samples = self.known.samples
        if isinstance(method, Shen2026):
            samples = max(1, 3 * samples // 4)
        last = 0.0

        def watch(progress: Progress, seconds: float) -> None:
            nonlocal last
            if seconds - last > 10:
                last = seconds
                console.print(
                    f"  {method.name} {seconds:5.0f} s  {progress.phase:8} step "
                    f"{progress.total_steps} residual {progress.residual:.1e}"
                )

        found = reconstruct(problem, samples, self.seed, method, time_limit=limit, observe=watch)
        self.add(
            box, note or method.name, found.samples, (found.seconds, found.steps, found.residual)
        )

    def add(
        self,
        box: str,
        attack: str,
        candidates: Tensor,
        cost: tuple[float, int, float] | None,
    ) -> None:
        """Score candidates and add a row."""
        truth = self.known.inputs
        best = _cosines(truth, candidates)
        published = published_score(candidates, self.known)
        contrast = other_data(candidates, self.known, self.held_out).cosines
        seconds, steps, residual = ("—", "—", "—") if cost is None else (
            f"{cost[0]:.0f}", f"{cost[1]}", f"{cost[2]:.1e}"
        )  # fmt: skip
        self.table.add_row(
            f"{self.seed}",
            box,
            attack,
            seconds,
            f"{len(candidates)}",
            steps,
            residual,
            f"{score(candidates, truth).recall:.1%}",
            f"{int((best > CLOSE).sum())}",
            f"{int((best > CLOSER).sum())}",
            f"{published.good}",
            f"{published.top10_ssim:.3f}",
            f"{published.top10_l2:.2f}",
            f"AUC {contrast.advantage:.2f}, p {contrast.p_value:.0e}",
        )
        console.print(
            f"  {attack} ({box}): {int((best > CLOSE).sum())} samples with a cosine over {CLOSE}, "
            f"median {float(best.median()):.2f}"
        )


def _cosines(truth: Tensor, candidates: Tensor) -> Tensor:
    """The largest cosine of each sample with any candidate, (n,)."""
    rows = torch.nn.functional.normalize(truth.double(), dim=1)
    columns = torch.nn.functional.normalize(candidates.double(), dim=1)
    return (rows @ columns.T).amax(1)
