"""Pixels: there and back again, and what is refused."""

from collections.abc import Callable

import pytest
import torch

from exhume.equation.pixels import Pixels
from exhume.errors import InputError
from problems import gaussian


@pytest.mark.parametrize("pixels", [Pixels(), Pixels(0.5, 0.2), Pixels((0.1, 0.2, 0.3), 2.0)])
def test_there_and_back_again(pixels: Pixels) -> None:
    inputs = gaussian(4, 12)
    torch.testing.assert_close(pixels.to_inputs(pixels.to_pixels(inputs)), inputs)


def test_each_channel_has_its_own() -> None:
    pixels = Pixels([0.0, 1.0], [1.0, 2.0])  # type: ignore[arg-type]  # as JSON has it
    assert pixels == Pixels((0.0, 1.0), (1.0, 2.0))
    images = gaussian(3, 2, 5, 5)
    expected = images * torch.tensor([1.0, 2.0])[:, None, None]
    expected = expected + torch.tensor([0.0, 1.0])[:, None, None]
    assert torch.equal(pixels.to_pixels(images.flatten(1)), expected.flatten(1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Pixels(float("nan")), "shift: expected a finite number"),
        (lambda: Pixels("0.5"), "shift: expected a finite number"),
        (lambda: Pixels(0.0, 0.0), "scale: expected a number above 0"),
        (lambda: Pixels((0.0, None)), "shift: expected a finite number"),
        (lambda: Pixels(()), "shift: expected a number, or one for each channel"),
        (lambda: Pixels((0.0, 1.0), (1.0, 1.0, 1.0)), "2 shifts but 3 scales"),
        (lambda: Pixels((0.0, 1.0)).to_pixels(torch.ones(1, 5)), "do not have 2 channels"),
    ],
)
def test_what_cannot_be_undone_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
