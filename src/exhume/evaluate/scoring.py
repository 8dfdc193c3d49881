"""Score candidates against the truth, as vectors and as images."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exhume.auditing.evidence import GRADES
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import metrics
from exhume.evaluate.metrics import assign, check_vectors, distances, nearest, take
from exhume.wording import finite

# Below this relative error a sample counts as recovered: its picture is plainly the same one
RECOVERED = 0.1
# A candidate is recognisable with less than this share of the nearest other sample's distance,
# and less than half of the norm: shown both, nobody takes it for the other one
NEARER, HALF = 1 / 3, 0.5
EXACT = 0.01  # Below this relative error it counts as exact: a picture shows no difference any more

Pairing = Callable[[Tensor], Tensor]
IN_ROW = ("error", "signed_error", "published_error", "cosine", "psnr", "ssim")
AGGREGATES = ("recovered", "exact", "recognisable", "error", "recall", "precision", *IN_ROW[1:])


@dataclass(frozen=True, eq=False)
class Score:
    """A score says what was recovered: plural names by true sample, singular names over all.

    Pairs are one to one, with the least sum of sign-invariant errors. A true sample left without a
    candidate (there were fewer candidates than samples) scores as the zero vector would: error 1,
    cosine 0, no image metrics. `error`, `signed_error`, `published_error`, `cosine` and `ssim` are
    means; `psnr` is the lower median, as one equal pair would make a mean infinite.
    """

    samples: int  # How many true samples there were
    candidates: int  # How many candidates there were
    matched: Tensor  # The candidate of each true sample, −1 for none
    errors: Tensor  # min(‖x − y‖, ‖x + y‖) / ‖x‖ of each pair
    signed_errors: Tensor  # ‖x − y‖ / ‖x‖ of the same; near 2 for an exact but negated candidate
    # ‖|x| − |y|‖ / √d, in a pairing of its own, on its own squares, as in the published code. It
    # merges images that differ: compare with it, do not rely on it
    published_errors: Tensor
    cosines: Tensor  # |cosine| of each pair, blind to the scale, which many models do not show
    flipped: Tensor  # Whether the negative of the candidate is the closer one
    flips: int  # How many pairs are of opposite sign
    # Peak signal-to-noise ratio of the pairs as images, NaN without a candidate; None where the
    # truth is no images. The candidate has its sign set right and is turned into an image with the
    # norm of its true sample: a score may know that, an attack may not
    psnrs: Tensor | None
    ssims: Tensor | None  # Structural similarity of the same; None below 3 pixels a side, too
    recovered: float  # Share of true samples whose own candidate has an error under 0.1
    exact: float  # The same under 0.01
    # Share whose own candidate is at least recognisable: recovered, or nearer by far than any other
    # training sample is; of images, `exhume score` counts by SSIM against held-out ones, too
    recognisable: float
    likenesses: Tensor  # Whether each true sample is among these
    recall: float  # Share of true samples with any candidate within 0.1
    precision: float  # Share of candidates within 0.1 of any true sample; 0 without candidates
    error: float
    signed_error: float
    published_error: float
    cosine: float
    psnr: float | None
    ssim: float | None

    def summary(self) -> dict[str, float | None]:
        """Return the aggregates by name, for JSON: what is not finite is None."""
        return {name: finite(getattr(self, name)) for name in AGGREGATES}

    def grade(self, sample: int) -> str:
        """Return what came back of a true sample: exact, recovered, recognisable or not found."""
        error = float(self.errors[sample])
        reached = error < EXACT, error < RECOVERED, bool(self.likenesses[sample]), True
        return GRADES[reached.index(True)]

    def seen(self, recognised: Tensor) -> "Score":
        """Return the score with further samples (n,) that are recognisable, as pictures."""
        likenesses = self.likenesses | recognised
        return replace(self, likenesses=likenesses, recognisable=_share(likenesses))

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON: what is not finite, or not there, is None."""
        columns = {name: getattr(self, f"{name}s") for name in IN_ROW}
        rows = [
            {
                "sample": i,
                "candidate": j if j >= 0 else None,
                "grade": self.grade(i),
                "flipped": bool(self.flipped[i]),
                **{k: None if v is None else finite(float(v[i])) for k, v in columns.items()},
            }
            for i, j in enumerate(self.matched.tolist())
        ]
        return {
            "samples": self.samples,
            "candidates": self.candidates,
            "thresholds": {"recovered": RECOVERED, "exact": EXACT, "nearer": NEARER},
            **self.summary(),
            "flips": self.flips,
            "rows": rows,
        }


