"""An interrupted training ends as if it had not been, and other files are refused."""

import itertools
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from exhume import data
from exhume.errors import InputError
from exhume.files import read_metadata, read_tensors, write_tensors
from exhume.models.architectures import initialise, two_layer
from exhume.victims import training
from exhume.victims.training import WINDOW, Trained, Training, train
from problems import gaussian

SPHERE = data.sphere(10, 6)
KNOWN = replace(SPHERE, targets=SPHERE.targets.sign())
LONG = Training(until=0, steps=6 * WINDOW)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "training.safetensors"


def small(width: int = 30, seed: int = 0) -> nn.Sequential:
    return initialise(two_layer(KNOWN.shape, width).double(), seed)


def same(a: Trained, b: Trained) -> bool:
    return all(torch.equal(tensor, b.trained[name]) for name, tensor in a.trained.items())


def interrupt(path: Path, windows: int, how: Training = LONG) -> None:
    """Train, and interrupt after some windows, as a user would."""
    left = itertools.count(windows - 1, -1)

    def show(*_: object) -> None:
        if next(left) == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(small(), KNOWN, how, show=show, checkpoint=path)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"loss": "logistic"},
        {"momentum": 0.5},
        {"optimizer": "sgd", "batch": 2},
        {"optimizer": "adam", "batch": 4, "decay": 0.01},
        {"lazy": 5.0},
    ],
    ids=str,
)
def test_an_interrupted_training_ends_as_if_it_had_not_been(
    how: dict[str, Any], path: Path
) -> None:
    settings = replace(LONG, **how)
    whole = train(small(), KNOWN, settings)
    for windows in (2, 1):
        interrupt(path, windows, settings)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    steps: list[int] = []
    resumed = train(
        small(), KNOWN, settings, show=lambda step, _: steps.append(step), checkpoint=path
    )
    assert steps[0] == 4 * WINDOW
    assert same(whole, resumed)
    for key in ("loss", "steps", "undone", "rate", "laziness"):
        assert resumed.record[key] == whole.record[key]
    assert not path.exists()


def test_an_interruption_within_a_window_goes_back_to_its_beginning(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(small(), KNOWN, LONG)
    step, taken = training._Run.step, itertools.count()

    def interrupted(*given: Any) -> None:
        if next(taken) == 2 * WINDOW + 7:
            raise KeyboardInterrupt
        step(*given)

    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(small(), KNOWN, LONG, checkpoint=path)
    assert same(whole, train(small(), KNOWN, LONG, checkpoint=path))


@pytest.mark.parametrize("optimizer", ["gd", "adam"])
def test_undone_windows_survive_an_interruption(
    optimizer: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "largest_eigenvalue", lambda *_: 1.0)  # far too small
    if optimizer == "adam":
        monkeypatch.setattr(training._Run, "_first_scale", lambda *_: 100.0)
    how = replace(LONG, optimizer=optimizer, steps=20 * WINDOW)
    whole = train(small(), KNOWN, how)
    interrupt(path, 3, how)
    resumed = train(small(), KNOWN, how, checkpoint=path)
    assert same(whole, resumed) and resumed.record["undone"] == whole.record["undone"] > 0


def test_checkpoints_are_written_on_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", -1.0)
    written: list[Path] = []

    def counted(target: Path, *rest: Any) -> None:
        written.append(target)
        write_tensors(target, *rest)

    monkeypatch.setattr(training, "write_tensors", counted)
    train(small(), KNOWN, LONG, checkpoint=path)
    assert written and set(written) == {path}
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("until", {"settings": replace(LONG, until=1e-9)}),
        ("rate", {"settings": replace(LONG, rate=0.01)}),
        ("dtype", {"dtype": torch.float32}),
        ("initial weights", {"module": small(seed=1)}),
        ("initial weights", {"module": small(width=31)}),
        ("data", {"data": replace(KNOWN, targets=-KNOWN.targets)}),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    word: str, changes: dict[str, Any], path: Path
) -> None:
    interrupt(path, 1)
    content = path.read_bytes()
    usual: dict[str, Any] = {"module": small(), "data": KNOWN, "settings": LONG}
    with pytest.raises(InputError, match=f"{path.name}.*another {word}"):
        train(**usual | changes, checkpoint=path)
    assert path.read_bytes() == content


def write_numbers(path: Path) -> None:
    write_tensors(path, read_tensors(path), {**read_metadata(path), "place": '{"loss": 1}'})


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("not a checkpoint"),
        lambda path: path.write_bytes(path.read_bytes()[:-10]),
        lambda path: write_tensors(path, {"1.weight": gaussian(3, 3)}),
        write_numbers,
    ],
    ids=["text", "cut", "weights", "numbers"],
)
def test_files_that_are_no_checkpoint_are_refused(
    damage: Callable[[Path], object], path: Path
) -> None:
    interrupt(path, 1)
    damage(path)
    with pytest.raises(InputError, match=path.name):
        train(small(), KNOWN, LONG, checkpoint=path)
