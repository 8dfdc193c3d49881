"""What theory says of a width, as one record: thresholds, guarantees, signs, privacy.

The record is what `exhume bound` prints, and writes as JSON.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from exhume.checks import number, whole_number
from exhume.errors import InputError
from exhume.features.activations import activation as activation_named
from exhume.theory.counting import blocks, label_fitting, reconstruction, safe_width, unknowns
from exhume.theory.hermite import coefficients, sign_ambiguity
from exhume.theory.privacy import error_bound, rho_at_error, rho_of, sphere_error_bound
from exhume.theory.width import NoBoundError, width_bound

SAMPLES = (1, 10, 100, 1000, 10_000)
"""The safe width is given for these numbers of samples, one a decade, where none is asked for."""

ORDERS = 8
"""So many Hermite coefficients are shown; those of higher orders hardly differ between σ."""

COUNTS = (
    "counts compare equations with unknowns for features in general position: below the threshold "
    "a continuum of data sets explains the weights, though single samples may still leak; above it "
    "nothing is promised, to either side",
    "samples have a known norm, and one coefficient for each output",
    "the samples' span is what the change of a dense first layer shows, if that was trained by "
    "gradient descent without decay; random features do not show it",
)
LAST = (
    "a safe width is one for the last layer alone: the other blocks have equations of their own, "
    "and knowing what samples look like makes up for equations"
)
TRAINED = "it is for random features, and the layers below the last one were trained here."
GUESSED = (
    "privacy: one sample is unknown, all others are known to the attacker; the sample is isotropic "
    "Gaussian, or uniform on a sphere, in those dimensions, so that data which are easier to guess "
    "have less protection"
)
ACCOUNTED = (
    "privacy: (ε, δ) was computed from ρ by ε = ρ + 2√(ρ ln(1/δ)); a tighter accountant allows a "
    "larger ρ for the same ε, and (ε, δ) alone implies none"
)


@dataclass(frozen=True)
class Sizes:
    """The sizes that are asked about.

    Attributes:
        dim: d, of an input.
        outputs: m.
        width: p, of what the last layer is given; None where only thresholds are asked for.
        activation: σ by name; None where it is not known.
        samples: n; None where it is not known.
        subspace: dimensions that the attacker knows the samples to lie in; None for all.
        shapes: of the trained parameters, where there is a checkpoint.
        head: name of the last layer of a network that was trained as a whole.
    """

    dim: int
    outputs: int
    width: int | None
    activation: str | None
    samples: int | None = None
    subspace: int | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    head: str | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be, and an activation of no known name."""
        count = 1 if self.samples is None else self.samples
        unknowns(self.dim, count, self.outputs, self.subspace)
        if self.width is not None:
            whole_number("width", self.width)
        if self.activation is not None:
            activation_named(self.activation)


@dataclass(frozen=True)
class Privacy:
    """The privacy of a training: ρ of zCDP, as it was told or from ε and δ."""

    rho: float
    told: bool
    delta: float | None

    @classmethod
    def of(cls, rho: float | None, epsilon: float | None, delta: float | None) -> "Privacy | None":
        """Return what was told of it; None where nothing was."""
        if rho is not None and epsilon is not None:
            raise InputError("rho and epsilon: give one of them.")
        if delta is not None and epsilon is None:
            raise InputError("delta: goes with --epsilon.")
        if epsilon is not None:
            return cls(rho_of(epsilon, delta or 0.0), False, delta)
        return None if rho is None else cls(number("rho", rho, above=0), True, None)

    def record(self, dim: int) -> dict[str, Any]:
        """Return the least error of any attack on samples of which nothing is known."""
        return {
            "rho": self.rho,
            "told": self.told,
            "dim": dim,
            "error_gaussian": error_bound(self.rho, dim),
            "error_sphere": sphere_error_bound(self.rho, dim) if dim > 1 else None,
            "rho_at_half": rho_at_error(0.5, dim),
        }


