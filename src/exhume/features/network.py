"""A module as a pure function of its weights and of flat inputs, exact when differentiated twice.

Torch's fused LayerNorm has wrong second derivatives, its fused attention and hardsigmoid none.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from exhume.device import tensor_cores
from exhume.errors import InputError
from exhume.features.activations import Activation, activation

Weights = Mapping[str, Tensor]  # parameters and buffers by name, as in a state dict

WRITTEN = 2**24  # entries of patches that are written out, at most: they take memory
_written_out = ContextVar("written_out", default=False)  # whether convolutions write patches out


@dataclass(frozen=True, eq=False)
class Network:
    """A prepared module (see `exhume.models.prepare`), called with weights of the caller's."""

    module: nn.Module  # in eval mode; its own weights are not used
    shape: tuple[int, ...]  # of one input
    outputs: int  # c, the number of outputs
    head: str | None  # name of the last linear layer; None where there is none
    # B, where the module is given Bx for x: in a subspace, x are coordinates and B is (d, r); where
    # the first layer was made smaller, x are inputs and B is (c, d)
    basis: Tensor | None = None
    batch_statistics: bool = False  # whether batch norms take those of the inputs, as in training

    @property
    def dim(self) -> int:
        """Return the number of entries of one x."""
        return math.prod(self.shape) if self.basis is None else self.basis.shape[1]

    def __call__(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return f(x; θ), (n, d) → (n, c)."""
        return self._run(weights, inputs).reshape(len(inputs), self.outputs)

    def hidden(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return what the head is given, (n, d) → (n, h); the outputs where there is no head."""
        if self.head is None:
            return self(weights, inputs)
        seen: list[Tensor] = []
        head = self.module.get_submodule(self.head)
        with head.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0])):
            self._run(weights, inputs)
        return seen[-1].reshape(len(inputs), -1)

    def _run(self, weights: Weights, inputs: Tensor) -> Tensor:
        if self.basis is not None:
            inputs = inputs @ self.basis.T.to(inputs)
        shaped = inputs.reshape(len(inputs), *self.shape)
        with exact_operations(self.batch_statistics):
            outputs: Tensor = functional_call(self.module, dict(weights), (shaped,))
        return outputs

    @property
    def head_weight(self) -> str:
        """Return the name of the head's weight (c, h); "" where there is no head."""
        return "" if self.head is None else f"{self.head}.weight".lstrip(".")

    @property
    def head_bias(self) -> str:
        """Return the name of the head's bias (c,), whether it has one or not; "" without a head."""
        return "" if self.head is None else f"{self.head}.bias".lstrip(".")

    @property
    def patches(self) -> tuple[int, int] | None:
        """Return height and width of the patches that the first layer cuts an image into, if so."""
        kinds = (nn.Conv2d, nn.Linear)
        first = next((part for part in self.module.modules() if isinstance(part, kinds)), None)
        if not isinstance(first, nn.Conv2d) or self.basis is not None or len(self.shape) < 2:
            return None
        height, width = first.kernel_size
        tiled = self.shape[-2] % height == 0 and self.shape[-1] % width == 0
        return (height, width) if tiled and _tiling(first) else None

    def first_dense(self, weights: Weights) -> str | None:
        """Return the name of the first weight, if dense, used once, and given the input.

        It is (h, d), or (h, C, a, b) where it is given images and cuts them into `patches`. It must
        be given the same with other weights: a learnt scale of the input may happen to be 1.
        """
        like = next(w for w in weights.values() if w.is_floating_point())
        weights = moved(weights, like.device, like.dtype)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(2, math.prod(self.shape), generator=generator).to(like)

        def other(weight: Tensor) -> Tensor:  # what is positive stays so, as a variance must
            drawn = torch.rand(2, *weight.shape, generator=generator).to(weight)
            return weight * (1 + drawn[0]) + 0.1 * drawn[1]

        given = self._given(weights, inputs)
        first = next((name for name, whole in given if whole), None)
        if first is None or [name for name, _ in given].count(first) > 1:
            return None
        others = {n: other(w) if w.is_floating_point() else w for n, w in weights.items()}
        try:
            again = self._given(others, inputs)
        except Exception:  # a foreign forward may ask something of its weights
            return None
        return f"{first}.weight".lstrip(".") if (first, True) in again else None

    def _given(self, weights: Weights, inputs: Tensor) -> list[tuple[str, bool]]:
        """Return which dense layers were called, and whether with the inputs themselves."""
        names = {part: name for name, part in self.module.named_modules()}
        seen: list[tuple[str, bool]] = []

        def note(part: nn.Module, arguments: tuple[Any, ...]) -> None:
            tiling = self.patches is not None and _tiling(part)
            if part in names and arguments and (tiling or isinstance(part, nn.Linear)):
                x = arguments[0].flatten(1) if tiling else arguments[0]
                seen.append((names[part], torch.equal(x, inputs)))

        with torch.no_grad(), register_module_forward_pre_hook(note):
            self(weights, inputs)
        return seen


