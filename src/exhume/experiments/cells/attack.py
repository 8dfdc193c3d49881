"""One victim, one attack, one score: the cell that every experiment is a grid of."""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exhume import data, victims
from exhume.checks import number, one_of, whole_number
from exhume.data import Data
from exhume.data.sets import DEFAULT_CLASSES
from exhume.equation.pixels import encoded
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import RECOVERED, Score, chance, residual_at_truth, score, span_residual
from exhume.evaluate.scoring import pictures
from exhume.features.activations import activation as named_activation
from exhume.features.weights import Seeded, Weights, materialise
from exhume.methods import METHODS, Observer, Reconstruction, reconstruct
from exhume.methods.progress import Method
from exhume.methods.tansley2026 import Tansley2026
from exhume.models import architectures
from exhume.victims import Victim
from exhume.victims.descent import LOSSES

# The most numbers in a set of samples or in the parameters that are attacked: 800 MB in float64,
# where a larger number is more likely a slip than a wish.
MOST_NUMBERS = 10**8


@dataclass(frozen=True)
class Samples:
    """Samples are training data by name and sizes."""

    data: str = "sphere"  # `sphere`, or a set of `exhume.data.load`
    dim: int | None = None  # d of sphere data; images have their own
    rank: int | None = None  # of sphere data: the samples lie in a random subspace of so many
    size: int | None = None  # of images: the side that they are shrunk to
    classes: str | None = None  # of images: a word of `exhume.data.load`; each set has its default
    samples: int = 12  # n
    seed: int = 0  # of everything random in the cell, the draw of the samples among it

    def check(self) -> None:
        """Refuse what could not be run, before any work."""
        one_of("data", self.data, ("sphere", *DEFAULT_CLASSES))
        whole_number("samples", self.samples)
        whole_number("seed", self.seed, 0)
        self.check_given(whole_number, "dim", "rank", "size")
        if self.data != "sphere":
            self.check_absent(f"{self.data}; it is for sphere", "dim", "rank")
            return
        self.check_absent("sphere; it is for images", "size", "classes")
        if self.dim is None:
            raise InputError("dim: sphere data needs a dimension, for example 60.")
        if self.rank is not None and self.rank > self.dim:
            raise InputError(f"rank: expected at most the dimension, {self.dim}, got {self.rank}.")
        check_size("dim · samples", self.dim * self.samples)
        check_size("dim · rank", self.dim * (self.rank or 1))

    def check_given(self, check: Callable[..., Any], *fields: str, **options: Any) -> None:
        """Check fields that are not left out."""
        for field in fields:
            if (value := getattr(self, field)) is not None:
                check(field, value, **options)

    def check_absent(self, what: str, *fields: str) -> None:
        """Refuse fields that would be ignored."""
        for field in fields:
            if (value := getattr(self, field)) is not None:
                raise InputError(f"{field}: got {value!r}, but it is not for {what}; leave it out.")

    def known(self) -> Data:
        """Return the training data."""
        if self.data == "sphere":
            return data.sphere(self.dim or 0, self.samples, self.seed, rank=self.rank)
        words: Any = self.classes
        return data.load(self.data, self.samples, self.seed, classes=words, size=self.size)


def check_size(what: str, numbers: int) -> None:
    """Refuse what no memory would hold, before any of it is made."""
    if numbers > MOST_NUMBERS:
        most = f"at most {MOST_NUMBERS:,} numbers"
        raise InputError(f"{what}: expected {most}, got {numbers:,}; take fewer.")


UNDETERMINED = "undetermined"  # nothing was attacked: any candidates would explain the weights
SUBSPACE = "tansley2026"  # the method that confines candidates to a subspace
LARGEST = 10_000  # the largest ratio; a larger one is taken for a slip
RIDGE = 1e-3  # logistic regression on random features has no minimum without one

# Training loss at which a network is done, unless it is given. The squared loss can reach zero; the
# others fall ever more slowly, as weights grow.
UNTIL = {"squared": 1e-8, "logistic": 1e-2, "cross_entropy": 1e-2}

# What of an architecture is made as large as the ratio asks for, and what that is a multiple of:
# a transformer has four heads.
SIZED = {"random_features": "width", "two_layer": "width", "resnet": "width", "vit": "dim"}
STEPS = {"vit": 4}

WORDS: dict[str, Collection[str]] = {
    "architecture": SIZED,
    "method": METHODS,
    "loss": LOSSES,
    "block": ("last", "all"),
    "dtype": ("float32", "float64"),
}


