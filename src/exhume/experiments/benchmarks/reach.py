"""This bench shows how far the attacks reach: kinds of networks against ways to train them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from joblib import Parallel, delayed
from torch import Tensor, nn
from torch.nn.functional import normalize

from exhume import victims
from exhume.checks import one_of
from exhume.equation.problem import Premise, Problem
from exhume.evaluate import score
from exhume.evaluate.recognition import COSINES
from exhume.experiments.benchmarks import bases
from exhume.experiments.benchmarks.bases import Case, tuned
from exhume.experiments.benchmarks.common import drawn, heading, say, show
from exhume.methods import reconstruct
from exhume.models.architectures import Block, Tokens, mlp
from exhume.models.formulation import weights_problem
from exhume.models.prepare import prepare
from exhume.recipes import Recipe
from exhume.solvers import Outcome
from exhume.victims.training import Training, train

# What an attack is called, what it is given, its method, and its share of the time that is left
Posing = tuple[str, Problem, str, float]
Posed = tuple[Tensor, Tensor, list[Posing]]  # the samples, public inputs, and the attacks

SAMPLES = 3  # more than one, so that they mix, and few enough for an attack of seconds
# Bases have seen a few hundred samples and not yet learnt them by heart: something is left to learn
BASE = 300, Recipe("adam", lr=3e-3, steps=30, norms="train")
WHOLE = 0.9  # share of the samples from which on a cell is reached: with one seed, all of them
WIDTH = 100  # of dense networks at the margin: enough for three samples, and trained in seconds
STEPS = 3000  # of training on the samples alone: seconds


def residual() -> nn.Module:
    """Return a block of ResNet-18 between a convolution and a head for 8×8."""
    maps = nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.GELU()
    return nn.Sequential(*maps, bases.Skip(8, 8, 2, nn.GELU), nn.Flatten(), nn.Linear(128, 10))


def transformer() -> nn.Module:
    """Return a vision transformer of one block for 8×8, whose head sees all four tokens."""
    patches = nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 24, 4, stride=4), Tokens(4, 24), Block(24, 4)
    return nn.Sequential(*patches, nn.LayerNorm(24), nn.Flatten(), nn.Linear(96, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": partial(mlp, (8, 8), (96,), 10, "gelu", True),
    "CNN": partial(bases.convolutions, 8, 1, 8, 32),
    "residual net": residual,
    "vision transformer": transformer,
    "tabular MLP": partial(mlp, (30,), (64,), 2, "gelu", True),
}
WAYS: dict[str, Recipe | None] = {  # those without a recipe are trained otherwise
    "lazy": None,
    "SGD": Recipe(steps=10),
    "mini-batches": Recipe(steps=10, batch_size=2, shuffle=0),
    "momentum": Recipe(steps=10, momentum=0.9),
    "decay": Recipe(steps=10, weight_decay=1e-3),
    "Adam": Recipe("adam", lr=2e-3, steps=10),
    "head only": Recipe(steps=10),
    "margin": None,
}
RATES = 0.005, 0.01, 0.02, 0.05, 0.1  # of SGD, tried in turn until the samples are fitted


def reach(
    networks: tuple[str, ...] = tuple(NETWORKS),
    ways: tuple[str, ...] = tuple(WAYS),
    seeds: int = 1,
    first_seed: int = 100,
    limit: float = 40.0,
    workers: int = 2,
) -> None:
    """Attack five kinds of networks, each trained in eight ways, with every method that may work.

    The share of samples recovered by the best method is printed; for weights alone at the margin
    it is the share that is recognisable.

    Args:
        networks: of MLP, CNN, residual net, vision transformer, tabular MLP.
        ways: of lazy, SGD, mini-batches, momentum, decay, Adam, head only, margin.
        seeds: how many.
        first_seed: of data, model and attack.
        limit: seconds a cell, for all its methods together.
        workers: cells at a time, with a thread each.
    """
    chosen = drawn(seeds, first_seed, networks, NETWORKS)
    for way in ways:
        one_of("way", way, WAYS)
    heading(f"reach: n = {SAMPLES}, seeds {chosen[0]} to {chosen[-1]}, {limit:g} s a cell")
    cells = [(network, way, seed) for network in networks for way in ways for seed in chosen]
    work = (delayed(attacked)(*cell, limit) for cell in cells)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for (network, way, seed), shares in zip(
        cells, Parallel(workers, return_as="generator")(work), strict=True
    ):
        said = ", ".join(f"{method} {share:.0%}" for method, share in shares.items())
        say(f"  {network}, {way}, seed {seed}: {said}")
        cell = found.setdefault((network, way), {})
        for method, share in shares.items():
            cell[method] = cell.get(method, 0.0) + share / seeds
    best = {cell: max(shares, key=shares.__getitem__) for cell, shares in found.items()}
    for form in ("{share:.0%}", "{method}"):
        rows: list[dict[str, str]] = []
        for network in networks:
            rows.append({"network": network})
            for way in ways:
                share = found[network, way][method := best[network, way]]
                rows[-1][way] = form.format(share=share, method=method if share else "–")
        show(" | ".join(f"{word}: {{{word}}}" for word in ("network", *ways)), rows)
    whole = sum(found[cell][method] >= WHOLE for cell, method in best.items())
    say(f"{whole} of {len(best)} cells at {WHOLE:.0%} or more")


def attacked(network: str, way: str, seed: int, limit: float) -> dict[str, float]:
    """Return the share of samples that each method finds; none is tried after one converged."""
    torch.set_num_threads(1)
    source, left = "table" if network == "tabular MLP" else "digits", limit
    case = Case(NETWORKS[network], WAYS[way], SAMPLES, BASE, RATES, source, standardised=True)
    if way == "margin":
        truth, public, attacks = at_margin(case, "MLP" in network, seed)
    else:
        truth, public, attacks = fine_tuned(case, way == "head only", seed)
    shares: dict[str, float] = {}
    for name, problem, method, part in attacks:
        problem = problem.to("cpu", torch.float64)
        found = reconstruct(problem, SAMPLES, seed, method, time_limit=part * left)
        left = max(0.0, left - found.seconds)
        samples = found.samples.nan_to_num(0.0, 0.0, 0.0)
        if way == "margin":
            x, y = (normalize(rows - public.mean(0)) for rows in (truth, samples))
            shares[name] = float(((x @ y.T).amax(1) > COSINES[1]).double().mean())
        else:
            shares[name] = score(samples, truth).recovered
        if found.outcome is Outcome.CONVERGED:
            break
    return shares


def fine_tuned(case: Case, head: bool, seed: int) -> Posed:
    """Fine-tune a network, or its head alone; replay goes first and has most of the time."""
    if head and case.recipe is not None:
        names = [name for name, _ in case.network().named_parameters()]
        case = replace(case, recipe=replace(case.recipe, frozen=tuple(names[:-2])))
    victim = tuned(case, seed)
    lazy = victim.change("last" if head else "all")
    attacks: list[Posing] = [("lazy", lazy, "exhume", 1.0)]
    if case.recipe is not None:
        attacks.insert(0, ("replay", victim.replay(), "exhume", 0.8))
    return victim.truth.inputs, victim.public, attacks


def at_margin(case: Case, dense: bool, seed: int) -> Posed:
    """Train a network on the samples alone until the direction of its weights stays.

    Dense networks have one output, odd against even classes. There is no such training of others
    here: they are trained to a small loss.
    """
    pool = case.pool()
    _, truth, public = bases.split(pool, BASE[0], SAMPLES, seed)
    told, other = bases.known_of(pool, public.inputs), "haim2022"
    if dense:
        signs = 2.0 * (truth.targets.argmax(1, keepdim=True) % 2) - 1
        one = replace(truth, targets=signs.double())
        victim = victims.kkt_mlp(one, (WIDTH,), seed=seed, steps=STEPS)
        problem = replace(victim.problem, domain=told.domain or victim.problem.domain)
    else:
        module, other = bases.seeded(case.network, seed).eval(), "buzaglo2023"
        weights = train(module, truth, Training("cross_entropy", until=1e-3, steps=STEPS))
        prepared = prepare(module, pool.shape).network
        problem = weights_problem(prepared, weights.trained, Premise.MARGIN, told)
    attacks: list[Posing] = [("exhume", problem, "exhume", 0.7), (other, problem, other, 1.0)]
    return truth.inputs, public.inputs, attacks
