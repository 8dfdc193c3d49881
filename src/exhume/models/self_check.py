"""Run a module as an attack will: check its outputs and its derivatives, or say what is wrong."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap

from exhume.errors import InputError, listed, quoted
from exhume.features.network import Network

ROWS = 8
"""Random inputs on which a model is tried: enough that no other size is likely to be 8 as well."""

STEPS = (1e-5, 1e-6, 1e-7, 1e-8)
"""Half-widths of finite differences, each with its own direction: large ones are accurate, small
ones cross few kinks. A kink can spoil one try, a wrong derivative spoils all."""

TOLERANCE = 1e-4
"""Relative error of a derivative at which a model is refused: wrong derivatives are off by more
than a thousandth, right ones agree with differences to a millionth."""

ROUNDING = 1e-10
"""A difference over a step h is rounded by about 1e-16/h of the values. A derivative smaller than
ROUNDING/h of the values counts as that large, so that flat functions are not taken for wrong."""

LARGE = 50_000_000
"""The most parameters whose derivatives are checked: more would take minutes."""

Random = Callable[..., Tensor]
Pair = tuple[Tensor, Tensor]  # of contracted gradients (n, tensors), and of activations (n, h)


def random_tensors(module: nn.Module) -> Random:
    """Return a source of normal tensors of the module's dtype and device, with its own state."""
    generator = torch.Generator().manual_seed(0)
    like = next(p for p in module.parameters() if p.is_floating_point())
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(like)


def candidates(random: Random, shape: tuple[int, ...], n: int = ROWS) -> Tensor:
    """Return random inputs of norm √d, (n, *shape)."""
    flat = random(n, math.prod(shape))
    scaled: Tensor = flat * (math.sqrt(flat.shape[1]) / flat.norm(dim=1, keepdim=True))
    return scaled.reshape(n, *shape)


# Outputs


