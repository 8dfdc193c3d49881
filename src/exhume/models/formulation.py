"""From initial and trained weights of a network to a Problem: the unified formulation.

Δθ ≈ Σ_i Σ_c A_ic ∇θ f_c(x_i) at a point on the way from the initial to the trained weights; for
the last linear layer ΔW_L ≈ Φ(X)ᵀA with Φ its inputs. MARGIN and DECAY say the same of θ itself.
"""

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.modules.instancenorm import _InstanceNorm

from exhume.checks import one_of
from exhume.equation.domain import Box, Domain, Sphere
from exhume.equation.pixels import Pixels
from exhume.equation.problem import FirstLayer, Premise, Problem, ThreatModel
from exhume.equation.tiles import Tiles
from exhume.errors import InputError
from exhume.features import Features
from exhume.features.dense import DenseGradients
from exhume.features.gradient import ParameterGradients
from exhume.features.modules import LastLayer, ModuleFeatures
from exhume.features.network import Network, Weights, dense_chain, midpoint, named_block
from exhume.features.random import RandomFeatures
from exhume.features.replay import TrainingRun
from exhume.features.weights import Stored
from exhume.recipes import Recipe, several

# Where features may be taken; `both` is initial and final, with coefficients of their own
POINTS = {
    "initial": "the initial weights",
    "final": "the final weights",
    "midpoint": "the midpoint of training",
    "both": "the initial and the final weights",
}
POINT = "midpoint"  # unless told otherwise: there the residual at the truth is mostly least

LAZY = (
    "features of the samples moved little in training (the lazy regime), and training followed "
    "the gradient of the loss"
)

# What is assumed where the weights themselves are the target
ASSUMED = {
    Premise.MARGIN: (
        "training with a logistic or cross-entropy loss went on until the direction of the weights "
        "no longer changed, and the network is homogeneous in its weights"
    ),
    Premise.DECAY: "training with weight decay came to rest at a stationary point of its loss",
}
RECIPE = "how it was trained, step by step, but not on what"  # what replay knows besides
BOUNDED = "inputs lie in [−1, 1]: neither their norm nor their range was told"

DRIFT = 1e-2  # the most of the target left at the truth for an attack to be worth its time
INPUTS = 8  # random ones at which outputs are compared: one could be at a zero of the network
ROUNDING = 1e-5  # share of the largest singular value of a change that may be rounding
HOMOGENEOUS = 1e-6  # the share of outputs at 2θ that rounding may explain; float64 leaves far less


@dataclass(frozen=True)
class Told:
    """What the auditor is told of the inputs."""

    domain: Domain | None = None  # where they may lie; each premise has its own assumption if None
    display: Pixels | None = None  # how they become pixels
    knows: tuple[str, ...] = ()  # a phrase for each thing told, for the report


NOTHING = Told()


def network_problem(
    network: Network,
    initial: Weights,
    trained: Weights,
    parameters: str = "last",
    point: str = POINT,
    told: Told = NOTHING,
) -> Problem:
    """Return the problem that a network poses, given its weights before and after training.

    Initial weights are at least those of `needed`. Parameters are `last` for the inputs of the last
    linear layer (its bias is left out), or a block whose gradients are taken (`all`, `first`,
    names, patterns). Inputs lie on the sphere of radius √d unless a domain is told.
    """
    one_of("point", point, POINTS)
    block, target, coarsest = _change(network, initial, trained, parameters)
    change = float(target.double().square().sum())
    size = sum(float(trained[name].double().square().sum()) for name in block)
    knows = ("the initial weights", "the trained weights", "the architecture", *told.knows)
    first = first_layer(network, initial, trained)
    return Problem(
        target,
        features_at(network, initial, trained, parameters, point),
        ThreatModel(knows, assumes=(LAZY,)),
        network.shape,
        told.domain or Sphere(),
        told.display,
        0.1 * coarsest**2 * 2 * size / change if change > 0 else 0.0,
        DRIFT,
        first_layer=first if first and first.tiles is None else None,
        tiled=first if first and first.tiles else None,
    )


@dataclass(frozen=True, eq=False)
class Known:
    """This is what the auditor knows of the training run."""

    recipe: Recipe | None = None  # how it went
    labels: tuple[int, ...] | None = None  # classes of the samples, in their order for mini-batches
    public: Tensor | None = None  # inputs of the same kind, (N, d)


