"""Prepared modules: each trap of torch is shown, and mended, or refused with what to do."""

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, prune

import odd_modules as odd
from exhume.errors import InputError
from exhume.features import network
from exhume.features.network import exact_operations
from exhume.models import self_check
from exhume.models.prepare import prepare
from odd_modules import Make, Shape, Written, candidates, mlp, normed, over_time, transformer

network.load_forward_mode()  # torch warns the first time


def derivative_error(module: nn.Module, shape: Shape) -> float:
    """The largest relative error of ∂/∂x of contracted per-sample gradients, from a loop."""
    module = copy.deepcopy(module).double()
    x, direction = candidates(*shape), candidates(*shape, seed=3)
    theta = {name: p.detach() for name, p in module.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    fixed = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in theta.values()]

    def scalar(theta: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(module, theta, (one[None],)).square().sum()

    def contracted(gradients: Iterable[Tensor]) -> Tensor:
        return torch.stack([(g * r).sum() for g, r in zip(gradients, fixed, strict=True)])

    def by_func(x: Tensor) -> Tensor:
        return vmap(lambda one: contracted(grad(scalar)(theta, one).values()))(x)

    def by_loop(x: Tensor) -> Tensor:
        leaves = {name: p.clone().requires_grad_() for name, p in theta.items()}
        each = (torch.autograd.grad(scalar(leaves, one), list(leaves.values())) for one in x)
        return torch.stack([contracted(found) for found in each])

    expected = (by_loop(x + 1e-5 * direction) - by_loop(x - 1e-5 * direction)) / 2e-5
    off = (jvp(by_func, (x,), (direction,))[1] - expected).norm(dim=0)
    size = expected.norm(dim=0)
    return (off / size)[size > 1e-3 * size.max()].max().item()


@pytest.mark.parametrize(
    ("make", "shape", "head"),
    [
        (mlp, (5,), "2"),
        (normed, (5,), "3"),
        (transformer, (4, 8), "head"),
        (odd.dot_products, (4, 8), "head"),
        (odd.convolutional, (1, 8, 8), "11"),
        (lambda: nn.Linear(5, 3), (5,), ""),
        (lambda: normed(nn.Hardsigmoid(inplace=True)), (5,), "3"),
        (lambda: normed(Written(lambda self, x: F.hardsigmoid(x, inplace=True))), (5,), "3"),
        (lambda: normed(nn.RMSNorm(8)), (5,), "3"),
        (lambda: normed(nn.GroupNorm(2, 8)), (5,), "3"),
        (lambda: normed(nn.BatchNorm1d(8)), (5,), "3"),
        (lambda: normed(nn.LayerNorm(8, bias=False)), (5,), "3"),
        (lambda: normed(nn.LayerNorm(8, elementwise_affine=False)), (5,), "3"),
        (lambda: over_time(odd.Swapped(4)), (1, 6), "6"),
        (odd.functional(F.layer_norm), (5,), "3"),
        (odd.functional(torch.layer_norm), (5,), "3"),
    ],
)
def test_a_copy_is_the_same_function_with_right_derivatives(
    make: Make, shape: Shape, head: str
) -> None:
    model, x = make(), candidates(*shape)
    prepared = prepare(model, shape)
    mended = prepared.network.module
    assert (prepared.network.head, prepared.network.outputs) == (head, 3)
    assert prepared.derivative_error is not None and prepared.derivative_error < 1e-5
    assert not any(module.training for module in mended.modules())
    assert list(mended.state_dict()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, mended.state_dict()[name])
    with torch.no_grad():
        expected = copy.deepcopy(model).double().eval()(x.clone())
    with exact_operations():
        found = copy.deepcopy(mended).double()(x.clone())
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        if not isinstance(model, nn.Linear):  # which has no curvature
            assert derivative_error(mended, shape) < 1e-7


def test_the_users_module_and_the_random_state_are_left_alone() -> None:
    model = transformer().train()
    model.register_forward_hook(lambda *_: None)
    next(model.parameters()).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    described, hooks = repr(model), dict(model._forward_hooks)
    identities = [id(p) for p in model.parameters()]
    state, attention = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    copied = prepare(model, (4, 8)).network.module
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() == attention
    assert repr(model) == described and dict(model._forward_hooks) == hooks
    assert all(module.training for module in model.modules())
    assert [id(p) for p in model.parameters()] == identities
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not copied._forward_hooks
    assert [p.requires_grad for p in copied.parameters()][:2] == [False, True]
    assert not {id(p) for p in copied.parameters()} & set(identities)


def watched() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    model[2].register_full_backward_hook(lambda *_: None)
    return model


def compiled(module: nn.Module) -> nn.Module:
    result = torch.compile(module.eval(), backend="eager")
    assert isinstance(result, nn.Module)
    return result


def compiled_inside() -> nn.Module:
    return nn.Sequential(compiled(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3)).eval()


def tracked() -> nn.Module:
    return over_time(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))


