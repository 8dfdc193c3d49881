"""Prepared modules: each trap of torch is shown, mended, or refused with a sentence."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, prune

from exhume.errors import InputError
from exhume.features import exact
from exhume.features.exact import exact_operations
from exhume.models import self_check
from exhume.models.prepare import Prepared, prepare

Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """The same models every time; torch's own warning about jvp out of the way."""
    with exact_operations():
        pass
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        yield


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


def normed(norm: nn.Module | None = None) -> nn.Module:
    norm = nn.LayerNorm(8) if norm is None else norm
    return lively(nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), nn.Linear(8, 3)))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return lively(
        Written(
            lambda self, x: self.head(self.encoder(x).mean(1)),
            encoder=nn.TransformerEncoder(layer, 2),
            head=nn.Linear(8, 3),
        )
    )


def dot_products() -> nn.Module:
    """Attention that calls the fused function itself."""

    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # (n, heads, t, e)
        outputs: Tensor = self.head(F.scaled_dot_product_attention(q, k, v).mean(2).flatten(1))
        return outputs

    return lively(Written(forward, qkv=nn.Linear(8, 24), head=nn.Linear(8, 3)))


def convolutional() -> nn.Module:
    return lively(
        nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            *(nn.MaxPool2d(2), nn.Dropout(0.3), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)),
            *(nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5)),
            nn.Linear(6, 3),
        )
    )


def candidates(*shape: int, n: int = 3, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64)


