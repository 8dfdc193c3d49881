"""Modules as users write them, to be prepared: usual ones, and odd ones."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Make = Callable[[], nn.Module]
Shape = tuple[int, ...]


class Written(nn.Module):
    """Parts by name, and a forward written as a function of them and the input."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def lively(module: nn.Module) -> nn.Module:
    """With no weight or statistic at 0 or 1, where mistakes hide."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer += torch.rand(buffer.shape, generator=generator)
    return module


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def wide() -> nn.Sequential:
    layers = (nn.Flatten(), nn.Linear(16, 600), nn.ReLU(inplace=True), nn.Dropout(0.0))
    return nn.Sequential(*layers, nn.Linear(600, 1))


def normed(norm: nn.Module | None = None) -> nn.Module:
    norm = nn.LayerNorm(8) if norm is None else norm
    return lively(nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), nn.Linear(8, 3)))


def over_time(norm: nn.Module) -> nn.Module:
    return lively(
        nn.Sequential(
            *(nn.Conv1d(1, 4, 3), norm, nn.Tanh(), nn.Conv1d(4, 6, 3), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(12, 3)),
        )
    ).eval()


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    parts = {"encoder": nn.TransformerEncoder(layer, 2), "head": nn.Linear(8, 3)}
    return lively(Written(lambda self, x: self.head(self.encoder(x).mean(1)), **parts))


def dot_products() -> nn.Module:

    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # (n, heads, t, e)
        outputs: Tensor = self.head(F.scaled_dot_product_attention(q, k, v).mean(2).flatten(1))
        return outputs

    return lively(Written(forward, qkv=nn.Linear(8, 24), head=nn.Linear(8, 3)))


def class_token() -> nn.Module:
    """Four tiles of an image (3, 4, 4) and a token before them, all with a place, and mixed."""

    def forward(self: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        return torch.cat([torch.ones_like(tokens[:, :1]), tokens], 1) + self.places

    tokens = Written(forward)
    tokens.places = nn.Parameter(torch.ones(1, 5, 5))
    first = nn.Conv2d(3, 5, 2, stride=2), tokens, nn.Tanh(), nn.Flatten()
    return lively(nn.Sequential(*first, nn.Linear(25, 7), nn.Tanh(), nn.Linear(7, 3)))


def convolutional() -> nn.Module:
    return lively(
        nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            *(nn.MaxPool2d(2), nn.Dropout(0.3), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)),
            *(nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5)),
            nn.Linear(6, 3),
        )
    )


def headless() -> nn.Module:
    """Its last layer is a convolution, and more follows it."""
    return lively(
        nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 1), nn.ReLU(inplace=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
    )


class Swapped(nn.LayerNorm):
    """A layer norm over another dimension, with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        normal = F.layer_norm(
            x.transpose(1, 2), self.normalized_shape, weight=self.weight, bias=self.bias, eps=1e-3
        )
        return normal.transpose(1, 2)


def functional(function: Callable[..., Tensor]) -> Make:
    scale, shift = torch.linspace(1, 2, 8), torch.linspace(-1, 1, 8)
    return lambda: normed(Written(lambda self, x: function(x, (8,), scale.to(x), shift.to(x))))


def candidates(*shape: int, n: int = 3, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64)
