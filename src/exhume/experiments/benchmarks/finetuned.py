"""These benches show what comes back of fine-tuned networks, and what is said if told wrong."""

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from exhume.auditing.suspects import suspects
from exhume.checks import one_of
from exhume.device import usable_device
from exhume.equation.problem import Problem
from exhume.evaluate import residual_at_truth, score, scoring
from exhume.experiments.benchmarks import bases
from exhume.experiments.benchmarks.bases import Base, Case, Tuned, tuned
from exhume.experiments.benchmarks.common import Watch, drawn, heading, say, show, tracked
from exhume.features.replay import Replayed, TrainingRun
from exhume.methods import reconstruct
from exhume.models.architectures import mlp
from exhume.recipes import Recipe
from exhume.solvers import Outcome
from exhume.wording import number

COLUMNS = (
    "case: {case} | method: {method} | wholly exact: {exact} of {seeds} | "
    "wholly recovered: {whole} of {seeds} | samples recovered: {recovered:.0%} | "
    "median error: {error:.1e} | residual: {residual:.1e} | lazy floor: {floor:.1e} | "
    "|ΔW₁|/|W₁|: {moved:.1e} | loss: {loss:.1e} | s: {seconds:.1f}"
)
SAID = (
    "told wrong: {case} | a claim: {claimed} of {seeds} | rightly suspected: {suspected} of {seeds}"
    " | residual, least: {least:.1e} | median: {residual:.1e} | median error: {error:.1e}"
)
ALONE = "-alone"  # what the name of a case ends with where the auditor has no public inputs
# Rates from 1e-3 to 0.2, tried in turn until samples are fitted: the least that does so is taken
RATES = tuple(1e-3 * 1.5**k for k in range(14))
METHODS = {
    "replay": "exhume, replay",
    "lazy": "exhume, lazy",
    "simudy2025": "simudy2025",
    "unmixed": "unmixed",
}
# Bases of digits with something left to learn, and of CIFAR-10 trained for as long as others gain.
# One that knows its own by heart is sure of half of the others, which then leave no trace.
HALFWAY: Base = 500, Recipe("adam", lr=3e-3, steps=30)
CIFAR10: Base = 2000, Recipe("adam", 1e-3, epochs=5, batch_size=100, shuffle=0, norms="train")
RECIPE = Recipe(lr=0.2, steps=20)

digits = partial(Case, partial(mlp, (8, 8), (40,), 10, "gelu", True))
fitted = partial(Case, recipe=Recipe(steps=20), standardised=True)  # at a rate that fits them
coloured = partial(fitted, samples=8, base=CIFAR10, source="cifar10", rates=RATES)
mnist = partial(fitted, samples=5, base=HALFWAY, rates=(5e-3, 1e-2, 2e-2, 5e-2))
adam = partial(digits, samples=3, standardised=True)
CASES = {
    "sgd20": digits(),
    "sgd100": digits(Recipe(lr=0.2, steps=100)),
    "momentum": digits(Recipe(lr=0.05, steps=20, momentum=0.9)),
    "decay": digits(Recipe(lr=0.2, steps=20, weight_decay=1e-4)),
    "batches": digits(Recipe(lr=0.2, steps=20, batch_size=2, shuffle=0)),
    "cnn": mnist(partial(bases.mnist_example, smooth=True)),
    "cnn-relu": mnist(bases.mnist_example),
    "adam": adam(Recipe("adam", lr=2e-3, steps=20)),
    "adamw": adam(Recipe("adamw", lr=2e-3, steps=20, weight_decay=1e-2)),
    "adam-slow": adam(Recipe("adam", lr=5e-4, steps=20)),
    "mlp": coloured(partial(mlp, (3, 32, 32), (256, 256), 10, "gelu", True)),
    "cnn-cifar": coloured(partial(bases.convolutions, 32, 3, 64, 128, 256)),
    "resnet18": coloured(bases.resnet18, recipe=Recipe(steps=50)),
    "vit": coloured(bases.transformer),
}