def overview(
    sizes: Sizes, conditions: Mapping[str, float], privacy: Privacy | None = None
) -> dict[str, Any]:
    """Return all that theory says of some sizes.

    Args:
        sizes: what is asked about.
        conditions: of the guarantee: tolerance, separation, floor, ceiling, failure (see
            `width_bound`).
        privacy: of the training, where it had some.
    """
    told = ("dim", "outputs", "width", "samples", "subspace", "activation")
    found: dict[str, Any] = {"sizes": {word: getattr(sizes, word) for word in told}}
    assumptions = [*COUNTS]
    if sizes.samples is not None:
        if sizes.head is not None:
            found["guarantee"] = {"none": TRAINED}
        elif sizes.activation is not None:
            found["guarantee"] = _guarantee(sizes, sizes.samples, conditions, assumptions)
        found["counting"] = _counting(sizes, sizes.samples)
    if sizes.shapes is not None:
        listed = blocks(sizes.shapes, sizes.dim, sizes.outputs, sizes.head)
        found["blocks"] = [asdict(block) for block in listed]
        found["safe_widths"] = _safe_widths(sizes)
        assumptions.append(LAST)
    if sizes.activation is not None:
        found["hermite"] = _hermite(sizes.activation)
    if privacy is not None:
        found["privacy"] = privacy.record(sizes.subspace or sizes.dim)
        assumptions += [GUESSED, ACCOUNTED] if privacy.delta else [GUESSED]
    return found | {"assumptions": assumptions}


def _counting(sizes: Sizes, samples: int) -> dict[str, Any]:
    """Thresholds by name, and where the width stands."""
    dim, outputs, known = sizes.dim, sizes.outputs, sizes.subspace
    thresholds = {"label fitting": label_fitting(samples)}
    if known is not None:
        least = reconstruction(dim, samples, outputs, known)
        thresholds[f"reconstruction in {known} known dimensions"] = least
    spanned = reconstruction(dim, samples, outputs, "span")
    thresholds["reconstruction in the samples' span"] = spanned
    thresholds["reconstruction in full space"] = reconstruction(dim, samples, outputs)
    if sizes.width is None:
        return {"thresholds": thresholds}
    return {
        "thresholds": thresholds,
        "ratios": {name: sizes.width / least for name, least in thresholds.items()},
        "verdict": _verdict(sizes.width, thresholds),
    }


def _verdict(width: int, thresholds: Mapping[str, int]) -> str:
    reached = [name for name, least in thresholds.items() if width >= least]
    if len(reached) == len(thresholds):
        return (
            f"Width {width:,} has as many equations as unknowns even in full space: counting does "
            "not protect the samples."
        )
    if any(name != "label fitting" for name in reached):
        where = next(name for name in reached if name != "label fitting")
        return (
            f"Width {width:,} has as many equations as unknowns for {where}, and fewer in full "
            "space: it depends on whether the attacker knows where the samples lie."
        )
    fitted = "fits any labels, but has" if reached else "is too narrow to fit any labels, and has"
    return (
        f"Width {width:,} {fitted} fewer equations than unknowns: a continuum of data sets "
        "explains the weights, and not all samples can be recovered from the last layer alone."
    )


def _guarantee(
    sizes: Sizes, samples: int, conditions: Mapping[str, float], assumptions: list[str]
) -> dict[str, Any]:
    """The width from which exact solutions are the samples; or why there is none."""
    sigma = sizes.activation or "relu"
    rest = {word: conditions[word] for word in ("tolerance", "separation", "failure")}
    size = conditions["floor"], conditions["ceiling"]
    try:
        bounded = width_bound(samples, sizes.dim, sigma, sizes.subspace, coefficients=size, **rest)
    except NoBoundError as error:
        return {"none": str(error)}
    record = asdict(bounded)
    assumptions += [f"guarantee: {sentence}" for sentence in record.pop("assumptions")]
    if sizes.outputs > 1:
        assumptions.append("guarantee: it is for one output alone, the others help")
    if sizes.width is not None:
        record["failure_at_width"] = bounded.failure_at(sizes.width)
        record["failure_at_width_numerical"] = bounded.failure_at(sizes.width, numerical=True)
    return record


def _safe_widths(sizes: Sizes) -> list[dict[str, int]]:
    return [
        {
            "samples": count,
            "full_space": safe_width(sizes.dim, count, sizes.outputs),
            "span": safe_width(sizes.dim, count, sizes.outputs, "span"),
        }
        for count in (SAMPLES if sizes.samples is None else (sizes.samples,))
    ]


def _hermite(name: str) -> dict[str, Any]:
    found = coefficients(name, ORDERS)
    return {
        "coefficients": found.values.tolist(),
        "error": found.error,
        "energy": found.energy,
        "share_above": found.rest,
        "sign": asdict(sign_ambiguity(name)),
    }
