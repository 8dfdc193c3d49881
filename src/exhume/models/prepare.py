"""Validate a module, fix what torch gets wrong in its derivatives, and say what was done.

Attacks differentiate per-sample parameter gradients and penultimate activations once more in the
input. Torch does that wrongly for fused LayerNorm, without a warning, and not at all for fused
attention. So a module is prepared first, and its derivatives are held against finite differences.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from exhume.errors import InputError
from exhume.features.exact import exact_operations

ROWS = 8
"""Random inputs on which the shape of a model is found out."""

STEPS = (1e-5, 1e-6, 1e-7, 1e-8)
"""Half-widths of finite differences, each with its own direction: large ones are accurate, small
ones cross few kinks. A kink can spoil one try, a wrong derivative spoils all."""

TOLERANCE = 1e-4
"""Relative error of a derivative at which a model is refused."""

ROUNDING = 1e-10
"""Over the step, the share of the values that a derivative counts as at least; a difference is
rounded by a millionth of that, so that flat functions are not taken for wrong ones."""

LARGE = 50_000_000
"""Number of parameters that the check of derivatives takes at most."""

DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORM = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    "_forward_hooks_always_called",
)
REMOVE = {
    WeightNorm: "torch.nn.utils.remove_weight_norm",
    SpectralNorm: "torch.nn.utils.remove_spectral_norm",
    BasePruningMethod: "torch.nn.utils.prune.remove",
}
LARGEST = 2**27
"""Most entries of one input."""

LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: z.log_softmax(-1),
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
}


@dataclass(frozen=True, eq=False)
class Prepared:
    """A module whose derivatives can be trusted inside `exact_operations()`.

    Attributes:
        module: a copy in eval mode, fixed, in float32 or float64. A batch of n inputs gives (n, c),
            or (n,) where the model was written so and c is 1; a batch of one may then give ().
        outputs: c.
        head: name of the last linear layer, as in `named_modules()`; it runs once, on (n, h).
        changes: a sentence for each thing that was changed: what, where and why.
        warnings: a sentence for each thing that weakens the attack's premise.
        derivative_error: largest relative error against finite differences; None if not checked.
    """

    module: nn.Module
    outputs: int
    head: str
    changes: tuple[str, ...]
    warnings: tuple[str, ...]
    derivative_error: float | None


def prepare(
    model: nn.Module, shape: tuple[int, ...], head: str | None = None, check: bool = True
) -> Prepared:
    """A copy of a model that can be attacked, or an error that says why not.

    The model itself is left as it is, and so is the global random state. Checks run in float64.

    Args:
        model: maps a batch of inputs (n, *shape) to (n, c) or (n,).
        shape: of one input.
        head: name of the last linear layer; found if None.
        check: compare derivatives with finite differences; without, they are on trust.

    Raises:
        InputError: if the model cannot be attacked as it is, with what to do.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        >>> prepared = prepare(model, (4,))
        >>> prepared.head, prepared.outputs
        ('3', 3)
        >>> print(prepared.changes[1])
        Replaced LayerNorm in 1 by a twin of elementary operations: the derivative of per-sample
        gradients through torch's fused one is wrong.
    """
    shape = _valid_shape(shape)
    model, changes = _without_wrapper(model)
    _refuse_module(model)
    _refuse_signature(model)
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        copy, dtype, copied = _copied(model)
        copy = copy.double() if check else copy
        tolerance = 1e-9 if check else 1e-4
        random = _source(copy)
        x = _candidates(random, ROWS, shape)
        with torch.no_grad():
            before = _outputs(copy, x)
        changes += copied + fix(copy)
        with exact_operations():
            with torch.no_grad():
                after = _outputs(copy, x)
                _check_forward(copy, x, before, after, tolerance)
                head = _find_head(copy, x, after.numel(), head)
            outputs = after[0].numel()
            error = None
            if check:
                tensors, left_out = _checked_tensors(copy)
                changes += left_out
                error = _derivative_error(copy, head, outputs, tensors, x[:2], random)
        copy = _cast(copy, dtype)
    return Prepared(copy, outputs, head, tuple(changes), tuple(_warnings(copy)), error)


# Refusals before anything runs


def _valid_shape(shape: Iterable[int]) -> tuple[int, ...]:
    shape = tuple(shape)
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise InputError(
            f"shape: expected the positive sizes of one input, without the batch, such as "
            f"(3, 32, 32), got {shape}."
        )
    if math.prod(shape) > LARGEST:
        raise InputError(
            f"shape: one input of {shape} has {math.prod(shape):,} entries; at most {LARGEST:,} "
            "can be looked for."
        )
    return shape


def _inner(module: nn.Module) -> nn.Module | None:
    """What a wrapper holds; None if it is none."""
    parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = getattr(module, "module" if parallel else "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _without_wrapper(model: nn.Module) -> tuple[nn.Module, list[str]]:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: expected a torch.nn.Module, got {type(model).__name__}; build the module "
            "first and load its weights into it."
        )
    changes = []
    while (inner := _inner(model)) is not None:
        prefix = next(name for name, child in model.named_children() if child is inner)
        changes.append(
            f"Unwrapped {type(model).__name__}: names of parameters lose the prefix {prefix!r}."
        )
        model = inner
    return model, changes


def _refuse_module(model: nn.Module) -> None:
    """Refuse what its layers and parameters already show."""
    modules = dict(model.named_modules())
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules.values()):
        raise InputError(
            "model: is TorchScript, which torch.func cannot differentiate; hand in the Python "
            "module and load the weights into it."
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InputError(
                f"model: {name} is not initialised yet (a lazy module); run the model once on a "
                "batch of inputs, or load its weights, and hand it in then."
            )
        if parameter.is_meta:
            raise InputError(f"model: {name} is on the meta device; load the weights first.")
        if parameter.is_floating_point() and not parameter.isfinite().all():
            raise InputError(
                f"model: {name} holds NaN or infinite entries; load weights that are not damaged."
            )
    for name, module in modules.items():
        _refuse_parametrized(name, module)
        _refuse_statistics(name, module)
    if not any(isinstance(module, nn.Linear) for module in modules.values()):
        raise InputError(
            "model: has no nn.Linear, so there is no last linear layer to attack; write its last "
            "layer as an nn.Linear (a 1×1 convolution of pooled features is one)."
        )


def _refuse_parametrized(name: str, module: nn.Module) -> None:
    remove = None
    if is_parametrized(module):
        remove = "torch.nn.utils.parametrize.remove_parametrizations"
    for hook in module._forward_pre_hooks.values():
        for kind, function in REMOVE.items():
            remove = function if isinstance(hook, kind) else remove
    if remove is not None:
        raise InputError(
            f"model: {name or 'the model'} ({type(module).__name__}) is parametrized, such as by "
            "weight_norm, spectral_norm or pruning: its weight is computed from other parameters "
            "at every call, so gradients would be taken in those and not in the weights that the "
            f"samples are seen in. Make the weight a parameter of its own with {remove}."
        )


def _refuse_statistics(name: str, module: nn.Module) -> None:
    if not isinstance(module, BATCH_NORM + INSTANCE_NORM) or module.running_mean is not None:
        return
    kind = type(module).__name__
    if isinstance(module, BATCH_NORM):
        raise InputError(
            f"model: {name} ({kind}) has no running statistics, so that an output depends on the "
            "other inputs of its batch; train with track_running_stats=True, or with nn.GroupNorm."
        )
    c = module.num_features
    raise InputError(
        f"model: {name} ({kind}) has no running statistics, and torch's derivatives of per-sample "
        f"gradients through it are wrong; replace it by nn.GroupNorm({c}, {c}, eps={module.eps}, "
        f"affine={module.affine}), which computes the same and loads the same weights."
    )


def _refuse_signature(model: nn.Module) -> None:
    """Refuse a forward that cannot be called with the input alone."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    fixed = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in fixed if p.default is p.empty]
    positional = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    others = needed[1:] if positional else needed
    if others or not positional:
        what = f"needs {_listed(others)} besides the input" if others else "takes no input"
        raise InputError(
            f"model: forward {what}; wrap it in a module whose forward takes the input alone."
        )


