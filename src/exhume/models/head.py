"""Find the last linear layer of a module, its head, and refuse one that cannot be attacked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from exhume.errors import InputError, listed
from exhume.models.self_check import distance

LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: z.log_softmax(-1),
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
}
"""What models that return probabilities end in."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a linear layer: its name, the shape it was given, what it returned."""

    name: str
    shape: tuple[int, ...]
    outputs: Tensor | None


def _calls(module: nn.Module, x: Tensor, size: int) -> tuple[list[_Call], Tensor]:
    """Return the calls of linear layers in order, and the model's outputs.

    Outputs of a layer are kept where they have `size` entries. Calls by keyword are left out.
    """
    calls: list[_Call] = []
    names = {part: name for name, part in module.named_modules() if isinstance(part, nn.Linear)}

    def record(part: nn.Module, args: tuple[Tensor, ...], outputs: Tensor) -> None:
        if isinstance(part, nn.Linear) and part in names and args:
            kept = outputs.clone() if outputs.numel() == size else None
            calls.append(_Call(names[part], tuple(args[0].shape), kept))

    with register_module_forward_hook(record):
        outputs = module(x)
    return calls, outputs


def _linear(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def find_head(module: nn.Module, x: Tensor, size: int, head: str | None) -> str:
    """Return the name of the layer whose output is the model's, or that is named.

    Args:
        module: the model.
        x: a batch of inputs.
        size: how many entries the model's outputs have for it.
        head: a name that the user gave; None to search.

    Raises:
        InputError: if there is none that runs once, on one row for each input.
    """
    calls, outputs = _calls(module, x, size)
    if head is None:
        head = _last(module, calls, outputs)
    elif head not in _linear(module):
        known = listed(_linear(module), 20)
        raise InputError(f"head: {head!r} is no linear layer; the linear layers are {known}.")
    elif head not in (names := [call.name for call in calls]):
        raise InputError(
            f"head: forward does not call {head}; name one that it calls: {listed(names)}."
        )
    for inputs in (x, x[:1]):
        shapes = [call.shape for call in _calls(module, inputs, 0)[0] if call.name == head]
        _refuse_shared(module, head, len(shapes))
        _refuse_tokens(head, shapes[0], len(inputs))
    return head


def _last(module: nn.Module, calls: list[_Call], outputs: Tensor) -> str:
    """Return the last call whose output is the model's, but for the shape."""
    if not calls:
        raise InputError(
            f"head: forward calls none of the linear layers ({listed(_linear(module))}), so the "
            "last one cannot be found; call it as a module and return its output."
        )
    whole = [
        (call.name, call.outputs.reshape(outputs.shape))
        for call in reversed(calls)
        if call.outputs is not None
    ]
    for name, found in whole:
        if torch.equal(found, outputs):
            return name
    for name, found in whole:
        for link, function in LINKS.items():
            if distance(function(found), outputs) < 1e-5:
                raise InputError(
                    f"model: ends in {link}; return the logits, the output of {name} (drop the "
                    f"final {link}), or name the layer with head={name!r}."
                )
    last = calls[-1]
    _refuse_tokens(last.name, last.shape, len(outputs))
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