NOT_KNOWN = Known()  # nothing of the run, unless a card says it


def replay_problem(
    network: Network, initial: Weights, trained: Weights, known: Known, told: Told = NOTHING
) -> Problem:
    """Return the problem θ − θ₀ = T(θ₀, X, y) − θ₀ that a training run of a known recipe poses.

    What did not change was frozen. Inputs lie on the sphere of radius √d unless a domain is told.
    """
    recipe, classes, public = known.recipe, known.labels or (), known.public
    if recipe is None:
        raise InputError("premise replay: needs the recipe of the training run; give --recipe.")
    if any(not 0 <= label < max(2, network.outputs) for label in classes):
        raise InputError(f"labels: expected classes from 0 to {max(2, network.outputs) - 1}.")
    if public is not None and public.shape[1] != (d := network.dim):
        raise InputError(f"public: expected inputs of {d} entries, got {public.shape[1]}.")
    lazy = network_problem(network, initial, trained, "all", "both", told)
    features = cast(ModuleFeatures, lazy.features)
    before, after = features.points
    unit = "steps" if recipe.steps else "epochs"
    length = f"{' or '.join(map(str, several(recipe.steps or recipe.epochs)))} {unit}"
    block = _trained_block(network, initial, trained, "all")
    _check_recipe(network, initial, trained, block, recipe)
    run = TrainingRun(
        replace(network, batch_statistics=recipe.norms == "train"),
        (initial, trained),
        f"training run of {length} by {recipe.optimizer}",
        block=block,
        recipe=recipe,
        lazy=replace(features, points=(before, midpoint(before, after), after)),
        labels=known.labels,
        public=public,
    )
    more = {"the labels": known.labels, "public inputs of the same kind": public}
    how = f"{RECIPE}, nor {', nor '.join(recipe.open.values())}" if recipe.open else RECIPE
    knows = (*lazy.threat_model.knows, how, *(w for w, v in more.items() if v is not None))
    steps = max(several(recipe.steps or recipe.epochs or 0))
    return replace(
        lazy,
        features=run,
        threat_model=ThreatModel(knows),
        drift=0.0,
        premise=Premise.REPLAY,
        resolution=lazy.resolution * (1 + steps),  # each step rounded the weights
    )


def _check_recipe(
    network: Network, initial: Weights, trained: Weights, block: tuple[str, ...], recipe: Recipe
) -> None:
    """Refuse a recipe that the weights contradict, or that cannot be simulated."""
    recipe.check_outputs(network.outputs)
    for pattern in recipe.frozen:
        if not fnmatch.filter(trained, pattern):
            raise InputError(f"recipe: frozen: {pattern!r} matches no parameter of the model.")
        if trained_too := fnmatch.filter(block, pattern):
            first = trained_too[0]
            raise InputError(f"recipe: frozen: {pattern!r} names {first}, which was trained.")
    for name, part in network.module.named_modules():
        if recipe.norms == "train" and isinstance(part, _InstanceNorm):
            raise InputError(
                f"recipe: norms: {name} is an InstanceNorm, which cannot be simulated in train "
                "mode; write norms: eval if it was in eval mode."
            )
        mean = f"{name}.running_mean"
        both = mean in trained and mean in initial
        if recipe.norms == "eval" and both and not torch.equal(initial[mean], trained[mean]):
            raise InputError(f"recipe: norms: {mean} changed in training; write norms: train.")


def weights_problem(
    network: Network,
    trained: Weights,
    premise: Premise,
    told: Told = NOTHING,
    initial: Weights | None = None,
) -> Problem:
    """Return the problem that trained weights alone pose: θ = Σ_i Σ_c A_ic ∇θ f_c(x_i).

    With initial weights it is θ − θ₀ that is such a sum: layers need not have forgotten their
    start. The premise is MARGIN or DECAY; inputs lie in the box [−1, 1] unless a domain is told.
    """
    before = initial or {name: torch.zeros_like(w) for name, w in trained.items()}
    block, target, coarsest = _change(network, before, trained, "all")
    assumes = (ASSUMED[premise], *(() if told.domain else (BOUNDED,)))
    knows = ("the trained weights", "the architecture", *told.knows)
    resolution, start = 0.1 * coarsest**2, None
    first = first_layer(network, before, trained)
    if initial is not None:
        knows, start = ("the initial weights", *knows), _column(initial, block)
        whole = sum(float(trained[name].double().square().sum()) for name in block)
        resolution *= 2 * whole / float(target.double().square().sum())
    return Problem(
        target,
        features_at(network, before, trained, "all", "final"),
        ThreatModel(knows, assumes),
        network.shape,
        told.domain or Box(-1.0, 1.0),
        told.display,
        resolution,
        DRIFT,
        first if first and first.tiles is None else None,
        premise,
        start,
    )


