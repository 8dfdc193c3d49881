"""Modules that cannot be attacked as they are: refused with what to do. The head is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from exhume.errors import InputError
from exhume.models.prepare import prepare
from odd_modules import Make, Shape, Written, mlp, normed


def with_head(forward: Callable[..., Any], outputs: int = 3, **parts: nn.Module) -> Make:
    return lambda: Written(forward, a=nn.Linear(5, outputs), **parts)


def chain(*layers: nn.Module) -> Make:
    return lambda: nn.Sequential(*layers)


two_heads = with_head(lambda self, x: (self.a(x.tanh()), self.b(x))[0], b=nn.Linear(5, 3))
softmaxed = chain(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Softmax(1))
on_tokens = with_head(lambda self, x: self.b(self.a(x).mean(1)), b=nn.Linear(3, 3))
shared_head = with_head(lambda self, x: self.a(self.a(x).tanh()), 5)
recurrent = with_head(lambda self, x: self.a(self.b(x)[0][:, -1]), b=nn.GRU(5, 5, batch_first=True))


@pytest.mark.parametrize(
    ("make", "shape", "named", "head"),
    [
        (two_heads, (5,), None, "a"),  # the layer whose output is returned
        (two_heads, (5,), "b", "b"),
        (softmaxed, (5,), "2", "2"),  # a named head may be followed by anything
        (softmaxed, (5,), "0", "0"),
        (on_tokens, (4, 5), None, "b"),
        (with_head(lambda self, x: self.a(x)[:, 0], 1), (5,), None, "a"),
        (with_head(lambda self, x: self.a(x).squeeze(), 1), (5,), None, "a"),
    ],
)
def test_the_head_is_found_or_named(make: Make, shape: Shape, named: str | None, head: str) -> None:
    assert prepare(make(), shape, head=named).network.head == head


class Crooked(torch.autograd.Function):
    """Its derivative is not that of its value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def changed(change: Callable[[nn.Sequential], object]) -> Make:
    def make() -> nn.Module:
        model = mlp()
        change(model)
        return model

    return make


class TwoInputs(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x)


@torch.no_grad()
def without_gradients(self: Any, x: Tensor) -> Tensor:
    hidden: Tensor = self.b(x).tanh()
    return hidden


def parametrized(by: Callable[..., nn.Module], *more: Any) -> Make:
    return lambda: nn.Sequential(by(nn.Linear(5, 3), "weight", *more))


UNTRACKED = nn.BatchNorm1d(8, track_running_stats=False)


