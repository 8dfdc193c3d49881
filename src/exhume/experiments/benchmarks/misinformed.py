"""This bench shows what an audit says where it is told wrong: no claim, and what it suspects."""

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch

from exhume.auditing import evidence
from exhume.evaluate import score
from exhume.experiments.benchmarks.bases import tuned
from exhume.experiments.benchmarks.common import drawn, heading, say, show, tracked
from exhume.experiments.benchmarks.finetuned import CASES
from exhume.methods import reconstruct
from exhume.recipes import Recipe
from exhume.solvers import Outcome

COLUMNS = (
    "told wrong: {case} | a claim: {claimed} of {seeds} | rightly suspected: {suspected} of {seeds}"
    " | residual, least: {least:.1e} | median: {residual:.1e} | median error: {error:.1e}"
)
RECIPE = Recipe(lr=0.2, steps=20)


@dataclass(frozen=True)
class Wrong:
    """A case says how digits were fine-tuned, what the auditor is told, and what is to blame."""

    suspected: str  # how a sentence goes that names it: any of the parts between bars
    made: Recipe = RECIPE
    told: Recipe = RECIPE
    samples: int = 4  # that are told; there are four
    other: bool = False  # whether the initial weights are those of another base model


WRONGS = {
    "nothing": Wrong("not met by chance"),
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
    show(COLUMNS, [_row(name, runs) for name, runs in each.items()])


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
    claims = evidence.claims(problem, found)
    say(f"  {name}, seed {seed}: residual {found.residual:.1e}. {claims[-1]}")
    return {
        "claimed": found.outcome is Outcome.CONVERGED,
        "suspected": any(words in claims[-1] for words in wrong.suspected.split("|")),
        "residual": found.residual,
        "error": statistics.median(score(found.samples, victim.truth.inputs).errors.tolist()),
    }


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts over seeds, and medians."""
    counts = {word: sum(run[word] for run in runs) for word in ("claimed", "suspected")}
    middle = {word: statistics.median(run[word] for run in runs) for word in ("residual", "error")}
    least = min(run["residual"] for run in runs)
    return {"case": name, "seeds": len(runs), "least": least, **counts, **middle}
