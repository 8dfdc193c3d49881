"""This bench learns how likely a candidate is a training sample, and tests it on other problems.

Problems of our own, whose truth is known: random features, two trained layers, fine-tuned networks,
weights alone; ratios from 0.3 to 10; the right number of samples and too few; and controls that
hold no sample to be found. Each is attacked from another start, too, where an audit does so. How
far candidates may be off is sketched for every other problem, as it is for images. What is learnt
is calibration.json of `exhume.auditing.judgement`.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

import exhume
from exhume import data, victims
from exhume.auditing.judgement import (
    CALIBRATION,
    SIGNS,
    SURE,
    judge,
    probabilities,
    signs,
)
from exhume.equation.problem import Premise
from exhume.experiments.benchmarks.bases import tuned
from exhume.experiments.benchmarks.common import drawn, heading, say, show, tracked
from exhume.experiments.benchmarks.finetuned import CASES
from exhume.experiments.benchmarks.posing import (
    NOTHING,
    Posed,
    activation,
    by_kind,
    once_more,
    posed,
    summed,
    table,
)
from exhume.experiments.cells.attack import Attack
from exhume.files import write_json
from exhume.methods import reconstruct
from exhume.report import plots
from exhume.theory.support import DENSE, support

RATIOS = (0.3, 0.6, 1.0, 1.3, 1.8, 3.0, 10.0)  # p·m/(d·n), on both sides of the counting limit
BINS = (0.0, 0.05, 0.2, 0.5, 0.8, SURE, 1.0)  # of probabilities, for the table
REPLAYED = 3  # times the budget, for a simulated run: it takes that many
RIDGE = 1e-3  # on standardised weights, for a candidate: signs that never disagree would have ∞
MORE = 2  # signs, the last ones, that are not always known
MOST = 10.0  # weight of such a sign: those that never disagree would have ∞
COLUMNS = (
    "probability: {low:.2f} to {high:.2f} | candidates: {count} | mean probability: {said:.3f} | "
    "are samples: {true:.3f}"
)
WITHOUT = "without: {without} | log-likelihood: {log_likelihood:.1f} | over 0.95: {sure} | "
WITHOUT += "of these no samples: {wrong}"
VERDICTS = "problem: {name} | runs: {runs} | verdicts: {verdicts} | wrongly sure of: {wrong}"


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
        _attacked(each, products, DENSE if (seed + i) % 2 else 0)
        for seed in tracked(chosen, "attacks")
        for i, each in enumerate(problems(seed))
    ]
    half = chosen[len(chosen) // 2]
    learnt = [run for run in runs if run["seed"] < half]
    tested = [run for run in runs if run["seed"] >= half]
    rows, true = _joined(learnt, "signs"), _joined(learnt, "true")
    model = with_more(fitted(rows[:, :-MORE], true), rows, true)
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
) -> dict[str, list[dict[str, Any]]]:
    """Judge runs by a model; show and return how often it is right."""
    for run in tested:
        judged = run["judged"](model=model)
        run |= {"said": judged.probabilities, "verdict": judged.verdict}
    sketched = [run for run in tested if run["sketched"]]
    tables = {
        "reliability": (tested, f"on the seeds from {half} on, which nothing was learnt from"),
        "sketched": (sketched, "of these, where errors were sketched"),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, (runs, title) in tables.items():
        rows[name] = reliability(_joined(runs, "said"), _joined(runs, "true"))
        show(COLUMNS, rows[name], title)
    known, true = _joined(tested, "signs"), _joined(tested, "true")
    rows["signs"] = []
    for without in (SIGNS[-MORE:], *((name,) for name in SIGNS[-MORE:]), ()):
        left = known.index_fill(1, torch.tensor([SIGNS.index(x) for x in without]).long(), 0.0)
        said = _likelihood(probabilities(left, model), true)
        rows["signs"].append({"without": ", ".join(without) or "none", **said})
    show(WITHOUT, rows["signs"], "what signs are worth that are not always known")
    show(VERDICTS, [summed(name, runs) for name, runs in by_kind(tested).items()])
    return rows


def _likelihood(said: Tensor, true: Tensor) -> dict[str, float]:
    """Return the log-likelihood, how many candidates are over 0.95, and how many of them wrong."""
    sure, left = said >= SURE, binary_cross_entropy(said, true.double(), reduction="sum")
    counts = {"sure": int(sure.sum()), "wrong": int((sure & ~true).sum())}
    return {"log_likelihood": -left.item(), **counts}


def problems(seed: int) -> Iterator[Posed]:
    """Pose every problem of a seed."""
    cell = partial(Attack, samples=4, seed=seed, activation=activation(seed))
    sphere = partial(cell, dim=12)
    for ratio in RATIOS:
        yield posed("random features", sphere(ratio=ratio))
    for ratio in RATIOS[::2]:
        yield posed("digits, ten outputs", cell(data="digits", size=4, classes="all", ratio=ratio))
        yield posed("faces", cell(data="faces", size=5, ratio=ratio))
        yield table(seed, ratio)
    for ratio in RATIOS[1::2]:
        network = sphere(architecture="two_layer", ratio=ratio, activation="gelu", dtype="float32")
        yield posed("two layers", replace(network, ratio=2 * ratio))
        yield posed("two layers, lazy", replace(network, lazy=100.0))
        few = sphere(samples=6, ratio=ratio, told=3)
        yield posed("too few asked for", few)
        moved = replace(few, architecture="two_layer", activation="gelu", ratio=2 * ratio)
        yield posed("too few asked for, two layers", moved)
    for ratio in RATIOS[2::2]:
        for name, changed in NOTHING.items():
            yield posed("", sphere(ratio=ratio)).without(f"control: {name}", changed)
    for ratio in RATIOS[3:]:  # more unknowns than the matrix is made for
        yield posed("whole digits", cell(data="digits", samples=9, ratio=ratio))
    victim = tuned(CASES["sgd20"], seed)
    truth, count = victim.truth.inputs, victim.truth.samples
    yield Posed("fine-tuned", victim.change().to("cpu"), truth, count, seed)
    if seed % 3 == 1:  # as dear as all others together
        yield Posed("replay", victim.replay().to("cpu", torch.float64), truth, count, seed)
    alone = victims.polynomial(victims.labellings(data.sphere(9, 4, seed), 3)[0], 16, 3)
    for premise in ("margin", "change"):
        problem = alone.posed("all", "final", premise).to("cpu")
        yield Posed(f"weights alone, as {premise}", problem, alone.truth.inputs, 4, seed)


def _attacked(one: Posed, products: int, dense: int) -> dict[str, Any]:
    """Attack a problem; return what may be said of it without the truth, and then the truth."""
    budget = REPLAYED * products if one.problem.premise is Premise.REPLAY else products
    found = reconstruct(one.problem, one.told, one.seed, product_limit=budget)
    rests = support(one.problem, found, dense)
    sought = once_more(one, found, rests)
    return {
        **{"name": one.name, "seed": one.seed, "sketched": rests.unknowns > dense},
        "signs": signs(one.problem, found, rests, sought),
        # by a model yet to be learnt
        "judged": partial(judge, one.problem, found, rests, again=sought),
        "true": one.true(found.samples),
    }


def fitted(rows: Tensor, true: Tensor) -> dict[str, Any]:
    """Learn intercept and weights by logistic regression with a ridge, on standardised signs.

    Each weight is held to the side on which its sign speaks for a sample: small error and residual,
    a large weight and ratio. What is left of the others is for the intercept. All signs but the
    last, which `with_more` adds.
    """
    x, y = rows.double(), true.double()
    mean, spread = x.mean(0), x.std(0).clamp_min(1e-3)
    side = torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    scaled = (x - mean) / spread
    free = torch.zeros(len(side) + 1, dtype=torch.float64, requires_grad=True)

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
    return {"intercept": intercept, "weights": dict(zip(SIGNS, own.tolist(), strict=False))}


def with_more(model: dict[str, Any], rows: Tensor, true: Tensor) -> dict[str, Any]:
    """Learn what the signs add that are not always known, all other weights held.

    They are 0 where they are not known, so that a candidate keeps its probability there.
    """
    side, more = torch.tensor([1.0, -1.0], dtype=torch.float64), SIGNS[-MORE:]

    def added(sizes: Sequence[float]) -> dict[str, Any]:
        weights = (side * torch.tensor(sizes)).tolist()
        return {**model, "weights": model["weights"] | dict(zip(more, weights, strict=True))}

    def loss(sizes: Sequence[float]) -> float:
        return binary_cross_entropy(probabilities(rows, added(sizes)), true.double()).item()

    return added(minimize(loss, [1.0] * MORE, bounds=[(0.0, MOST)] * MORE).x)


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