# The copy


def _copied(model: nn.Module) -> tuple[nn.Module, torch.dtype, list[str]]:
    """A copy in eval mode, the dtype to hand it out in, and what was changed."""
    changes = []
    try:
        copy = deepcopy(model)
    except Exception as error:
        raise InputError(
            f"model: cannot be copied ({_first_line(error)}); keep computed tensors out of its "
            "attributes."
        ) from error
    inside = []
    for parent in list(copy.modules()):
        for name, child in list(parent.named_children()):
            while (inner := _inner(child)) is not None:
                child = inner
                setattr(parent, name, child)
                inside.append(name)
    if inside:
        changes.append(
            f"Unwrapped compiled or parallel modules inside ({_listed(inside)}): names of "
            "parameters lose the prefix of the wrapper."
        )
    if any(module.training for module in copy.modules()):
        changes.append("Set to eval mode.")
    copy.eval()
    for module in copy.modules():
        module.training = False
    kinds = {p.dtype for p in copy.parameters() if p.is_floating_point()}
    dtype = torch.float64 if torch.float64 in kinds else torch.float32
    if kinds - {dtype}:
        names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        changes.append(f"Parameters are {names}; the copy computes in {dtype}.")
    return _cast(copy, dtype), dtype, changes


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Real numbers only, unlike `module.to`."""
    return module.double() if dtype == torch.float64 else module.float()


def fix(module: nn.Module) -> list[str]:
    """Change a module of our own in place; a sentence for each kind of change."""
    changes = []
    norms, dropout, attention, inplace, hooked = [], [], [], [], []
    for name, part in module.named_modules():
        name = name or "the model"
        if isinstance(part, nn.LayerNorm):
            norms.append(name)
        if isinstance(part, DROPOUT) and part.p > 0:
            dropout.append(name)
        if isinstance(part, nn.MultiheadAttention):
            attention.append(name)
        if isinstance(part, nn.TransformerEncoder):
            part.enable_nested_tensor = part.use_nested_tensor = False
        if getattr(part, "inplace", False) is True:
            part.inplace = False
            inplace.append(name)
        if any(getattr(part, hooks) for hooks in HOOKS):
            hooked.append(name)
            for hooks in HOOKS:
                getattr(part, hooks).clear()
    if norms:
        changes.append(
            f"Replaced LayerNorm in {_listed(norms)} by a twin of elementary operations: the "
            "derivative of per-sample gradients through torch's fused one is wrong."
        )
    if attention:
        changes.append(
            f"Attention in {_listed(attention)} runs through torch's math kernel: the fused ones "
            "have no second derivative."
        )
    if inplace:
        changes.append(
            f"Switched off in-place operation in {_listed(inplace)}: torch.func may not "
            "overwrite what it differentiates."
        )
    if dropout:
        changes.append(
            f"Dropout in {_listed(dropout)} is inactive in eval mode: features must not be random."
        )
    if hooked:
        changes.append(
            f"Dropped the hooks of {_listed(hooked)} from the copy: they are not part of what is "
            "differentiated."
        )
    return changes


def _warnings(module: nn.Module) -> list[str]:
    """What the user must know about a prepared module."""
    parts = dict(module.named_modules())
    found = []
    batch = [name for name, part in parts.items() if isinstance(part, BATCH_NORM)]
    if batch:
        found.append(
            f"BatchNorm in {_listed(batch)} uses its running statistics. If the model was trained "
            "with batch statistics, each sample's features then held a mix of its batch, so that "
            "the attack's premise, one set of features for each sample, holds only approximately."
        )
    dropout = [name for name, part in parts.items() if isinstance(part, DROPOUT) and part.p > 0]
    if dropout:
        found.append(
            f"Dropout in {_listed(dropout)} is inactive in the attack. If the model was trained "
            "with it, features were random, and the attack's premise holds only on average."
        )
    instance = [name for name, part in parts.items() if isinstance(part, INSTANCE_NORM)]
    if instance:
        found.append(
            f"InstanceNorm in {_listed(instance)} uses its running statistics, which training did "
            "not: the features of the attack are only approximately those of the training."
        )
    return found


# Running it


def _source(module: nn.Module) -> Callable[..., Tensor]:
    """Random normal tensors of the module's dtype and device, without the global state."""
    generator = torch.Generator().manual_seed(0)
    like = next(p for p in module.parameters() if p.is_floating_point())

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(like)

    return random