def derivative_error(module: nn.Module, shape: tuple[int, ...]) -> float:
    """∂/∂x of contracted per-sample gradients: vmap, grad and jvp against a loop's differences.

    The largest relative error of any parameter tensor whose derivative is not negligible.
    """
    module = copy.deepcopy(module).double()
    x, direction = candidates(*shape), candidates(*shape, seed=3)
    theta = {name: p.detach() for name, p in module.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    fixed = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in theta.values()]

    def scalar(theta: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(module, theta, (one[None],)).square().sum()

    def by_func(x: Tensor) -> Tensor:
        gradients = vmap(grad(scalar), (None, 0))(theta, x).values()
        return torch.stack(
            [(g * r).flatten(1).sum(1) for g, r in zip(gradients, fixed, strict=True)]
        )

    def by_loop(x: Tensor) -> Tensor:
        leaves = {name: p.clone().requires_grad_() for name, p in theta.items()}
        columns = []
        for one in x:
            found = torch.autograd.grad(scalar(leaves, one), list(leaves.values()))
            pairs = zip(found, fixed, strict=True)
            columns.append(torch.stack([(g * r).sum() for g, r in pairs]))
        return torch.stack(columns, 1)

    step = 1e-5
    expected = (by_loop(x + step * direction) - by_loop(x - step * direction)) / (2 * step)
    off = (jvp(by_func, (x,), (direction,))[1] - expected).norm(dim=1)
    size = expected.norm(dim=1)
    return (off / size)[size > 1e-3 * size.max()].max().item()


def same_outputs(prepared: Prepared, model: nn.Module, shape: tuple[int, ...]) -> bool:
    x = candidates(*shape)
    with torch.no_grad(), exact_operations():
        expected = copy.deepcopy(model).double().eval()(x.clone())
        given = copy.deepcopy(prepared.module).double()(x.clone())
    return torch.allclose(given, expected, rtol=1e-10, atol=1e-12)


def refusal(model: Any, shape: tuple[int, ...] = (5,), **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        prepare(model, shape, **options)
    return str(caught.value)


# Models that are prepared


@pytest.mark.parametrize(
    ("make", "shape", "head"),
    [
        (mlp, (5,), "2"),
        (normed, (5,), "3"),
        (transformer, (4, 8), "head"),
        (dot_products, (4, 8), "head"),
        (convolutional, (1, 8, 8), "11"),
        (lambda: nn.Linear(5, 3), (5,), ""),
        (lambda: normed(nn.RMSNorm(8)), (5,), "3"),
        (lambda: normed(nn.GroupNorm(2, 8)), (5,), "3"),
        (lambda: normed(nn.LayerNorm(8, bias=False)), (5,), "3"),
        (lambda: normed(nn.LayerNorm(8, elementwise_affine=False)), (5,), "3"),
    ],
)
def test_a_prepared_copy_is_the_same_function_with_right_derivatives(
    make: Make, shape: tuple[int, ...], head: str
) -> None:
    model = make()
    prepared = prepare(model, shape)
    assert (prepared.head, prepared.outputs) == (head, 3)
    assert prepared.derivative_error is not None and prepared.derivative_error < 1e-5
    assert not any(module.training for module in prepared.module.modules())
    assert list(prepared.module.state_dict()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, prepared.module.state_dict()[name])
    prepared.module.load_state_dict(model.state_dict())
    assert same_outputs(prepared, model, shape)


@pytest.mark.parametrize("make", [transformer, convolutional])
def test_the_users_module_and_the_random_state_are_left_alone(make: Make) -> None:
    model = make().train()
    shape = (4, 8) if make is transformer else (1, 8, 8)
    model.register_forward_hook(lambda *_: None)
    next(model.parameters()).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    described, hooks = repr(model), dict(model._forward_hooks)
    identities = [id(p) for p in model.parameters()]
    state = torch.get_rng_state()
    attention = torch.backends.mha.get_fastpath_enabled()
    prepared = prepare(model, shape)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() == attention
    assert repr(model) == described and dict(model._forward_hooks) == hooks
    assert all(module.training for module in model.modules())
    assert [id(p) for p in model.parameters()] == identities
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not prepared.module._forward_hooks
    assert [p.requires_grad for p in prepared.module.parameters()][:2] == [False, True]
    assert not {id(p) for p in prepared.module.parameters()} & set(identities)


def test_changes_and_warnings_say_what_was_done() -> None:
    prepared = prepare(convolutional(), (1, 8, 8))
    assert len(prepared.changes) == 3
    assert prepared.changes[0] == "Set to eval mode."
    assert "in-place operation in 2, 7:" in prepared.changes[1]
    assert "Dropout in 4, 10 is inactive" in prepared.changes[2]
    warning, dropped = prepared.warnings
    assert "Dropout in 4, 10 is inactive" in dropped and "on average" in dropped
    assert "BatchNorm in 1, 6 uses its running statistics" in warning
    assert "approximately" in warning

    prepared = prepare(transformer(), (4, 8))
    text = " ".join(prepared.changes)
    assert "Replaced LayerNorm in encoder.layers.0.norm1, " in text
    assert "Attention in encoder.layers.0.self_attn, encoder.layers.1.self_attn runs" in text
    assert all("Dropout" in warning for warning in prepared.warnings)

    prepared = prepare(mlp().eval(), (5,))
    assert not prepared.changes and not prepared.warnings


def test_preparing_again_changes_nothing() -> None:
    once = prepare(nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), (5,))
    assert len(once.changes) == 2
    assert not prepare(once.module, (5,)).changes


def test_without_the_check_there_is_no_error_to_report() -> None:
    prepared = prepare(transformer(), (4, 8), check=False)
    assert prepared.derivative_error is None
    assert prepared.head == "head"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("check", [True, False])
def test_half_precision_becomes_float32_and_float64_stays(kind: torch.dtype, check: bool) -> None:
    model = normed().to(kind)
    prepared = prepare(model, (5,), check=check)
    expected = torch.float64 if kind == torch.float64 else torch.float32
    for name, tensor in prepared.module.state_dict().items():
        assert tensor.dtype == expected
        assert torch.equal(tensor, model.state_dict()[name].to(expected))
    named = any("Parameters are" in change for change in prepared.changes)
    assert named == (kind in (torch.float16, torch.bfloat16))


def test_it_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert prepare(normed(), (5,)).derivative_error is not None
    model = normed()
    with torch.inference_mode():
        assert prepare(model, (5,)).derivative_error is not None


def test_single_outputs_may_be_squeezed() -> None:
    flat = Written(lambda self, x: self.a(x)[:, 0], a=nn.Linear(5, 1))
    squeezed = Written(lambda self, x: self.a(x).squeeze(), a=nn.Linear(5, 1))
    for model in (flat, squeezed):
        prepared = prepare(model, (5,))
        assert (prepared.outputs, prepared.head) == (1, "a")


def test_the_head_is_the_layer_whose_output_is_returned() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        outputs: Tensor = self.main(x.tanh())
        self.other(x)
        return outputs.reshape(-1, 3)

    model = Written(forward, other=nn.Linear(5, 3), main=nn.Linear(5, 3))
    assert prepare(model, (5,)).head == "main"
    assert prepare(model, (5,), head="other").head == "other"


def test_a_named_head_may_be_followed_by_anything() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Softmax(1))
    assert prepare(model, (5,), head="2").head == "2"
    assert prepare(model, (5,), head="0").head == "0"


