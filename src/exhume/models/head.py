"""Find the last linear layer of a module, its head, and refuse one that cannot be attacked."""

from collections.abc import Callable

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

Call = tuple[str, tuple[int, ...], Tensor]  # a linear layer's name, its input's shape, its output


def find_head(module: nn.Module, x: Tensor, size: int, head: str | None) -> str:
    """Return the name of the layer whose output is the model's, or that is named.

    It must run once, on one row for each input of a batch, with weights of its own. The model's
    outputs for the batch x have `size` entries.
    """
    linear = {part: name for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    calls, outputs = _calls(module, linear, x, size)
    called = [name for name, _, _ in calls]
    if head is not None and head not in linear.values():
        known = listed(linear.values(), 20)
        raise InputError(f"head: {head!r} is no linear layer; the linear layers are {known}.")
    if head is not None and head not in called:
        raise InputError(
            f"head: forward does not call {head}; name one that it calls: {listed(called)}."
        )
    if not calls:
        raise InputError(
            f"head: forward calls none of the linear layers ({listed(linear.values())}); call the "
            "last one as a module and return its output."
        )
    if head is None:
        head = _last(calls, outputs)
    for inputs in (x, x[:1]):
        again, _ = _calls(module, linear, inputs, 0)
        shapes = [shape for name, shape, _ in again if name == head]
        if len(shapes) > 1:
            raise InputError(
                f"head: {head} runs {len(shapes)} times in one forward; the last layer must be one "
                "of its own."
            )
        _refuse_tokens(head, shapes[0], len(inputs))
    prefix = f"{head}." if head else ""
    own = {id(p): prefix + name for name, p in module.get_submodule(head).named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (of_head := own.get(id(parameter), name)) != name:
            raise InputError(
                f"head: the {of_head.removeprefix(prefix)} of {head} is shared with {name}; the "
                "last layer must have weights of its own."
            )
    return head


def _calls(
    module: nn.Module, linear: dict[nn.Linear, str], x: Tensor, size: int
) -> tuple[list[Call], Tensor]:
    """Return the calls of linear layers in order (none by keyword), and the model's outputs.

    Outputs of a layer are kept where they have `size` entries, to spare the memory.
    """
    calls: list[Call] = []

    def record(part: nn.Module, args: tuple[Tensor, ...], outputs: Tensor) -> None:
        if isinstance(part, nn.Linear) and part in linear and args:
            kept = outputs.clone() if outputs.numel() == size else outputs.new_empty(0)
            calls.append((linear[part], tuple(args[0].shape), kept))

    with register_module_forward_hook(record):
        return calls, module(x)


def _last(calls: list[Call], outputs: Tensor) -> str:
    """Return the last call whose output is the model's, but for the shape."""
    whole = [
        (name, found.reshape(outputs.shape))
        for name, _, found in reversed(calls)
        if found.numel() == outputs.numel()
    ]
    for name, found in whole:
        if torch.equal(found, outputs):
            return name
    for name, found in whole:
        for link, function in LINKS.items():
            if distance(function(found), outputs) < 1e-5:
                raise InputError(
                    f"model: ends in {link}; return the logits, the output of {name}, or name the "
                    f"layer with head={name!r}."
                )
    name, shape, _ = calls[-1]
    _refuse_tokens(name, shape, len(outputs))
    raise InputError(
        f"model: something follows {name}, its last linear layer; return the output of that "
        f"layer, or name one with head={name!r}."
    )


def _refuse_tokens(head: str, shape: tuple[int, ...], n: int) -> None:
    if len(shape) != 2 or shape[0] != n:
        raise InputError(
            f"head: {head or 'the model'} is applied to a tensor of shape {shape}; expected "
            f"({n}, h), one row for each input: pool before it, or name another with head=."
        )
