"""Transforms and sets: what is remembered of the pixels, what is kept private, what is refused."""

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from exhume import data
from exhume.data import Data, Transform
from exhume.equation.pixels import Pixels
from exhume.errors import InputError


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    samples=st.integers(1, 4),
    channels=st.integers(1, 3),
    shift=st.floats(-1, 1),
    scale=st.floats(0.1, 10),
    normalise=st.booleans(),
)
def test_undo_inverts_apply(
    seed: int, samples: int, channels: int, shift: float, scale: float, normalise: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(samples, 4 * channels, generator=generator, dtype=torch.float64)
    norms = torch.rand(samples, generator=generator, dtype=torch.float64) + 0.1
    mean = torch.arange(4.0 * channels).double()
    shifts = tuple(shift + channel for channel in range(channels))
    scales = tuple(scale + channel for channel in range(channels))
    given_norms = norms if normalise else None
    for transform in (
        Transform(shift, scale),
        Transform(shifts, scale),
        Transform(shifts, scales),
        Transform(2.5, scales, mean=mean),
    ):
        inputs = transform.apply(pixels, given_norms)
        torch.testing.assert_close(transform.undo(inputs, given_norms), pixels)
        rows = pixels - mean if transform.mean is not None else pixels
        plain = Pixels(0.0 if transform.mean is not None else transform.shift, transform.scale)
        factors = math.sqrt(4 * channels) / norms[:, None] if normalise else 1.0
        torch.testing.assert_close(inputs, plain.to_inputs(rows) * factors)


def test_norms_rescale_to_the_root_of_the_dimension_and_are_used_if_handed_over() -> None:
    pixels = torch.tensor([[3.0, 4.0, 0.0, 0.0]])
    assert Transform().apply(pixels, torch.tensor([5.0])).norm().item() == pytest.approx(2.0)
    transform = Transform(0.5, 2.0, norms=torch.tensor([7.0]))
    assert transform.undo(torch.tensor([[1.0, 0.0]])).tolist() == [[2.5, 0.5]]


@pytest.mark.parametrize(
    ("transform", "card"),
    [
        (Transform(0.5, 0.2), {"shift": 0.5, "scale": 0.2}),
        (Transform((0.1, 0.2), 0.2), {"shift": [0.1, 0.2], "scale": 0.2}),
        (Transform(0.5, norms=torch.tensor([3.25])), {"shift": 0.5, "scale": 1.0}),
        (
            Transform(0.5, mean=torch.full((3072,), 3.25)),
            {"shift": 0.5, "scale": 1.0, "centre": "pixels"},
        ),
    ],
)
def test_a_card_goes_through_json_without_what_is_private(
    transform: Transform, card: dict[str, Any]
) -> None:
    written = json.dumps(transform.card())
    assert json.loads(written) == card
    assert "3.25" not in written + repr(transform)


def test_images_of_candidates() -> None:
    truth = data.load("faces", samples=3)
    assert truth.transform.norms is not None
    candidates = truth.inputs[:2].float()
    known = truth.images(candidates, truth.transform.norms[:2])
    assert known.dtype == torch.float32
    torch.testing.assert_close(known, truth.images()[:2].float())
    unknown = truth.images(candidates)
    assert unknown.shape == (2, 25, 25) and truth.display is not None
    torch.testing.assert_close(unknown.flatten(1), truth.display.to_pixels(candidates))
    assert type(truth.display) is Pixels  # what an auditor is told has no private numbers
    assert data.sphere(3, 2).display is None
    assert "tensor" not in repr(truth)


def changed(**changes: Any) -> Data:
    good: dict[str, Any] = {
        "inputs": torch.ones(2, 4, dtype=torch.float64),
        "targets": torch.ones(2, 1, dtype=torch.float64),
        "shape": (2, 2),
    }
    return Data(**good | changes)


ROW = torch.zeros(1, 4)
NAN = torch.full((2, 4), math.nan, dtype=torch.float64)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Transform(scale=0.0), "scale"),
    (lambda: Transform(norms=torch.tensor([0.0])), "norms must be"),
    (lambda: Transform(norms=torch.ones(2, 2)), "norms must be"),
    (lambda: Transform(mean=torch.ones(2, 2)), "mean image must be"),
    (lambda: Transform(mean=torch.tensor([math.nan])), "mean image must be"),
    (lambda: Transform((0.0, 0.0, 0.0)).apply(ROW), "3 channels"),
    (lambda: Transform().undo(ROW, torch.ones(2)), "1 rows but 2 norms"),
    (lambda: Transform(mean=torch.zeros(3)).undo(ROW), "4 numbers, mean image of 3"),
    (lambda: changed(inputs=NAN), "not finite"),
    (lambda: changed(targets=torch.full((2, 1), math.inf).double()), "not finite"),
    (lambda: changed(targets=torch.zeros(3, 1).double()), "2 samples but 3 targets"),
    (lambda: changed(targets=torch.zeros(2).double()), "targets of custom"),
    (lambda: changed(inputs=torch.zeros(0, 4).double()), "at least one row"),
    (lambda: changed(inputs=torch.zeros(2, 4)), "float32"),
    (lambda: changed(shape=(3,)), "does not hold 4"),
    (lambda: changed(shape=(-2, -2)), "does not hold 4"),
    (lambda: changed(transform=Transform(norms=torch.ones(3))), "3 norms"),
    (lambda: changed(transform=Transform((0.0, 0.0, 0.0))), "3 channels"),
    (lambda: changed(transform=Transform(mean=torch.zeros(2))), "mean image of 2 numbers"),
    (lambda: changed().images(torch.ones(2, 3)), r"expected \(k, 4\)"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


# The file


VIEW = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).T