@dataclass(frozen=True)
class Attack(Samples):
    """Train a model, attack it, and only then compare with its training data."""

    ratio: float = 5.0  # attacked parameters for each unknown, p·m/(d·n); it says the width
    architecture: str = "random_features"  # random_features, two_layer, resnet or vit
    activation: str = "relu"  # of random features and two_layer; the others have their own
    loss: str = "squared"  # squared, logistic, or (not for random features) cross_entropy
    block: str = "last"  # of a network, the parameters that are attacked: last or all
    until: float | None = None  # training loss at which a network is done; `UNTIL` unless given
    lazy: float | None = None  # α of α(f − f₀), see `victims.Training`
    dtype: str = "float64"  # precision of the training of a network
    method: str = "exhume"  # tansley2026 may be told the subspace, see `subspace_is`
    told: int | None = None  # samples the attack is told of: n unless given, 0 if it has to find it
    products: int | None = 30_000  # most passes over the features; no clock, so that results repeat
    keep: int = 0  # of images: how many pairs to keep as a picture, originals above reconstructions

    def check(self) -> None:
        """Refuse what could not be run, before any work."""
        super().check()
        for field, known in WORDS.items():
            one_of(field, getattr(self, field), known)
        named_activation(self.activation)
        if number("ratio", self.ratio, above=0) > LARGEST:
            raise InputError(f"ratio: expected at most {LARGEST:,}, got {self.ratio:g}.")
        if whole_number("keep", self.keep, 0) and self.data == "sphere":
            raise InputError("keep: sphere data has no pictures to keep; expected 0.")
        self.check_given(number, "until", "lazy", above=0)
        self.check_given(whole_number, "told", least=0)
        self.check_given(whole_number, "products")
        if self.dim is not None:
            self._equations(self.dim)
        if self.architecture == "random_features":
            self.check_absent("random_features, which are solved for", "until", "lazy")
            one_of("loss of random_features", self.loss, ("squared", "logistic"))
            one_of("block of random_features", self.block, ("last",))
        elif self.architecture != "two_layer":
            if self.data == "sphere":
                raise InputError(f"architecture: {self.architecture} takes images, not sphere.")
            if self.activation != "relu":
                raise InputError(f"activation: {self.architecture} has its own; leave relu.")

    def _equations(self, dim: int) -> float:
        """The parameters that are asked for, ratio · d · n."""
        equations = self.ratio * dim * self.samples
        check_size("ratio · dim · samples, the parameters that are attacked", round(equations))
        return equations

    def run(self, device: str) -> dict[str, Any]:
        """Train, attack, score; with no more features than candidates nothing is attacked."""
        self.check()
        known = self.known()
        width = self.width(known)
        sizes = self.sizes(known, width)
        entries = known.outputs if self.block == "all" else 1
        if self._parameters(known, width)[0] <= entries * max(self.told or 0, known.samples):
            return {**sizes, **dict.fromkeys(RESULTS), "outcome": UNDETERMINED}
        victim = self.victim(known, width, device)
        problem = victim.posed(self.block).to(device)
        return sizes | self.scored(victim, problem, self.attack(problem))

    def sizes(self, known: Data, width: int) -> dict[str, Any]:
        """Return what was asked for in numbers: d, p, m, p·m, and the ratio as the width has it."""
        equations = self._parameters(known, width)[1]
        return {
            "inputs": known.dim,
            "width": width,
            "outputs": known.outputs,
            "parameters": equations,
            "actual_ratio": equations / (known.dim * known.samples),
            "subspace": subspace_is(self.method, self.architecture, self.rank),
        }

    def width(self, known: Data) -> int:
        """Return the width whose equations come nearest to ratio · d · n."""
        wanted = self._equations(known.dim)
        step = STEPS.get(self.architecture, 1)

        def equations(steps: int) -> int:
            return self._parameters(known, steps * step)[1]

        high = 1
        while equations(high) < wanted:
            high *= 2
        high = bisect_left(range(high), wanted, high // 2 + 1, key=equations)
        low = high - 1  # too few, or none
        nearer = low >= 1 and wanted - equations(low) < equations(high) - wanted
        return step * (low if nearer else high)

    def _parameters(self, known: Data, width: int) -> tuple[int, int]:
        """Rows of the target and its entries, p and p·m, of a model of that width."""
        if self.architecture in ("random_features", "two_layer") and self.block == "last":
            return width, width * known.outputs
        sizes: dict[str, Any] = {"shape": list(known.shape), "outputs": known.outputs}
        sizes |= {SIZED[self.architecture]: width}
        with torch.device("meta"):
            network = architectures.build(self.architecture, sizes)
        if self.block == "all":
            every = sum(p.numel() for p in network.parameters())
            return every, every
        *_, last = (part for part in network.modules() if isinstance(part, torch.nn.Linear))
        return last.in_features, last.in_features * last.out_features

    def drawn(self, known: Data, width: int, device: str) -> Weights:
        """Return V of random features, in the memory of a device."""
        seeded = Seeded(width, known.dim, self.seed)
        return materialise(seeded.to(torch.device(device), torch.float32))

    def victim(
        self,
        known: Data,
        width: int,
        device: str,
        weights: Weights | None = None,
        show: Callable[[int, float], None] | None = None,
    ) -> Victim:
        """Train the model, on V if it was drawn already; `show` sees the steps of a network."""
        if self.architecture == "random_features":
            if weights is None and torch.device(device).type == "cuda":
                weights = self.drawn(known, width, device)
            ridge = RIDGE if self.loss == "logistic" else 0.0
            return victims.random_features(
                known, width, self.activation, self.seed, self.loss, ridge, weights, device
            )
        own: dict[str, Any] = {name: getattr(self, name) for name in ("loss", "seed", "lazy")}
        own |= {SIZED[self.architecture]: width, "device": device, "show": show}
        own["dtype"] = getattr(torch, self.dtype)
        own["until"] = UNTIL[self.loss] if self.until is None else self.until
        if self.architecture == "two_layer":
            own["activation"] = self.activation
        trained: Victim = getattr(victims, self.architecture)(known, **own)
        return trained

    def attack(
        self, problem: Problem, limit: float | None = None, observe: Observer | None = None
    ) -> Reconstruction:
        """Reconstruct from what an attacker may see alone, in `limit` seconds if it is given."""
        told = self.samples if self.told is None else self.told or None
        method: str | Method = self.method
        if subspace_is(self.method, self.architecture, self.rank) == "told" and self.dim:
            method = Tansley2026(basis=data.subspace(self.dim, self.rank or 0, self.seed))
        budget: Any = {"time_limit": limit, "product_limit": self.products}
        return reconstruct(problem, told, self.seed, method, observe=observe, **budget)

    def scored(self, victim: Victim, problem: Problem, found: Reconstruction) -> dict[str, Any]:
        """Compare a reconstruction with the truth; entries that are not finite count as zero.

        `label_error` is the training loss over that of a model that answers zero, `floor` the
        residual at the truth, `chance` the error of random candidates, `neighbour` that of the
        nearest other sample, `confined` the rank that candidates were held to.
        """
        known, training = victim.truth, victim.training
        fit = training["fit" if "fit" in training else "loss"]
        nothing = float(known.targets.square().mean())
        if self.loss != "squared":
            several = self.loss == "cross_entropy" and known.outputs > 1
            nothing = math.log(known.outputs if several else 2)
        candidates = found.samples.nan_to_num(0.0, 0.0, 0.0)
        result = score(candidates, known)
        level = chance(known.inputs, len(candidates), self.seed)
        values: dict[str, Any] = {
            "fit": fit,
            "label_error": fit / nothing,
            **result.summary(),
            "flips": result.flips,
            "recovered_flips": int((result.flipped & (result.errors < RECOVERED)).sum()),
            "candidates": len(candidates),
            "outcome": found.outcome.value,
            "steps": found.steps,
            "products_used": found.products,
            "residual": found.residual if math.isfinite(found.residual) else None,
            "floor": residual_at_truth(problem, known),
            "span_residual": span_residual(problem.features, candidates, known),
            "chance": level.sphere["error"],
            "neighbour": level.neighbour and level.neighbour["error"],
            "confined": found.rank,
        }
        if self.keep:
            values["picture"] = picture(known, candidates, result, self.keep)
        return values


# What an attack adds to the sizes, in order; where nothing was attacked, each is None.
RESULTS = (
    "fit", "label_error", "recovered", "exact", "recognisable", "error", "recall", "precision",
    "signed_error", "published_error", "cosine", "psnr", "ssim", "flips", "recovered_flips",
    "candidates", "outcome", "steps", "products_used", "residual", "floor", "span_residual",
    "chance", "neighbour", "confined",
)  # fmt: skip


def subspace_is(method: str, architecture: str, rank: int | None) -> str | None:
    """Say how an attack comes by the subspace of the samples; None if it does not look for one.

    The first layer of random features does not move and shows no subspace: where the samples have
    a rank, tansley2026 is handed the true basis there. Elsewhere it estimates one.
    """
    if method != SUBSPACE:
        return None
    return "told" if architecture == "random_features" and rank is not None else "estimated"


def picture(known: Data, candidates: Tensor, result: Score, count: int) -> str:
    """Draw the first samples above their candidates, scaled as in the score, as a PNG in base64."""
    shown = pictures(known, candidates, result.matched, result.flipped)
    rows = [torch.cat(list(images[:count].nan_to_num(0.5)), -1) for images in shown]  # none is grey
    return encoded(torch.cat(rows, -2).numpy())