def _tiling(part: nn.Module) -> bool:
    """Whether a layer gives each tile of an image to one dense layer."""
    if not isinstance(part, nn.Conv2d) or part.padding not in ((0, 0), "valid"):
        return False
    return part.stride == part.kernel_size and part.dilation == (1, 1) and part.groups == 1


def known_network(module: nn.Module, shape: tuple[int, ...], outputs: int) -> Network:
    """Return a bundled architecture as a network; others go through `exhume.models.prepare`."""
    head = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)][-1]
    return Network(module, shape, outputs, head)


def named_block(trainable: tuple[str, ...], pattern: str) -> tuple[str, ...]:
    """Return the names of the parameters that a user means, in the order of the model.

    The pattern is `all`, `first` or `last` (the first or last layer with weights, its bias too),
    or names and patterns with commas between them.
    """
    if pattern == "all":
        return trainable
    if pattern in ("first", "last"):
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in trainable))
        layer = layers[0] if pattern == "first" else layers[-1]
        return tuple(name for name in trainable if name.rpartition(".")[0] == layer)
    words = [word.strip() for word in pattern.split(",") if word.strip()]
    lost = [word for word in words if not any(fnmatchcase(name, word) for name in trainable)]
    if lost or not words:
        what = f"{lost[0]!r} names none of the model's: " if lost else "expected some of "
        advice = "Write all, first, last, or names and patterns with commas between them."
        raise InputError(f"parameters: {what}{', '.join(trainable)}. {advice}")
    return tuple(name for name in trainable if any(fnmatchcase(name, word) for word in words))


def midpoint(initial: Weights, trained: Weights) -> dict[str, Tensor]:
    """Return (θ₀ + θ)/2 for floating-point weights, and the trained ones for the others."""
    return {n: (initial[n] + w) / 2 if w.is_floating_point() else w for n, w in trained.items()}