def outputs_of(module: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a batch, refused unless they are (n, c) or (n,) and finite."""
    try:
        outputs = module(x.clone())
    except Exception as error:
        raise InputError(f"model: {_why_forward_fails(module, x, error)}") from error
    n = len(x)
    if not isinstance(outputs, Tensor):
        raise InputError(
            f"model: returns a {type(outputs).__name__} and not a tensor; return the logits alone."
        )
    given = tuple(outputs.shape)
    squeezed = n == 1 and given == ()
    if not squeezed and (outputs.ndim not in (1, 2) or given[0] != n or outputs.numel() == 0):
        raise InputError(
            f"model: a batch of {n} with inputs of shape {tuple(x.shape[1:])} gives outputs of "
            f"shape {given}; expected one row for each input, ({n}, c) or ({n},)."
        )
    if not outputs.isfinite().all():
        raise InputError(
            "model: outputs of random inputs of norm √d hold NaN or infinite entries; look for an "
            "overflow or a division by zero in forward."
        )
    return outputs.clone()


def _why_forward_fails(module: nn.Module, x: Tensor, error: Exception) -> str:
    def runs(inputs: Tensor) -> bool:
        try:
            module(inputs)
        except Exception:
            return False
        return True

    if runs(torch.zeros_like(x, dtype=torch.int64)):
        return "takes integer tokens, but candidates move continuously; let it take embeddings."
    if x.dtype == torch.float64:
        module.float()
        if runs(x.float()):
            return (
                f"runs in float32 but not in float64 ({quoted(error)}), in which it is checked; "
                "make fixed tensors buffers, and let forward follow its input's dtype."
            )
    return (
        f"forward fails for a batch of {len(x)} with inputs of shape {tuple(x.shape[1:])} "
        f"({quoted(error)}); mend the shape, or wrap it in a module whose forward takes that alone."
    )


def check_forward(
    module: nn.Module, x: Tensor, before: Tensor, after: Tensor, tolerance: float
) -> None:
    """Refuse outputs that differ when called again, for each input alone, or from before."""
    given = x.clone()
    again = module(given)
    if not torch.equal(given, x):
        raise InputError(
            "model: forward overwrites its input; write x = x - mean and not x -= mean."
        )
    if distance(again, after) > tolerance:
        raise InputError(
            "model: two calls with the same inputs differ; make forward deterministic in eval mode "
            "(F.dropout has training=self.training)."
        )
    for i in range(2):
        alone = outputs_of(module, x[i : i + 1])
        if distance(alone.reshape(-1), after[i].reshape(-1), after) > tolerance:
            raise InputError(
                "model: the outputs of an input depend on the other inputs of its batch; look for "
                "statistics over the batch, and for batch_first=False."
            )
    off = distance(before, after)
    if off > tolerance:
        raise InputError(
            f"model: its mended copy has other outputs, by {off:.1e} of their size; if hooks take "
            "part in computing them, write what they do in forward."
        )


def distance(given: Tensor, expected: Tensor, among: Tensor | None = None) -> float:
    """Return the largest difference over the largest entry expected, or among some more."""
    if given.shape != expected.shape:
        return math.inf
    size = (expected if among is None else among).abs().max()
    return ((given - expected).abs().max() / size.clamp_min(torch.finfo(size.dtype).tiny)).item()


# Derivatives


def derivative_error(network: Network, x: Tensor, random: Random) -> tuple[float, list[str]]:
    """Return the largest relative error of ∂/∂x of ⟨∇_θ u·f(x), r⟩ and of the activations.

    vmap, grad and jvp are held against central differences of a plain loop over samples, vjp
    against jvp. A sentence says which tensors were checked, if not all.
    """
    parameters, changes = _checked_tensors(network.module)
    fixed = [random(*p.shape) for p in parameters.values()]
    u = random(network.outputs)

    def scalar(theta: Mapping[str, Tensor], one: Tensor) -> Pair:
        inputs = one.reshape(1, -1)
        return (network(theta, inputs)[0] * u).sum(), network.hidden(theta, inputs)[0]

    def contracted(gradients: Iterable[Tensor]) -> Tensor:
        return torch.stack([(g * r).sum() for g, r in zip(gradients, fixed, strict=True)])

    def by_loop(x: Tensor) -> Pair:
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        rows, activations = [], []
        for one in x:
            value, hidden = scalar(leaves, one)
            found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            rows.append(contracted(found))
            activations.append(hidden.detach())
        return torch.stack(rows), torch.stack(activations)

    def by_func(x: Tensor) -> Pair:  # as attacks do
        def one_sample(one: Tensor) -> Pair:
            gradients, hidden = grad(scalar, has_aux=True)(parameters, one)
            return contracted(gradients.values()), hidden

        rows, activations = vmap(one_sample)(x)
        return rows, activations

    best = torch.full((), math.inf, dtype=torch.float64).to(x)
    for step in STEPS:
        direction = candidates(random, tuple(x.shape[1:]), len(x))
        best = torch.minimum(best, _errors(by_loop, by_func, x, direction, step))
        if best.max() < 0.01 * TOLERANCE:
            break
    _refuse_wrong(network.module, list(parameters), best.amax(0))
    return best.max().item(), changes


def _checked_tensors(module: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """Return the parameters to check: all, or as many tensors as have LARGE entries together."""
    every = {name: p.detach() for name, p in module.named_parameters() if p.is_floating_point()}
    if sum(p.numel() for p in every.values()) <= LARGE:
        return every, []
    names, room, chosen = list(every), LARGE, set()
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
    for name in (names[i] for i in order):
        if every[name].numel() <= room:
            room -= every[name].numel()
            chosen.add(name)
    sentence = (
        f"The model is large: derivatives were checked for {len(chosen)} of {len(every)} "
        f"parameter tensors, drawn at random, with {LARGE - room} entries."
    )
    return {name: p for name, p in every.items() if name in chosen}, [sentence]


def _errors(
    by_loop: Callable[[Tensor], Pair],
    by_func: Callable[[Tensor], Pair],
    x: Tensor,
    direction: Tensor,
    step: float,
) -> Tensor:
    """Return relative errors (n, tensors + 1): of each tensor's contraction, of activations."""
    try:
        ahead, behind = by_loop(x + step * direction), by_loop(x - step * direction)
        values, pushed = jvp(by_func, (x,), (direction,))[:2]
        (pulled,) = vjp(by_func, x)[1](pushed)
    except Exception as error:
        raise InputError(
            f"model: torch.func cannot differentiate it ({quoted(error)}). Recurrent layers, "
            "in-place operations on slices and custom autograd functions are usual causes."
        ) from error
    rows, activations = ((a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True))
    if not pushed[1].any() and not activations.any():
        raise InputError(
            "model: the activations before its head do not change with random inputs of norm √d: "
            "its units are all dead, or forward rounds its input."
        )
    forward = sum(part.square().sum() for part in pushed)  # ‖J·D‖² = ⟨D, JᵀJ·D⟩ of one Jacobian
    off = (((pulled * direction).sum() - forward).abs() / forward).item()
    if off > TOLERANCE:
        raise InputError(
            f"model: forward and reverse derivatives in the input differ by {off:.1e} of their "
            "size; look for detach, no_grad and custom autograd functions in forward."
        )
    least, tiny = ROUNDING / step, torch.finfo(torch.float64).tiny
    scale = torch.maximum(rows.abs(), values[0].abs()).amax(1, keepdim=True)
    of_rows = (pushed[0] - rows).abs() / (rows.abs() + least * scale).clamp_min(tiny)
    missed, size, scale = (
        part.norm(dim=1, keepdim=True) for part in (pushed[1] - activations, activations, values[1])
    )
    of_activations = missed / (size + least * scale).clamp_min(tiny)
    return torch.cat([of_rows, of_activations], dim=1).nan_to_num(torch.inf)


def _refuse_wrong(module: nn.Module, names: list[str], errors: Tensor) -> None:
    """Name the tensors with wrong derivatives, worst first, and the layers that own them."""
    owners = [type(module.get_submodule(name.rpartition(".")[0])).__name__ for name in names]
    words = [f"{name} ({owner})" for name, owner in zip(names, owners, strict=True)]
    words.append("the activations before the head")
    order = errors.argsort(descending=True).tolist()
    if suspects := [words[i] for i in order if errors[i] > TOLERANCE]:
        raise InputError(
            f"model: derivatives are off by {errors.max().item():.1e} of their size from finite "
            f"differences, for {listed(suspects)}. Suspects are these layers and those after: "
            "F.instance_norm, custom autograd functions, detach, no_grad and casts in forward."
        )