CNN = """Set to eval mode. / in-place operation in 2, 7: / Dropout in 4, 10 is inactive in eval /
BatchNorm in 1, 6 uses its running statistics / Dropout in 4, 10 is inactive in the attack"""
TRANSFORMER = """Set to eval mode. / Replaced LayerNorm in encoder.layers.0.norm1, /
Attention in encoder.layers.0.self_attn, encoder.layers.1.self_attn runs / Dropout / on average"""
PARALLEL = "Unwrapped DataParallel: names of parameters lose the prefix 'module'"


@pytest.mark.parametrize(
    ("make", "shape", "said"),
    [
        (lambda: mlp().eval(), (5,), ""),
        (odd.convolutional, (1, 8, 8), CNN),
        (transformer, (4, 8), TRANSFORMER),
        (watched, (5,), "Set to eval mode. / Dropped the hooks of 0, 2"),
        (lambda: compiled(nn.DataParallel(mlp())), (5,), f"Unwrapped OptimizedModule / {PARALLEL}"),
        (compiled_inside, (5,), "Unwrapped compiled or parallel modules inside (0)"),
        (tracked, (1, 6), "InstanceNorm in 1 uses its running statistics"),
    ],
)
def test_changes_and_warnings_say_what_was_done(make: Make, shape: Shape, said: str) -> None:
    prepared = prepare(make(), shape)
    found = (*prepared.changes, *prepared.warnings)
    expected = [part.strip() for part in said.split("/") if part]
    assert len(found) == len(expected)
    assert all(part in sentence for part, sentence in zip(expected, found, strict=True))
    first = next(iter(prepared.network.module.state_dict()))
    assert first.startswith(("0.weight", "encoder.layers.0."))
    again = prepare(prepared.network.module, shape).changes
    assert all("LayerNorm" in c or "Attention" in c or "Dropout" in c for c in again), "once only"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("check", [True, False])
def test_half_precision_becomes_float32_and_float64_stays(kind: torch.dtype, check: bool) -> None:
    model = normed().to(kind)
    with torch.inference_mode():  # where gradients are off
        prepared = prepare(model, (5,), check=check)
    assert (prepared.derivative_error is not None) == check
    expected = torch.float64 if kind == torch.float64 else torch.float32
    for name, tensor in prepared.network.module.state_dict().items():
        assert tensor.dtype == expected
        assert torch.equal(tensor, model.state_dict()[name].to(expected))
    named = any("Parameters are" in change for change in prepared.changes)
    assert named == (kind in (torch.float16, torch.bfloat16))


def test_large_models_are_checked_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "LARGE", 40)
    prepared = prepare(mlp(), (5,))
    assert prepared.derivative_error is not None
    assert "for 1 of 4 parameter tensors, drawn at random, with 40" in prepared.changes[-1]