def needed(network: Network, trained: Weights, parameters: str, point: str) -> tuple[str, ...]:
    """Return the names of the initial weights without which there is no such problem."""
    if point == "final":
        return _block(network, trained, parameters)
    unused = network.head_bias if parameters == "last" else None  # no part of the head's inputs
    return tuple(name for name in trained if name != unused)


def features_at(
    network: Network, initial: Weights, trained: Weights, parameters: str, point: str
) -> Features:
    """Return the features of a block at a point; dense layers have a fast path."""
    before = {name: initial.get(name, w) for name, w in trained.items()}
    points: tuple[Weights, ...] = {
        "initial": (before,),
        "final": (trained,),
        "midpoint": (midpoint(before, trained),),
        "both": (before, trained),
    }[point]
    chain = dense_chain(network)
    if parameters != "last":
        title = f"gradients of {parameters} parameters at {POINTS[point]}"
        block = _trained_block(network, initial, trained, parameters)
        kind = ParameterGradients if chain is None else DenseGradients
        return kind(network, points, title, block=block)
    title = f"last layer, features at {POINTS[point]}"
    if chain is None or chain.names[1:] != (network.head,) or len(points) > 1:
        return LastLayer(network, points, title)
    v = points[0][f"{chain.names[0]}.weight"]
    bias = points[0].get(f"{chain.names[0]}.bias")
    spread = float(v.double().square().mean().sqrt())
    return RandomFeatures(Stored(v), chain.activations[0], bias=bias, spread=spread, title=title)


def _change(
    network: Network, initial: Weights, trained: Weights, parameters: str
) -> tuple[tuple[str, ...], Tensor, float]:
    """Return the block, ΔW_Lᵀ (h, c) or its change as one column, and its coarsest rounding."""
    block = _trained_block(network, initial, trained, parameters)
    if not block:
        names = ", ".join(_block(network, trained, parameters))
        raise InputError(f"parameters {parameters!r} ({names}) did not change in training.")
    changes = [trained[name] - initial[name] for name in block]
    coarsest = max(torch.finfo(trained[name].dtype).eps for name in block)
    if parameters == "last":
        return block, changes[0].T.contiguous(), coarsest
    return block, _column(dict(zip(block, changes, strict=True)), block), coarsest


def _column(tensors: Weights, block: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in block])[:, None]


def _trained_block(
    network: Network, initial: Weights, trained: Weights, parameters: str
) -> tuple[str, ...]:
    """Return the block without what was frozen: its change is zero, its gradients are not."""
    block = _block(network, trained, parameters)
    return tuple(name for name in block if not torch.equal(initial[name], trained[name]))


def _block(network: Network, weights: Weights, parameters: str) -> tuple[str, ...]:
    if parameters == "last":
        return (network.head_weight,)
    trainable = tuple(name for name, _ in network.module.named_parameters() if name in weights)
    return named_block(trainable, parameters)


def first_layer(network: Network, initial: Weights, trained: Weights) -> FirstLayer | None:
    """Return the first layer, where it is dense, sees the input itself, and was trained.

    It may see the input tile by tile; then embeddings of places are those whose change its own
    could have made, with a class token before them or without.
    """
    name = network.first_dense(trained)
    if name is None or name not in initial or torch.equal(initial[name], trained[name]):
        return None
    bias = f"{name.removesuffix('weight')}bias"
    added = trained[bias] - initial[bias] if {bias} <= trained.keys() & initial.keys() else None
    before, after = initial[name], trained[name]
    if network.patches is None or after.ndim == 2:
        return FirstLayer(before, after, added)
    tiles, units = Tiles(network.shape, network.patches), len(after)
    layer = FirstLayer(before.flatten(1), after.flatten(1), added, tiles)
    sizes = [places * units for places in (tiles.places, tiles.places + 1)]
    fits = [n for n, w in trained.items() if w.shape[-1:] == (units,) and w.numel() in sizes]
    rows = {n: trained[n] - initial[n] for n in fits if n in initial}
    rows = {n: change.reshape(-1, units)[-tiles.places :] for n, change in rows.items()}
    rows = {n: change for n, change in rows.items() if change.any()}
    if not rows:
        return layer
    columns = _column_space((after - before).flatten(1))

    def missed(name: str) -> float:
        own = rows[name].double().cpu()
        return float((own - own @ columns @ columns.T).norm() / own.norm())

    best = min(rows, key=missed)
    return replace(layer, places=rows[best], embedding=best)


