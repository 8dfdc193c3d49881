"""Two-layer networks with activation z^α at an exact KKT point, solved for instead of trained.

    min ½|θ|²  subject to  y_i f(x_i) ≥ 1,    f(x) = Σ_k a_k (w_k·x)^α

is stationary where w_k = α a_k T(w_k^{α−1}, ·), a_k = T(w_k^α), T = Σ_i λ_i y_i x_i^{⊗α}: neurons
are eigenvectors of T, moved by Newton's method until y_i f(x_i) = 1 for every active sample.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.checks import whole_number
from exhume.data import Data
from exhume.equation.problem import ThreatModel
from exhume.errors import InputError
from exhume.features.activations import polynomial as named
from exhume.models import architectures
from exhume.models.folder import NetworkModel
from exhume.theory.moments import Neurons, output, violation
from exhume.victims.victim import Victim

STARTS = 200  # random starts for eigenvectors: the tensors here have a few dozen at most
ITERATIONS = 40  # Newton steps from each start, of bounded length; the last few of them converge
TRIES = 12  # multipliers to begin with: the even ones, then others near them at random
ROUNDS = 8  # how often neurons are picked anew where they cannot be followed to the margin
EXACT = 1e-12  # relative size of equations that count as solved: what float64 leaves after Newton
MOST_LABELLED = 10  # most samples whose labellings are all compared: there are 2^9 of them
ASSUMED = "the weights are a KKT point of margin maximisation"
KKT = ThreatModel(knows=("the trained weights", "the architecture"), assumes=(ASSUMED,))


def polynomial(
    data: Data, width: int, degree: int = 3, seed: int = 0, active: Sequence[int] | None = None
) -> Victim:
    """Solve for f(x) = Σ_k a_k (w_k·x)^α at a KKT point of margin maximisation, to rounding.

    The data has one output, and the signs of its targets are the labels; α is 3 or more, and the
    width counts twins. `active` samples hold the network up, λ_i ≠ 0, all if None; the others must
    end beyond the margin by themselves. `training` has the violation of stationarity, the margins
    y_i f(x_i), and the active samples.
    """
    whole_number("degree", degree, least=3)
    whole_number("width", width)
    if data.outputs != 1 or not data.targets.all():
        raise InputError("data: expected one target a sample, whose sign is the label; none zero.")
    chosen = list(range(data.samples)) if active is None else sorted(set(active))
    if not chosen or chosen[0] < 0 or chosen[-1] >= data.samples:
        raise InputError(f"active: expected some of 0 to {data.samples - 1}, got {active}.")
    labels = data.targets[:, 0].sign()
    basis = _span(data.inputs[chosen])
    samples = data.inputs[chosen] @ basis
    generator, rejected = torch.Generator().manual_seed(seed), 0
    for attempt in range(TRIES):
        scatter = torch.randn(len(chosen), generator=generator, dtype=torch.float64)
        multipliers = labels[chosen] / samples.norm(dim=1) ** degree
        if attempt > 0:
            multipliers = multipliers * (0.3 * scatter).exp()
        found = _kkt_point(samples, multipliers, width, degree, generator)
        if found is None:
            continue
        last = (found.first @ samples.T) ** degree @ found.multipliers
        first, last = (w.repeat_interleave(found.copies, 0) for w in (found.first @ basis.T, last))
        neurons = Neurons(first, last, (*(0.0,) * degree, 1.0))
        margins = labels * output(neurons, data.inputs)
        if (margins > 1 - 1e-9).all():
            record = {"data": data.name, "seed": seed, "loss": "margin", "active": chosen}
            off = violation(neurons, data.inputs[chosen], found.multipliers)
            return _victim(data, neurons, record | {"violation": off, "margins": margins.tolist()})
        rejected += 1
    raise InputError(
        f"data: no KKT point of {width} neurons was found in {TRIES} starts ({rejected} left an "
        "inactive sample within the margin); use other labels (see exhume.victims.labellings), "
        "samples at wider angles, or another number of neurons."
    )


def labellings(data: Data, degree: int = 3, seed: int = 0) -> list[Data]:
    """Return the same samples under every choice of labels ±1, up to the sign of them all.

    Those under which Σ_i y_i (x_i/|x_i|)^{⊗α} has the most real eigenvectors come first: there a
    KKT point has the most neurons to choose from. The seed is that of the eigenvectors' starts.
    """
    if data.samples > MOST_LABELLED:
        raise InputError(f"data: {data.samples} samples; expected at most {MOST_LABELLED}.")
    samples = torch.nn.functional.normalize(data.inputs, dim=1)
    samples = samples @ _span(samples)
    generator = torch.Generator().manual_seed(seed)
    every = itertools.product((1.0,), *[(1.0, -1.0)] * (data.samples - 1))
    ranked = [torch.tensor(signs, dtype=torch.float64) for signs in every]
    ranked.sort(key=lambda labels: -len(_eigenneurons(samples, labels, degree, generator)))
    return [replace(data, targets=labels[:, None]) for labels in ranked]


def _span(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of the rows, (d, r)."""
    vectors: Tensor
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    return vectors[values > 1e-10 * values[0]].T