REFUSED: list[tuple[Any, ...]] = [
    # what it is
    (lambda: {"weight": 1}, (5,), "expected a torch.nn.Module, got dict"),
    (lambda: nn.LazyLinear(3), (5,), "weight is not initialised yet (a lazy module)"),
    (lambda: nn.Linear(5, 3, device="meta"), (5,), "load the weights first"),
    (changed(lambda m: m[0].bias.data.fill_(torch.nan)), (5,), "0.bias holds NaN or infinite"),
    (lambda: nn.Conv2d(1, 2, 3), (1, 5, 5), "has no nn.Linear"),
    (parametrized(parametrizations.weight_norm), (5,), "parametrize.remove_parametrizations."),
    (parametrized(nn.utils.weight_norm), (5,), "with torch.nn.utils.remove_weight_norm."),
    (parametrized(nn.utils.spectral_norm), (5,), "with torch.nn.utils.remove_spectral_norm."),
    (parametrized(prune.random_unstructured, 0.5), (5,), "with torch.nn.utils.prune.remove."),
    (lambda: normed(UNTRACKED), (5,), "1 (BatchNorm1d) has no running statistics"),
    (lambda: torch.jit.trace(mlp(), torch.zeros(1, 5)), (5,), "is TorchScript"),
    (changed(lambda m: setattr(m, "more", 2 * m[0].weight)), (5,), "cannot be copied (RuntimeE"),
    # how it is called
    (mlp, (), "expected positive sizes"),
    (mlp, (2**28,), "too many entries; at most 134,217,728"),
    (lambda: TwoInputs(5, 3), (5,), "positional argument: 'mask'); mend the shape, or wrap it"),
    (mlp, (6,), "a batch of 8 with inputs of shape (6,) (RuntimeError: mat1 and mat2"),
    (chain(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)), (5,), "takes integer tokens, but"),
    (with_head(lambda self, x: self.a(x.float())), (5,), "runs in float32 but not in float64"),
    # what it returns
    (with_head(lambda self, x: (self.a(x), x)), (5,), "returns a tuple and not a tensor"),
    (lambda: nn.Linear(5, 3), (4, 5), "outputs of shape (8, 4, 3); expected one row"),
    (with_head(lambda self, x: self.a(x.squeeze())), (5,), "(5,) gives outputs of shape (3,)"),
    (with_head(lambda self, x: self.a(x).log()), (5,), "√d hold NaN or infinite entries"),
    (with_head(lambda self, x: F.dropout(self.a(x))), (5,), "two calls with the same inputs"),
    (with_head(lambda self, x: self.a(x - x.mean(0))), (5,), "depend on the other inputs"),
    (with_head(lambda self, x: self.a(x.sub_(1))), (5,), "forward overwrites its input"),
    (
        changed(lambda m: m[0].register_forward_hook(lambda *x: 2 * x[2])),
        (5,),
        "if hooks take part",
    ),
    # its head
    (chain(nn.Linear(5, 3), nn.Softmax(1)), (5,), "in softmax; return the logits, the output of 0"),
    (chain(nn.Linear(5, 1), nn.Sigmoid(), nn.Flatten(0)), (5,), "ends in sigmoid; return the log"),
    (with_head(lambda self, x: self.a(x)[:, 0].sigmoid()), (5,), "something follows a"),
    (chain(nn.Linear(5, 3), nn.ReLU()), (5,), "something follows 0"),
    (with_head(lambda self, x: self.a(x).mean(1)), (4, 5), "shape (8, 4, 5); expected (8, h)"),
    (with_head(lambda self, x: self.a(x[:, None])[:, 0]), (5,), "a tensor of shape (8, 1, 5)"),
    (with_head(lambda self, x: F.linear(x, self.a.weight)), (5,), "none of the linear layers (a)"),
    (shared_head, (5,), "a runs 2 times in one forward"),
    (changed(lambda m: setattr(m[0], "more", m[2].weight)), (5,), "weight of 2 is shared with 0.m"),
    # its derivatives
    (with_head(lambda self, x: self.a(Crooked.apply(x))), (5,), "torch.func cannot different"),
    (recurrent, (4, 5), "Recurrent layers"),
    (with_head(lambda self, x: self.a(x.round())), (5,), "do not change with random inputs"),
    (with_head(lambda self, x: self.a(x.detach() ** 2)), (5,), "derivatives"),
    (with_head(lambda m, x: m.a(without_gradients(m, x)), b=nn.Linear(5, 5)), (5,), "no_grad"),
    # the layer that is named as its head
    (mlp, (5,), "'fc' is no linear layer; the linear layers are 0, 2", "fc"),
    (mlp, (5,), "'1' is no linear layer; the linear layers are 0, 2", "1"),
    (shared_head, (5,), "a runs 2 times", "a"),
    (on_tokens, (4, 5), "a is applied to a tensor of shape (8, 4, 5)", "a"),
    (with_head(lambda self, x: self.a(x), b=mlp()), (5,), "name one that it calls: a", "b.0"),
]


@pytest.mark.filterwarnings("ignore:`torch:FutureWarning", "ignore:`torch:DeprecationWarning")
@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[2])
def test_refusals(row: tuple[Any, ...]) -> None:
    make, shape, sentence, *head = row
    model, state = make(), torch.get_rng_state()
    with pytest.raises(InputError) as caught:
        prepare(model, shape, *head)
    assert sentence in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)