def finetuned(
    cases: tuple[str, ...] = ("sgd20", "sgd20-alone", "sgd100", "sgd100-alone"),
    seeds: int = 10,
    first_seed: int = 100,
    limit: float = 60.0,
    methods: tuple[str, ...] = ("replay", "lazy", "simudy2025"),
    samples: int | None = None,
    labels: bool = True,
    device: str = "auto",
    pictures: Path | None = None,
) -> None:
    """Recover what a pretrained network was fine-tuned on.

    All methods have the same time and know the number of samples. Training is in float32, attacks
    on digits are in float64, those on CIFAR-10 in float32.

    Args:
        cases: of digits sgd20, sgd100, momentum, decay, batches, cnn, cnn-relu, adam, adamw,
            adam-slow; of CIFAR-10, for a GPU, mlp, cnn-cifar, resnet18, vit. With -alone after the
            name the auditor has no public images.
        seeds: how many.
        first_seed: of data, model and attack.
        limit: seconds an attack.
        methods: of replay, lazy, simudy2025, and unmixed, which takes dense layers of images.
        samples: n, in the place of the case's own.
        labels: tell the labels to replay and simudy2025, in the order of the samples.
        device: where to run.
        pictures: a folder for one of each attack on images: private ones above what came back.
    """
    chosen = drawn(seeds, first_seed, [name.removesuffix(ALONE) for name in cases], CASES)
    for method in methods:
        one_of("method", method, METHODS)
    device = usable_device(device)
    heading(f"finetuned: seeds {chosen[0]} to {chosen[-1]}, {limit:g} s an attack", device)
    rows = []
    for name in cases:
        case = CASES[name.removesuffix(ALONE)]
        case = case if samples is None else replace(case, samples=samples)
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        for seed in tracked(chosen, name):
            victim = tuned(case, seed, device)
            # On a GPU convolutions in float64 take four times as long, and samples are as near
            precision = torch.float32 if case.source == "cifar10" else torch.float64
            lazy = victim.change().to(device, precision)
            replay = victim.replay(not name.endswith(ALONE), labels).to(device, precision)
            shared = {"floor": residual_at_truth(lazy, victim.truth), **victim.weights.record}
            rate, moved = shared["recipe"]["lr"], shared["laziness"]["first"]
            say(
                f"  {name} seed {seed}: rate {rate:g}, loss {shared['loss']:.0e}, W₁ moved "
                f"{moved:.0e}, floor {shared['floor']:.0e}"
            )
            if replay.target.is_cuda and seed == chosen[0]:
                say(f"  {name}: {products(replay, victim)}")
            for method in methods:
                problem = lazy if method in ("lazy", "unmixed") else replay
                picture = pictures and pictures / f"{name}-{seed}-{method}.png"
                run = attacked(problem, victim, method, seed, limit, picture)
                runs[method].append(shared | run)
        rows += [row(name, METHODS[method], runs[method]) for method in methods]
    show(COLUMNS, rows)


def attacked(
    problem: Problem,
    victim: Tuned,
    method: str,
    seed: int,
    limit: float,
    picture: Path | None = None,
) -> dict[str, Any]:
    """Attack for `limit` seconds at most, compare with the truth, and draw it."""
    named = METHODS[method].partition(",")[0]
    watch = Watch(None, f"{method} ", 10.0) if problem.target.is_cuda else None
    found = reconstruct(problem, victim.truth.samples, seed, named, time_limit=limit, observe=watch)
    samples = found.samples.nan_to_num(0.0, 0.0, 0.0)
    result = score(samples, victim.truth.inputs)
    errors = sorted(result.errors.tolist())
    said = " ".join(f"{error:.1e}" for error in errors)
    say(
        f"    {method}: {found.outcome.value}, residual {found.residual:.1e}, errors {said}, "
        f"{found.products} products, {found.seconds:.1f} s"
    )
    shares = {"recovered": result.recovered, "exact": result.exact}
    if picture is not None:  # private images above what came back of them
        from exhume.report.gallery import pairs_png  # matplotlib, where there is something to draw

        picture.parent.mkdir(parents=True, exist_ok=True)
        both = scoring.pictures(victim.truth, samples, result.matched, result.flipped)
        notes = [f"error {number(x)}" for x in result.errors.tolist()]
        pairs_png(*both, notes, picture, victim.truth.samples)
    return {"errors": errors, "residual": found.residual, "seconds": found.seconds, **shares}