def _victim(data: Data, neurons: Neurons, record: dict[str, object]) -> Victim:
    arguments = {"shape": list(data.shape), "outputs": 1, "width": len(neurons.first)}
    arguments["activation"] = named(*neurons.coefficients).name
    first, last = architectures.build("two_layer", arguments).state_dict()
    trained = {first: neurons.first, last: neurons.last[None]}
    initial = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    model = NetworkModel("two_layer", arguments, initial, trained, None)
    problem = replace(model.problem("all", "final"), drift=0.0, threat_model=KKT)
    return Victim(problem, data, record, initial, trained, model)


@dataclass(frozen=True, eq=False)
class _Stationary:
    """Neurons that are stationary for some multipliers, on samples in coordinates of their span."""

    first: Tensor  # distinct neurons, (K, r)
    copies: Tensor  # the number of twins of each, (K,), which begin with nearly even margins
    multipliers: Tensor  # b, (n,), of the signs of the labels
    samples: Tensor  # (n, r)


def _kkt_point(
    samples: Tensor, multipliers: Tensor, width: int, degree: int, generator: torch.Generator
) -> _Stationary | None:
    """Return a KKT point, with neurons picked anew where they cannot be followed, or None."""
    for _ in range(ROUNDS):
        first = _eigenneurons(samples, multipliers, degree, generator)
        shares = _shares(first, samples, multipliers, degree)
        copies = _evened(shares, width)
        margins = copies.double() @ shares
        if not (margins > 0).all():
            break
        # f scales as |b|^{−(α+1)/(α−1)}, w as |b|^{−1/(α−1)}
        scale = margins.log().mean().exp() ** ((degree - 1) / (degree + 1))
        used = copies > 0
        sized = first[used] * scale ** (-1 / (degree - 1))
        start = _Stationary(sized, copies[used], multipliers * scale, samples)
        end, reached = _to_margin(start, degree)
        if reached:
            return end
        multipliers = end.multipliers
    return None


def _shares(first: Tensor, samples: Tensor, multipliers: Tensor, degree: int) -> Tensor:
    """Return what each neuron adds to each margin, y_i a_k (w_k·x_i)^α with a_k = T(w_k^α)."""
    raised = (first @ samples.T) ** degree
    return multipliers.sign() * (raised @ multipliers)[:, None] * raised


def _eigenneurons(
    samples: Tensor, multipliers: Tensor, degree: int, generator: torch.Generator
) -> Tensor:
    """Find stationary neurons (K, r), real eigenvectors of T, by Newton from random starts.

    A step s solves (H − μI)s − νu = −(g − μu), u·s = 0, with g = T(u^{α−1}, ·) and
    H = (α − 1) T(u^{α−2}, ·, ·). Negatives are the same neuron.
    """
    size = samples.shape[1]
    units = torch.randn(STARTS, size, generator=generator, dtype=torch.float64)
    units = torch.nn.functional.normalize(units, dim=1)
    system = torch.zeros(STARTS, size + 1, size + 1, dtype=torch.float64)
    identity = torch.eye(size, dtype=torch.float64)

    def mapped() -> tuple[Tensor, Tensor]:  # T(u^{α−1}, ·), (K, r), and T(u^α), (K,)
        image = ((units @ samples.T) ** (degree - 1) * multipliers) @ samples
        return image, (image * units).sum(1)

    for _ in range(ITERATIONS):
        image, values = mapped()
        weights = (degree - 1) * (units @ samples.T) ** (degree - 2) * multipliers
        system[:, :size, :size] = torch.einsum("ki,id,ie->kde", weights, samples, samples)
        system[:, :size, :size] -= values[:, None, None] * identity
        system[:, :size, size], system[:, size, :size] = -units, units
        right = torch.nn.functional.pad(values[:, None] * units - image, (0, 1))
        # gelsd: the default, gelsy, does not give the same bits twice
        step = torch.linalg.lstsq(system, right[..., None], driver="gelsd").solution[:, :size, 0]
        step = step / (step.norm(dim=1, keepdim=True) / 0.3).clamp_min(1)
        units = torch.nn.functional.normalize(units + step, dim=1)
    image, values = mapped()
    largest = values.abs().max()
    off = (image - values[:, None] * units).norm(dim=1)
    good = (off < 1e-11 * largest) & (values.abs() > 1e-6 * largest)
    distinct: list[int] = []
    for k in good.nonzero().flatten().tolist():
        if not distinct or (units[distinct] @ units[k]).abs().max() < 1 - 1e-8:
            distinct.append(k)
    lengths = (degree * values[distinct].square()) ** (-1 / (2 * degree - 2))
    return units[distinct] * lengths[:, None]