def _column_space(change: Tensor) -> Tensor:
    """Return an orthonormal basis (h, r) of the columns of a change (h, t), but for rounding."""
    axes, sizes, _ = torch.linalg.svd(change.double().cpu(), full_matrices=False)
    seen: Tensor = axes[:, sizes > ROUNDING * sizes[0]]
    return seen


def premise_named(word: str | Premise) -> Premise:
    """Return the premise of that name."""
    if isinstance(word, Premise):
        return word
    return Premise(one_of("premise", word, [premise.value for premise in Premise]))


def target_named(premise: Premise, target: str | None, initial: bool) -> str:
    """Return whether the target is `weights` or their `change`: as asked, or by the premise.

    At the margin it is the change where initial weights were given. Decay wears them off, so that
    there it is the weights. The other premises have no choice.
    """
    own = "change" if not premise.weights_alone or (premise is Premise.MARGIN and initial) else None
    chosen = one_of("target", target or own or "weights", ("weights", "change"))
    if chosen == "weights" and not premise.weights_alone:
        words = f"premise {premise.value}: is about what training changed"
        raise InputError(f"target: {words}; leave it out, or give --premise margin or decay.")
    return chosen


def check_whole(premise: Premise, parameters: str | None, point: str | None) -> None:
    """Refuse a block or a point where all trained weights are the target."""
    if parameters not in (None, "all") or point not in (None, "final"):
        raise InputError(
            f"premise {premise.value}: takes all trained weights, and features at them; leave out "
            "the parameters and the point, or give the premise change."
        )


def degree(features: Features, inputs: Tensor) -> tuple[float, float]:
    """Return the L of f(2θ) ≈ 2^L f(θ), and the share ‖f(2θ) − 2^L f(θ)‖ / ‖f(2θ)‖ that it misses.

    θ is the features' last point. L is not a number where outputs are zero or change sign; the
    share is then 1. Both are 0 where the features are not those of a whole network.
    """
    features = features.to(features.device, torch.float64)
    once, twice = features.predict(inputs), features.predict(inputs, 2.0)
    if once is None or twice is None:
        return 0.0, 0.0
    size, common = float(once.square().sum()), float((once * twice).sum())
    if size == 0 or common <= 0:
        return math.nan, 1.0
    factor = common / size
    return math.log2(factor), float((twice - factor * once).norm() / twice.norm())


def doubts(problem: Problem, samples: int | None) -> tuple[str, ...]:
    """Return what of the weights speaks against the premise of a problem, a sentence each.

    MARGIN asks for f(sθ) = s^L f(θ). With MARGIN and DECAY a dense first layer is Σ_i δ_i x_iᵀ, and
    n samples, if their number is known, leave nothing beyond n directions.
    """
    found: list[str] = []
    if problem.premise is Premise.MARGIN:
        inputs = problem.domain.start(INPUTS, problem.dim, torch.Generator().manual_seed(0))
        _, missed = degree(problem.features, inputs)
        if missed > HOMOGENEOUS:
            found.append(
                "The premise margin cannot hold exactly: the network is not homogeneous in its "
                f"weights. With all of them doubled, {missed:.1e} of its outputs is no multiple of "
                "what they were. Biases in deeper layers, norms, and activations that bend other "
                "than at zero do this."
            )
    layer = problem.first_layer if problem.premise.weights_alone else None
    if layer is not None and samples is not None:
        beyond = layer.spectrum[0][samples:].square().sum()  # singular values of no sample's
        share = float(beyond) / float(problem.size)
        if share > DRIFT:
            found.append(
                f"The weights contradict the premise {problem.premise.value}: the first layer "
                f"holds {share:.1e} of their square beyond its {samples} largest directions, where "
                f"{samples} samples can leave nothing, so that at least as much stays unexplained. "
                "Its initial weights are still there, for training ended too early, or there are "
                "more samples."
            )
    return tuple(found)