def _candidates(random: Callable[..., Tensor], n: int, shape: tuple[int, ...]) -> Tensor:
    """Inputs of norm √d, (n, *shape)."""
    flat = random(n, math.prod(shape))
    scaled: Tensor = flat * (math.sqrt(flat.shape[1]) / flat.norm(dim=1, keepdim=True))
    return scaled.reshape(n, *shape)


def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    """Outputs of a batch, refused unless they are (n, c) or (n,) and finite."""
    try:
        outputs = module(x.clone())
    except Exception as error:
        raise InputError(_why_forward_fails(module, x, error)) from error
    n, shape = x.shape[0], tuple(x.shape[1:])
    if not isinstance(outputs, Tensor):
        raise InputError(
            f"model: returns a {type(outputs).__name__} and not a tensor; wrap it in a module "
            "whose forward returns the logits alone."
        )
    given = tuple(outputs.shape)
    squeezed = n == 1 and given == ()
    if not squeezed and (outputs.ndim not in (1, 2) or given[0] != n or outputs.numel() == 0):
        raise InputError(
            f"model: a batch of {n} with inputs of shape {shape} gives outputs of shape {given}; "
            f"expected ({n}, c), or ({n},) for a single output. Wrap it in a module whose forward "
            "returns one row for each input, also in a batch of one."
        )
    if not outputs.isfinite().all():
        raise InputError(
            "model: outputs of random inputs of norm √d hold NaN or infinite entries, though its "
            "parameters are finite; look for an overflow or a division by zero in forward."
        )
    return outputs.clone()