def moved(weights: Weights, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the same weights elsewhere; integers stay integers."""
    kinds = {name: dtype if w.is_floating_point() else w.dtype for name, w in weights.items()}
    return {name: w.to(device, kinds[name]) for name, w in weights.items()}


def derivatives(rounded: bool) -> AbstractContextManager[None]:
    """Take derivatives with TF32 on a GPU where they may be rounded, else without."""
    load_forward_mode()
    return tensor_cores(rounded)


@contextmanager
def exact_operations(batch_statistics: bool = False) -> Iterator[None]:
    """Run modules so that they can be differentiated twice, also outside, once values are there.

    LayerNorm and hardsigmoid are made of elementary operations, scaled dot products run through
    torch's math kernel, and the inference path of attention modules is off; convolutions of tiles
    are products, which is faster. Batch norms may be those of training, without a note of what
    their running statistics become.
    """
    load_forward_mode()
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), _ElementaryOperations(batch_statistics):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@cache
def load_forward_mode() -> None:
    """Take torch's first forward derivative, which warns that the compiler it uses is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Return (x − mean)/√(var + eps) · weight + bias over the last dimensions, as torch's does."""
    normal = _normalised(input, tuple(range(-len(normalized_shape), 0)), eps)
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return (x − mean)/√(var + eps) · weight + bias with the statistics of a batch (n, c, …)."""
    dims, shape = (0, *range(2, input.ndim)), (-1, *(1,) * (input.ndim - 2))
    normal = _normalised(input, dims, eps)
    normal = normal if weight is None else normal * weight.view(shape)
    return normal if bias is None else normal + bias.view(shape)


def _normalised(input: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = input - input.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """Return min(max(x + 3, 0), 6) / 6, as torch's does, but never in place."""
    return F.relu6(input + 3) / 6


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Return torch's; for an image cut into tiles (n, c·a·b) it is one product with the weight.

    A transformer begins with that, and derivatives of a product take a third of the time. Patches
    that overlap are written out inside of `patches_written_out`.
    """
    channels, (tall, wide) = weight.shape[1], weight.shape[2:]
    simple = input.ndim == 4 and _pair(dilation) == (1, 1) and groups == 1
    cut = _pair(stride) == (tall, wide) != (1, 1) and simple
    plain = _pair(padding) in ((0, 0), ("valid", "valid"))
    if not (cut and plain) or input.shape[2] % tall or input.shape[3] % wide:
        small = weight[0].numel() * input[:, 0].numel() <= WRITTEN
        if simple and small and _written_out.get() and not isinstance(padding, str):
            return _patched(input, weight, bias, _pair(stride), _pair(padding))
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    down, across = input.shape[2] // tall, input.shape[3] // wide
    tiles = input.reshape(len(input), channels, down, tall, across, wide)
    maps = F.linear(tiles.permute(0, 2, 4, 1, 3, 5).flatten(3), weight.flatten(1), bias)
    return maps.permute(0, 3, 1, 2).contiguous()  # as torch's is, which some modules rely on


@contextmanager
def patches_written_out() -> Iterator[None]:
    """Let convolutions be products of all patches.

    Of a few small images (`WRITTEN`) they and their derivatives take a GPU half as long then: its
    library's kernels are made for large ones. Torch maps their derivative over batches one by one,
    hence not always.
    """
    before = _written_out.set(True)
    try:
        yield
    finally:
        _written_out.reset(before)


def _patched(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], edge: Any
) -> Tensor:
    """Return the convolution as one product of the weight with all patches, (c·a·b, n·h·w)."""
    (tall, wide), (down, across) = weight.shape[2:], stride
    framed = F.pad(input, (edge[1], edge[1], edge[0], edge[0])) if any(edge) else input
    patches = framed.unfold(2, tall, down).unfold(3, wide, across)  # (n, c, h, w, a, b)
    sides = len(input), *patches.shape[2:4]
    columns = patches.permute(1, 4, 5, 0, 2, 3).reshape(weight[0].numel(), -1)
    maps = (weight.flatten(1) @ columns).view(-1, *sides).transpose(0, 1)
    maps = maps if bias is None else maps + bias.view(-1, 1, 1)
    return maps.contiguous()


def _pair(value: Any) -> tuple[Any, Any]:
    """A number for both sides, as torch takes it: alone, in a sequence of one, or two of them."""
    alone = isinstance(value, str) or not isinstance(value, Sequence)
    several = (value,) if alone else tuple(value)
    return several if len(several) == 2 else several * 2


# Ours in the place of torch's, also in modules that call the functions themselves
TWINS: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.hardsigmoid: hardsigmoid,
    F.conv2d: conv2d,
}


class _ElementaryOperations(TorchFunctionMode):
    """Torch's functions are their twins inside."""

    def __init__(self, batch_statistics: bool) -> None:
        super().__init__()
        self.batch_statistics = batch_statistics

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = TWINS.get(func, func)
        if func is F.batch_norm and self.batch_statistics:
            func = batch_norm
        return func(*args, **(kwargs or {}))


class Elementwise(nn.Module):
    """An activation as a layer."""

    def __init__(self, name: str) -> None:
        """Take the activation of that name, see `exhume.features.activations.activation`."""
        super().__init__()
        self.activation = activation(name)

    def forward(self, z: Tensor) -> Tensor:
        """Return σ(z), entry by entry."""
        return self.activation.value(z)

    def extra_repr(self) -> str:
        """Return the activation's name."""
        return self.activation.name


def known_activation(module: nn.Module) -> Activation | None:
    """Return the activation that a layer computes, if it is one of ours."""
    if isinstance(module, Elementwise):
        return module.activation
    names = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.GELU: "gelu", nn.Softplus: "softplus"}
    plain = getattr(module, "approximate", "none") == "none" and getattr(module, "beta", 1) == 1
    return activation(names[type(module)]) if plain and type(module) in names else None


def with_activation(module: nn.Module, surrogate: Activation) -> nn.Module | None:
    """Return a copy, on the same weights, with another activation for every ReLU; None if none."""
    found = [
        (path, name)
        for path, parent in module.named_modules()
        for name, part in parent._modules.items()  # named_children would name a shared layer once
        if part is not None and (known := known_activation(part)) and known.name == "relu"
    ]
    if not found:
        return None
    shared = copy.deepcopy(module, {id(x): x for x in (*module.parameters(), *module.buffers())})
    for path, name in found:
        layer = Elementwise("relu").train(module.training)
        layer.activation = surrogate
        setattr(shared.get_submodule(path), name, layer)
    return shared


class Chain(NamedTuple):
    """The dense layers of a network."""

    names: tuple[str, ...]  # of the layers, first to last
    activations: tuple[Activation, ...]  # after each of them but the last


def dense_chain(network: Network) -> Chain | None:
    """Return the layers of Sequential(Flatten, Linear, σ, …, Linear), or None for others."""
    if type(network.module) is not nn.Sequential:
        return None
    parts = [
        (name, part)
        for name, part in network.module._modules.items()  # named_children leaves out repetitions
        if not isinstance(part, nn.Dropout | nn.Identity | None)
        and not (isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1))
    ]
    names = tuple(name for name, _ in parts[0::2])
    dense = [part for _, part in parts[0::2] if type(part) is nn.Linear]
    between = [known_activation(part) for _, part in parts[1::2]]
    activations = tuple(sigma for sigma in between if sigma is not None)
    tensors = [id(tensor) for part in dense for tensor in part.parameters()]
    fits = (
        len(dense) == len(names) == len(activations) + 1
        and len(between) == len(activations)
        and dense[0].in_features == torch.Size(network.shape).numel()
        and len(set(tensors)) == len(tensors)
    )
    return Chain(names, activations) if fits else None
