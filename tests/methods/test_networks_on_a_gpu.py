"""Networks on a GPU agree with those on the CPU; skipped where there is none."""

from dataclasses import replace

import pytest
import torch
from recipe_problems import watched

from exhume import data, evaluate, reconstruct, victims
from exhume.equation.objective import curvature, fitted, gauss_newton, gradient
from exhume.equation.problem import Premise
from exhume.methods.progress import pack
from exhume.models.formulation import weights_problem
from nets import SIZES, make
from problems import gaussian

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("point", ["midpoint", "both"])
@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize("name", SIZES)
def test_products_agree_with_the_cpu(name: str, parameters: str, point: str) -> None:
    problem = make(name).problem(parameters, point)
    x, direction = gaussian(2, problem.dim, seed=3), gaussian(2, problem.dim, seed=4)
    exact = problem.to("cuda", torch.float64)
    here, there = fitted(problem, x), fitted(exact, x)
    assert fitted(problem.to("cuda"), x).value == pytest.approx(here.value, rel=1e-3, abs=1e-6)
    for ours, reference in (
        (gradient(exact, there), gradient(problem, here)),
        (gauss_newton(there, direction.cuda()), gauss_newton(here, direction)),
        (curvature(there), curvature(here)),
    ):
        scale = 1e-6 * reference.abs().max() + 1e-12  # where few features leave a residual of zero
        assert torch.allclose(ours.cpu(), reference, rtol=1e-6, atol=scale)


def test_the_margin_agrees_with_the_cpu() -> None:
    for net in (make("mlp", 1), make("mlp", 3)):
        problem = weights_problem(net.network, net.trained, Premise.MARGIN)
        x = gaussian(4, problem.dim, seed=3)
        here, there = fitted(problem, x), fitted(problem.to("cuda", torch.float64), x)
        assert there.value == pytest.approx(here.value, rel=1e-9)
        assert there.penalty == pytest.approx(here.penalty, rel=1e-9)
        assert torch.allclose(there.coefficients.cpu(), here.coefficients, rtol=1e-6, atol=1e-9)


def test_networks_trained_on_the_gpu_are_recovered_there() -> None:
    known = data.sphere(8, 2, 100)
    options = {"seed": 100, "device": "cuda", "lazy": 30.0}
    dense = victims.two_layer(known, width=600, **options)
    deep = victims.mlp(known, widths=(60, 200), activation="gelu", **options)
    for problem, method in (
        (dense.problem, "exhume"),
        (dense.problem, "tansley2026"),
        (deep.posed("last"), "exhume"),
        (deep.posed("all"), "exhume"),
    ):
        found = reconstruct(problem.to("cuda"), 2, 0, method, product_limit=10_000)
        assert evaluate.score(found.samples, known).recovered == 1


@pytest.mark.parametrize("method", ["exhume", "haim2022", "shen2026"])
def test_weights_at_the_margin_are_attacked_on_the_gpu_and_gone_on_with(method: str) -> None:
    known = data.sphere(12, 6, 100)
    victim = victims.kkt_mlp(known, (40,), seed=100, steps=400, device="cuda")
    problem = victim.problem.to("cuda")
    found, moves = watched(problem, 6, method, product_limit=600)
    assert found.samples.isfinite().all() and found.residual < 0.5
    half = pack(moves[len(moves) // 2], 1.0)
    resume = replace(half, tensors={name: tensor.cpu() for name, tensor in half.tensors.items()})
    again = reconstruct(problem, 6, 0, method, resume=resume, product_limit=600)
    assert (again.steps, again.products) == (found.steps, found.products)
    torch.testing.assert_close(again.samples, found.samples, rtol=1e-3, atol=1e-3)
