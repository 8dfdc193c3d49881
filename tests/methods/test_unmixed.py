"""Images unmixed from the rows of a first layer, whole or tile by tile: what comes back."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from recipe_problems import weights_of
from torch import Tensor, nn
from torch.nn.functional import normalize

from exhume import data
from exhume.auditing.forecast import hours
from exhume.auditing.settings import Settings
from exhume.equation.domain import Box, Span
from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.methods import method_named, reconstruct, unmixed
from exhume.methods.progress import pack, unpack
from exhume.methods.unmixed import Unmixed, start_of
from exhume.models import architectures
from exhume.models.folder import NetworkModel
from exhume.models.formulation import Told, network_problem
from exhume.models.prepare import prepare
from exhume.recipes import Recipe
from exhume.search.puzzle import together
from exhume.solvers import Outcome
from exhume.victims.training import state_of
from problems import gaussian
from replays import trained

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


def test_rows_are_without_most_of_their_noise() -> None:
    problem, truth = planted(0.7)
    assert problem.first_layer is not None
    raw, rows = problem.first_layer.spectrum[1], unmixed._rows(problem, FACES)
    own = torch.linalg.svd(truth, full_matrices=False)[2][: FACES - 1]  # they sum to zero

    def noise(rows: Tensor) -> Tensor:
        return 1 - (normalize(rows) @ own.T).square().sum(1)

    assert 10 < len(rows) < unmixed._seen(problem.first_layer, FACES)
    assert (noise(rows) < noise(raw[: len(rows)])).all()
    assert noise(raw[: len(rows)]).max() < noise(raw[len(rows) : FACES - 1]).min()
    clean = planted()[0]
    assert clean.first_layer is not None  # where there is none, rows are as they are
    assert torch.equal(unmixed._rows(clean, 9), clean.first_layer.spectrum[1][:9])


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


def test_a_start_in_the_span_of_the_samples_is_as_large_as_one_outside() -> None:
    problem, _ = planted(1e-4)
    assert problem.first_layer is not None
    basis = problem.first_layer.spectrum[1][:FACES]
    inside = replace(problem, domain=Span(basis, problem.domain))
    wide, near = (start_of(one, FACES, 0) for one in (problem, inside))
    assert wide is not None and near is not None
    torch.testing.assert_close(inside.domain.project(near), near)
    torch.testing.assert_close(near.norm(dim=1), wide.norm(dim=1), rtol=0.05, atol=0)


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


@cache
def transformer(uniform: bool = False) -> tuple[Problem, Tensor]:
    """A small transformer fine-tuned on four photographs, one with a tile of one colour if asked.

    Positions are as torch's Embedding has them: with positions near zero, places look alike.
    """
    torch.manual_seed(0)
    module = architectures.vit((3, 32, 32), patch=16, dim=64, outputs=10)
    nn.init.normal_(module.get_parameter("1.positions"))
    photos = data.load("photos", 4, normalise=False)
    images = photos.inputs.float().view(4, 3, 32, 32)
    if uniform:
        images[0, :, :16, :16] = 1.5
    weights = trained(module, images, torch.eye(10)[:4], Recipe(lr=0.05, steps=5))
    assert photos.display is not None
    low, high = photos.display.to_inputs(torch.tensor([[0.0], [1.0]]))[:, 0].tolist()
    network = prepare(module, (3, 32, 32), check=False).network
    problem = network_problem(network, *weights, told=Told(Box(low, high)))
    return problem, images.flatten(1).double()


@pytest.mark.parametrize("number", [4, None])
def test_photographs_are_put_together_from_the_tiles_of_a_transformer(number: int | None) -> None:
    problem, truth = transformer()
    assert problem.first_layer is None and problem.tiled is not None
    found = reconstruct(problem, number, method="unmixed")
    assert found.samples.shape == (4, 3072) and found.outcome is Outcome.STALLED
    assert (cosines(found.samples, truth) > 0.9).sum() >= 3
    assert score(found.samples, truth).errors.median() < 0.25  # with their size, that is
    torch.testing.assert_close(problem.domain.project(found.samples), found.samples)


def test_the_network_itself_says_in_the_end_which_tiles_make_an_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, _ = transformer()
    right = reconstruct(problem, 4, method="unmixed").samples

    def mistaken(*given: Any) -> Tensor:
        """No two tiles of an image are left together."""
        images = together(*given)
        return torch.stack([images[:, place].roll(place) for place in range(4)], 1)

    monkeypatch.setattr(unmixed, "together", mistaken)
    assert (cosines(reconstruct(problem, 4, method="unmixed").samples, right) > 0.999).all()


def test_a_run_on_tiles_goes_on_to_the_same_bits() -> None:
    problem, _ = transformer()
    method = Unmixed()
    progress = method.advance(problem, method.init(problem, 4, 0))
    again = unpack(problem, pack(progress, 0.0))
    ends = [method.advance(problem, one) for one in (progress, again)]
    assert ends[0].candidates.shape == (4, 3072)
    assert torch.equal(ends[0].candidates, ends[1].candidates)


def test_tiles_whose_places_do_not_show_are_refused() -> None:
    problem, _ = transformer()
    layer = problem.tiled
    assert layer is not None and layer.places is not None
    assert Unmixed().applies(problem, 4) and not Unmixed().applies(problem, 5)
    odd = layer.trained.clone()
    odd += torch.outer(torch.ones(64), torch.arange(768) / 1e5)  # a direction of no tile
    for lost in (
        replace(layer, places=None),
        replace(layer, places=gaussian(4, 64).float()),  # no combination of the columns
        replace(layer, trained=odd),  # 17 of 4 places each
    ):
        other = replace(problem, tiled=lost)
        assert not Unmixed().applies(other, None)
        with pytest.raises(InputError, match=r"cannot be put together.*Use the method 'exhume'"):
            reconstruct(other, method="unmixed")


def test_tiles_of_a_run_that_was_cut_short_are_put_together_all_the_same() -> None:
    problem, _ = transformer()
    short, long = Unmixed(turns=10), Unmixed()
    ended, cut = (each.advance(problem, each.init(problem, 4, 0)) for each in (short, long))
    assert ended.outcome is Outcome.BUDGET and cut.outcome is None
    assert torch.equal(
        long.finish(problem, cut).candidates, short.finish(problem, ended).candidates
    )
    assert not torch.equal(cut.candidates, ended.candidates)  # which only shows how far it is


def test_tiles_without_contours_are_refused_and_not_lost() -> None:
    problem, _ = transformer(uniform=True)
    assert not Unmixed().applies(problem, 4)
    with pytest.raises(InputError, match="cannot be put together"):
        reconstruct(problem, 4, method="unmixed")
