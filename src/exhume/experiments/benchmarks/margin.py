"""Networks trained to the margin: what the published recipes and ours find, in the same time."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any, cast, get_args

import torch
from torch import Tensor

from exhume import data
from exhume.auditing.evidence import LEVEL
from exhume.checks import one_of, whole_number
from exhume.data import Data
from exhume.device import usable_device
from exhume.equation.domain import Box
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import recognised, score
from exhume.experiments.benchmarks.common import Watch, drawn, heading, say, show, training_shown
from exhume.experiments.cells.margin import CASES, Case
from exhume.methods import Reconstruction, method_named, presets, reconstruct
from exhume.methods import preset as published
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.progress import Method, Progress
from exhume.methods.published import STEPS
from exhume.methods.shen2026 import Choice, Shen2026
from exhume.report.gallery import pairs_png
from exhume.solvers import Outcome
from exhume.victims import Victim

COLUMNS = (
    "seed: {seed} | box: {box} | target: {target} | attack: {attack} | "
    "found in (s): {found.seconds:.0f} | "
    "candidates: {candidates} | steps: {found.steps:d} | residual: {found.residual:.1e} | "
    "SSIM > 0.4: {seen.ssim} ({seen.control.ssim}) | "
    "cos > 0.8: {seen.cosine80} ({seen.control.cosine80}) | "
    "cos > 0.9: {seen.cosine90} ({seen.control.cosine90}) | "
    "mean cos: {mean:.3f} | best cos: {best:.2f} | recovered: {recovered:.1%}"
)
TOTALS = (
    "box: {box} | target: {target} | attack: {attack} | candidates: {candidates} | "
    "SSIM > 0.4: {ssim} | cos > 0.8: {cosine80} | cos > 0.9: {cosine90} | mean cos: {mean:.3f}"
)
PROBE = 3.0  # most seconds for finding out how long a step of a recipe takes

TARGETS = {"weights": "θ", "change": "θ − θ₀"}
TUNED = "tuned"  # in the place of a preset
ATTACKS = ("exhume", "recipe", "runs", "presets", TUNED, "splitting")
RUNS = 10  # of a recipe side by side
SHOWN = 12  # pairs in a picture


def kkt(
    cases: tuple[str, ...] = ("faces",),
    seeds: int = 1,
    first_seed: int = 0,
    limit: float = 60.0,
    training: str = "flow",
    preset: str | None = None,
    targets: tuple[str, ...] = ("weights", "change"),
    boxes: tuple[str, ...] = ("wide",),
    attacks: tuple[str, ...] = ("exhume", "recipe", "splitting"),
    every: int | None = None,
    device: str = "auto",
    pictures: Path | None = None,
) -> None:
    """Reconstruct samples from the weights of networks on their way to the margin, or there.

    Every attack has the same time and begins with the same number of candidates, two for each
    sample; shen2026, which splits some, with fewer, and beside it the recipe with as many as it
    ended with (count of …). Behind each count of recognisable images stands the same of as many
    held-out images, in brackets.

    Args:
        cases: faces (labels by chance, 625-200-200-1, n = 24); digits (odd/even, n = 20); mnist
            and mnist_500 (odd/even, 784-1000-1000-1, n = 100 and 500); cifar10 and cifar10_500
            (vehicles/animals, 3072-1000-1000-1, the same); classes (ten of cifar10, n = 500);
            decay (cifar10 at rest under weight decay); and digits_ten (64-200-200-10, n = 40)
            and faces_decay, which are small.
        seeds: how many.
        first_seed: of data, model and attack.
        limit: seconds an attack, without a GPU those of the processor.
        training: flow, gradient flow as published, or rest, until the weights' direction stays.
        preset: the published settings of the recipe, such as b9, or tuned, to choose among them
            without the truth; each case has its own if left out.
        targets: what is explained: weights, the trained ones alone, and change, where the initial
            ones are known.
        boxes: what the attacker is told of the inputs: wide, the box [−1, 1], or pixels, the range
            of every pixel after the mean image was taken off.
        attacks: exhume, ours; recipe, the published one with that preset; runs, ten starts of it
            side by side, of which as many candidates as one has are shown, those they agree on;
            presets, with each of its own; tuned, with none; splitting, shen2026 by the published
            rule and by the adaptive one at quarters of the steps there is time for, each beside its
            count of candidates.
        every: steps between splits, 50,000 as published; then by the published rule alone, and up
            to the published 200,000 steps.
        device: where to run.
        pictures: a folder for one of each attack: the best images above what came back of them.
    """
    chosen = drawn(seeds, first_seed, cases, CASES)
    known: dict[str, Any] = {"box": ("wide", "pixels"), "target": TARGETS, "attack": ATTACKS}
    for word, given in zip(known, (boxes, targets, attacks), strict=True):
        for name in given:
            one_of(word, name, known[word])
    if every is not None:
        whole_number("every", every)
    one_of("training", training, ("flow", "rest"))
    device = usable_device(device)
    heading("kkt", device)
    for name in cases:
        rows, case = [], CASES[name]
        one_of("preset", preset or case.preset, (TUNED, *presets(case.recipe)))
        for seed in chosen:
            victim = _trained(case, training, seed, device)
            folder = pictures and pictures / f"{name}-{seed}"
            held_out = data.held_out(victim.truth, seed=seed)
            board = Board(victim.truth, held_out, seed, limit, folder)
            _baselines(board, victim)
            # decay wears initial weights off, so that knowing them is of no use
            for box, target in product(boxes, targets if case.decay is None else ("weights",)):
                problem = _posed(victim, target, box).to(device)
                seen = Seen(problem, board, box, TARGETS[target])
                for attack in attacks:
                    seen.attack(attack, case.recipe, preset or case.preset, every)
            rows += board.rows
        show(COLUMNS, rows, title=name)
        if seeds > 1:
            show(TOTALS, _totals(rows), title=f"{name}, all seeds")
            _say_closer(rows)
    say(f"in brackets: held-out images. {LEVEL}")


def _posed(victim: Victim, target: str, box: str) -> Problem:
    """Pose what the attacker sees: the weights or their change, and a box of the inputs."""
    posed = victim.posed(premise=victim.problem.premise, target=target)
    mean = cast(Tensor, victim.truth.transform.mean)  # taken off pixels from 0 to 1
    return posed if box == "wide" else replace(posed, domain=Box(-mean, 1 - mean))


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


@dataclass(frozen=True, eq=False)
class Seen:
    """What an attacker sees of a network, and the board where his attacks are noted."""

    problem: Problem
    board: "Board"
    box: str
    target: str

    def attack(self, attack: str, name: str, run: str, every: int | None) -> None:
        """Make an attack of that kind with the recipe of that name, by preset or tuned."""
        if attack == "exhume":
            self.go(attack, method_named(attack, self.problem))
            return
        own: dict[str, Haim2022] = {TUNED: {"haim2022": Haim2022}.get(name, Buzaglo2023)()}
        for preset in presets(name):
            with suppress(InputError):  # one for other weights
                own[preset] = cast(Haim2022, published(name, preset, self.problem))
        one_of("preset", run, own)
        if attack == "presets":
            for preset, method in [*own.items()][1:]:
                self.go(f"{name}, {preset}", method)
        elif attack == "runs":
            many = replace(own[run], starts=RUNS, agreed=True)
            self.say_pace(own[run], many)
            self.go(f"{name}, {run}, {RUNS} runs", many)
        elif attack != "splitting":
            chosen = run if attack == "recipe" else attack
            self.go(f"{name}, {chosen}", own[chosen])
        elif every is not None:
            self.split(replace(own[run], steps=STEPS), every, ("published",))
        else:
            tried, seconds = self.timed(own[run], self.board.brief)
            steps = max(1, round(tried.steps * self.board.limit / seconds))
            self.split(own[run], max(10, steps // 4), get_args(Choice))

    def split(self, base: Haim2022, every: int, rules: Sequence[Choice]) -> None:
        """Attack with splits by each rule, and with as many candidates from the start."""
        samples = self.board.known.samples
        for rule in rules:
            split = Shen2026(base, every, rule=rule)
            count = len(self.go(f"shen2026, {rule}", split, _fewer(samples)).samples)
            self.go(f"count of {rule}", replace(base, surplus=count / samples))

    def say_pace(self, one: Haim2022, many: Haim2022) -> None:
        """Say how long a step takes alone and with others beside it, once steps are recorded."""
        words = []
        for method in (one, many):
            for _ in range(2):
                tried, seconds = self.timed(method, self.board.brief)
            each = 1000 * seconds * method.starts / max(1, tried.steps)
            words.append(f"{each:.2f} ms for {method.starts}")
        say(f"  a step of runs side by side takes {', '.join(words)}")

    def go(self, name: str, method: Method, samples: int | None = None) -> Reconstruction:
        """Attack for so many samples, all if left out, and add a row of that name."""
        watch = Watch(None, f"{name} ", 10.0)
        found, seconds = self.timed(method, self.board.limit, samples, watch)
        timed = replace(found, seconds=seconds)
        self.board.add(self.box, name, found.samples, timed, self.target)
        return found

    def timed(
        self, method: Method, limit: float, samples: int | None = None, watch: Watch | None = None
    ) -> tuple[Reconstruction, float]:
        """Attack for so many seconds, and say how many it took: of the processor, if that does it.

        They do not depend on what else a machine is busy with.
        """
        asked = self.problem, samples or self.board.known.samples, self.board.seed
        if self.problem.target.device.type != "cpu":
            found = reconstruct(*asked, method, time_limit=limit, observe=watch)
            return found, found.seconds
        start = process_time()
        until = Until(method, start + limit)
        found = reconstruct(*asked, cast(Method, until), observe=watch)
        return found, process_time() - start


@dataclass(frozen=True)
class Until:
    """A method that ends when the processor's clock says so."""

    method: Method
    end: float

    def __getattr__(self, name: str) -> Any:
        """Be the method in all else."""
        return getattr(self.method, name)

    def advance(self, problem: Problem, progress: Progress) -> Progress:
        """Make the method's next move, which is the last once time is up."""
        moved = self.method.advance(problem, progress)
        late = moved.outcome is None and process_time() >= self.end
        return replace(moved, outcome=Outcome.BUDGET) if late else moved