def _why_forward_fails(module: nn.Module, x: Tensor, error: Exception) -> str:
    def runs(inputs: Tensor) -> bool:
        try:
            module(inputs)
        except Exception:
            return False
        return True

    n, shape = x.shape[0], tuple(x.shape[1:])
    quoted = f"{type(error).__name__}: {_first_line(error)}"
    if runs(torch.zeros_like(x, dtype=torch.int64)):
        return (
            "model: takes integer tokens, but the attack moves its candidates continuously; wrap "
            "it in a module whose forward takes what the embedding returns."
        )
    if x.dtype == torch.float64:
        module.float()
        if runs(x.float()):
            return (
                f"model: runs in float32 but not in float64 ({quoted}), in which derivatives are "
                "checked; make fixed tensors buffers, and let forward follow the dtype of its "
                "input."
            )
    return (
        f"model: forward fails for a batch of {n} with inputs of shape {shape} ({quoted}); mend "
        f"the shape, or wrap it in a module whose forward takes a batch of shape {tuple(x.shape)}."
    )


def _check_forward(
    module: nn.Module, x: Tensor, before: Tensor, after: Tensor, tolerance: float
) -> None:
    """Same outputs again, for each input alone, and as before the changes."""
    given = x.clone()
    again = module(given)
    if not torch.equal(given, x):
        raise InputError(
            "model: forward overwrites its input, which would move the candidates; write "
            "x = x - mean and not x -= mean."
        )
    if _distance(again, after) > tolerance:
        raise InputError(
            "model: two calls with the same inputs differ, so forward is random also in eval "
            "mode, such as by F.dropout without training=self.training; make it deterministic."
        )
    for i in range(2):
        alone = _outputs(module, x[i : i + 1])
        if _distance(alone.reshape(-1), after[i].reshape(-1), after) > tolerance:
            raise InputError(
                "model: the outputs of an input depend on the other inputs of its batch; attacks "
                "need one set of features for each sample. Look for statistics over the batch, "
                "or for the batch in another dimension than the first (batch_first=False)."
            )
    off = _distance(before, after)
    if off > tolerance:
        raise InputError(
            f"model: what was changed in the copy changed its outputs by {off:.1e} of their size; "
            "if hooks take part in computing them, write what they do in forward."
        )


