"""Operations of torch that are exact when they are differentiated twice.

Attacks differentiate per-sample parameter gradients once more in the input. Torch does that wrongly
for its fused LayerNorm, without a warning, and not at all for its fused attention.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def exact_operations() -> Iterator[None]:
    """Run modules so that they can be differentiated twice, also outside, once values are there.

    LayerNorm is made of elementary operations, scaled dot products run through torch's math
    kernel, and the inference path of attention modules is off.
    """
    load_forward_mode()
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), _ElementaryLayerNorm():
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
    """Return (x − mean)/√(var + eps) · weight + bias over the last dimensions, as torch's does.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), (2,), eps=0.0).tolist()
        [[-1.0, 1.0]]
    """
    dims = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    normal = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    if weight is not None:
        normal = normal * weight
    return normal if bias is None else normal + bias


class _ElementaryLayerNorm(TorchFunctionMode):
    """Torch's layer norm is ours inside, also in modules that call the function themselves."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.layer_norm or func is torch.layer_norm:
            func = layer_norm
        return func(*args, **(kwargs or {}))
