"""One victim, one attack, one score: the cell that every experiment is a grid of."""

import base64
import io
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exhume import data, victims
from exhume.data import Data
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import RECOVERED, Score, chance, residual_at_truth, score, span_residual
from exhume.experiments.samples import (
    Samples,
    check_absent,
    check_number,
    check_size,
    check_whole,
    check_word,
)
from exhume.features.activations import activation as named_activation
from exhume.features.weights import Seeded, materialise
from exhume.methods import METHODS, Reconstruction, reconstruct
from exhume.methods.progress import Method
from exhume.methods.tansley2026 import Tansley2026
from exhume.models import architectures
from exhume.report.gallery import displayed
from exhume.sweep import Record
from exhume.victims import Victim
from exhume.victims.losses import LOSSES

UNDETERMINED = "undetermined"
"""The outcome where nothing was attacked, as any candidates would explain the weights."""

UNTIL = {"squared": 1e-8, "logistic": 1e-2, "cross_entropy": 1e-2}
"""Training loss at which a network is done, unless it is given."""

RIDGE = 1e-3
"""Of logistic regression on random features, which has no minimum without one."""

SIZED = {"random_features": "width", "two_layer": "width", "resnet": "width", "vit": "dim"}
"""Architectures, and what of each is made as large as the ratio asks for."""

STEPS = {"vit": 4}
"""What that number must be a multiple of: the four heads of a transformer."""

LARGEST = 10_000
"""The largest ratio that is not taken for a slip."""

SUBSPACE = "tansley2026"
"""The method that confines candidates to a subspace."""

TOLD, ESTIMATED = "told", "estimated"
"""How that method comes by the subspace."""


