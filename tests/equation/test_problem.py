"""What a problem may hold, its pixels, and what is refused; who imports whom is import-linter's."""

import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

import exhume.errors
from exhume.equation.pixels import Pixels
from exhume.equation.problem import Problem
from problems import THREAT, gaussian, make_features, make_problem, refusals

SOURCE = Path(exhume.errors.__file__).parent


def test_an_attack_imports_nothing_by_a_name_made_at_run_time() -> None:
    """import-linter reads imports, and would not see these; a factory alone needs them."""
    for room in ("auditing", "theory", "methods", "search", "solvers", "equation", "features"):
        text = "".join(path.read_text() for path in (SOURCE / room).glob("*.py"))
        assert text and not re.search("__import__|import_module|importlib", text)


def test_a_problem_knows_its_sizes_and_has_no_field_that_could_hold_the_truth() -> None:
    known = (
        "target features threat_model shape domain display resolution drift first_layer premise "
    )
    known += "start whole tiled"
    assert {field.name for field in fields(Problem)} == set(known.split())
    problem = make_problem(make_features(5, 40), gaussian(40, 2))
    assert problem.dim == 5 and problem.ratio(4) == pytest.approx(40 * 2 / (5 * 4))
    moved = problem.to("cpu", torch.float32)
    assert moved.target.dtype == moved.features.dtype == torch.float32


def test_pixels_go_there_and_back_and_each_channel_has_its_own() -> None:
    inputs = gaussian(4, 12)
    for pixels in (Pixels(), Pixels(0.5, 0.2), Pixels((0.1, 0.2, 0.3), 2.0)):
        torch.testing.assert_close(pixels.to_inputs(pixels.to_pixels(inputs)), inputs)
    pixels = Pixels([0.0, 1.0], [1.0, 2.0])  # type: ignore[arg-type]  # as JSON has it
    assert pixels == Pixels((0.0, 1.0), (1.0, 2.0))
    images = gaussian(3, 2, 5, 5)
    scale, shift = torch.tensor([[1.0, 2.0], [0.0, 1.0]])[..., None, None]
    assert torch.equal(pixels.to_pixels(images.flatten(1)), (images * scale + shift).flatten(1))


def posed(target: Tensor, *shape: int) -> Callable[[], object]:
    return lambda: Problem(target, make_features(5, 40), THREAT, shape or (5,))


test_what_no_attack_could_use_is_refused = refusals(
    (posed(torch.ones(40)), "expected shape"),
    (posed(torch.ones(39, 1)), "expected shape"),
    (posed(torch.ones(1, 40)), "expected shape"),
    (posed(torch.ones(40, 0)), "expected shape"),
    (posed(torch.full((40, 1), math.nan)), "NaN"),
    (posed(torch.full((40, 1), math.inf)), "infinite"),
    (posed(torch.zeros(40, 2)), "zero everywhere"),
    (posed(torch.ones(40, 2)), "move both with problem.to"),
    (posed(torch.ones(40, 2).double(), 2, 3), "has 6 entries, but the features take 5"),
    (lambda: Pixels(float("nan")), "shift: expected a finite number"),
    (lambda: Pixels("0.5"), "shift: expected a finite number"),
    (lambda: Pixels(0.0, 0.0), "scale: expected a number above 0"),
    (lambda: Pixels((0.0, None)), "shift: expected a finite number"),
    (lambda: Pixels(()), "shift: expected a number, or one for each channel"),
    (lambda: Pixels((0.0, 1.0), (1.0, 1.0, 1.0)), "2 shifts but 3 scales"),
    (lambda: Pixels((0.0, 1.0)).to_pixels(torch.ones(1, 5)), "do not have 2 channels"),
)