def _evened(shares: Tensor, width: int) -> Tensor:
    """Return the twins of each neuron, (K,), added one by one to make the margins most even."""
    copies = torch.zeros(len(shares), dtype=torch.int64)
    margins = torch.zeros_like(shares[0])
    for _ in range(width):
        unused = copies == 0
        allowed = unused if unused.any() else ~unused
        totals = margins + shares
        even = torch.nn.functional.normalize(totals, dim=1).sum(1)
        best = int(even.masked_fill(~allowed, -torch.inf).argmax())
        copies[best] += 1
        margins = totals[best]
    return copies


def _to_margin(start: _Stationary, degree: int) -> tuple[_Stationary, bool]:
    """Follow the neurons, to the end or as far as they go, while m_i^{1−s} goes to 1."""
    begin = start.copies.double() @ _shares(start.first, start.samples, start.multipliers, degree)
    now, done, step = start, 0.0, 0.5
    while done < 1:
        step = min(step, 1 - done)
        moved = _newton(now, begin ** (1 - done - step), degree)
        if moved is not None:
            now, done, step = moved, done + step, 2 * step
        elif step < 1e-3:
            return now, False
        else:
            step /= 2
    return now, True


def _newton(start: _Stationary, margins: Tensor, degree: int) -> _Stationary | None:
    """Solve w_k = α a_k T(w_k^{α−1}, ·) for all neurons, with the margins; None if far away."""
    x, b, first, copies = start.samples, start.multipliers, start.first, start.copies.double()
    y = b.sign()
    identity = torch.eye(first.shape[1], dtype=torch.float64)
    for _ in range(8):
        z = first @ x.T
        raised, lower = z**degree, z ** (degree - 1)
        a, g = raised @ b, (lower * b) @ x
        equation = first - degree * a[:, None] * g
        missed = y * ((copies * a) @ raised) - margins
        off = equation.norm(dim=1) / first.norm(dim=1)
        size = off.max().maximum((missed / margins).abs().max())
        if size < EXACT / 10:
            break
        hessian = torch.einsum("ki,id,ie->kde", (degree - 1) * z ** (degree - 2) * b, x, x)
        scale, column = a[:, None, None], g[:, :, None]
        by_first = identity - degree * (scale * hessian + degree * column * g[:, None, :])
        by_b = -degree * (column * raised[:, None, :] + scale * lower[:, None, :] * x.T)
        turned = raised.T[:, :, None] * g + a[:, None] * lower.T[:, :, None] * x[:, None, :]
        outputs_by_first = (y[:, None, None] * copies[:, None] * degree) * turned  # (n, K, r)
        outputs_by_b = y[:, None] * (raised.T * copies) @ raised
        solved, failed = torch.linalg.solve_ex(by_first, torch.cat([equation[:, :, None], by_b], 2))
        rest = outputs_by_b - torch.einsum("nkr,krj->nj", outputs_by_first, solved[:, :, 1:])
        right = torch.einsum("nkr,kr->n", outputs_by_first, solved[:, :, 0]) - missed
        step_b, also = torch.linalg.solve_ex(rest, right)
        step = -solved[:, :, 0] - solved[:, :, 1:] @ step_b
        far = (step.norm(dim=1) / first.norm(dim=1)).max().maximum((step_b / b).abs().max())
        if failed.any() or also.any() or not far < 0.5:
            return None
        first, b = first + step, b + step_b
    return replace(start, first=first, multipliers=b) if size < EXACT else None
