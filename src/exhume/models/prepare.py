"""Make a copy of a user's module that can be attacked, and say what was done to it.

Much that is usual in a module makes second derivatives impossible, or wrong without a warning.
Each such trap is mended in the copy, or refused; then derivatives are checked (`self_check`).
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from exhume.errors import InputError, listed, quoted
from exhume.features.network import Network, exact_operations
from exhume.models import self_check

LARGEST = 2**27  # the most entries of one input: a batch of eight in float64 then takes 8 GiB
HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward", "_backward")))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A module whose derivatives can be trusted inside `exact_operations()`."""

    network: Network  # a copy in eval mode, mended, in float32 or float64
    changes: tuple[str, ...] = ()  # a sentence for each thing that was changed: what, where and why
    warnings: tuple[str, ...] = ()  # a sentence for each thing that weakens the attack's premise
    derivative_error: float | None = None  # largest, relative; None if not checked


def prepare(
    model: nn.Module,
    shape: tuple[int, ...],
    head: str | None = None,
    check: bool = True,
    last: bool = True,
) -> Prepared:
    """Return a copy of a model that can be attacked, or raise an error that says why not.

    The model, from inputs (n, *shape) to (n, c) or (n,), is left as it is, and so is the global
    random state. The head is the name of the last linear layer, found if None. `check` compares
    derivatives with finite differences, in float64. `last` says that this layer is attacked: a
    model without one is refused.
    """
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise InputError(f"shape: expected positive sizes such as (3, 32, 32), got {shape}.")
    if math.prod(shape) > LARGEST:
        raise InputError(f"shape: {shape} has too many entries; at most {LARGEST:,} can be found.")
    model, changes = _unwrapped(model)
    _refuse(model)
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        copy, dtype, copied = _copied(model)
        copy = copy.double() if check else copy
        random = self_check.random_tensors(copy)
        x = self_check.candidates(random, shape)
        with torch.no_grad():
            copied += _returning_logits(copy, x)
            before = self_check.outputs_of(copy, x)
            changes += copied + _mend(copy)
            with exact_operations():
                after = self_check.outputs_of(copy, x)
                self_check.check_forward(copy, x, before, after, 1e-9 if check else 1e-4)
                try:
                    found, linked = self_check.find_head(copy, x, after.numel(), head)
                except InputError:
                    if last or head is not None:
                        raise
                    found, linked = None, False
                    changes.append("Found no last linear layer, which other blocks do without.")
                if found is not None and linked:
                    changes.append(_without_log_softmax(copy, found))
        network, error = Network(copy, shape, after[0].numel(), found), None
        if check:
            error, part = self_check.derivative_error(network, x[:2], random)
            changes += part
        _cast(copy, dtype)
    return Prepared(network, tuple(changes), tuple(_sentences(copy, WARNINGS)), error)


class _Logits(nn.Module):
    """A module that returns an object is derived from this first, to return the logits in it."""

    def forward(self, *inputs: Tensor) -> Any:
        return _logits_in(super().forward(*inputs))


class _Unlinked(nn.Module):
    """A module that ends in a log_softmax is derived from this first, to end in its last layer."""

    last_layer: str

    def forward(self, *inputs: Tensor) -> Tensor:
        seen: list[Tensor] = []
        layer = self.get_submodule(self.last_layer)
        with layer.register_forward_hook(lambda module, given, outputs: seen.append(outputs)):
            super().forward(*inputs)
        return seen[-1]


def _derived(module: nn.Module, first: type, **entries: Any) -> None:
    """Let a module be of a class that goes before its own: names of parameters stay."""
    module.__class__ = type(type(module).__name__, (first, type(module)), entries)