def score(samples: Tensor, truth: Data | Tensor) -> Score:
    """Match candidates (k, d) with the training samples one to one, and measure.

    Candidates are in the space of the model's inputs; k need not be n. The truth is the training
    data, or its (n, d) inputs, which give no image metrics.

    Example:
        >>> truth = 10 * torch.eye(3)
        >>> found = torch.tensor([[0.0, -10.0, 0.0], [9.5, 0.0, 0.0]])
        >>> result = score(found, truth)
        >>> result.matched.tolist(), result.errors.tolist()
        ([1, 0, -1], [0.05, 0.0, 1.0])
        >>> round(result.recovered, 3), round(result.exact, 3), result.flips
        (0.667, 0.333, 1)
        >>> [result.grade(i) for i in range(3)]
        ['recovered', 'exact', 'not found']
    """
    return measure(samples, truth, assign)


def measure(
    samples: Tensor, truth: Data | Tensor, pair: Pairing, others_only: bool = False
) -> Score:
    """Return the score in a pairing of the caller's choice.

    `pair` takes costs (n, k) to the column of each row, −1 for none. With `others_only` the pairs
    (i, i) are forbidden: the samples are the true samples themselves.
    """
    x, norms = true_inputs(truth)
    y = check_vectors(samples, "candidate", dim=x.shape[1])
    costs = distances(x, y) / norms[:, None]
    published_costs = distances(x, y, "published").square()
    if others_only:
        costs.fill_diagonal_(math.inf)
        published_costs.fill_diagonal_(math.inf)
    nearby = (distances(x, x) / norms[:, None]).fill_diagonal_(math.inf).amin(1)

    matched = pair(costs)
    paired = take(y, matched)
    flipped = (x * paired).sum(1) < 0
    aligned = torch.where(flipped[:, None], -paired, paired)
    errors = metrics.errors(x, aligned)
    likenesses = (errors < RECOVERED) | (errors < (NEARER * nearby).clamp(max=HALF))

    def either_sign(truth: Tensor, found: Tensor) -> Tensor:
        return torch.minimum(metrics.errors(truth, found), metrics.errors(truth, -found))

    # Rounding in the costs must not put the nearest candidate behind the matched one.
    closest = torch.minimum(either_sign(x, take(y, nearest(costs))), errors)
    columns: dict[str, Any] = {
        "errors": errors,
        "signed_errors": metrics.errors(x, paired),
        "published_errors": metrics.published_errors(x, take(y, pair(published_costs))),
        "cosines": metrics.cosines(x, aligned),
    }
    means: dict[str, Any] = {name[:-1]: float(values.mean()) for name, values in columns.items()}
    psnrs = ssims = None
    if not isinstance(truth, Tensor) and len(truth.shape) in (2, 3):
        originals, images = pictures(truth, y, matched, flipped)
        psnrs, least = metrics.psnr(originals, images), min(truth.shape[-2:])
        ssims = metrics.ssim(originals, images) if least >= metrics.SIDE else None
    return Score(
        samples=len(x),
        candidates=len(y),
        matched=matched,
        flipped=flipped,
        flips=int(flipped.sum()),
        psnrs=psnrs,
        ssims=ssims,
        recovered=_share(errors < RECOVERED),
        exact=_share(errors < EXACT),
        recognisable=_share(likenesses),
        likenesses=likenesses,
        recall=_share(closest < RECOVERED),
        precision=_share(either_sign(x[costs.argmin(0)], y) < RECOVERED),
        psnr=None if psnrs is None else float(psnrs.nanmedian()),
        ssim=None if ssims is None else float(ssims.nanmean()),
        **columns,
        **means,
    )


def pictures(
    truth: Data, samples: Tensor, matched: Tensor, flipped: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the true samples and their candidates as images in [0, 1], (n, *shape) each.

    A candidate has its sign set right, and the norm of its true sample before rescaling. Where a
    sample has none, the image is NaN. The last two arguments are those of a `Score`.
    """
    x, norms = truth.inputs.detach().to("cpu", torch.float64), truth.transform.norms
    found = paired(samples.to(x), matched, flipped)
    norms = None if norms is None else norms.detach().cpu()
    return truth.images(x, norms).clamp(0, 1), truth.images(found, norms).clamp(0, 1)


def paired(samples: Tensor, matched: Tensor, flipped: Tensor) -> Tensor:
    """Return the candidate of each true sample with its sign set right, (n, d); NaN for none."""
    y = take(samples, matched, missing=math.nan)
    return torch.where(flipped[:, None], -y, y)


def true_inputs(truth: Data | Tensor) -> tuple[Tensor, Tensor]:
    """Return the true inputs, (n, d) in float64, and their norms, (n,); refuse none, and zeros."""
    x = check_vectors(truth if isinstance(truth, Tensor) else truth.inputs, "true sample")
    if len(x) == 0:
        raise InputError("there are no true samples to score against")
    norms = metrics.norms(x)
    if not norms.all():
        place = int((norms == 0).nonzero()[0])
        raise InputError(f"true sample {place} is zero in every entry; leave it out")
    return x, norms


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else 0.0
