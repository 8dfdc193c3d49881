"""What theory says of a width, as the record that `exhume bound` prints, and writes as JSON."""

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

SAMPLES = (1, 10, 100, 1000, 10_000)  # of safe widths where no number is asked for: one a decade
ORDERS = 8  # so many Hermite coefficients are shown; those of higher orders hardly differ between σ
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
AS_MANY = "has as many equations as unknowns"
DEPENDS = "it depends on whether the attacker knows where the samples lie"
CONTINUUM = "a continuum of data sets explains the weights, and not all samples can be recovered"
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
    """The sizes that are asked about."""

    dim: int  # d, of an input
    outputs: int  # m
    width: int | None  # p, of what the last layer is given; None where only thresholds are asked
    activation: str | None  # σ by name, where it is known
    samples: int | None = None  # n, where it is known
    subspace: int | None = None  # dimensions that the attacker knows the samples to lie in
    shapes: Mapping[str, tuple[int, ...]] | None = None  # of trained parameters, of a checkpoint
    head: str | None = None  # name of the last layer of a network that was trained as a whole

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be, and an activation of no known name."""
        count = 1 if self.samples is None else self.samples
        unknowns(self.dim, count, self.outputs, self.subspace)
        if self.width is not None:
            whole_number("width", self.width)
        if self.activation is not None:
            activation_named(self.activation)


def overview(
    sizes: Sizes,
    conditions: Mapping[str, float],
    rho: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> dict[str, Any]:
    """Return all that theory says of some sizes.

    Conditions of the guarantee are tolerance, separation, floor, ceiling and failure (see
    `width_bound`). The training is ρ-zCDP, or (ε, δ)-DP, with δ = 0 if None.
    """
    privacy = _privacy(rho, epsilon, delta, sizes.subspace or sizes.dim)  # refuses, so it is first
    asked = ("dim", "outputs", "width", "samples", "subspace", "activation")
    found: dict[str, Any] = {"sizes": {word: getattr(sizes, word) for word in asked}}
    dim, outputs, sigma, assumptions = sizes.dim, sizes.outputs, sizes.activation, [*COUNTS]
    if sizes.samples is not None:
        if sizes.head is not None:
            found["guarantee"] = {"none": TRAINED}
        elif sigma is not None:
            found["guarantee"] = _guarantee(sizes, sizes.samples, sigma, conditions, assumptions)
        found["counting"] = _counting(sizes, sizes.samples)
    if sizes.shapes is not None:
        found["blocks"] = [asdict(b) for b in blocks(sizes.shapes, dim, outputs, sizes.head)]
        found["safe_widths"] = [
            {"samples": n, "full_space": safe_width(dim, n, outputs)}
            | {"span": safe_width(dim, n, outputs, "span")}
            for n in (SAMPLES if sizes.samples is None else (sizes.samples,))
        ]
        assumptions.append(LAST)
    if sigma is not None:
        series = coefficients(sigma, ORDERS)
        shown = {"coefficients": series.values.tolist(), "error": series.error}
        shown |= {"energy": series.energy, "share_above": series.rest}
        found["hermite"] = shown | {"sign": asdict(sign_ambiguity(sigma))}
    if privacy is not None:
        found["privacy"] = privacy
        assumptions += [GUESSED, ACCOUNTED] if delta else [GUESSED]
    return found | {"assumptions": assumptions}


def _privacy(
    rho: float | None, epsilon: float | None, delta: float | None, dim: int
) -> dict[str, Any] | None:
    """The least error of any attack on a sample in so many dimensions; None if nothing is told."""
    if rho is not None and epsilon is not None:
        raise InputError("rho and epsilon: give one of them.")
    if delta is not None and epsilon is None:
        raise InputError("delta: goes with --epsilon.")
    if rho is None and epsilon is None:
        return None
    least = number("rho", rho, above=0) if epsilon is None else rho_of(epsilon, delta or 0.0)
    on_sphere = sphere_error_bound(least, dim) if dim > 1 else None
    errors = {"error_gaussian": error_bound(least, dim), "error_sphere": on_sphere}
    told = {"rho": least, "told": epsilon is None, "dim": dim}
    return told | errors | {"rho_at_half": rho_at_error(0.5, dim)}


def _counting(sizes: Sizes, samples: int) -> dict[str, Any]:
    """Thresholds by name, and where the width stands."""
    dim, outputs, known, width = sizes.dim, sizes.outputs, sizes.subspace, sizes.width
    thresholds = {"label fitting": label_fitting(samples)}
    if known is not None:
        name = f"reconstruction in {known} known dimensions"
        thresholds[name] = reconstruction(dim, samples, outputs, known)
    spanned = reconstruction(dim, samples, outputs, "span")
    thresholds["reconstruction in the samples' span"] = spanned
    thresholds["reconstruction in full space"] = reconstruction(dim, samples, outputs)
    if width is None:
        return {"thresholds": thresholds}
    reached = [name for name, least in thresholds.items() if width >= least]
    where = next((name for name in reached if name != "label fitting"), None)
    if len(reached) == len(thresholds):
        verdict = f"{AS_MANY} even in full space: counting does not protect the samples."
    elif where is not None:
        verdict = f"{AS_MANY} for {where}, and fewer in full space: {DEPENDS}."
    else:
        fits = "fits any labels, but has" if reached else "is too narrow to fit any labels, and has"
        verdict = f"{fits} fewer equations than unknowns: {CONTINUUM} from the last layer alone."
    ratios = {name: width / least for name, least in thresholds.items()}
    return {"thresholds": thresholds, "ratios": ratios, "verdict": f"Width {width:,} {verdict}"}


def _guarantee(
    sizes: Sizes, samples: int, sigma: str, conditions: Mapping[str, float], assumptions: list[str]
) -> dict[str, Any]:
    """The width from which exact solutions are the samples; or why there is none."""
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
