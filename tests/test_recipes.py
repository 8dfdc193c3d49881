"""Recipes: read from files and optimisers, and refused where no run could have been so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import exhume
from exhume.recipes import Recipe, from_optimizer, read


def test_a_file_says_it_all(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("optimizer: adamw\nlr: 1e-2\nepochs: [2]\nbatch_size: 4\nbetas: [0.8, 0.9]\n")
    recipe = read(path)
    assert recipe == Recipe("adamw", 0.01, epochs=2, batch_size=4, betas=(0.8, 0.9))
    assert recipe.length(6) == 4
    listed: dict[str, Any] = {"steps": [10, 20], "milestones": [3], "betas": [0.9, 0.99]}
    several = Recipe(frozen="0.*", schedule="steps", **listed)
    assert (several.frozen, several.steps, several.milestones) == (("0.*",), (10, 20), (3,))
    assert hash(several) == hash(replace(several, betas=(0.9, 0.99)))
    assert [len(batch) for batch in recipe.batches(6)] == [4, 2, 4, 2]


def test_an_optimizer_says_what_it_knows() -> None:
    weights = [nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.AdamW(weights, lr=0.02, weight_decay=0.1)
    assert from_optimizer(optimizer, steps=5) == Recipe("adamw", 0.02, 5, weight_decay=0.1)
    with pytest.raises(exhume.InputError, match="amsgrad"):
        from_optimizer(torch.optim.Adam(weights, amsgrad=True), steps=5)
    turned = torch.optim.Adam(weights, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True)
    assert from_optimizer(turned, steps=5).optimizer == "adamw"
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    assert from_optimizer(optimizer, steps=5, schedule="cosine").lr == 0.02
    with pytest.raises(exhume.InputError, match="has a schedule"):
        from_optimizer(optimizer, steps=5)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"lr": 0.1}, "either steps or epochs"),
        ({"steps": 1, "lr": 0}, "lr"),
        ({"steps": 1, "optimizer": "lion"}, "optimizer"),
        ({"steps": 1, "momentum": 1.0}, "below 1"),
        ({"steps": 1, "optimizer": "adam", "momentum": 0.9}, "has its own"),
        ({"steps": 1, "rate": 0.1}, "'rate' is no entry"),
        ({"steps": 1, "lr": "fast"}, "lr: expected a number above 0, got 'fast'"),
        ({"steps": 1, "warmup": "two"}, "warmup: expected a whole number"),
        ({"steps": 1, "betas": [0.9, 0.9, 0.9]}, "expected two numbers"),
        ({"steps": 1, "nesterov": True}, "is a kind of momentum"),
        ({"steps": 1, "milestones": (3,)}, "schedule: steps"),
        ({"steps": 1, "schedule": "steps"}, "needs milestones"),
        ({"steps": 1, "loss": "mse", "label_smoothing": 0.1}, "is for cross_entropy"),
        ({"steps": []}, "steps: expected a number, or several"),
        ([1], "expected entries"),
    ],
)
def test_refusals(entries: Any, words: str) -> None:
    with pytest.raises(exhume.InputError, match=words):
        Recipe.of(entries)


def test_losses_are_for_as_many_outputs_as_there_are() -> None:
    for loss, outputs, words in (("cross_entropy", 1, "loss: logistic"), ("logistic", 3, "has 3")):
        with pytest.raises(exhume.InputError, match=words):
            Recipe(steps=1, loss=loss).check_outputs(outputs)
    Recipe(steps=1, loss="mse").check_outputs(1)


def test_losses_are_those_of_torch() -> None:
    outputs, classes = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    labels, signs = nn.functional.one_hot(classes), 2.0 * (classes[:, None] > 0) - 1
    smooth = Recipe(steps=1, label_smoothing=0.1).value(outputs, labels)
    entropy = nn.functional.cross_entropy(outputs, classes, label_smoothing=0.1)
    torch.testing.assert_close(smooth, entropy)
    for loss, f, y, value in (
        ("mse", outputs, labels.float(), nn.functional.mse_loss),
        ("logistic", outputs[:, :1], signs, nn.functional.soft_margin_loss),
    ):
        torch.testing.assert_close(Recipe(steps=1, loss=loss).value(f, y), value(f, y))


def test_warmup_ends_at_the_rate_and_cosine_a_step_before_zero() -> None:
    recipe = Recipe(lr=1.0, steps=6, warmup=2, schedule="cosine")
    assert [round(recipe.rate(k), 3) for k in range(6)] == [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]


def test_longer_steps_go_as_far_on_a_lasting_gradient() -> None:
    recipe = Recipe(lr=0.01, epochs=40, momentum=0.5, warmup=8, schedule="steps", milestones=20)
    few = recipe.in_steps(10, recipe.length(3))
    assert (few.steps, few.epochs, few.momentum) == (10, None, 0.5**4)
    assert few.lr / (1 - few.momentum) == pytest.approx(4 * 0.01 / (1 - 0.5))
    assert (few.warmup, few.milestones) == (2, (5,))
    assert Recipe(steps=8).in_steps(2, 8).lr is None
