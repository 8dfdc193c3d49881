"""ReLU and max-pooling with a slope that changes: φ(z/σ)/σ in the place of a jump at z = 0.

The gradient of a network with kinks jumps where a unit turns on. A derivative sees no jumps, but
between a candidate and the sample that it should become thousands of units turn. If z is off by
errors of size σ, the mean slope is Φ(z/σ), and its derivative φ(z/σ)/σ is what a step needs. Values
and slopes stay those of the network: only the derivative of slopes is another.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

LEAST = 1e-6  # of the size of z, is σ: float32 tells no more apart
SCALE = math.sqrt(2 * math.pi)  # φ(z) = exp(−z²/2)/SCALE


class Softened(TorchFunctionMode):
    """Inside, ReLU and max-pooling are ours, in modules and where their functions are called."""

    def __init__(self, share: Tensor) -> None:
        """Take errors of z to be that share of its size."""
        super().__init__()
        self.share = share
        self.met = False  # whether there was any

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ours in the place of torch's."""
        ramp, pooled = func in (F.relu, torch.relu, Tensor.relu), func is torch.max_pool2d
        self.met = self.met or ramp or pooled
        if ramp:
            return relu(args[0] if args else kwargs["input"], self.share)
        if pooled:
            return max_pool2d(*args, **(kwargs or {}), share=self.share)
        return func(*args, **(kwargs or {}))


def relu(z: Tensor, share: Tensor) -> Tensor:
    """Return max(z, 0), with σ = share · √mean(z²)."""
    with torch.no_grad():
        sigma = z.square().mean().sqrt() * share.clamp(min=LEAST) + torch.finfo(z.dtype).tiny
    result: Tensor = _Ramp.apply(z, sigma)  # type: ignore[no-untyped-call]
    return result


def max_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
    *,
    share: Tensor,
) -> Tensor:
    """Return the largest of every window, by max(a, b) = b + max(a − b, 0)."""
    pair = torch.nn.modules.utils._pair
    (height, width), (down, right) = pair(kernel_size), pair(stride or kernel_size)
    if ceil_mode or pair(padding) != (0, 0) or pair(dilation) != (1, 1):
        return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)
    rows = (input.shape[-2] - height) // down + 1, (input.shape[-1] - width) // right + 1
    parts = [
        input[..., i : i + down * rows[0] : down, j : j + right * rows[1] : right][
            ..., : rows[0], : rows[1]
        ]
        for i in range(height)
        for j in range(width)
    ]
    largest = parts[0]
    for part in parts[1:]:
        largest = largest + relu(part - largest, share)
    return largest


class _Step(torch.autograd.Function):
    """1 where z > 0, else 0; its derivative is φ(z/σ)/σ."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, sigma: Tensor) -> Tensor:
        return (z > 0).to(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        z, sigma = ctx.saved_tensors
        result: Tensor = tangent * torch.exp(-(z / sigma).square() / 2) / (SCALE * sigma)
        return result

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return _Step.jvp(ctx, slope, None), None


class _Ramp(torch.autograd.Function):
    """max(z, 0), with `_Step` for its slope."""

    generate_vmap_rule = True
    setup_context = _Step.setup_context

    @staticmethod
    def forward(z: Tensor, sigma: Tensor) -> Tensor:
        return z.clamp(min=0)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        step: Tensor = _Step.apply(*ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return tangent * step

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return _Ramp.jvp(ctx, slope, None), None
