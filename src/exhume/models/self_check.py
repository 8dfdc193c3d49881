"""Run a module as an attack will: check outputs and derivatives, find the head, or refuse it."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.nn.modules.module import register_module_forward_hook

from exhume.errors import InputError, listed, quoted
from exhume.features.network import Network

ROWS = 8  # random inputs on which a model is tried: no other size is likely to be 8 as well
STEPS = (1e-5, 1e-6, 1e-7, 1e-8)  # of differences: a kink can spoil one, a wrong derivative all
TOLERANCE = 1e-4  # relative error to be refused: wrong derivatives are off by more than 1e-3
ROUNDING = 1e-10  # derivatives below ROUNDING/h of the values count as that large: h rounds those
LARGE = 50_000_000  # the most parameters whose derivatives are checked: more would take minutes

LOG_SOFTMAX = "log_softmax"
# What models that return probabilities end in; the first one's loss is that of the logits
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    LOG_SOFTMAX: lambda z: z.log_softmax(-1),
    "softmax": lambda z: z.softmax(-1),
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
}

Call = tuple[str, tuple[int, ...], Tensor]  # a linear layer's name, its input's shape, its output
Random = Callable[..., Tensor]
Pair = tuple[Tensor, Tensor]  # of contracted gradients (n, tensors), and of activations (n, h)
Pairs = Callable[[Tensor], Pair]


def random_tensors(module: nn.Module) -> Random:
    """Return a source of normal tensors of the module's dtype and device, with its own state."""
    generator = torch.Generator().manual_seed(0)
    like = next(p for p in module.parameters() if p.is_floating_point())
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(like)


def candidates(random: Random, shape: tuple[int, ...], n: int = ROWS) -> Tensor:
    """Return random inputs of norm √d, (n, *shape)."""
    flat = random(n, math.prod(shape))
    scale: Tensor = math.sqrt(flat.shape[1]) / flat.norm(dim=1, keepdim=True)
    return (flat * scale).reshape(n, *shape)


