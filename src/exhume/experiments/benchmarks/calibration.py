"""This bench learns how likely a candidate is a training sample, and tests it on other problems.

Problems of our own, whose truth is known: random features, two trained layers, fine-tuned networks,
weights alone; ratios from 0.3 to 10; the right number of samples and too few; and controls that
hold no sample to be found. How far candidates may be off is sketched for every other problem, as it
is for images. What is learnt is calibration.json of `exhume.auditing.judgement`.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import exhume
from exhume import data, victims
from exhume.auditing.judgement import CALIBRATION, SIGNS, SURE, signs, weighed
from exhume.data import Data
from exhume.equation.problem import Premise, Problem
from exhume.evaluate import RECOVERED
from exhume.evaluate.metrics import distances
from exhume.experiments.benchmarks.bases import loaded, tuned
from exhume.experiments.benchmarks.common import drawn, heading, say, show, tracked
from exhume.experiments.benchmarks.finetuned import CASES
from exhume.experiments.cells.attack import Attack
from exhume.files import write_json
from exhume.methods import reconstruct
from exhume.report import plots
from exhume.theory.support import DENSE, support

RATIOS = (0.3, 0.6, 1.0, 1.3, 1.8, 3.0, 10.0)  # p·m/(d·n), on both sides of the counting limit
BINS = (0.0, 0.05, 0.2, 0.5, 0.8, SURE, 1.0)  # of probabilities, for the table
REPLAYED = 3  # times the budget, for a simulated run: it takes that many
RIDGE = 1e-3  # on standardised weights, for a candidate: signs that never disagree would have ∞
COLUMNS = (
    "probability: {low:.2f} to {high:.2f} | candidates: {count} | mean probability: {said:.3f} | "
    "are samples: {true:.3f}"
)
VERDICTS = "problem: {name} | runs: {runs} | verdicts: {verdicts} | wrongly sure of: {wrong}"


@dataclass(frozen=True, eq=False)
class Posed:
    """A problem is posed here, with the truth beside it."""

    name: str  # of its kind
    problem: Problem
    truth: Tensor  # (n, d); what a control would have to find
    told: int | None  # how many samples the attack is told of
    seed: int


def calibration(
    seeds: int = 8,
    first_seed: int = 200,
    products: int = 1500,
    out: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Learn the probability that a candidate is a training sample; test it on other seeds.

    The first half of the seeds is learnt from, the second half tests what was learnt. That takes
    some minutes on one thread.

    Args:
        seeds: how many, of data, models and attacks alike; two or more.
        first_seed: where they begin.
        products: the budget of an attack.
        out: a file for what was learnt, such as calibration.json; that of the package has been
            made so.
        figure: an SVG file for the reliability diagram.
    """
    chosen = drawn(max(2, seeds), first_seed)
    heading(f"calibration: seeds {chosen[0]} to {chosen[-1]}, {products} products an attack")
    runs = [
        _attacked(posed, products, DENSE if (seed + i) % 2 else 0)
        for seed in tracked(chosen, "attacks")
        for i, posed in enumerate(problems(seed))
    ]
    half = chosen[len(chosen) // 2]
    learnt = [run for run in runs if run["seed"] < half]
    tested = [run for run in runs if run["seed"] >= half]
    model = fitted(_joined(learnt, "signs"), _joined(learnt, "true"))
    measured = _measured(tested, model, half)
    record = {
        "made by": f"exhume bench calibration --seeds {len(chosen)} --first-seed {first_seed} "
        f"--products {products}",
        "exhume": exhume.__version__,
        "learnt from": {"seeds": [chosen[0], half - 1], **_sizes(learnt)},
        "tested on": {"seeds": [half, chosen[-1]], **_sizes(tested), **measured},
        **model,
    }
    say(json.dumps({"intercept": model["intercept"], "weights": model["weights"]}))
    if out is not None:
        write_json(out, record)
        say(f"written: {out}; the package reads exhume/auditing/{CALIBRATION}")
    if figure is not None:
        curve = {row["said"]: row["true"] for row in measured["reliability"]}
        curves = {"measured": curve, "perfect": {0.0: 0.0, 1.0: 1.0}}
        panel = plots.lines("Reliability", curves, "probability", "share of samples", scales="")
        figure.write_text(plots.svg(plots.sheet(panel)), encoding="utf-8")


def _measured(
    tested: list[dict[str, Any]], model: dict[str, Any], half: int
) -> dict[str, list[dict[str, float]]]:
    """Judge runs by a model; show and return how often it is right."""
    for run in tested:
        judged = run["judged"](model)
        run |= {"said": judged.probabilities, "verdict": judged.verdict}
    sketched = [run for run in tested if run["sketched"]]
    tables = {
        "reliability": (tested, f"on the seeds from {half} on, which nothing was learnt from"),
        "sketched": (sketched, "of these, where errors were sketched"),
    }
    rows = {}
    for name, (runs, title) in tables.items():
        rows[name] = reliability(_joined(runs, "said"), _joined(runs, "true"))
        show(COLUMNS, rows[name], title)
    _show_verdicts(tested)
    return rows


def problems(seed: int) -> Iterator[Posed]:
    """Pose every problem of a seed."""
    activation = ("relu", "tanh", "gelu")[seed % 3]
    cell = partial(Attack, samples=4, seed=seed, activation=activation)
    sphere = partial(cell, dim=12)
    for ratio in RATIOS:
        yield _cell("random features", sphere(ratio=ratio))
    for ratio in RATIOS[::2]:
        yield _cell("digits, ten outputs", cell(data="digits", size=4, classes="all", ratio=ratio))
        yield _cell("faces", cell(data="faces", size=5, ratio=ratio))
        yield _table(seed, ratio, activation)
    for ratio in RATIOS[1::2]:
        network = sphere(architecture="two_layer", ratio=ratio, activation="gelu", dtype="float32")
        yield _cell("two layers", replace(network, ratio=2 * ratio))
        yield _cell("two layers, lazy", replace(network, lazy=100.0))
        few = sphere(samples=6, ratio=ratio, told=3)
        yield replace(_cell("too few asked for", few), told=3)
        moved = replace(few, architecture="two_layer", activation="gelu", ratio=2 * ratio)
        yield replace(_cell("too few asked for, two layers", moved), told=3)
    for ratio in RATIOS[2::2]:
        for name, control in CONTROLS.items():
            yield control(f"control: {name}", _cell("", sphere(ratio=ratio)), seed)
    for ratio in RATIOS[3:]:  # more unknowns than the matrix is made for
        yield _cell("whole digits", cell(data="digits", samples=9, ratio=ratio))
    yield from _others(seed)


def _cell(name: str, cell: Attack) -> Posed:
    known = cell.known()
    width = max(cell.width(known), cell.samples + 1)
    victim = cell.victim(known, width, "cpu")
    problem = victim.posed(cell.block).to("cpu")
    return Posed(name, problem, known.inputs, cell.told or cell.samples, cell.seed)


def _table(seed: int, ratio: float, activation: str) -> Posed:
    """Rows of a table of patients, each with norm √d."""
    rows = loaded("table", 0, False)
    order = torch.randperm(rows.samples, generator=torch.Generator().manual_seed(seed))[:4]
    inputs, targets = rows.inputs[order], rows.targets[order].argmax(1, keepdim=True) * 2.0 - 1
    known: Data = data.from_arrays(inputs.numpy(), targets.numpy(), normalise=True, name="table")
    width = max(round(ratio * known.dim * 4), 5)
    victim = victims.random_features(known, width, activation, seed)
    return Posed("table", victim.problem, known.inputs, 4, seed)


def _permuted(name: str, posed: Posed, seed: int) -> Posed:
    """The same weights in another order: no samples explain them."""
    order = torch.randperm(len(posed.problem.target), generator=torch.Generator().manual_seed(seed))
    return replace(
        posed, name=name, problem=replace(posed.problem, target=posed.problem.target[order])
    )


def _elsewhere(name: str, posed: Posed, seed: int) -> Posed:
    """The weights of a model that began elsewhere: features of another seed."""
    width, dim = posed.problem.features.width, posed.problem.dim
    other = victims.random_features(data.sphere(dim, 4, seed + 500), width, "relu", seed + 500)
    return replace(posed, name=name, problem=replace(posed.problem, target=other.problem.target))


def _noise(name: str, posed: Posed, seed: int) -> Posed:
    """An untrained head of three outputs."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(posed.problem.features.width, 3, generator=generator)
    return replace(posed, name=name, problem=replace(posed.problem, target=target))


CONTROLS: dict[str, Callable[[str, Posed, int], Posed]] = {
    "target permuted": _permuted,
    "other initial weights": _elsewhere,
    "untrained head": _noise,
}


def _others(seed: int) -> Iterator[Posed]:
    """A fine-tuned network, lazily and for some seeds by replay, and weights alone."""
    victim = tuned(CASES["sgd20"], seed)
    truth, count = victim.truth.inputs, victim.truth.samples
    yield Posed("fine-tuned", victim.change().to("cpu"), truth, count, seed)
    if seed % 3 == 1:  # as dear as all others together
        yield Posed("replay", victim.replay().to("cpu", torch.float64), truth, count, seed)
    alone = victims.polynomial(victims.labellings(data.sphere(9, 4, seed), 3)[0], 16, 3)
    for premise in ("margin", "change"):
        problem = alone.posed("all", "final", premise).to("cpu")
        yield Posed(f"weights alone, as {premise}", problem, alone.truth.inputs, 4, seed)


def _attacked(posed: Posed, products: int, dense: int) -> dict[str, Any]:
    """Attack a problem; return what may be said of it without the truth, and then the truth."""
    budget = REPLAYED * products if posed.problem.premise is Premise.REPLAY else products
    found = reconstruct(posed.problem, posed.told, posed.seed, product_limit=budget)
    rests = support(posed.problem, found, dense)
    near = distances(posed.truth, found.samples) / posed.truth.norm(dim=1, keepdim=True)
    true = near.amin(0) < RECOVERED
    return {
        **{"name": posed.name, "seed": posed.seed, "sketched": rests.unknowns > dense},
        "signs": signs(posed.problem, found, rests),
        "judged": partial(weighed, posed.problem, found, rests),  # by a model yet to be learnt
        "true": true & (not posed.name.startswith("control")),
    }


def fitted(rows: Tensor, true: Tensor) -> dict[str, Any]:
    """Learn intercept and weights by logistic regression with a ridge, on standardised signs.

    Each weight is held to the side on which its sign speaks for a sample: small error and residual,
    a large weight and ratio. What is left of the others is for the intercept.
    """
    x, y = rows.double(), true.double()
    mean, spread = x.mean(0), x.std(0).clamp_min(1e-3)
    side = torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    scaled = (x - mean) / spread
    free = torch.zeros(len(SIGNS) + 1, dtype=torch.float64, requires_grad=True)

    def weights() -> Tensor:
        held = side * torch.nn.functional.softplus(free[1:])
        return torch.where(side == 0, free[1:], held)

    optimiser = torch.optim.LBFGS([free], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        logits = scaled @ weights() + free[0]
        fit = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
        total: Tensor = fit + RIDGE * weights().square().sum() / 2
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        own = weights() / spread
        intercept = float(free[0] - (own * mean).sum())
    return {"intercept": intercept, "weights": dict(zip(SIGNS, own.tolist(), strict=True))}


def reliability(said: Tensor, true: Tensor) -> list[dict[str, float]]:
    """Return, by ranges of the probability, how many candidates there are and are samples."""
    rows = []
    for low, high in itertools.pairwise(BINS):
        inside = (said >= low) & ((said < high) | (high == 1))
        if count := int(inside.sum()):
            means = {
                "said": float(said[inside].mean()),
                "true": float(true[inside].double().mean()),
            }
            rows.append({"low": low, "high": high, "count": count, **means})
    return rows


def _joined(runs: list[dict[str, Any]], word: str) -> Tensor:
    return torch.cat([run[word] for run in runs])


def _sizes(runs: list[dict[str, Any]]) -> dict[str, int]:
    true = _joined(runs, "true")
    return {"runs": len(runs), "candidates": len(true), "samples": int(true.sum())}


def _show_verdicts(runs: list[dict[str, Any]]) -> None:
    rows = []
    for name in dict.fromkeys(run["name"] for run in runs):
        own = [run for run in runs if run["name"] == name]
        verdicts = Counter(run["verdict"] for run in own)
        wrong = sum(int(((run["said"] >= SURE) & ~run["true"]).sum()) for run in own)
        said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        rows.append({"name": name, "runs": len(own), "verdicts": said, "wrong": wrong})
    show(VERDICTS, rows)
