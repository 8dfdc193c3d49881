"""Images unmixed from the rows of a first layer: the analysis, its noise, and what comes back."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipe_problems import weights_of
from torch import Tensor
from torch.nn.functional import normalize

from exhume import data
from exhume.auditing.forecast import hours
from exhume.auditing.settings import Settings
from exhume.equation.domain import Box
from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.methods import method_named, reconstruct
from exhume.methods.progress import pack, unpack
from exhume.methods.unmixed import Unmixed, above_noise, contours, orthogonal, turned
from exhume.models import architectures
from exhume.models.folder import NetworkModel
from exhume.solvers import Outcome
from exhume.victims.training import state_of
from problems import gaussian

FACES, WIDTH = 24, 60


@cache
def planted(noise: float = 0.0, target: str = "weights") -> tuple[Problem, Tensor]:
    """A network whose first layer is a mixture of faces, and noise; and these faces."""
    faces = data.load("faces", FACES, centre="pixels")
    arguments = {"shape": list(faces.shape), "outputs": 1, "widths": [WIDTH], "bias": "first"}
    module = architectures.build("mlp", arguments)
    before = state_of(module)
    first = next(name for name, tensor in before.items() if tensor.shape == (WIDTH, faces.dim))
    mixed = gaussian(WIDTH, FACES, seed=1) @ faces.inputs.double()
    start = before[first] if target == "change" else torch.zeros_like(before[first])
    there = start + (mixed + noise * gaussian(*mixed.shape, seed=2)).float()
    model = NetworkModel("mlp", arguments, before, {**before, first: there}, faces.display)
    return model.problem(premise=Premise.MARGIN, target=target), faces.inputs.double()


def cosines(found: Tensor, truth: Tensor) -> Tensor:
    """Of each sample with the nearest candidate."""
    return (normalize(truth) @ normalize(found.double()).T).amax(1)


@given(channels=st.integers(1, 3), high=st.integers(3, 6), wide=st.integers(3, 6))
def test_contours_are_differences_of_the_same_size(channels: int, high: int, wide: int) -> None:
    images = gaussian(4, channels, high, wide, seed=channels * high + wide)
    found = contours(images)
    kinds = (high, wide - 1), (high - 1, wide), (high, wide - 2), (high - 2, wide)
    kinds = (*kinds, (high - 1, wide - 1))
    sizes = [h * w for h, w in kinds] * channels
    assert found.shape == (4, sum(sizes))
    for part in found.split(sizes, 1):
        assert part.square().mean().item() == pytest.approx(1.0)
    # brightness that is the same everywhere, and contrast, make none
    assert contours(2 * images) == pytest.approx(found)
    if channels == 1:
        assert contours(images + 5) == pytest.approx(found)
        across = (images[:, 0, :, 1:] - images[:, 0, :, :-1]).flatten(1)
        assert found[:, : sizes[0]] == pytest.approx(across / across.square().mean().sqrt())


def test_turns_find_the_sources_of_a_mixture() -> None:
    uniform = torch.rand(4, 4000, generator=torch.Generator().manual_seed(0)).double() - 0.5
    sources = -uniform.sign() * (1 - 2 * uniform.abs()).log() / math.sqrt(2)  # Laplace, size 1
    mixing = orthogonal(gaussian(4, 4, seed=3))
    turn = orthogonal(gaussian(4, 4, seed=4))
    for _ in range(50):
        turn = turned(turn, mixing @ sources)
    assert turn @ turn.T == pytest.approx(torch.eye(4).double(), abs=1e-9)
    assert ((turn @ mixing).abs().amax(1) > 0.99).all()  # each component is one source


def test_noise_is_told_from_what_stands_out() -> None:
    def count(matrix: Tensor) -> int:
        return above_noise(torch.linalg.svdvals(matrix), tuple(matrix.shape))

    noise, low = gaussian(60, 200, seed=5), gaussian(60, 7, seed=6) @ gaussian(7, 200, seed=7)
    assert count(noise) <= 1  # the largest may stand out by chance
    assert count(noise.T) <= 1
    assert count(0.1 * noise + low) == count((0.1 * noise + low).T) == 7
    assert count(1e-9 * noise + low) == 7  # rounding
    assert count(low) == 7
    assert 1 <= count(gaussian(50, 50, seed=8)) <= 50  # no such noise has a least value


@pytest.mark.parametrize("target", ["weights", "change"])
def test_faces_come_back_from_the_rows(target: str) -> None:
    problem, truth = planted(1e-4, target)
    found = reconstruct(problem, FACES)
    assert found.outcome is Outcome.STALLED and found.products == 0
    assert len(found.samples) <= 2 * FACES and found.samples.shape[1] == problem.dim
    assert (cosines(found.samples, truth) > 0.8).sum() >= 20
    assert (cosines(found.samples, truth) > 0.9).sum() >= 15
    alone = reconstruct(problem, None, method="unmixed")  # the number is that of the directions
    assert torch.equal(alone.samples, found.samples)


def test_where_there_is_nothing_nothing_stands_out() -> None:
    problem, truth = planted(1e-4)
    assert problem.first_layer is not None
    there = problem.first_layer.trained.flatten()
    order = torch.randperm(len(there), generator=torch.Generator().manual_seed(0))
    mixed = there[order].view_as(problem.first_layer.trained)
    control = replace(problem, first_layer=FirstLayer(torch.zeros_like(mixed), mixed))
    assert not Unmixed().applies(control, FACES)  # so that `exhume` goes on to the equation
    found = reconstruct(control, FACES, method="unmixed")
    assert len(found.samples) <= 4 and (cosines(found.samples, truth) < 0.5).all()


def test_the_bias_tells_sign_and_size() -> None:
    problem = planted(1e-4)[0]
    faces = data.load("faces", FACES, centre="pixels").images().flatten(1).double()  # with the mean
    mixing = gaussian(WIDTH, FACES, seed=1)
    layer = FirstLayer(torch.zeros(WIDTH, 625).double(), mixing @ faces, mixing.sum(1))
    wide = replace(problem, first_layer=layer, domain=Box(-9.0, 9.0))
    found = reconstruct(wide, FACES, method="unmixed").samples
    assert found.shape == (FACES, 625)
    assert (cosines(found, faces) > 0.9).sum() >= 20  # each with one sign, that is
    assert score(found, faces).errors.median() < 0.25
    lost = replace(layer, bias=gaussian(WIDTH, seed=2))  # no combination
    assert (
        len(reconstruct(replace(wide, first_layer=lost), FACES, method="unmixed").samples) > FACES
    )


def test_images_without_contours_are_refused_and_boxes_may_be_anywhere() -> None:
    problem, truth = planted(1e-4)
    flat = gaussian(WIDTH, 2, seed=3) @ torch.ones(2, 625).double()
    layer = FirstLayer(torch.zeros_like(flat), flat)
    with pytest.raises(InputError, match="without any contours"):
        reconstruct(replace(problem, first_layer=layer), 1, method="unmixed")
    found = reconstruct(replace(problem, domain=Box(0.0, 1.0)), FACES).samples
    assert found.min() >= 0 and found.max() <= 1
    own, seen = (x - x.mean(1, keepdim=True) for x in (truth, found))
    assert (cosines(seen, own) > 0.8).sum() >= 20


def test_a_run_goes_on_to_the_same_bits() -> None:
    problem, _ = planted(1e-4)
    method = method_named("exhume", problem)
    progress = method.advance(problem, method.init(problem, FACES, 0))
    again = unpack(problem, pack(progress, 0.0))
    ends = [method.advance(problem, one) for one in (progress, again)]
    assert progress.phase == "unmix" and progress.residual == 1
    assert torch.equal(ends[0].candidates, ends[1].candidates)


def test_no_time_is_foretold_without_products() -> None:
    assert hours(Settings(samples=FACES), planted(1e-4)[0]) is None


def test_few_turns_end_at_their_budget() -> None:
    found = reconstruct(planted(1e-4)[0], FACES, method=Unmixed(turns=1))
    assert found.outcome is Outcome.BUDGET and found.steps == 1


def test_it_is_for_images_with_differences_enough_and_a_dense_first_layer() -> None:
    problem = planted(1e-4)[0]
    assert Unmixed().applies(problem, FACES)
    small = weights_of()  # images of 2×3
    assert not Unmixed().applies(small, 3)
    assert method_named("exhume", small).init(small, 3, 0).phase != "unmix"
    for other in (replace(problem, shape=(625,)), replace(problem, first_layer=None)):
        assert not Unmixed().applies(other, FACES)
        with pytest.raises(InputError, match="takes images"):
            reconstruct(other, FACES, method="unmixed")