def _fewer(samples: int) -> int:
    """For how many samples splitting begins, so that it ends with about as many candidates."""
    return max(1, 3 * samples // 4)


def _totals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Counts of each attack added up over seeds, the others' in brackets, and means."""
    same: dict[tuple[str, ...], list[Any]] = {}
    for row in rows:
        same.setdefault((row["box"], row["target"], row["attack"]), []).append(row)
    totals = []
    for key, own in same.items():
        total: dict[str, Any] = dict(zip(("box", "target", "attack"), key, strict=True))
        for word in ("ssim", "cosine80", "cosine90"):
            seen = sum(getattr(row["seen"], word) for row in own)
            others = sum(getattr(row["seen"].control, word) for row in own)
            total[word] = f"{seen} ({others})"
        total["mean"] = fmean(row["mean"] for row in own)
        total["candidates"] = ", ".join(str(row["candidates"]) for row in own)
        totals.append(total)
    return totals


def _say_closer(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say how often splits end closer, by mean cosine, than as many candidates from the start."""
    for rule in get_args(Choice):
        splits, counts = (
            [row for row in rows if row["attack"] == f"{word} {rule}"]
            for word in ("shen2026,", "count of")
        )
        pairs = [(a, b) for a, b in zip(splits, counts, strict=True) if a["split"]]
        closer = sum(one["mean"] > other["mean"] for one, other in pairs)
        if splits:
            words = f"{len(pairs)} of {len(splits)} runs split, {closer} of them end"
            say(f"{rule} rule: {words} closer than as many candidates from the start")


def _trained(case: Case, training: str, seed: int, device: str) -> Victim:
    victim = case.trained(training, seed, device=device, show=training_shown())
    known = victim.truth
    record = victim.training
    flow = f", a flow time of {record['time']:.3g}" if "time" in record else ""
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
    pictures: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def brief(self) -> float:
        """Seconds for finding out how long a step takes."""
        return min(PROBE, self.limit / 10)

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
        row |= {"mean": float(seen.cosines.mean())}
        # what splits began with three candidates for two samples
        row["split"] = len(candidates) > 2 * _fewer(self.known.samples)
        self.rows.append(row)
        of = f"of {seen.samples} images over SSIM 0.4"
        other = seen.control and seen.control.ssim
        say(f"  {attack} ({box}, {target}): {seen.ssim} {of}, {other} held-out")
        if found is not None and self.pictures is not None:
            self.pictures.mkdir(parents=True, exist_ok=True)
            best = seen.cosines.argsort(descending=True)
            notes = [f"cosine {seen.cosines[row]:.2f}" for row in best]
            word = next(word for word, sign in TARGETS.items() if sign == target)
            out = self.pictures / f"{attack.replace(', ', '-')}-{box}-{word}.png"
            pairs_png(seen.originals[best], seen.pictures[best], notes, out, limit=SHOWN)