def test_layer_norm_is_wrong_outside_of_exact_operations_and_that_would_be_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert derivative_error(normed(), (5,)) > 1e-3
    assert derivative_error(over_time(odd.Swapped(4)), (1, 6)) > 1e-3
    monkeypatch.setattr(network, "TWINS", {})
    with exact_operations():
        assert derivative_error(transformer().eval(), (4, 8)) > 1e-3
    with pytest.raises(InputError, match=r"off by .* for 1.weight \(LayerNorm\). Suspects"):
        prepare(normed(), (5,))
    assert prepare(normed(), (5,), check=False).derivative_error is None


def test_fused_attention_batch_norm_in_training_and_inference_paths_have_no_derivatives() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="flash"):
            derivative_error(odd.dot_products(), (4, 8))
    with pytest.raises((RuntimeError, ValueError)):
        derivative_error(normed(nn.BatchNorm1d(8)).train(), (5,))
    with pytest.raises(NotImplementedError, match="forward AD with aten::hardsigmoid_backward"):
        derivative_error(normed(nn.Hardsigmoid()), (5,))
    x, model = candidates(4, 8), transformer().double().eval().requires_grad_(False)
    with pytest.raises(RuntimeError, match="forward AD with aten::_transformer_encoder_layer_fwd"):
        jvp(model, (x,), (x,))
    with exact_operations():
        gradcheck(model, x.requires_grad_(), check_forward_ad=True, fast_mode=True)  # or raises


def test_exact_operations_restore_what_was_there_also_after_errors() -> None:
    def settings() -> tuple[bool, ...]:
        kernels = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled")
        now = (getattr(torch.backends.cuda, kernel)() for kernel in kernels)
        return (torch.backends.mha.get_fastpath_enabled(), *now)

    before = settings()
    with exact_operations():
        with exact_operations():
            pass
        assert settings() == (False, False, False, True)
    with pytest.raises(KeyError), exact_operations():
        raise KeyError
    assert settings() == before


def test_in_place_layers_would_overwrite_the_candidates() -> None:
    model, ones = nn.Sequential(nn.ELU(inplace=True), nn.Linear(5, 3)), torch.full((1, 5), -1.0)
    for module, kept in ((model, False), (prepare(model, (5,)).network.module, True)):
        x = ones.clone()
        module(x)
        assert torch.equal(x, ones) == kept
    assert model[0].inplace


def test_instance_norm_has_wrong_derivatives_and_group_norm_right_ones() -> None:
    fused, advised = over_time(nn.InstanceNorm1d(4, affine=True)), over_time(nn.GroupNorm(4, 4))
    advised.load_state_dict(fused.state_dict())
    x = candidates(1, 6).float()
    assert torch.allclose(fused(x), advised(x), atol=1e-5)
    assert derivative_error(fused, (1, 6)) > 1e-3
    assert derivative_error(prepare(advised, (1, 6)).network.module, (1, 6)) < 1e-8
    with pytest.raises(InputError, match=r"nn.GroupNorm\(4, 4, eps=1e-05, affine=True\)"):
        prepare(fused, (1, 6))


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


@pytest.mark.parametrize(
    ("make", "shape"), [(odd.headless, (1, 8, 8)), (softmaxed, (5,)), (shared_head, (5,))]
)
def test_blocks_of_parameters_need_no_head(make: Make, shape: Shape) -> None:
    prepared = prepare(make(), shape, last=False)
    assert prepared.network.head is None and prepared.network.head_weight == ""
    assert prepared.derivative_error is not None and prepared.derivative_error < 1e-5
    assert prepared.changes[-1] == "Found no last linear layer, which other blocks do without."


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
    (odd.headless, (1, 8, 8), "has no nn.Linear; attack other weights (--parameters all)"),
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
    (changed(lambda m: m[0].register_forward_hook(lambda *x: 2 * x[2])), (5,), "if hooks take"),
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