def test_wrappers_are_taken_off() -> None:
    parallel = nn.DataParallel(mlp())
    prepared = prepare(parallel, (5,))
    assert isinstance(prepared.module, nn.Sequential)
    assert "Unwrapped DataParallel: names of parameters lose the prefix 'module'" in str(
        prepared.changes
    )
    assert isinstance(parallel.module, nn.Sequential)
    compiled = torch.compile(nn.DataParallel(mlp()), backend="eager")
    assert isinstance(compiled, nn.Module)
    prepared = prepare(compiled, (5,))
    assert "Unwrapped OptimizedModule" in prepared.changes[0]
    assert list(prepared.module.state_dict()) == list(mlp().state_dict())
    layer = torch.compile(nn.Linear(5, 8), backend="eager")
    inside = nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3))
    prepared = prepare(inside, (5,))
    assert "inside (0)" in prepared.changes[0]
    assert next(iter(prepared.module.state_dict())) == "0.weight"


def test_large_models_are_checked_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "LARGE", 40)
    prepared = prepare(mlp(), (5,))
    assert prepared.derivative_error is not None
    assert "derivatives were checked for" in prepared.changes[-1]
    assert "of 4 parameter tensors" in prepared.changes[-1]


def test_hooks_that_only_watch_are_dropped_and_others_refused() -> None:
    seen: list[int] = []
    watched = mlp()
    watched[0].register_forward_hook(lambda *_: seen.append(1))
    watched[2].register_full_backward_hook(lambda *_: None)
    prepared = prepare(watched, (5,))
    assert "Dropped the hooks of 0, 2" in prepared.changes[-1]
    assert len(seen) == 1
    changed = mlp()
    changed[0].register_forward_hook(lambda module, args, outputs: 2 * outputs)
    assert "if hooks take part in computing them" in refusal(changed)


# Traps: without the fix the result is wrong or there is none


def test_layer_norm_is_wrong_outside_of_exact_operations_and_right_inside() -> None:
    model = normed()
    prepared = prepare(model, (5,)).module
    assert derivative_error(model, (5,)) > 1e-3
    with exact_operations():
        assert derivative_error(prepared, (5,)) < 1e-8


def test_wrong_derivatives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "layer_norm", F.layer_norm)
    sentence = refusal(normed())
    assert "derivatives are off by" in sentence
    assert "for 1.weight (LayerNorm). Suspects" in sentence
    assert prepare(normed(), (5,), check=False).derivative_error is None


def test_a_whole_transformer_needs_our_layer_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer().eval()
    prepared = prepare(model, (4, 8)).module
    with exact_operations():
        assert derivative_error(prepared, (4, 8)) < 1e-8
        monkeypatch.setattr(exact, "layer_norm", F.layer_norm)
        assert derivative_error(model, (4, 8)) > 1e-3


def third_derivative_error(norm: nn.Module) -> float:
    """Along one direction, by autograd, against a difference of the second."""
    x, direction = candidates(8), candidates(8, seed=3)

    def derivative(x: Tensor, order: int) -> Tensor:
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        value = norm(x + t * direction).tanh().square().sum()
        for _ in range(order):
            (value,) = torch.autograd.grad(value, t, create_graph=True)
        return value.detach()

    step = 1e-5
    behind, ahead = (derivative(x + s * direction, 2) for s in (-step, step))
    expected = (ahead - behind) / (2 * step)
    return ((derivative(x, 3) - expected) / expected).abs().item()


@pytest.mark.parametrize("affine", [True, False])
def test_third_derivatives_of_fused_layer_norm_are_wrong_and_of_ours_right(affine: bool) -> None:
    norm = lively(nn.LayerNorm(8, elementwise_affine=affine)).double()
    assert third_derivative_error(norm) > 1e-3
    with exact_operations():
        assert third_derivative_error(norm) < 1e-7