def _logits_in(outputs: Any) -> Any:
    """Return the logits of an output object, as Hugging Face's models have; others as they are."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def _returning_logits(copy: nn.Module, x: Tensor) -> list[str]:
    """Let a copy whose forward returns an object with logits return these, and say so."""
    try:
        outputs = copy(x.clone())
    except Exception:
        return []  # it will be said why, when outputs are asked for
    if isinstance(outputs, Tensor) or not isinstance(_logits_in(outputs), Tensor):
        return []
    _derived(copy, _Logits)
    return [f"Took the logits out of the {type(outputs).__name__} that forward returns."]


def _without_log_softmax(copy: nn.Module, head: str) -> str:
    """Let a copy end in its last linear layer, and say so."""
    last = list(copy._modules)[-1] if isinstance(copy, nn.Sequential) else None
    if last is not None and isinstance(copy._modules[last], nn.LogSoftmax):
        copy._modules[last] = nn.Identity()
    else:
        _derived(copy, _Unlinked, last_layer=head)
    return (
        f"Left out the log_softmax after {head or 'the model'}: its negative log-likelihood is the "
        "cross-entropy of the logits, whose gradients are taken."
    )


COMPUTED = (
    "has a weight that is computed from other parameters, in which gradients would be taken; make "
    "it a parameter of its own with torch.nn.utils."
)

Table = tuple[tuple[Callable[[nn.Module], bool], str], ...]


def _hooked(kind: type) -> Callable[[nn.Module], bool]:
    return lambda part: any(isinstance(hook, kind) for hook in part._forward_pre_hooks.values())


def _of(kind: type) -> Callable[[nn.Module], bool]:
    return lambda part: isinstance(part, kind)


REFUSED_PARAMETERS: tuple[tuple[Callable[[nn.Parameter], bool], str], ...] = (
    (is_lazy, "is not initialised yet (a lazy module); run the model once first."),
    (lambda p: p.is_meta, "is on the meta device; load the weights first."),
    (
        lambda p: p.is_floating_point() and not bool(p.isfinite().all()),
        "holds NaN or infinite entries; load weights that are not damaged.",
    ),
)

# What no part of a model may be, and how the sentence goes on after its name and type
REFUSED_PARTS: Table = (
    (_of(torch.jit.ScriptModule), "is TorchScript; hand in the Python module."),
    (is_parametrized, COMPUTED + "parametrize.remove_parametrizations."),
    (_hooked(WeightNorm), COMPUTED + "remove_weight_norm."),
    (_hooked(SpectralNorm), COMPUTED + "remove_spectral_norm."),
    (_hooked(BasePruningMethod), COMPUTED + "prune.remove."),
    (
        lambda part: isinstance(part, _BatchNorm) and part.running_mean is None,
        "has no running statistics, so that inputs of a batch mix; train with nn.GroupNorm.",
    ),
    (
        lambda part: isinstance(part, _InstanceNorm) and part.running_mean is None,
        "has no running statistics, and torch's derivatives of gradients through it are wrong; "
        "replace it by nn.GroupNorm({0.num_features}, {0.num_features}, eps={0.eps}, "
        "affine={0.affine}), which computes the same and loads the same weights.",
    ),
)


def _refuse(model: nn.Module) -> None:
    """Refuse what the parts and parameters of a model already show."""
    for name, part in model.named_modules():
        for refused, sentence in REFUSED_PARTS:
            if refused(part):
                where = f"{name or 'the model'} ({type(part).__name__})"
                raise InputError(f"model: {where} {sentence.format(part)}")
    for name, parameter in model.named_parameters():
        for unusable, sentence in REFUSED_PARAMETERS:
            if unusable(parameter):
                raise InputError(f"model: {name} {sentence}")


def _inner(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper holds; None if the module is no wrapper."""
    parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = getattr(module, "module" if parallel else "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _unwrapped(model: nn.Module) -> tuple[nn.Module, list[str]]:
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    changes = []
    while (inner := _inner(model)) is not None:
        prefix = next(name for name, child in model.named_children() if child is inner)
        lost = f"names of parameters lose the prefix {prefix!r}"
        changes.append(f"Unwrapped {type(model).__name__}: {lost}.")
        model = inner
    return model, changes


def _copied(model: nn.Module) -> tuple[nn.Module, torch.dtype, list[str]]:
    """Return a copy in eval mode, the dtype to hand it out in, and what was changed."""
    try:
        copy = deepcopy(model)
    except Exception as error:
        advice = "keep computed tensors out of attributes"
        raise InputError(f"model: cannot be copied ({quoted(error)}); {advice}.") from error
    changes, inside = [], []
    for parent in list(copy.modules()):
        for name, child in list(parent.named_children()):
            while (inner := _inner(child)) is not None:
                child = inner
                setattr(parent, name, child)
                inside.append(name)
    if inside:
        changes.append(
            f"Unwrapped compiled or parallel modules inside ({listed(inside)}): names of "
            "parameters lose the prefix of the wrapper."
        )
    if any(module.training for module in copy.modules()):
        changes.append("Set to eval mode.")
    copy.eval()
    for module in copy.modules():
        module.training = False  # also where eval() is overridden
    kinds = {p.dtype for p in copy.parameters() if p.is_floating_point()}
    dtype = torch.float64 if torch.float64 in kinds else torch.float32
    if kinds - {dtype}:
        names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        changes.append(f"Parameters are {names}; the copy computes in {dtype}.")
    return _cast(copy, dtype), dtype, changes


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return module.double() if dtype == torch.float64 else module.float()


def _drops(part: nn.Module) -> bool:
    return isinstance(part, _DropoutNd) and part.p > 0


def _in_place(part: nn.Module) -> bool:
    return getattr(part, "inplace", False) is True


# What is mended in the copy, or when it runs, and what the user is told of it
CHANGES: Table = (
    (
        _of(nn.LayerNorm),
        "Replaced LayerNorm in {} by a twin of elementary operations: the derivative of per-sample "
        "gradients through torch's fused one is wrong.",
    ),
    (
        _of(nn.Hardsigmoid),
        "Replaced Hardsigmoid in {} by a twin of elementary operations: torch has no derivative of "
        "per-sample gradients through its own.",
    ),
    (
        _of(nn.MultiheadAttention),
        "Attention in {} runs through torch's math kernel: the fused ones have no second "
        "derivative.",
    ),
    (
        _in_place,
        "Switched off in-place operation in {}: torch.func may not overwrite what it "
        "differentiates.",
    ),
    (_drops, "Dropout in {} is inactive in eval mode: features must not be random."),
    (
        lambda part: any(getattr(part, hooks) for hooks in HOOKS),
        "Dropped the hooks of {} from the copy: they are not part of what is differentiated.",
    ),
)

# What weakens the attack's premise, and what the user is told of it
WARNINGS: Table = (
    (
        _of(_BatchNorm),
        "BatchNorm in {} uses its running statistics, unless a recipe says norms: train. If the "
        "model was trained with batch statistics, each sample's features then held a mix of its "
        "batch, so that the attack's premise, one set of features for each sample, holds only "
        "approximately.",
    ),
    (
        _drops,
        "Dropout in {} is inactive in the attack. If the model was trained with it, features were "
        "random, and the attack's premise holds only on average.",
    ),
    (
        _of(_InstanceNorm),
        "InstanceNorm in {} uses its running statistics, which training did not: the features of "
        "the attack are only approximately those of the training.",
    ),
)


def _sentences(module: nn.Module, table: Table) -> list[str]:
    """Return the sentences of a table that apply to some part, with the names of these parts."""
    parts = [(name or "the model", part) for name, part in module.named_modules()]
    found = [(sentence, [n for n, part in parts if applies(part)]) for applies, sentence in table]
    return [sentence.format(listed(names)) for sentence, names in found if names]


def _mend(module: nn.Module) -> list[str]:
    """Change a copy in place, and say so; LayerNorm and attention change when it is run."""
    changes = _sentences(module, CHANGES)
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.enable_nested_tensor = part.use_nested_tensor = False
        if _in_place(part):
            part.inplace = False  # type: ignore[assignment]
        for hooks in HOOKS:
            getattr(part, hooks).clear()
    return changes
