"""Whether the weights of a two-layer polynomial network determine its training samples.

The weights show tensors T_q = Σ_i b_i x_i^{⊗q} by linear equations. If these have one solution
only, every sample with λ_i ≠ 0 follows for α ≥ 3, while the x_i are independent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from exhume.checks import number
from exhume.models.state import StateOrFile
from exhume.theory.moments import (
    LOCAL,
    Moments,
    View,
    at_scale,
    decompose,
    dimension,
    fewest_neurons,
    moments_of,
    neurons_of,
    output,
    powers,
    refine,
    view_of,
    violation,
)

UNEXPLAINED = 1e-2  # share of the weights that samples may leave unexplained: a KKT point has none


@dataclass(frozen=True, eq=False)
class Identifiability:
    """This says what the weights determine."""

    degrees: tuple[int, ...]  # of the polynomial σ, lowest first
    dim: int  # d, of a sample
    neurons: int  # how many hold equations
    rank_of_neurons: int  # r, the dimension of their span U
    unknowns: int  # of the symmetric tensors on U, Σ_q C(r+q−1, q)
    equations: int  # r for each neuron, and one more if σ has several degrees
    rank: int  # of the equations
    smallest: float  # their last singular value, relative to the first; 0 if there are too few
    tolerance: float  # relative singular value that counts as zero
    sufficient_rank: int  # dimension of the span of all (w_k^{⊗(q−1)})_q
    sufficient_unknowns: int  # the rank at which it alone would do: dim Sym^{α−1}(U)
    misfit: float  # what the best tensors leave of the equations, relative
    undetermined: tuple[str, ...]  # sentences on what of a sample the weights cannot show
    reasons: tuple[str, ...]  # sentences on why the condition, or the recovery, fails
    # recovered, (n, d) float64; None if the condition fails or nothing fits
    samples: Tensor | None = None
    multipliers: Tensor | None = None  # b_i = λ_i y_i, (n,)
    residual: float | None = None  # |θ − Σ_i b_i ∇θ f(x_i)| / |θ| of what was recovered

    @property
    def degree(self) -> int:
        """Return α, the highest degree."""
        return self.degrees[-1]

    @property
    def holds(self) -> bool:
        """Tell whether the equations determine the tensors."""
        return self.rank == self.unknowns

    @property
    def margin(self) -> float:
        """Return the last singular value over the tolerance; the condition holds above 1."""
        return self.smallest / self.tolerance


@dataclass(frozen=True, eq=False)
class Recovered:
    """These samples explain the weights."""

    samples: Tensor  # (n, d) float64
    multipliers: Tensor  # b_i = λ_i y_i, (n,)
    residual: float  # |θ − Σ_i b_i ∇θ f(x_i)| / |θ|


def identifiability(
    model: nn.Module,
    trained: StateOrFile | None = None,
    rank: int | None = None,
    tolerance: float | None = None,
    level: float = 1.0,
) -> Identifiability:
    """Check the rank condition and, where it holds, recover the active samples.

    The model is a two-layer network with a polynomial activation of degree 3 or more, `trained`
    its weights, or their file; `rank` is r, the dimension of the neurons' span, by default where
    their singular values fall off; relative ones up to the tolerance, by default that of the
    weights, count as zero. The level γ is the margin y f(x) of every active sample, for the norm
    of samples where σ has one degree and there is no bias.

    Example:
        >>> from exhume.models.architectures import initialise, two_layer
        >>> found = identifiability(initialise(two_layer((3,), 2, activation="polynomial:0,0,0,1")))
        >>> found.rank_of_neurons, found.rank, found.unknowns, found.holds
        (2, 4, 4, True)
    """
    number("level", level, above=0)
    view = view_of(neurons_of(model, trained), rank, tolerance)
    moments = moments_of(view)
    reasons = [] if moments.determined else [_too_few(view, moments)]
    found = _recovered(view, moments, level) if moments.determined else None
    if found is not None and not found.residual <= UNEXPLAINED:
        left = f"The samples found leave {found.residual:.1e} of the weights unexplained"
        most = f"more than {view.rank} samples are active"
        reasons.append(f"{left}: these are not at a KKT point (train longer), or {most}.")
        found = None
    unit, lower = normalize(view.inside.first, dim=1), [q - 1 for q in view.inside.degrees]
    values = torch.linalg.svdvals(torch.cat([powers(unit, q) for q in lower], 1))
    return Identifiability(
        degrees=view.inside.degrees,
        dim=view.dim,
        neurons=len(view.inside.first),
        rank_of_neurons=view.rank,
        unknowns=moments.unknowns,
        equations=moments.equations,
        rank=moments.rank,
        smallest=moments.smallest,
        tolerance=view.tolerance,
        sufficient_rank=int((values > view.tolerance * values[0]).sum()),
        sufficient_unknowns=sum(dimension(view.rank, q) for q in lower),
        misfit=moments.misfit,
        undetermined=_undetermined(view, level, found is not None and _whole(view, found)),
        reasons=tuple(reasons),
        **({} if found is None else vars(found)),
    )


def recover(model: nn.Module, trained: StateOrFile | None = None) -> Recovered:
    """Return samples from the tensor of least norm that fits, whatever the condition says.

    Where it fails other samples fit as well. Model and weights are those of `identifiability`.
    """
    view = view_of(neurons_of(model, trained))
    return _recovered(view, moments_of(view), 1.0)


def _recovered(view: View, moments: Moments, level: float) -> Recovered:
    """Decompose, refine on the equations where they determine T, and put to scale."""
    neurons, degree, lifted = view.inside, view.inside.degree, view.neurons.lifted
    tensors = dict(moments.tensors)
    samples, multipliers, _ = decompose(tensors.pop(degree), view.rank, degree, moments.uncertainty)
    if tensors:
        samples, multipliers = at_scale(samples, multipliers, tensors, degree)
    if moments.determined:
        samples, multipliers = refine(neurons, samples, multipliers)
    full = samples @ view.basis.T
    alike = len({q % 2 for q in neurons.degrees}) == 1
    if alike and degree % 2:  # (x, b) and (−x, −b)
        sign = full[:, -1].sign() if lifted else multipliers.sign()
        full, multipliers = full * sign[:, None], multipliers * sign
    elif alike and lifted:  # x and −x
        full = full * full[:, -1:].sign()
    if not tensors and lifted:
        multipliers = multipliers * full[:, -1] ** degree
        full = full / full[:, -1:]
    elif not tensors:  # x_i → c x_i and b_i → b_i / c^α leave the same trace: |f(x_i)| = level
        tiny = torch.finfo(full.dtype).tiny
        scale = (level / output(view.neurons, full).abs().clamp_min(tiny)) ** (1 / degree)
        full, multipliers = full * scale[:, None], multipliers / scale**degree
    residual = violation(view.neurons, full, multipliers)
    return Recovered(full[:, : view.dim], multipliers, residual)


def _whole(view: View, found: Recovered) -> bool:
    """Tell whether σ'(w_k·x_i), (K, n), has rank n: then no sample goes on outside of the span."""
    samples = pad(found.samples, (0, 1), value=1.0) if view.neurons.lifted else found.samples
    slopes = view.inside.slope(view.inside.first @ (samples @ view.basis).T)
    values = torch.linalg.svdvals(normalize(slopes, dim=0))
    return len(values) == len(samples) and bool(values[-1] > view.tolerance * values[0])