class Swapped(nn.LayerNorm):
    """A layer norm over another dimension, with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        normal = F.layer_norm(
            x.transpose(1, 2), self.normalized_shape, weight=self.weight, bias=self.bias, eps=1e-3
        )
        return normal.transpose(1, 2)


def test_a_subclass_of_layer_norm_keeps_its_forward() -> None:
    model = lively(
        nn.Sequential(
            *(nn.Conv1d(1, 4, 3), Swapped(4), nn.Tanh(), nn.Conv1d(4, 6, 3)),
            *(nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        )
    )
    assert derivative_error(model, (1, 6)) > 1e-3
    prepared = prepare(model, (1, 6))
    with exact_operations():
        assert derivative_error(prepared.module, (1, 6)) < 1e-8
    assert same_outputs(prepared, model, (1, 6))
    assert isinstance(prepared.module[1], Swapped)


@pytest.mark.parametrize("function", [F.layer_norm, torch.layer_norm])
def test_functions_of_layer_norm_are_right_too(function: Callable[..., Tensor]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        outputs: Tensor = self.b(function(self.a(x), (8,), self.scale.weight[0]).tanh())
        return outputs

    parts = {"a": nn.Linear(5, 8), "scale": nn.Linear(8, 1, bias=False), "b": nn.Linear(8, 3)}
    prepared = prepare(lively(Written(forward, **parts)), (5,), head="b")
    with exact_operations():
        assert derivative_error(prepared.module, (5,)) < 1e-8


def test_fused_attention_cannot_be_differentiated_twice() -> None:
    model = dot_products()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="flash"):
            derivative_error(model, (4, 8))
    with exact_operations():
        assert derivative_error(prepare(model, (4, 8)).module, (4, 8)) < 1e-8


def test_the_inference_path_of_transformers_cannot_be_differentiated() -> None:
    model = transformer().double().eval()
    theta = {name: p.detach() for name, p in model.named_parameters()}
    x, direction = candidates(4, 8), candidates(4, 8, seed=3)

    def outputs(x: Tensor) -> Tensor:
        return functional_call(model, theta, (x,))

    with pytest.raises(RuntimeError, match="forward AD with aten::_transformer_encoder_layer_fwd"):
        jvp(outputs, (x,), (direction,))
    with exact_operations():
        found = jvp(outputs, (x,), (direction,))[1]
        step = 1e-5 * direction
        expected = (outputs(x + step) - outputs(x - step)) / 2e-5
    assert torch.allclose(found, expected, rtol=1e-7, atol=1e-8)


def test_exact_operations_restores_what_was_there_also_after_errors() -> None:
    def settings() -> tuple[bool, ...]:
        cuda = torch.backends.cuda
        return (
            torch.backends.mha.get_fastpath_enabled(),
            *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        )

    before = settings()
    with exact_operations():
        assert settings() == (False, False, False, True)
        with exact_operations():
            pass
        assert settings() == (False, False, False, True)
    assert settings() == before
    with pytest.raises(KeyError), exact_operations():
        raise KeyError
    assert settings() == before
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with exact_operations():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(before[0])


def test_train_mode_batch_norm_fails_and_eval_mode_is_exact() -> None:
    model = normed(nn.BatchNorm1d(8))
    with pytest.raises((RuntimeError, ValueError)):
        derivative_error(model.train(), (5,))
    assert derivative_error(prepare(model, (5,)).module, (5,)) < 1e-8


def test_in_place_layers_would_overwrite_the_candidates() -> None:
    model = nn.Sequential(nn.ELU(inplace=True), nn.Linear(5, 3))
    x = torch.full((1, 5), -1.0)
    model(x)
    assert x[0, 0] != -1
    prepared = prepare(model, (5,))
    x = torch.full((1, 5), -1.0)
    prepared.module(x)
    assert torch.equal(x, torch.full((1, 5), -1.0))
    assert model[0].inplace


def test_instance_norm_has_wrong_derivatives_and_group_norm_right_ones() -> None:
    def model(norm: nn.Module) -> nn.Module:
        return lively(
            nn.Sequential(
                *(nn.Conv1d(1, 4, 3), norm, nn.Tanh(), nn.Conv1d(4, 6, 3), nn.Tanh()),
                *(nn.Flatten(), nn.Linear(12, 3)),
            )
        ).eval()

    fused, advised = model(nn.InstanceNorm1d(4, affine=True)), model(nn.GroupNorm(4, 4))
    advised.load_state_dict(fused.state_dict())
    x = candidates(1, 6).float()
    assert torch.allclose(fused(x), advised(x), atol=1e-5)
    assert derivative_error(fused, (1, 6)) > 1e-3
    assert derivative_error(prepare(advised, (1, 6)).module, (1, 6)) < 1e-8
    sentence = refusal(fused, (1, 6))
    assert "nn.GroupNorm(4, 4, eps=1e-05, affine=True)" in sentence
    running = model(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))
    assert "InstanceNorm in 1 uses its running statistics" in prepare(running, (1, 6)).warnings[0]


# Refusals


class Crooked(torch.autograd.Function):
    """Its derivative is not that of its value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def unsupported() -> nn.Module:
    return Written(lambda self, x: self.a(Crooked.apply(x)), a=nn.Linear(5, 3))


