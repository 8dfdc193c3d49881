"""This bench counts strong claims where nothing may be claimed, and where all is found.

The strong claim is that so many equations are not met by chance, `evidence.not_by_chance`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exhume import data, victims
from exhume.auditing.controls import CONTROLS, untrained
from exhume.auditing.evidence import not_by_chance
from exhume.auditing.judgement import judge
from exhume.experiments.benchmarks.common import drawn, heading, say, show, tracked
from exhume.experiments.benchmarks.posing import (
    Posed,
    activation,
    by_kind,
    once_more,
    posed,
    summed,
    table,
)
from exhume.experiments.cells.attack import Attack
from exhume.features.weights import Seeded, Stored
from exhume.methods import reconstruct
from exhume.models import architectures
from exhume.solvers import Outcome
from exhume.theory.support import support

DIM, COUNT = 12, 4  # of most problems: an attack on them takes a tenth of a second
# Distinct features of the redundant models: 0.6 equations for each unknown, so that others fit
NARROW = COUNT + round(0.6 * COUNT * (DIM - 1))
WIDE = 150  # features of those that do not see all of an input: three equations for each unknown
PLAIN, ADVERSARIAL, TRUE = "control", "adversarial", "true recovery"
LONGER = 10  # times the budget, where samples can be found: a search ends there when it is done
COLUMNS = (
    "kind: {kind} | problem: {name} | runs: {runs} | converged: {converged} | "
    "strongly claimed: {claimed} | wholly recovered: {whole} | verdicts: {verdicts} | "
    "wrongly sure of: {wrong}"
)


def controls(seeds: int = 10, first_seed: int = 400, products: int = 1500) -> None:
    """Attack where there is nothing to find, or where others fit as well; count strong claims.

    Seventeen controls a seed, nine of them adversarial, and three models whose samples can be
    recovered. That takes some minutes on one thread.

    Args:
        seeds: how many, of data, models and attacks alike.
        first_seed: where they begin.
        products: the budget of an attack; ten times as many where samples can be recovered.
    """
    chosen = drawn(seeds, first_seed)
    heading(f"controls: seeds {chosen[0]} to {chosen[-1]}, {products} products an attack")
    runs = [
        _attacked(kind, one, products * (LONGER if kind == TRUE else 1))
        for seed in tracked(chosen, "attacks")
        for kind, problems in KINDS.items()
        for one in problems(seed)
    ]
    show(COLUMNS, [_row(name, own) for name, own in by_kind(runs).items()])
    for kind in KINDS:
        own = [run for run in runs if run["kind"] == kind]
        claimed, whole = (sum(run[word] for run in own) for word in ("claimed", "whole"))
        say(f"{kind}: {len(own)} runs, {claimed} strongly claimed, {whole} wholly recovered")


def _attacked(kind: str, one: Posed, products: int) -> dict[str, Any]:
    """Attack a problem; return what is said of it, and whether that is so."""
    found = reconstruct(one.problem, one.told, one.seed, product_limit=products)
    rests, true = support(one.problem, found), one.true(found.samples)
    judged = judge(one.problem, found, rests, again=once_more(one, found, rests))
    return {
        **{"kind": kind, "name": one.name, "verdict": judged.verdict},
        "converged": found.outcome is Outcome.CONVERGED,
        "claimed": not_by_chance(one.problem, found, rests),
        "whole": bool(true.all()),
        "said": judged.probabilities,
        "true": true,
    }


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {word: sum(run[word] for run in runs) for word in ("converged", "claimed", "whole")}
    return {"kind": runs[0]["kind"], **summed(name, runs), **counts}


def _sphere(seed: int, **sizes: Any) -> Attack:
    told: dict[str, Any] = {"dim": DIM, "samples": COUNT, "activation": activation(seed)}
    return Attack(**{**told, "seed": seed, **sizes})


def _two_layer(seed: int, **sizes: Any) -> Attack:
    return _sphere(seed, architecture="two_layer", activation="gelu", dtype="float32", **sizes)


def plain(seed: int) -> Iterator[Posed]:
    """Pose problems in which there is nothing: another order, or weights that began elsewhere."""
    cells = {f"ratio {r:g}": _sphere(seed, ratio=r) for r in (1.3, 3.0, 10.0)}
    cells["two layers"] = _two_layer(seed, ratio=3.0, lazy=100.0)
    for name, cell in cells.items():
        whole = posed("", cell)
        for control, changed in CONTROLS.items():
            yield whole.without(f"{control}: {name}", changed)


def adversarial(seed: int) -> Iterator[Posed]:
    """Pose problems that others than the samples explain as well, or that are told wrong."""
    digits = Attack(data="digits", size=4, classes="all", activation="tanh")
    digits = replace(digits, samples=5, ratio=1.25, seed=seed)  # tanh is met most easily
    yield posed("more outputs than samples", digits)
    for name, rows in REDUNDANT.items():
        yield _trained(name, rows(partial(_gaussian, seed)), seed)
    head = posed("", _sphere(seed, samples=8, ratio=1.25 / 8))
    yield head.without("untrained head, eight outputs", partial(untrained, outputs=8))
    yield _wrong_start(seed)
    few: Callable[..., Attack] = _two_layer if seed % 2 else _sphere
    yield posed("too few samples asked for", few(seed, samples=6, ratio=4.0, told=3))
    flat = _two_layer(seed, samples=6, rank=3, ratio=12.0, told=3)  # mixtures lie in their span
    yield posed("too few of dependent samples", flat)
    wide = _sphere(seed, samples=12, ratio=200.0, told=1, activation="tanh")
    yield posed("one of twelve asked for, ratio 200", wide)


def recoverable(seed: int) -> Iterator[Posed]:
    """Pose problems whose samples can be found."""
    yield posed("random features, ratio 3", _sphere(seed, ratio=3.0))
    yield _trained("three outputs, ratio 6", _gaussian(seed, 2 * DIM * COUNT), seed, outputs=3)
    yield replace(table(seed, 3.0), name="table, ratio 3")


KINDS = {PLAIN: plain, ADVERSARIAL: adversarial, TRUE: recoverable}

# The first layer of models that show less than their size, (p, d)
REDUNDANT: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "zero rows": lambda v: torch.cat([v(NARROW), torch.zeros(70, DIM)]),
    "repeated rows": lambda v: torch.cat([v(NARROW), -v(NARROW), v(NARROW)]),
    "a bottleneck": lambda v: v(WIDE, DIM // 2) @ v(DIM // 2),
    "pooling": lambda v: v(WIDE, DIM // 2).repeat_interleave(2, 1),
    "an input that nothing sees": lambda v: v(WIDE) * (torch.arange(DIM) > 0),
}


def _gaussian(seed: int, rows: int, columns: int = DIM) -> Tensor:
    return Seeded(rows, columns, seed).rows(0, rows)


def _trained(name: str, rows: Tensor, seed: int, outputs: int = 1) -> Posed:
    """A head on features σ(Vx) with that V, (p, d), trained to Gaussian targets."""
    known = data.sphere(DIM, COUNT, seed)
    targets = torch.randn(COUNT, outputs, generator=torch.Generator().manual_seed(seed)).double()
    known, told = replace(known, targets=targets), (len(rows), activation(seed), seed)
    problem = victims.random_features(known, *told, weights=Stored(rows)).problem
    return Posed(name, problem, known.inputs, COUNT, seed)


def _wrong_start(seed: int) -> Posed:
    """A trained network, and the initial weights of another seed: the target is wrong, too."""
    cell = _two_layer(seed, ratio=6.0)
    known = cell.known()
    model = cell.victim(known, cell.width(known), "cpu").model
    assert model is not None
    module = architectures.build(model.architecture, model.arguments)
    start = architectures.initialise(module, seed + 1).state_dict()
    problem = replace(model, initial=start).problem().to("cpu")
    return Posed("initial weights of another seed", problem, known.inputs, COUNT, seed, True)