def _too_few(view: View, moments: Moments) -> str:
    """Say why the condition fails."""
    needed = (
        f" {fewest_neurons(view.inside.degree, view.rank)} neurons in general position would "
        f"do, there are {len(view.inside.first)}, and twins count once."
    )
    return (
        f"The equations have rank {moments.rank} for {moments.unknowns} unknowns, so that many "
        f"tensors fit the weights.{needed if len(view.inside.degrees) == 1 else ''} {LOCAL}"
    )


def _undetermined(view: View, level: float, whole: bool) -> tuple[str, ...]:
    """Say what of a sample the weights cannot show."""
    degrees = view.inside.degrees
    said = ["A sample with multiplier zero (beyond the margin) leaves no trace."]
    if view.rank < len(view.basis):
        where = f"the span of the neurons ({view.rank} of {len(view.basis)} dimensions)"
        shown = "a part outside would show, unless samples that agree inside cancel there."
        unseen = f"Whatever of a sample lies outside {where} may leave no trace."
        said.append(f"Active samples lie in {where}: {shown}" if whole else unseen)
    if not view.neurons.lifted:
        if len(degrees) == 1:
            norm = "The norm of a sample leaves no trace of its own: it is set so that |f(x)| ="
            said.append(f"{norm} {level:g}, the margin that active samples are assumed to share.")
        if all(q % 2 == 0 for q in degrees):
            said.append("A sample and its negative leave the same trace; the sign cannot be found.")
        if all(q % 2 for q in degrees):
            trace = "leave the same trace as the negatives of both"
            said.append(f"A sample and its label {trace}; the sign is the one with label +1.")
    return tuple(said)
