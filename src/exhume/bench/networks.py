"""Trained networks: what their last layers, or all their parameters, give back."""

from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from exhume import data, victims
from exhume.bench.common import Watch, check_count, console, heading, training_shown
from exhume.data import Data
from exhume.device import usable_device
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import residual_at_truth, score
from exhume.methods import reconstruct
from exhume.victims import Victim

COLUMNS = (
    "case", "seed", "n", "ratio", "training", "|ΔW₁|/|W₁|", "attack", "attack (s)", "outcome",
    "recovered", "exact", "error", "residual", "floor",
)  # fmt: skip


def networks(
    cases: tuple[str, ...] = ("digits",),
    seeds: int = 5,
    first_seed: int = 0,
    limit: float = 60.0,
    device: str = "auto",
) -> None:
    """Recovery from trained networks.

    Args:
        cases: digits (two layers, widths 4dn, dn and dn/2, full space and subspace), losses
            (logistic and cross-entropy at several ratios), blocks (all parameters against the
            last layer), cifar10 (two layers, 10 classes, n = 100), resnet, vit (n = 10).
        seeds: how many, for the cases that are small.
        first_seed: of model and attack.
        limit: most seconds an attack.
        device: where to run.
    """
    check_count("seeds", seeds)
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        raise InputError(f"case {unknown[0]!r}: expected some of {', '.join(CASES)}.")
    device = usable_device(device)
    heading("networks", device)
    for case in cases:
        table = Table(*COLUMNS)
        bench = _Bench(table, limit, device)
        small = case in ("digits", "losses", "blocks")
        for seed in range(first_seed, first_seed + (seeds if small else 1)):
            CASES[case](bench, seed)
        console.print(table)


class _Bench:
    """One table of attacks."""

    def __init__(self, table: Table, limit: float, device: str) -> None:
        self.table, self.limit, self.device = table, limit, device

    def train(self, make: Callable[..., Victim], known: Data, seed: int, **options: Any) -> Victim:
        """A victim, with a word on its training."""
        return make(known, seed=seed, device=self.device, show=training_shown(), **options)

    def attack(
        self, case: str, seed: int, victim: Victim, problem: Problem, method: str, note: str = ""
    ) -> None:
        """Attack, score, add a row."""
        known, training = victim.truth, victim.training
        problem = problem.to(self.device)
        watch = Watch(known.inputs) if self.device != "cpu" else None
        found = reconstruct(
            problem, known.samples, seed, method, time_limit=self.limit, observe=watch
        )
        seconds = found.seconds - (watch.spent if watch else 0.0)
        result = score(found.samples, known.inputs)
        equations = problem.target.numel() / ((found.rank or problem.dim) * known.samples)
        self.table.add_row(
            case,
            f"{seed}",
            f"{known.samples}",
            f"{equations:.2f}",
            f"{training['loss']:.0e}, {training['steps']} steps, {training['seconds']:.0f} s",
            f"{training['laziness']['first']:.1e}",
            note or method,
            f"{seconds:.1f}",
            found.outcome.value,
            f"{result.recovered:.0%}",
            f"{result.exact:.0%}",
            f"{result.error:.1e}",
            f"{found.residual:.1e}",
            f"{residual_at_truth(problem, known):.1e}",
        )
        console.print(
            f"  {case} seed {seed} {note or method}: recovered {result.recovered:.0%} in "
            f"{seconds:.1f} s"
        )


def _digits(bench: _Bench, seed: int) -> None:
    known = data.load("digits", 20, seed, classes="parity")
    for factor in (4.0, 1.0, 0.5):
        width = round(factor * known.dim * known.samples)
        victim = bench.train(victims.two_layer, known, seed, width=width, until=1e-8)
        for method in ("exhume", "tansley2026"):
            bench.attack(f"width {factor:g}dn", seed, victim, victim.problem, method)


def _losses(bench: _Bench, seed: int) -> None:
    known = data.load("digits", 20, seed)
    for loss, until in (("logistic", 1e-2), ("cross_entropy", 1e-2)):
        for ratio in (2.0, 5.0, 20.0):
            width = round(ratio * known.dim * known.samples / known.outputs)
            victim = bench.train(
                victims.two_layer, known, seed, width=width, loss=loss, until=until
            )
            for method in ("exhume", "tansley2026"):
                bench.attack(f"{loss}, p_L = {ratio:g}dn", seed, victim, victim.problem, method)


def _blocks(bench: _Bench, seed: int) -> None:
    known = data.sphere(20, 5, seed)
    victim = bench.train(
        victims.two_layer, known, seed, width=60, activation="gelu", lazy=100.0, until=1e-8
    )
    for parameters in ("last", "all"):
        problem = victim.posed(parameters)
        bench.attack("width 60, gelu", seed, victim, problem, "exhume", f"{parameters} parameters")


def _cifar10(bench: _Bench, seed: int) -> None:
    known = data.load("cifar10", 100, seed, classes="all")
    width = 4 * known.dim * known.samples // known.outputs
    victim = bench.train(
        victims.two_layer, known, seed, width=width, until=1e-7, dtype=torch.float32
    )
    for method in ("exhume", "tansley2026"):
        bench.attack("two-layer, p_L = 4dn", seed, victim, victim.problem, method)


def _resnet(bench: _Bench, seed: int) -> None:
    known = data.load("cifar10", 10, seed)
    width = -(-10 * known.dim * known.samples // (49 * known.outputs))
    victim = bench.train(victims.resnet, known, seed, width=width, until=1e-7, dtype=torch.float32)
    bench.attack(f"residual, {width} channels", seed, victim, victim.problem, "exhume")


def _vit(bench: _Bench, seed: int) -> None:
    known = data.load("cifar10", 10, seed)
    victim = bench.train(
        victims.vit, known, seed, dim=256, depth=2, heads=4, until=1e-6, dtype=torch.float32
    )
    for parameters in ("last", "all"):
        problem = victim.posed(parameters)
        bench.attack("vision transformer", seed, victim, problem, "exhume", parameters)


CASES: dict[str, Callable[[_Bench, int], None]] = {
    "digits": _digits,
    "losses": _losses,
    "blocks": _blocks,
    "cifar10": _cifar10,
    "resnet": _resnet,
    "vit": _vit,
}
