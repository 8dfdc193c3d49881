"""Networks that can be trained and attacked, as plain modules of torch.

Each takes samples (n, *shape), where (H, W) is an image of one channel, and gives outputs (n, m).
"""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from exhume.checks import sizes, whole_number
from exhume.errors import InputError
from exhume.features.network import Elementwise

DEEPEST = 1000  # blocks: a card may not ask for more than can be built at once
LARGE, BLOCK = 100_000_000, 1 << 24  # larger tensors are drawn in blocks; a seed depends on both
POSITIONS = 0.02  # standard deviation of positions at the start, as vision transformers use

Module = TypeVar("Module", bound=nn.Module)


class Residual(nn.Module):
    """ReLU(z + conv(ReLU(conv(z)))) on maps (n, width, h, w), with convolutions of 3×3, no bias."""

    def __init__(self, width: int) -> None:
        """Make a block on maps of `width` channels."""
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.inner = Elementwise("relu")
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.outer = Elementwise("relu")

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, width, h, w) to the same shape."""
        result: Tensor = self.outer(z + self.second(self.inner(self.first(z))))
        return result


class Stem(nn.Conv2d):
    """The first convolution of the residual network, its weights scaled by C·H·W as published."""

    def __init__(self, image: tuple[int, int, int], width: int, kernel: tuple[int, int]) -> None:
        """Go from an image (C, H, W) to `width` channels."""
        super().__init__(image[0], width, kernel, padding=1, bias=False)
        self.fan_in = math.prod(image)


class Tokens(nn.Module):
    """A map (n, c, h, w) as a sequence (n, hw, c), with learned positions added."""

    def __init__(self, count: int, dim: int) -> None:
        """Make positions for `count` = hw tokens of `dim` = c numbers."""
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(count, dim))

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, c, h, w) to (n, hw, c)."""
        return z.flatten(2).mT + self.positions


class Block(nn.Module):
    """A transformer block: attention (written out, to have second derivatives), then two layers."""

    def __init__(self, dim: int, heads: int) -> None:
        """Make a block for tokens of `dim` numbers, split evenly among `heads`."""
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)
        self.norm_layers = nn.LayerNorm(dim)
        wide, narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.layers = nn.Sequential(wide, Elementwise("gelu"), narrow)

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, tokens, dim) to the same shape."""
        count, tokens, dim = z.shape
        split = self.query_key_value(self.norm_attention(z))
        split = split.reshape(count, tokens, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # each (n, heads, tokens, k)
        weights = (query @ key.mT / math.sqrt(dim // self.heads)).softmax(-1)
        z = z + self.mix((weights @ value).transpose(1, 2).reshape(z.shape))
        result: Tensor = z + self.layers(self.norm_layers(z))
        return result


class Mean(nn.Module):
    """The mean over the tokens, (n, tokens, dim) → (n, dim)."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the mean."""
        return z.mean(1)


def two_layer(
    shape: Sequence[int], width: int, outputs: int = 1, activation: str = "relu", bias: bool = False
) -> nn.Sequential:
    """Return the module of f(x) = W₂ σ(W₁ x), with a bias in both layers or in none."""
    return mlp(shape, [whole_number("width", width)], outputs, activation, bias)


def mlp(
    shape: Sequence[int],
    widths: Sequence[int],
    outputs: int = 1,
    activation: str = "relu",
    bias: bool | str = False,
) -> nn.Sequential:
    """Return the module of f(x) = W_L σ(… σ(W₂ σ(W₁ x))).

    All layers have a bias, or none, or the "first" alone, which keeps a ReLU network homogeneous.
    """
    if not isinstance(bias, bool) and bias != "first":
        raise InputError(f"bias: expected true, false or first, got {bias!r}.")
    if not isinstance(activation, str):
        raise InputError(f"activation: expected a name such as relu, got {activation!r}.")
    units = [math.prod(sizes("shape", shape)), *sizes("widths", widths, math.inf)]
    layers: list[nn.Module] = [nn.Flatten()]
    for index, (before, after) in enumerate(itertools.pairwise(units)):
        has_bias = bias is True or (bias == "first" and index == 0)
        layers += [nn.Linear(before, after, has_bias), Elementwise(activation)]
    head = nn.Linear(units[-1], whole_number("outputs", outputs), bias is True)
    return nn.Sequential(*layers, head)


def resnet(
    shape: Sequence[int], width: int, outputs: int = 1, blocks: int = 4, kernel: int | None = None
) -> nn.Sequential:
    """Return the residual network of Iurada 2025: one large convolution, blocks, a linear head.

    It has no norms and no biases. Unless `kernel` gives its side, the first convolution makes the
    maps 7×7, as published: 28 for images of 32×32.
    """
    image, channel = _image(shape)
    _, height, breadth = image
    size = (height - 4, breadth - 4) if kernel is None else (whole_number("kernel", kernel),) * 2
    rows, columns = height + 3 - size[0], breadth + 3 - size[1]
    if min(size) < 1 or min(rows, columns) < 1:
        raise InputError(
            f"kernel: {size[0]}×{size[1]} does not fit on images of {height}×{breadth}; choose one "
            f"between 1 and {min(height, breadth) + 2}."
        )
    width = whole_number("width", width)
    return nn.Sequential(
        *channel,
        Stem(image, width, size),
        Elementwise("relu"),
        *(Residual(width) for _ in range(_depth("blocks", blocks))),
        nn.Flatten(),
        nn.Linear(rows * columns * width, whole_number("outputs", outputs), bias=False),
    )


