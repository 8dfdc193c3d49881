"""What a score has to be compared with: chance, look-alikes, data that the model never saw."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exhume.checks import whole_number
from exhume.data import Data
from exhume.equation.domain import Box, SphereInBox
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate.metrics import check_vectors, distances, nearest
from exhume.evaluate.published import GOOD, is_published_for, published_score
from exhume.evaluate.scoring import RECOVERED, measure, score, true_inputs

# Chance draws from a stream of its own, as the data may have been drawn from the same seed
STREAM = 0xC4A7CE


@dataclass(frozen=True)
class Chance:
    """A chance level says what the aggregates of a score are where nothing was recovered."""

    candidates: int  # How many random candidates were drawn
    trials: int  # How often
    seed: int  # The seed of the draws
    # Each aggregate of `score` for random candidates, mean over the trials: uniform on the sphere
    # with the mean norm of the true samples. On the sphere of radius √d the errors go to √2, the
    # published error to √(2 − 4/π) ≈ 0.85 from below as d grows
    sphere: dict[str, float | None]
    # The same for the nearest other training sample in place of each one (leave one out, one may
    # stand in for several). Images of a kind resemble each other, so this is the level to beat
    # there. None with a single sample
    neighbour: dict[str, float | None] | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)


def chance(truth: Data | Tensor, candidates: int, seed: int = 0, trials: int = 5) -> Chance:
    """Return the chance level of every aggregate on the same data, for as many candidates."""
    whole_number("candidates", candidates)
    whole_number("trials", trials)
    x, norms = true_inputs(truth)
    generator = np.random.default_rng([seed, STREAM])
    draws = []
    for _ in range(trials):
        points = torch.from_numpy(generator.standard_normal((candidates, x.shape[1])))
        drawn = float(norms.mean()) * torch.nn.functional.normalize(points, dim=1)
        draws.append(score(drawn, truth).summary())
    means: dict[str, float | None] = {}
    for name in draws[0]:  # None where a draw has none
        values = [value for draw in draws if (value := draw[name]) is not None]
        means[name] = sum(values) / trials if len(values) == trials else None
    others = measure(x, truth, nearest, others_only=True).summary() if len(x) > 1 else None
    return Chance(candidates, trials, seed, means, others)


@dataclass(frozen=True, eq=False)
class Contrast:
    """A contrast holds how near candidates come to the model's own samples and to held-out ones.

    Example:
        >>> contrast = Contrast(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.4, 0.5, 0.6]))
        >>> contrast.advantage, round(contrast.p_value, 9), contrast.shares(above=0.65)
        (1.0, 0.05, (1.0, 0.0))
    """

    own: Tensor  # Best similarity of each training sample, (n,)
    other: Tensor  # The same for held-out samples, (k,)

    @property
    def advantage(self) -> float:
        """Return the share of pairs whose own sample is nearer, ties half: ½ is no recovery."""
        return float(self._test().statistic) / (len(self.own) * len(self.other))

    @property
    def p_value(self) -> float:
        """Return the p-value of a one-sided Mann-Whitney test of own samples being nearer."""
        return float(self._test().pvalue)

    def _test(self) -> Any:
        from scipy.stats import mannwhitneyu

        own, other = self.own.double().numpy(), self.other.double().numpy()
        return mannwhitneyu(own, other, alternative="greater")

    def shares(self, above: float) -> tuple[float, float]:
        """Return the share of own and of held-out samples with a similarity above a bar."""
        own, other = ((best > above).double().mean().item() for best in (self.own, self.other))
        return own, other


@dataclass(frozen=True, eq=False)
class OtherData:
    """This control says whether candidates resemble training samples more than others of a kind."""

    # Share of own and of held-out samples with any candidate within 0.1
    recovered: tuple[float, float]
    cosines: Contrast  # Largest |cosine| with any candidate
    # SSIM with the nearest candidate, as published; None where samples are no images
    ssims: Contrast | None

    def to_dict(self) -> dict[str, Any]:
        """Return the aggregates, for JSON; pairs are own and held-out."""
        record: dict[str, Any] = {
            "samples": [len(self.cosines.own), len(self.cosines.other)],
            "recovered": list(self.recovered),
        }
        for name, contrast in (("cosine", self.cosines), ("ssim", self.ssims)):
            if contrast is not None:
                record[name] = {
                    "mean": [contrast.own.mean().item(), contrast.other.mean().item()],
                    "advantage": contrast.advantage,
                    "p_value": contrast.p_value,
                }
        if self.ssims is not None:
            record["good"] = list(self.ssims.shares(GOOD))
        return record


def other_data(candidates: Tensor, truth: Data, held_out: Data) -> OtherData:
    """Compare candidates with the training samples, and with as many that the model never saw.

    If the candidates hold nothing of the training set beyond its kind, own and held-out samples
    can be exchanged, and a small p-value is as rare as it says. So nothing that was taken from
    the training samples alone may enter the similarities: where their mean image was
    subtracted, that of both sides takes its place. With the former, candidates of nothing seem to
    recover samples, as they become the mean image. Held-out samples are of the same kind and in the
    same transform: `exhume.data.held_out` draws them.
    """
    if not len(candidates):
        raise InputError("there are no candidates to compare with the training samples")
    if held_out.shape != truth.shape:
        both = f"held-out samples have shape {held_out.shape}, the training samples {truth.shape}"
        raise InputError(f"{both}: draw them with exhume.data.held_out")
    y = check_vectors(candidates, "candidate", dim=truth.dim)
    directions = torch.nn.functional.normalize(y, dim=1)

    def recovered(side: Data) -> float:
        x, norms = true_inputs(side)
        return (distances(x, y).amin(1) / norms < RECOVERED).double().mean().item()

    def cosines(side: Data) -> Tensor:
        x, norms = true_inputs(side)
        return ((x @ directions.T).abs().amax(1) / norms).clamp(max=1)

    shares = recovered(truth), recovered(held_out)
    if truth.transform.mean is not None:
        truth, held_out = _with_one_mean(truth, held_out)
    ssims = None
    if is_published_for(truth.shape):
        ssims = Contrast(published_score(y, truth).ssim, published_score(y, held_out).ssim)
    return OtherData(shares, Contrast(cosines(truth), cosines(held_out)), ssims)


def _with_one_mean(*sides: Data) -> list[Data]:
    """Return both sides as inputs from which the mean image of both was subtracted."""
    pixels = [side.images().flatten(1) for side in sides]
    mean = torch.cat(pixels).mean(0)

    def centred(side: Data, rows: Tensor) -> Data:
        transform = replace(side.transform, mean=mean, shift=mean.mean().item())
        return replace(side, inputs=transform.apply(rows, transform.norms), transform=transform)

    return list(map(centred, sides, pixels))


def wrong_prior(problem: Problem, shift: float) -> Problem:
    """Return the same problem with the box of the inputs in the wrong place.

    Weights do not depend on the box. What a search finds in the right one and no longer in a wrong
    one, at as small a residual, it owed to the box and not to the weights. The shift is added to
    the bounds of every entry; random starts inside the box move along.
    """

    def moved(box: Box) -> Box:
        return Box(*(box.bounds.value + shift))

    domain = problem.domain
    if isinstance(domain, Box):
        return replace(problem, domain=moved(domain))
    if isinstance(domain, SphereInBox):
        return replace(problem, domain=replace(domain, box=moved(domain.box)))
    raise InputError(f"wrong prior: shifts the bounds of a box; inputs lie in: {domain.name}.")