def shared_head() -> nn.Module:
    return Written(lambda self, x: self.a(self.a(x).tanh()), a=nn.Linear(5, 5))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    return model


def recurrent() -> nn.Module:
    return Written(
        lambda self, x: self.head(self.a(x)[0][:, -1]),
        a=nn.GRU(5, 4, batch_first=True),
        head=nn.Linear(4, 3),
    )


def damaged() -> nn.Module:
    model = mlp()
    nn.init.constant_(model[0].bias, torch.nan)
    return model


def legacy(norm: Callable[[nn.Module], nn.Module]) -> Make:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.Sequential(norm(nn.Linear(5, 3)))

    return make


class TwoInputs(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor, *, scale: float, bias: float = 0) -> Tensor:
        return super().forward(x)


class NoInput(nn.Linear):
    def forward(self) -> Tensor:
        return self.weight


def with_head(forward: Callable[..., Any]) -> Make:
    return lambda: Written(forward, a=nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("make", "shape", "sentence"),
    [
        # what it is
        (lambda: {"weight": 1}, (5,), "expected a torch.nn.Module, got dict"),
        (lambda: nn.LazyLinear(3), (5,), "weight is not initialised yet (a lazy module)"),
        (lambda: nn.Linear(5, 3, device="meta"), (5,), "load the weights first"),
        (damaged, (5,), "0.bias holds NaN or infinite entries"),
        (lambda: nn.Conv2d(1, 2, 3), (1, 5, 5), "has no nn.Linear"),
        (
            lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 3))),
            (5,),
            "with torch.nn.utils.parametrize.remove_parametrizations.",
        ),
        (legacy(nn.utils.weight_norm), (5,), "with torch.nn.utils.remove_weight_norm."),
        (legacy(nn.utils.spectral_norm), (5,), "with torch.nn.utils.remove_spectral_norm."),
        (
            lambda: nn.Sequential(prune.random_unstructured(nn.Linear(5, 3), "weight", 0.5)),
            (5,),
            "with torch.nn.utils.prune.remove.",
        ),
        (
            lambda: normed(nn.BatchNorm1d(8, track_running_stats=False)),
            (5,),
            "1 (BatchNorm1d) has no running statistics",
        ),
        # how it is called
        (mlp, (), "expected the positive sizes of one input"),
        (mlp, (5, -1), "expected the positive sizes of one input"),
        (
            lambda: TwoInputs(5, 3),
            (5,),
            "positional argument: 'mask'); mend",
        ),
        (lambda: NoInput(5, 3), (5,), "positional argument"),
        (mlp, (6,), "a batch of 8 with inputs of shape (6,) (RuntimeError: mat1 and mat2"),
        (
            lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)),
            (5,),
            "takes integer tokens, but the attack moves its candidates continuously",
        ),
        (with_head(lambda self, x: self.a(x.float())), (5,), "runs in float32 but not in float64"),
        # what it returns
        (with_head(lambda self, x: (self.a(x), x)), (5,), "returns a tuple and not a tensor"),
        (with_head(lambda self, x: {"logits": self.a(x)}), (5,), "returns a dict and not"),
        (lambda: nn.Linear(5, 3), (4, 5), "outputs of shape (8, 4, 3); expected (8, c)"),
        (with_head(lambda self, x: self.a(x).sum()), (5,), "outputs of shape ()"),
        (
            with_head(lambda self, x: self.a(x.squeeze())),
            (5,),
            "a batch of 1 with inputs of shape (5,) gives outputs of shape (3,)",
        ),
        (with_head(lambda self, x: self.a(x).log()), (5,), "NaN or infinite entries, though"),
        (with_head(lambda self, x: F.dropout(self.a(x))), (5,), "two calls with the same inputs"),
        (with_head(lambda self, x: self.a(x - x.mean(0))), (5,), "depend on the other inputs"),
        (with_head(lambda self, x: x @ x.T + self.a(x)[:, :1]), (5,), "depend on the other inputs"),
        (with_head(lambda self, x: self.a(x.sub_(1))), (5,), "forward overwrites its input"),
        # its head
        (
            lambda: nn.Sequential(nn.Linear(5, 3), nn.Softmax(1)),
            (5,),
            "ends in softmax; return the logits, the output of 0 (drop the final softmax)",
        ),
        (lambda: nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(1)), (5,), "ends in log_softmax"),
        (with_head(lambda self, x: self.a(x)[:, 0].sigmoid()), (5,), "something follows a"),
        (
            lambda: nn.Sequential(nn.Linear(5, 1), nn.Sigmoid(), nn.Flatten(0)),
            (5,),
            "ends in sigmoid; return the logits",
        ),
        (lambda: nn.Sequential(nn.Linear(5, 3), nn.ReLU()), (5,), "something follows 0"),
        (
            with_head(lambda self, x: self.a(x).mean(1)),
            (4, 5),
            "a is applied to a tensor of shape (8, 4, 5); expected (8, h)",
        ),
        (
            with_head(lambda self, x: self.a(x[:, None])[:, 0]),
            (5,),
            "a is applied to a tensor of shape (8, 1, 5)",
        ),
        (
            with_head(lambda self, x: F.linear(x, self.a.weight)),
            (5,),
            "forward calls none of the linear layers (a)",
        ),
        (shared_head, (5,), "a runs 2 times in one forward"),
        (tied, (5,), "the weight of 2 is shared with 0.weight"),
        # its derivatives
        (unsupported, (5,), "torch.func cannot differentiate it (RuntimeError: "),
        (recurrent, (4, 5), "Recurrent layers"),
        (with_head(lambda self, x: self.a(x.round())), (5,), "do not change with the input"),
        (with_head(lambda self, x: self.a(x.detach() ** 2)), (5,), "derivatives"),
    ],
)
def test_refusals(make: Make, shape: tuple[int, ...], sentence: str) -> None:
    model = make()
    state = torch.get_rng_state()
    assert sentence in refusal(model, shape)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_with_no_grad_inside_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.a(x).tanh()
        outputs: Tensor = self.head(hidden)
        return outputs

    model = Written(forward, a=nn.Linear(5, 4), head=nn.Linear(4, 3))
    assert "no_grad" in refusal(model)


def test_torch_script_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.trace(mlp(), torch.zeros(1, 5))
    assert "is TorchScript" in refusal(model)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = mlp()
    model.computed = model[0].weight * 2
    assert "cannot be copied (RuntimeError: Only Tensors created explicitly" in refusal(model)


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("fc", "'fc' is no linear layer; the linear layers are 0, 2."),
        ("1", "'1' is no linear layer; the linear layers are 0, 2."),
    ],
)
def test_a_head_that_is_no_linear_layer_is_refused(head: str, sentence: str) -> None:
    assert sentence in refusal(mlp(), head=head)


def test_named_heads_must_run_once_on_rows() -> None:
    assert "a runs 2 times" in refusal(shared_head(), head="a")
    unused = Written(lambda self, x: self.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3))
    assert "forward does not call b; name one that it calls: a" in refusal(unused, head="b")
    tokens = Written(
        lambda self, x: self.b(self.a(x).mean(1)), a=nn.Linear(5, 4), b=nn.Linear(4, 3)
    )
    assert "a is applied to a tensor of shape (8, 4, 5)" in refusal(tokens, (4, 5), head="a")
    assert prepare(tokens, (4, 5)).head == "b"
