"""Networks trained to the margin: what the published recipes and ours find, in the same time."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
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
from exhume.methods import Reconstruction, method_named, reconstruct
from exhume.methods import preset as published
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.progress import Method
from exhume.methods.shen2026 import Shen2026
from exhume.search.tuning import FACTOR, rungs
from exhume.victims import Victim

COLUMNS = (
    "seed: {seed} | box: {box} | target: {target} | attack: {attack} | "
    "found in (s): {found.seconds:.0f} | "
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
    preset: str  # of the recipe: the first published one for such data
    steps: int = 6000  # of training to rest
    decay: float | None = None  # on the squared loss; such a network is always trained to rest


images = partial(data.load, centre="pixels")
parity, vehicles = partial(images, classes="parity"), partial(images, classes="vehicles")
BIG = (1000, 1000)  # the published widths
CASES = {
    "faces": Case(partial(images, "faces", 24), (200, 200), "haim2022", "b9"),
    "digits": Case(partial(parity, "digits", 20), (200, 200), "haim2022", "kcf9"),
    "mnist": Case(partial(parity, "mnist", 100), BIG, "haim2022", "kcf9"),
    "mnist_500": Case(partial(parity, "mnist", 500), BIG, "haim2022", "kcf9", 15_000),
    "cifar10": Case(partial(vehicles, "cifar10", 100), BIG, "haim2022", "b9"),
    "cifar10_500": Case(partial(vehicles, "cifar10", 500), BIG, "haim2022", "b9", 15_000),
    "classes": Case(
        partial(images, "cifar10", 500, classes="all"), BIG, "buzaglo2023", "classes1", 30_000
    ),
    "decay": Case(
        partial(vehicles, "cifar10", 100), BIG, "buzaglo2023", "decay1", 15_000, decay=7.5e-4
    ),
}
TARGETS = {"weights": "θ", "change": "θ − θ₀"}
TUNED = "tuned"  # in the place of a preset


def kkt(
    cases: tuple[str, ...] = ("faces",),
    seeds: int = 1,
    first_seed: int = 0,
    limit: float = 60.0,
    training: str = "flow",
    preset: str | None = None,
    targets: tuple[str, ...] = ("weights", "change"),
    boxes: tuple[str, ...] = ("wide",),
    device: str = "auto",
) -> None:
    """Reconstruct samples from the weights of networks on their way to the margin, or there.

    Every attack has the same time and begins with the same number of candidates, two for each
    sample; shen2026, which splits some, with fewer. Behind each count of recognisable images stands
    the same of as many held-out images, in brackets.

    Args:
        cases: faces (labels by chance, 625-200-200-1, n = 24); digits (odd/even, n = 20); mnist
            and mnist_500 (odd/even, 784-1000-1000-1, n = 100 and 500); cifar10 and cifar10_500
            (vehicles/animals, 3072-1000-1000-1, the same); classes (ten of cifar10, n = 500);
            decay (cifar10 at rest under weight decay).
        seeds: how many.
        first_seed: of data, model and attack.
        limit: seconds an attack.
        training: flow, gradient flow as published, or rest, until the weights' direction stays.
        preset: the published settings of the recipe, such as b9, or tuned, to spend a third of the
            time on looking for others; each case has its own if left out.
        targets: what is explained: weights, the trained ones alone, and change, where the initial
            ones are known.
        boxes: what the attacker is told of the inputs: wide, the box [−1, 1], or pixels, the range
            of every pixel after the mean image was taken off.
        device: where to run.
    """
    chosen = drawn(seeds, first_seed, cases, CASES)
    one_of("training", training, ("flow", "rest"))
    for box in boxes:
        one_of("box", box, ("wide", "pixels"))
    for target in targets:
        one_of("target", target, TARGETS)
    device = usable_device(device)
    heading("kkt", device)
    for name in cases:
        rows, case = [], CASES[name]
        for seed in chosen:
            victim = _trained(case.data(seed), case, training, seed, device)
            board = Board(victim.truth, data.held_out(victim.truth, seed=seed), seed, limit)
            _baselines(board, victim)
            # decay wears initial weights off, so that knowing them is of no use
            for box, target in product(boxes, targets if case.decay is None else ("weights",)):
                posed = victim.posed(premise=victim.problem.premise, target=target)
                mean = cast(Tensor, victim.truth.transform.mean)  # taken off pixels from 0 to 1
                domain = posed.domain if box == "wide" else Box(-mean, 1 - mean)
                problem = replace(posed, domain=domain).to(device)
                for method in _methods(case.recipe, preset or case.preset, board, problem):
                    board.attack(box, TARGETS[target], method, problem)
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


def _methods(name: str, run: str, board: "Board", problem: Problem) -> tuple[Method, ...]:
    """Ours, the recipe by preset and the recipe with splits, at quarters of the steps there are.

    A recipe that is tuned has the steps there is time for; a third of them goes into tuning.
    """
    ours, recipe = method_named("exhume", problem), {"haim2022": Haim2022}.get(name, Buzaglo2023)
    base = recipe() if run == TUNED else cast(Haim2022, published(name, run, problem))
    samples, brief = board.known.samples, min(PROBE, board.limit / 10)
    tried = reconstruct(problem, samples, board.seed, base, time_limit=brief)
    steps = max(1, round(tried.steps * board.limit / tried.seconds))
    if run != TUNED:
        return ours, base, Shen2026(base, max(10, steps // 4))
    tuning = sum(FACTOR**rung * size for rung, size in enumerate(rungs(recipe().trials)))
    base = recipe(steps=10**9, probe=max(10, steps // (3 * tuning)))
    return ours, base, Shen2026(base, max(10, steps // 6))


def _trained(known: Data, case: Case, training: str, seed: int, device: str) -> Victim:
    how: Any = {"device": device, "show": training_shown()}
    if case.decay is not None:
        how |= {"decay": case.decay, "loss": "squared"}
    if training == "rest" or case.decay is not None:
        training, how["steps"] = "rest", case.steps
    victim = victims.kkt_mlp(known, case.widths, training, seed, **how)
    record = victim.training
    flow = f", a flow time of {record['time']:.3g}" if training == "flow" else ""
    say(
        f"  seed {seed}: loss {record['loss']:.1e} after {record['steps']:,} steps{flow}, "
        f"{record['seconds']:.0f} s; {record['active']} of {known.samples} samples active"
    )
    for name, own in record["layers"].items():
        say(
            f"    {name}: {own['left']:.2f} of its start left, {own['start']:.0%} of what it is; "
            f"KKT residual at the truth {own['residual']:.1e}, of its change {own['change']:.1e}"
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

    def attack(self, box: str, target: str, method: Method, problem: Problem) -> None:
        """Attack and add a row; what splits candidates begins with fewer."""
        samples = self.known.samples
        if isinstance(method, Shen2026):
            samples = max(1, 3 * samples // 4)
        budget: Any = {"time_limit": self.limit, "observe": Watch(None, f"{method.name} ", 10.0)}
        found = reconstruct(problem, samples, self.seed, method, **budget)
        self.add(box, method.name, found.samples, found, target)

    def add(
        self,
        box: str,
        attack: str,
        candidates: Tensor,
        found: Reconstruction | None = None,
        target: str = "—",
    ) -> None:
        """Score candidates and add a row."""
        seen = recognised(candidates, self.known, self.held_out)
        row = {"seed": self.seed, "box": box, "attack": attack, "candidates": len(candidates)}
        row |= {"found": found, "recovered": score(candidates, self.known.inputs).recall}
        row |= {"target": target, "seen": seen, "best": float(seen.cosines.max())}
        self.rows.append(row)
        of = f"of {seen.samples} images over SSIM 0.4"
        other = seen.control and seen.control.ssim
        say(f"  {attack} ({box}, {target}): {seen.ssim} {of}, {other} held-out")