@dataclass(frozen=True)
class Attack(Samples):
    """Train a model, attack it, and only then compare with its training data.

    Attributes:
        ratio: equations for each unknown, p·m/(d·n), in the parameters that are attacked. The
            width that comes nearest to it is chosen.
        architecture: random_features, two_layer, resnet or vit.
        activation: of random features and two_layer; the others have their own.
        loss: squared, logistic, or (not for random features) cross_entropy.
        block: of a network, the parameters that are attacked: last or all.
        until: training loss at which a network is done; `UNTIL` unless given.
        lazy: α of α(f − f₀), see `victims.Training`.
        dtype: precision of the training of a network.
        method: of `exhume.methods`; tansley2026 may be told the subspace, see `subspace_is`.
        told: the number of samples that the attack is given; n unless given.
        products: budget of the attack, in passes over the features. There is no clock, so that
            results repeat; None for no limit.
        keep: of images: how many pairs to keep as a picture, originals above reconstructions.
    """

    ratio: float = 5.0
    architecture: str = "random_features"
    activation: str = "relu"
    loss: str = "squared"
    block: str = "last"
    until: float | None = None
    lazy: float | None = None
    dtype: str = "float64"
    method: str = "exhume"
    told: int | None = None
    products: int | None = 30_000
    keep: int = 0

    def check(self) -> None:
        """Refuse what could not be run, before any work."""
        super().check()
        check_word("architecture", self.architecture, SIZED)
        check_word("method", self.method, METHODS)
        check_word("loss", self.loss, LOSSES)
        check_word("block", self.block, ("last", "all"))
        check_word("dtype", self.dtype, ("float32", "float64"))
        named_activation(self.activation)
        check_number("ratio", self.ratio)
        if self.ratio > LARGEST:
            raise InputError(f"ratio: expected at most {LARGEST:,}, got {self.ratio:g}.")
        check_whole("keep", self.keep, 0)
        if self.keep and self.data == "sphere":
            raise InputError("keep: sphere data has no pictures to keep; expected 0.")
        for field in ("until", "lazy"):
            if getattr(self, field) is not None:
                check_number(field, getattr(self, field))
        for field in ("told", "products"):
            if getattr(self, field) is not None:
                check_whole(field, getattr(self, field), 1)
        if self.dim is not None:
            self._equations(self.dim)
        self._check_model()

    def _equations(self, dim: int) -> float:
        """The parameters that are asked for, ratio · d · n."""
        equations = self.ratio * dim * self.samples
        check_size("ratio · dim · samples, the parameters that are attacked", round(equations))
        return equations

    def _check_model(self) -> None:
        if self.architecture == "random_features":
            if self.loss == "cross_entropy":
                raise InputError(
                    "loss: random features are fitted with squared or logistic, got cross_entropy."
                )
            for field in ("until", "lazy"):
                check_absent(field, getattr(self, field), "random_features, which are solved for")
            if self.block != "last":
                raise InputError("block: of random features only the last layer is trained.")
        elif self.architecture != "two_layer":
            if self.data == "sphere":
                raise InputError(f"architecture: {self.architecture} takes images, not sphere.")
            if self.activation != "relu":
                raise InputError(
                    f"activation: {self.architecture} has its own; leave relu, got "
                    f"{self.activation!r}."
                )

    def run(self, device: str) -> dict[str, Any]:
        """Train, attack, score.

        Where there are no more features than candidates, any candidates explain the weights:
        nothing is attacked, the outcome is `undetermined`, and scores are None. Where an attack
        diverged, entries that are not finite score as zero.

        Args:
            device: where to compute.

        Returns:
            `inputs` (d), `width`, `outputs` (m), `parameters` (p·m), `actual_ratio` (as the width
            has it), `subspace` (told, estimated, or None), `fit` (training loss), `label_error`
            (the same, over that of a model that answers zero), what `Score.summary` has, `flips`,
            `recovered_flips` (those among the recovered), `candidates`, `outcome`, `steps`,
            `products_used`, `residual`, `floor` (the residual at the truth), `span_residual`,
            `chance` (error of random candidates), `neighbour` (error of the nearest other sample),
            `confined` (rank that candidates were held to), and `picture` (PNG, base64) where one
            is kept.
        """
        self.check()
        known = self.known()
        width = self.width(known)
        count = self.told or self.samples
        features, equations = self._sizes(known, width)
        sizes: dict[str, Any] = {
            "inputs": known.dim,
            "width": width,
            "outputs": known.outputs,
            "parameters": equations,
            "actual_ratio": equations / (known.dim * known.samples),
            "subspace": subspace_is(self.method, self.architecture, self.rank),
        }
        rows = known.outputs if self.block == "all" else 1
        if features <= rows * max(count, known.samples):
            return {**sizes, **dict.fromkeys(RESULTS), "outcome": UNDETERMINED}
        victim = self.victim(known, width, device)
        problem = victim.posed(self.block).to(device)
        found = self.attack(problem)
        training = victim.training
        fit = training["fit"] if "fit" in training else training["loss"]
        fitted = {"fit": fit, "label_error": fit / self._loss_of_nothing(known)}
        return {**sizes, **fitted, **self._scored(problem, known, found)}

    def _loss_of_nothing(self, known: Data) -> float:
        """The training loss of a model that answers zero."""
        if self.loss == "squared":
            return float(known.targets.square().mean())
        return math.log(known.outputs if self.loss == "cross_entropy" and known.outputs > 1 else 2)

    def width(self, known: Data) -> int:
        """The width whose equations come nearest to ratio · d · n.

        Example:
            >>> cell = Attack(dim=10, samples=3, ratio=2.0)
            >>> cell.width(cell.known())
            60
        """
        wanted = self._equations(known.dim)
        step = STEPS.get(self.architecture, 1)

        def equations(steps: int) -> int:
            return self._sizes(known, steps * step)[1]

        high = 1
        while equations(high) < wanted:
            high *= 2
        low = high // 2  # too few, or none
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if equations(middle) < wanted else (low, middle)
        nearer = low >= 1 and wanted - equations(low) < equations(high) - wanted
        return step * (low if nearer else high)

    def _sizes(self, known: Data, width: int) -> tuple[int, int]:
        """Rows of the target and its entries, p and p·m, of a model of that width."""
        if self.architecture in ("random_features", "two_layer") and self.block == "last":
            return width, width * known.outputs
        arguments = {"shape": list(known.shape), "outputs": known.outputs}
        with torch.device("meta"):
            network = architectures.build(
                self.architecture, {**arguments, SIZED[self.architecture]: width}
            )
        if self.block == "all":
            every = sum(p.numel() for p in network.parameters())
            return every, every
        *_, last = (part for part in network.modules() if isinstance(part, torch.nn.Linear))
        return last.in_features, last.in_features * last.out_features

    def victim(self, known: Data, width: int, device: str) -> Victim:
        """The trained model."""
        if self.architecture == "random_features":
            weights = None
            if torch.device(device).type == "cuda":
                seeded = Seeded(width, known.dim, self.seed)
                weights = materialise(seeded.to(torch.device(device), torch.float32))
            return victims.random_features(
                known,
                width,
                self.activation,
                self.seed,
                self.loss,
                RIDGE if self.loss == "logistic" else 0.0,
                weights,
                device,
            )
        make = getattr(victims, self.architecture)
        if self.architecture == "two_layer":
            make = partial(make, activation=self.activation)
        trained: Victim = make(
            known,
            **{SIZED[self.architecture]: width},
            loss=self.loss,
            seed=self.seed,
            device=device,
            dtype=getattr(torch, self.dtype),
            until=UNTIL[self.loss] if self.until is None else self.until,
            lazy=self.lazy,
        )
        return trained

    def attack(self, problem: Problem) -> Reconstruction:
        """The reconstruction, from what an attacker may see alone."""
        return reconstruct(
            problem,
            self.told or self.samples,
            self.seed,
            self._method(),
            product_limit=self.products,
        )

    def _method(self) -> str | Method:
        told = subspace_is(self.method, self.architecture, self.rank) == TOLD
        if told and self.dim and self.rank:
            return Tansley2026(basis=data.subspace(self.dim, self.rank, self.seed))
        return self.method

    def _scored(self, problem: Problem, known: Data, found: Reconstruction) -> dict[str, Any]:
        candidates = found.samples.nan_to_num(0.0, 0.0, 0.0)
        result = score(candidates, known)
        level = chance(known.inputs, len(candidates), self.seed)
        values: dict[str, Any] = {
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


RESULTS = (
    "fit", "label_error", "recovered", "exact", "error", "recall", "precision", "signed_error",
    "published_error", "cosine", "psnr", "ssim", "flips", "recovered_flips", "candidates",
    "outcome", "steps", "products_used", "residual", "floor", "span_residual", "chance",
    "neighbour", "confined",
)  # fmt: skip
"""What an attack adds to the sizes; None where nothing was attacked."""


def subspace_is(method: str, architecture: str, rank: int | None) -> str | None:
    """How an attack comes by the subspace of the samples; None if it does not look for one.

    The first layer of random features does not move and shows no subspace: where the samples have
    a rank, tansley2026 is handed the true basis there. Elsewhere it estimates one.

    Example:
        >>> subspace_is("tansley2026", "random_features", 4)
        'told'
        >>> subspace_is("tansley2026", "two_layer", 4)
        'estimated'
        >>> subspace_is("exhume", "random_features", 4)
    """
    if method != SUBSPACE:
        return None
    return TOLD if architecture == "random_features" and rank is not None else ESTIMATED


def without_picture(record: Record) -> Record:
    """The same record for a table, which has no place for a picture."""
    if record.values is None:
        return record
    return replace(record, values={k: v for k, v in record.values.items() if k != "picture"})


def picture(known: Data, candidates: Tensor, result: Score, count: int) -> str:
    """The first samples above their reconstructions, as a PNG in base64.

    Candidates have their sign set right and the norm of their sample, as in the score; a sample
    without one is grey.
    """
    from PIL import Image

    matched = result.matched[:count]
    signs = torch.where(result.flipped[:count, None], -1.0, 1.0)
    norms = known.transform.norms
    found = known.images(
        signs * candidates[matched.clamp_min(0)], None if norms is None else norms[:count]
    )
    found[matched < 0] = 0.5
    rows = [torch.cat(list(images), -1) for images in (known.images()[:count], found)]
    pixels = np.rint(255 * displayed(torch.cat(rows, -2).numpy())).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