def outputs_of(module: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a batch, refused unless they are (n, c) or (n,) and finite."""
    try:
        outputs = module(x.clone())
    except Exception as error:
        raise InputError(f"model: {_why_forward_fails(module, x, error)}") from error
    n = len(x)
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        advice = "return the logits alone, or an object that has them as .logits"
        raise InputError(f"model: returns a {kind} and not a tensor; {advice}.")
    given = tuple(outputs.shape)
    squeezed = n == 1 and given == ()
    if not squeezed and (outputs.ndim not in (1, 2) or given[0] != n or outputs.numel() == 0):
        shapes = f"inputs of shape {tuple(x.shape[1:])} gives outputs of shape {given}"
        raise InputError(f"model: a batch of {n} with {shapes}; expected one row for each input.")
    if not outputs.isfinite().all():
        raise InputError("model: outputs of random inputs of norm √d hold NaN or infinite entries.")
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
            advice = "make fixed tensors buffers, and let forward follow its input's dtype"
            return f"runs in float32 but not in float64 ({quoted(error)}); {advice}."
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
        raise InputError("model: forward overwrites its input; write x = x - mean, not x -= mean.")
    if distance(again, after) > tolerance:
        advice = "make forward deterministic in eval mode (F.dropout has training=self.training)"
        raise InputError(f"model: two calls with the same inputs differ; {advice}.")
    for i in range(2):
        alone = outputs_of(module, x[i : i + 1])
        if distance(alone.reshape(-1), after[i].reshape(-1), after) > tolerance:
            advice = "look for statistics over the batch, and for batch_first=False"
            raise InputError(f"model: outputs depend on the other inputs of a batch; {advice}.")
    if (off := distance(before, after)) > tolerance:
        why = "if hooks take part in computing them, write what they do in forward"
        raise InputError(f"model: its mended copy has other outputs, by {off:.1e}; {why}.")


def distance(given: Tensor, expected: Tensor, among: Tensor | None = None) -> float:
    """Return the largest difference over the largest entry expected, or among some more."""
    if given.shape != expected.shape:
        return math.inf
    size = (expected if among is None else among).abs().max()
    return ((given - expected).abs().max() / size.clamp_min(torch.finfo(size.dtype).tiny)).item()


def derivative_error(network: Network, x: Tensor, random: Random) -> tuple[float, list[str]]:
    """Return the largest relative error of ∂/∂x of ⟨∇_θ u·f(x), r⟩ and of the activations.

    Differences are those of a plain loop. A sentence says which tensors were checked, if not all.
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

        pair: Pair = vmap(one_sample)(x)
        return pair

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


def _errors(by_loop: Pairs, by_func: Pairs, x: Tensor, direction: Tensor, step: float) -> Tensor:
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
        why = "its units are all dead, or forward rounds its input"
        raise InputError(f"model: activations do not change with random inputs of norm √d: {why}.")
    forward = sum(part.square().sum() for part in pushed)  # ‖J·D‖² = ⟨D, JᵀJ·D⟩ of one Jacobian
    off = (((pulled * direction).sum() - forward).abs() / forward).item()
    if off > TOLERANCE:
        why = "look for detach, no_grad and custom autograd functions in forward"
        raise InputError(f"model: forward and reverse derivatives differ by {off:.1e}; {why}.")
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
    owners = {name: type(module.get_submodule(name.rpartition(".")[0])).__name__ for name in names}
    words = [*(f"{n} ({owner})" for n, owner in owners.items()), "the activations before the head"]
    order = errors.argsort(descending=True).tolist()
    if suspects := [words[i] for i in order if errors[i] > TOLERANCE]:
        raise InputError(
            f"model: derivatives are off by {errors.max().item():.1e} of their size from finite "
            f"differences, for {listed(suspects)}. Suspects are these layers and those after: "
            "F.instance_norm, custom autograd functions, detach, no_grad and casts in forward."
        )


def find_head(module: nn.Module, x: Tensor, size: int, head: str | None) -> tuple[str, bool]:
    """Return the layer that is named, or whose output is the model's, of `size` entries for x.

    With it comes whether the model is the log_softmax of that output.
    """
    linear = {part: name for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    if not linear:
        advice = "attack other weights (--parameters all), or write its last layer as one"
        raise InputError(f"head: the model has no nn.Linear; {advice}.")
    calls, outputs = _calls(module, linear, x, size)
    called = [name for name, _, _ in calls]
    if head is not None and head not in linear.values():
        known = listed(linear.values(), 20)
        raise InputError(f"head: {head!r} is no linear layer; the linear layers are {known}.")
    if head is not None and head not in called:
        named = listed(called)
        raise InputError(f"head: forward does not call {head}; name one that it calls: {named}.")
    if not calls:
        known = listed(linear.values())
        raise InputError(f"head: forward calls none of the linear layers ({known}) as a module.")
    linked = False
    if head is None:
        head, linked = _last(calls, outputs)
    for inputs in (x, x[:1]):
        again, _ = _calls(module, linear, inputs, 0)
        shapes = [shape for name, shape, _ in again if name == head]
        if len(shapes) > 1:
            often = f"runs {len(shapes)} times in one forward"
            raise InputError(f"head: {head} {often}; the last layer must be one of its own.")
        _refuse_tokens(head, shapes[0], len(inputs))
    prefix = f"{head}." if head else ""
    own = {id(p): prefix + name for name, p in module.get_submodule(head).named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (of_head := own.get(id(parameter), name)) != name:
            shared = f"the {of_head.removeprefix(prefix)} of {head} is shared with {name}"
            raise InputError(f"head: {shared}; the last layer must have weights of its own.")
    return head, linked


def _calls(
    module: nn.Module, linear: dict[nn.Linear, str], x: Tensor, size: int
) -> tuple[list[Call], Tensor]:
    """Return calls of linear layers, with outputs of `size` entries, and the model's outputs."""
    calls: list[Call] = []

    def record(part: nn.Module, args: tuple[Tensor, ...], outputs: Tensor) -> None:
        if isinstance(part, nn.Linear) and part in linear and args:
            kept = outputs.clone() if outputs.numel() == size else outputs.new_empty(0)
            calls.append((linear[part], tuple(args[0].shape), kept))

    with register_module_forward_hook(record):
        return calls, module(x)


def _last(calls: list[Call], outputs: Tensor) -> tuple[str, bool]:
    """Return the last call whose output is the model's, but for the shape; see `find_head`."""
    size = outputs.numel()
    whole = [(n, x.reshape(outputs.shape)) for n, _, x in reversed(calls) if x.numel() == size]
    for name, found in whole:
        if torch.equal(found, outputs):
            return name, False
    for name, found in whole:
        for link, function in LINKS.items():
            if distance(function(found), outputs) < 1e-5:
                if link == LOG_SOFTMAX:
                    return name, True
                either = f"the output of {name}, or name the layer with head={name!r}"
                raise InputError(f"model: ends in {link}; return the logits, {either}.")
    name, shape, _ = calls[-1]
    _refuse_tokens(name, shape, len(outputs))
    either = f"return the output of that layer, or name one with head={name!r}"
    raise InputError(f"model: something follows {name}, its last linear layer; {either}.")


def _refuse_tokens(head: str, shape: tuple[int, ...], n: int) -> None:
    if len(shape) != 2 or shape[0] != n:
        where = f"{head or 'the model'} is applied to a tensor of shape {shape}"
        raise InputError(f"head: {where}; expected ({n}, h): pool before it, or name another.")