def row(case: str, method: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a case and a method: counts of seeds, and medians over them."""
    return _medians(runs, "residual", "floor", "loss", "seconds") | {
        "case": case,
        "method": method,
        "seeds": len(runs),
        "exact": sum(run["exact"] == 1 for run in runs),
        "whole": sum(run["recovered"] == 1 for run in runs),
        "recovered": statistics.fmean(run["recovered"] for run in runs),
        "error": statistics.median(error for run in runs for error in run["errors"]),
        "moved": statistics.median(run["laziness"]["first"] for run in runs),
    }


def _medians(runs: list[dict[str, Any]], *words: str) -> dict[str, float]:
    return {word: statistics.median(run[word] for run in runs) for word in words}


def products(problem: Problem, victim: Tuned) -> str:
    """Time push and pull on a GPU as a graph and eagerly, and say whether they agree.

    Eager ones simulate the run anew, as those of long runs do.
    """
    run, x = cast(TrainingRun, problem.features), victim.truth.inputs.to(problem.target)
    labels = victim.truth.targets.to(x).reshape(-1, 1)
    taken: dict[str, tuple[float, torch.Tensor]] = {}
    graph, eager = run.linearize(x), Replayed(run, x)
    for kind, maps in (("graph", graph), ("eager", eager)):
        maps.combine(labels)
        eager.short = False
        maps.__dict__["jacobian"] = None  # products, not a Jacobian that is kept
        pull = partial(maps.pull, problem.target, labels)
        for what, product in (("push", partial(maps.push, x, labels)), ("pull", pull)):
            result = product()
            torch.cuda.synchronize()
            clock = time.perf_counter()
            for _ in range(3):
                product()
            torch.cuda.synchronize()
            taken[f"{kind} {what}"] = (time.perf_counter() - clock) / 3 * 1e3, result
    said = [f"{what} {seconds:.1f} ms" for what, (seconds, _) in taken.items()]
    for what in ("push", "pull"):
        (fast, one), (slow, two) = (taken[f"{kind} {what}"] for kind in ("graph", "eager"))
        off = float((one - two).norm() / two.norm())
        said.append(f"{what} {slow / fast:.0f} times faster, off by {off:.0e}")
    return ", ".join(said)


@dataclass(frozen=True)
class Wrong:
    """A case says how digits were fine-tuned, what the auditor is told, and what is to blame."""

    suspected: str  # how a sentence goes that names it: any of the parts between bars; "" for none
    made: Recipe = RECIPE
    told: Recipe = RECIPE
    samples: int = 4  # that are told; there are four
    other: bool = False  # whether the initial weights are those of another base model


WRONGS = {
    "nothing": Wrong(""),
    "a rate of 0.24 for 0.2": Wrong("rate is suspected", told=replace(RECIPE, lr=0.24)),
    "25 steps for 20": Wrong(
        "steps is suspected|or the number of steps", told=replace(RECIPE, steps=25)
    ),
    "SGD for Adam": Wrong("optimiser is suspected", Recipe("adam", lr=2e-3, steps=20)),
    "another base model": Wrong("base model is suspected", other=True),
    "3 samples for 4": Wrong("number of samples is suspected", samples=3),
}


def misinformed(seeds: int = 10, first_seed: int = 100, limit: int = 5000) -> None:
    """Attack fine-tuned networks with a wrong rate, steps, optimiser, base model, or number.

    A network of 64-40-10 units was pretrained on digits and fine-tuned on four others by 20 steps
    of SGD. The auditor has public digits, and labels but for the wrong number of samples.

    Args:
        seeds: how many, of data, network and attack alike.
        first_seed: where they begin.
        limit: products an attack.
    """
    chosen = drawn(seeds, first_seed)
    heading(f"misinformed: seeds {chosen[0]} to {chosen[-1]}, {limit} products an attack")
    each = {name: [_audited(name, seed, limit) for seed in tracked(chosen)] for name in WRONGS}
    show(SAID, [_row(name, runs) for name, runs in each.items()])


def _audited(name: str, seed: int, limit: int) -> dict[str, Any]:
    """Return what an audit says of one seed, and how far its candidates are from the samples."""
    wrong, case = WRONGS[name], replace(CASES["sgd20"], recipe=WRONGS[name].made)
    victim = tuned(case, seed)
    if wrong.other:
        base = tuned(case, seed + 1).weights.initial
        victim = replace(victim, weights=victim.weights._replace(initial=base))
    known = wrong.samples == victim.truth.samples
    problem = replace(victim, recipe=wrong.told).replay(labels=known).to("cpu", torch.float64)
    found = reconstruct(problem, wrong.samples, seed, product_limit=limit)
    said = " ".join(suspects(problem, found))
    say(f"  {name}, seed {seed}: residual {found.residual:.1e}. {said}")
    return {
        "claimed": found.outcome is Outcome.CONVERGED,
        "suspected": any(x in said for x in wrong.suspected.split("|") if x or not said),
        "residual": found.residual,
        "error": statistics.median(score(found.samples, victim.truth.inputs).errors.tolist()),
    }


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts over seeds, and medians."""
    counts = {word: sum(run[word] for run in runs) for word in ("claimed", "suspected")}
    said = {"case": name, "seeds": len(runs), "least": min(run["residual"] for run in runs)}
    return {**said, **counts, **_medians(runs, "residual", "error")}