# The head


@dataclass(frozen=True, eq=False)
class _Call:
    name: str
    shape: tuple[int, ...]
    outputs: Tensor | None


def _calls(module: nn.Module, x: Tensor, size: int) -> tuple[list[_Call], Tensor]:
    """Calls of linear layers in order, with the outputs where there are `size` of them.

    The model's outputs come along. Layers that get their input by keyword are left out.
    """
    calls: list[_Call] = []

    def recorder(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Tensor, ...], outputs: Tensor) -> None:
            kept = outputs.clone() if outputs.numel() == size else None
            if args:
                calls.append(_Call(name, tuple(args[0].shape), kept))

        return record

    handles = [
        part.register_forward_hook(recorder(name))
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        outputs = module(x)
    finally:
        for handle in handles:
            handle.remove()
    return calls, outputs


def _find_head(module: nn.Module, x: Tensor, size: int, head: str | None) -> str:
    """Name of the layer that is named, or whose output is the model's, if it can be attacked."""
    calls, outputs = _calls(module, x, size)
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if head is not None:
        head = _canonical(module, head, linear)
        if not any(call.name == head for call in calls):
            raise InputError(
                f"head: forward does not call {head}; name one that it calls: "
                f"{_listed(call.name for call in calls)}."
            )
    else:
        head = _last(calls, linear, outputs, len(x))
    for inputs in (x, x[:1]):
        shapes = [call.shape for call in _calls(module, inputs, 0)[0] if call.name == head]
        _refuse_shared(module, head, len(shapes))
        _refuse_tokens(head, shapes[0], len(inputs))
    return head


def _canonical(module: nn.Module, head: str, linear: list[str]) -> str:
    """The name under which `named_modules` lists a linear layer."""
    try:
        layer = module.get_submodule(head)
    except AttributeError:
        layer = None
    for name in linear:
        if layer is module.get_submodule(name):
            return name
    found = "does not exist" if layer is None else f"is a {type(layer).__name__}"
    raise InputError(f"head: {head!r} {found}; the linear layers are {_listed(linear, 20)}.")


def _last(calls: list[_Call], linear: list[str], outputs: Tensor, n: int) -> str:
    """The last call whose output is the model's, but for the shape."""
    if not calls:
        raise InputError(
            f"head: forward calls none of the linear layers ({_listed(linear)}), so the last one "
            "cannot be found; call it as a module and return its output."
        )
    for call in reversed(calls):
        if call.outputs is not None and torch.equal(call.outputs.reshape(outputs.shape), outputs):
            return call.name
    for call in reversed(calls):
        for link, function in LINKS.items():
            if call.outputs is None:
                continue
            linked = function(call.outputs.reshape(outputs.shape))
            if _distance(linked, outputs) < 1e-5:
                raise InputError(
                    f"model: ends in {link}; return the logits, the output of {call.name} (drop "
                    f"the final {link}), or name the layer with head={call.name!r}."
                )
    last = calls[-1]
    _refuse_tokens(last.name, last.shape, n)
    raise InputError(
        f"model: its output is not that of a linear layer: something follows {last.name}, the "
        f"last one; return the output of that layer, or name one with head={last.name!r}."
    )


def _refuse_tokens(head: str, shape: tuple[int, ...], n: int) -> None:
    if len(shape) != 2 or shape[0] != n:
        raise InputError(
            f"head: in a batch of {n}, {head or 'the model'} is applied to a tensor of shape "
            f"{shape}; expected ({n}, h), one row for each input. A head on several positions or "
            "tokens cannot be attacked: pool before it, or name another with head=."
        )


def _refuse_shared(module: nn.Module, head: str, times: int) -> None:
    if times > 1:
        raise InputError(
            f"head: {head} runs {times} times in one forward; its weights then hold the samples "
            "through several features. Use a layer of its own for the last one."
        )
    prefix = f"{head}." if head else ""
    own = {id(p): name for name, p in module.get_submodule(head).named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in own and name != prefix + own[id(parameter)]:
            raise InputError(
                f"head: the {own[id(parameter)]} of {head} is shared with {name}, so that it "
                "holds the samples through several features. Give the head weights of its own."
            )


# Derivatives


def _checked_tensors(module: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """Parameters to check: all, or as many tensors of a large model as have LARGE entries."""
    every = {name: p.detach() for name, p in module.named_parameters() if p.is_floating_point()}
    if sum(p.numel() for p in every.values()) <= LARGE:
        return every, []
    names = list(every)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
    chosen: set[str] = set()
    room = LARGE
    for name in (names[i] for i in order):
        if every[name].numel() <= room:
            room -= every[name].numel()
            chosen.add(name)
    sentence = (
        f"The model is large: derivatives were checked for {len(chosen)} of {len(every)} "
        f"parameter tensors, drawn at random, with {LARGE - room} entries."
    )
    return {name: p for name, p in every.items() if name in chosen}, [sentence]


def _outputs_and_hidden(
    module: nn.Module, head: str, parameters: Mapping[str, Tensor], inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """f(x; θ) and what enters the head, both to be differentiated."""
    hidden: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        hidden.append(args[0])

    handle = module.get_submodule(head).register_forward_pre_hook(keep)
    try:
        outputs: Tensor = functional_call(module, dict(parameters), (inputs,))
    finally:
        handle.remove()
    return outputs, hidden[0]


def _derivative_error(
    module: nn.Module,
    head: str,
    outputs: int,
    parameters: dict[str, Tensor],
    x: Tensor,
    random: Callable[..., Tensor],
) -> float:
    """Largest relative error of ∂/∂x of ⟨∇_θ u·f(x), r⟩, tensor by tensor, and of the activations.

    vmap, grad and jvp are held against central differences of a plain loop over samples, vjp
    against jvp.
    """
    weights = {name: random(*p.shape) for name, p in parameters.items()}
    u = random(outputs)

    def scalar(theta: Mapping[str, Tensor], one: Tensor) -> tuple[Tensor, Tensor]:
        outputs, hidden = _outputs_and_hidden(module, head, theta, one[None])
        return (outputs.reshape(-1) * u).sum(), hidden.reshape(-1)

    def contracted(gradients: Iterable[Tensor]) -> Tensor:
        pairs = zip(gradients, weights.values(), strict=True)
        return torch.stack([(g * r).sum() for g, r in pairs])

    def by_loop(x: Tensor) -> tuple[Tensor, Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        rows, activations = [], []
        for one in x:
            value, hidden = scalar(leaves, one)
            found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            rows.append(contracted(found))
            activations.append(hidden.detach())
        return torch.stack(rows), torch.stack(activations)

    def by_func(x: Tensor) -> tuple[Tensor, Tensor]:
        def one_sample(one: Tensor) -> tuple[Tensor, Tensor]:
            gradients, hidden = grad(scalar, has_aux=True)(parameters, one)
            return contracted(gradients.values()), hidden

        rows, activations = vmap(one_sample)(x)
        return rows, activations

    errors: list[Tensor] = []
    for step in STEPS:
        direction = _candidates(random, len(x), tuple(x.shape[1:]))
        try:
            ahead, behind = by_loop(x + step * direction), by_loop(x - step * direction)
            values, pushed = jvp(by_func, (x,), (direction,))[:2]
            if not errors:
                pull = vjp(by_func, x)[1]
                (pulled,) = pull(pushed)
        except Exception as error:
            raise InputError(
                f"model: torch.func cannot differentiate it ({type(error).__name__}: "
                f"{_first_line(error)}); rewrite that operation with elementary ones. Recurrent "
                "layers, in-place operations on slices and custom autograd functions without a "
                "jvp are usual causes."
            ) from error
        differences = ((ahead[0] - behind[0]) / (2 * step), (ahead[1] - behind[1]) / (2 * step))
        if not errors:
            _refuse_constant(pushed[1], differences[1])
            _refuse_one_sided(pushed, pulled, direction)
        errors.append(_errors(pushed, differences, values, ROUNDING / step))
        best = torch.stack(errors).amin(0)
        if best.max() < 0.01 * TOLERANCE:
            break
    _refuse_wrong(module, list(parameters), best)
    return best.max().item()


def _errors(
    pushed: tuple[Tensor, Tensor],
    differences: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    floor: float,
) -> Tensor:
    """Relative errors (n, tensors + 1): of each tensor's contraction, then of the activations.

    A derivative counts as `floor` times its candidate's values at least.
    """
    tiny = torch.finfo(torch.float64).tiny
    off, size = (pushed[0] - differences[0]).abs(), differences[0].abs()
    scale = torch.maximum(size, values[0].abs()).amax(1, keepdim=True)
    rows = off / (size + floor * scale).clamp_min(tiny)
    off, size, scale = (
        part.norm(dim=1, keepdim=True)
        for part in (pushed[1] - differences[1], differences[1], values[1])
    )
    activations = off / (size + floor * scale).clamp_min(tiny)
    return torch.cat([rows, activations], dim=1).nan_to_num(torch.inf)


def _refuse_one_sided(pushed: tuple[Tensor, ...], pulled: Tensor, direction: Tensor) -> None:
    """‖J·D‖² = ⟨D, JᵀJ·D⟩: forward and reverse mode must be of one Jacobian."""
    forward = sum(part.square().sum() for part in pushed)
    reverse = (pulled * direction).sum()
    off = ((reverse - forward).abs() / forward).item()
    if off > TOLERANCE:
        raise InputError(
            f"model: forward and reverse derivatives in the input differ by {off:.1e} of their "
            "size; look for detach, no_grad and custom autograd functions in forward."
        )


def _refuse_constant(pushed: Tensor, difference: Tensor) -> None:
    if not pushed.any() and not difference.any():
        raise InputError(
            "model: the activations before its head do not change with the input, for random "
            "inputs of norm √d: its units are all dead, or forward rounds its input."
        )


def _refuse_wrong(module: nn.Module, names: list[str], errors: Tensor) -> None:
    """Name the tensors with wrong derivatives, worst first, and the layers that own them."""
    worst = errors.amax(0)
    if worst.max() <= TOLERANCE:
        return
    suspects = []
    for i in worst.argsort(descending=True).tolist():
        if worst[i] > TOLERANCE and i < len(names):
            owner = type(module.get_submodule(names[i].rpartition(".")[0])).__name__
            suspects.append(f"{names[i]} ({owner})")
        elif worst[i] > TOLERANCE:
            suspects.append("the activations before the head")
    raise InputError(
        f"model: derivatives are off by {worst.max().item():.1e} of their size from finite "
        f"differences, for {_listed(suspects)}. Suspects are these layers and those that follow: "
        "F.instance_norm (use nn.GroupNorm), custom autograd functions, detach, no_grad, rounding "
        "and casts to float32 in forward."
    )


# Words


def _distance(given: Tensor, expected: Tensor, among: Tensor | None = None) -> float:
    """Largest difference, relative to the largest entry expected, or to the largest among more."""
    if given.shape != expected.shape:
        return math.inf
    size = (expected if among is None else among).abs().max()
    size = size.clamp_min(torch.finfo(size.dtype).tiny)
    return ((given - expected).abs().max() / size).item()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _listed(names: Iterable[str], limit: int = 4) -> str:
    """Names in a row, the first few of many, each once."""
    unique = list(dict.fromkeys(names))
    if len(unique) > limit:
        return f"{', '.join(unique[:limit])} and {len(unique) - limit} more"
    return ", ".join(unique)