def vit(
    shape: Sequence[int],
    patch: int = 4,
    dim: int = 64,
    depth: int = 2,
    heads: int = 4,
    outputs: int = 1,
) -> nn.Sequential:
    """Return a small vision transformer: patches, blocks, a norm, the mean, a head; no dropout.

    The side of a patch must divide both sides of the image, and `heads` the `dim` of a token.
    """
    (channels, height, breadth), channel = _image(shape)
    for word, value in (("patch", patch), ("dim", dim), ("heads", heads)):
        whole_number(word, value)
    if height % patch or breadth % patch:
        raise InputError(f"patch: expected a side that tiles {height}×{breadth}, got {patch}.")
    if dim % heads:
        raise InputError(f"heads: {dim} numbers cannot be split evenly among {heads} heads.")
    return nn.Sequential(
        *channel,
        nn.Conv2d(channels, dim, patch, stride=patch),
        Tokens(height * breadth // patch**2, dim),
        *(Block(dim, heads) for _ in range(_depth("depth", depth))),
        nn.LayerNorm(dim),
        Mean(),
        nn.Linear(dim, whole_number("outputs", outputs)),
    )


def _depth(word: str, value: object) -> int:
    if (depth := whole_number(word, value)) > DEEPEST:
        raise InputError(f"{word}: expected at most {DEEPEST}, got {depth}.")
    return depth


def _image(shape: object) -> tuple[tuple[int, int, int], list[nn.Module]]:
    """Return (C, H, W) of an image, and a layer that gives a grey one (n, H, W) its channel."""
    sides = sizes("shape", shape)
    if len(sides) not in (2, 3):
        raise InputError(
            f"shape: expected an image, (H, W) or (C, H, W), got {list(sides)}; for other samples "
            "choose two_layer or mlp."
        )
    channels, height, breadth = (1, *sides)[-3:]
    return (channels, height, breadth), [] if len(sides) == 3 else [nn.Unflatten(1, (1, height))]


MADE: tuple[Callable[..., nn.Module], ...] = (two_layer, mlp, resnet, vit)
ARCHITECTURES = {make.__name__: make for make in MADE}  # by the name that a card gives them


def build(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the network that a card describes, its weights not yet those of any seed."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(f"unknown architecture {name!r}; known are {', '.join(ARCHITECTURES)}.")
    if not isinstance(arguments, Mapping):
        raise InputError(f"architecture {name}: its arguments are no mapping, got {arguments!r}.")
    signature = inspect.signature(ARCHITECTURES[name])
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise InputError(f"architecture {name}: {error}; known are {known}.") from error
    try:
        return ARCHITECTURES[name](**arguments)
    except InputError as error:
        raise InputError(f"architecture {name}, {error}") from error
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise InputError(f"architecture {name}: too large to be made ({error}).") from error


def initialise(module: Module, seed: int = 0) -> Module:
    """Draw the weights of a network, in place, and return it.

    Weights are N(0, 1/fan-in), positions N(0, 0.02²), biases 0, norms the identity, drawn on the
    CPU in float64 and then rounded: a seed means the same network in any precision and device.
    """
    if whole_number("seed", seed, least=0) >= 2**63:
        raise InputError(f"seed: expected a whole number below 2⁶³, got {seed}.")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in module.named_parameters():  # one that is shared comes once
            deviation, constant = _distribution(module, path)
            if deviation == 0:
                parameter.fill_(constant)
            elif parameter.numel() <= LARGE:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn.mul_(deviation))
            else:
                for part in torch.split(parameter.view(-1), BLOCK):
                    part.copy_(torch.randn(len(part), generator=generator).mul_(deviation))
    return module


def _distribution(module: nn.Module, path: str) -> tuple[float, float]:
    """Return a parameter's standard deviation at the start, and its value where that is zero."""
    layer, _, name = path.rpartition(".")
    part = module.get_submodule(layer)
    if isinstance(part, Tokens):
        return POSITIONS, 0.0
    if isinstance(part, nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._BatchNorm):
        return 0.0, 0.0 if name == "bias" else 1.0
    if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        fan_in = part.fan_in if isinstance(part, Stem) else part.weight[0].numel()
        return (0.0 if name == "bias" else 1 / math.sqrt(fan_in)), 0.0
    kind = type(part).__name__
    raise InputError(f"parameter {path!r} of a {kind}: cannot be drawn; initialise it yourself.")
