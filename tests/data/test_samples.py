"""Transforms and sets: what is remembered of the pixels, what is kept private, what is refused."""

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
from problems import gaussian


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 3), st.floats(-1, 1), st.floats(0.1, 10), st.booleans())
def test_undo_inverts_apply(
    seed: int, channels: int, shift: float, scale: float, normalise: bool
) -> None:
    pixels, size = gaussian(3, 4 * channels, seed=seed), 4 * channels
    norms = gaussian(3, seed=seed).abs() + 0.1 if normalise else None
    factors = 1.0 if norms is None else math.sqrt(size) / norms[:, None]
    mean = torch.arange(float(size)).double()
    shifts, scales = (tuple(level + c for c in range(channels)) for level in (shift, scale))
    for transform, rows, left in (
        (Transform(shift, scale), pixels, shift),
        (Transform(shifts, scale), pixels, shifts),
        (Transform(shifts, scales), pixels, shifts),
        (Transform(2.5, scales, mean=mean), pixels - mean, 0.0),
    ):
        inputs = transform.apply(pixels, norms)
        torch.testing.assert_close(transform.undo(inputs, norms), pixels)
        plain = Pixels(left, transform.scale).to_inputs(rows)
        torch.testing.assert_close(inputs, plain * factors)
    kept = Transform(0.5, 2.0, norms=torch.tensor([7.0]))  # used only if handed over
    assert kept.undo(torch.tensor([[1.0, 0.0]])).tolist() == [[2.5, 0.5]]


def test_a_card_goes_through_json_without_what_is_private() -> None:
    plain, secret = {"shift": 0.5, "scale": 1.0}, torch.full((3072,), 3.25)
    for transform, card in (
        (Transform(0.5), plain),
        (Transform((0.1, 0.2), 0.2), {"shift": [0.1, 0.2], "scale": 0.2}),
        (Transform(0.5, norms=secret), plain),
        (Transform(0.5, mean=secret), {**plain, "centre": "pixels"}),
    ):
        written = json.dumps(transform.card())
        assert json.loads(written) == card and "3.25" not in written + repr(transform)


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
    good = {"inputs": torch.ones(2, 4).double(), "targets": torch.ones(2, 1).double()}
    return Data(**{**good, "shape": (2, 2)} | changes)


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


VIEW = gaussian(4, 3).T
CHANNELS = Data(VIEW, VIEW[:, :1], (2, 2), transform=Transform((0.1, 0.2), (0.3, 0.4)))


@pytest.mark.parametrize("how", [{}, {"normalise": False}, {"centre": "pixels"}, None], ids=str)
def test_save_and_read(how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = CHANNELS if how is None else data.load("digits", 5, **how)
    path = tmp_path / "new" / "set.safetensors"
    data.save(before, path)
    after = data.read(path)
    assert after.inputs.equal(before.inputs) and after.targets.equal(before.targets)
    assert after.images().equal(before.images())
    assert after.images(before.inputs[:2]).equal(before.images(before.inputs[:2]))
    for word in ("shape", "name", "transform"):
        assert getattr(after, word) == getattr(before, word)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("disk full")))
    with pytest.raises(InputError, match="disk full"):  # it appears whole or not at all
        data.save(data.sphere(4, 2), path)
    assert path.read_bytes() == content and os.listdir(path.parent) == [path.name]
    for damaged in (b"", content[:4], content[:50], content[:-1], b"text" * 9):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"set.safetensors"):
            data.read(path)
    path.unlink()
    with pytest.raises(InputError, match=r"set.safetensors: no such file"):
        data.read(path)


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
    parts: dict[str, Any] = {"name": "x", "shape": "[3]", "transform": '{"shift": 0, "scale": 1}'}
    parts |= {"inputs": torch.ones(2, 3).double(), "targets": torch.ones(2, 1).double(), **changes}
    tensors = {key: value for key, value in parts.items() if isinstance(value, Tensor)}
    metadata = {key: value for key, value in parts.items() if isinstance(value, str)}
    path = tmp_path / "set.safetensors"
    save_file(tensors, path, metadata)
    with pytest.raises(InputError, match=message) as error:
        data.read(path)
    assert str(path) in str(error.value)