@pytest.mark.parametrize(
    "before",
    [
        data.load("digits", samples=5),
        data.load("digits", samples=5, normalise=False),
        data.load("digits", samples=5, centre="pixels"),
        Data(VIEW, VIEW[:, :1], (2, 2), transform=Transform((0.1, 0.2), (0.3, 0.4))),
    ],
    ids=["normalised", "plain", "centred", "channels"],
)
def test_save_and_read(before: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "truth.safetensors"
    data.save(before, path)
    after = data.read(path)
    assert after.inputs.equal(before.inputs)
    assert after.targets.equal(before.targets)
    assert after.images().equal(before.images())
    assert after.images(before.inputs[:2]).equal(before.images(before.inputs[:2]))
    assert (after.shape, after.name, after.transform) == (
        *(before.shape, before.name, before.transform),
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)  # it appears whole or not at all
    with pytest.raises(InputError, match="disk full"):
        data.save(data.sphere(4, 2), path)
    assert path.read_bytes() == content and os.listdir(path.parent) == [path.name]


def test_read_names_the_file_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    with pytest.raises(InputError, match=r"set.safetensors: no such file"):
        data.read(path)
    data.save(data.sphere(3, 2), path)
    whole = path.read_bytes()
    for content in (b"", whole[:4], whole[:50], whole[:-1], b"text" * 9):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"set.safetensors"):
            data.read(path)
    with pytest.raises(InputError, match=str(tmp_path)):
        data.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": None}, "no 'inputs'"),
        ({"targets": None}, "no 'targets'"),
        ({"name": None}, "no 'name'"),
        ({"transform": None}, "no 'transform'"),
        ({"transform": "{"}, "cannot be read"),
        ({"transform": "{}"}, "no 'shift'"),
        ({"transform": '{"shift": "a", "scale": 1}'}, "shift: expected"),
        ({"shape": "7"}, "cannot be read"),
        ({"shape": "[7]"}, "does not hold 3"),
        ({"inputs": torch.full((2, 3), math.nan, dtype=torch.float64)}, "not finite"),
        ({"norms": torch.ones(5)}, "5 norms"),
        ({"transform": '{"shift": 0, "scale": 1, "centre": "pixels"}'}, "no 'mean'"),
    ],
)
def test_read_refuses_other_files(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "inputs": torch.ones(2, 3, dtype=torch.float64),
        "targets": torch.ones(2, 1, dtype=torch.float64),
        "name": "x",
        "shape": "[3]",
        "transform": '{"shift": 0, "scale": 1}',
    } | changes
    tensors = {key: value for key, value in parts.items() if isinstance(value, Tensor)}
    metadata = {key: value for key, value in parts.items() if isinstance(value, str)}
    path = tmp_path / "set.safetensors"
    save_file(tensors, path, metadata)
    with pytest.raises(InputError, match=message) as error:
        data.read(path)
    assert str(path) in str(error.value)
