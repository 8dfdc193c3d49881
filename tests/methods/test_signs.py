"""Replay of Adam: what columns of a first layer tell is read and held, and samples come back."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import exhume
from exhume.features.network import Weights
from exhume.methods import signs
from exhume.models.formulation import Known
from exhume.recipes import Recipe
from replays import posed, small, trained

RECIPE = Recipe("adam", lr=0.02, steps=4)
LABELS = (0, 1)


def inputs(count: int, seed: int) -> Tensor:
    """Draw inputs whose first entry is always zero, and whose second is −0.3."""
    drawn = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    drawn[:, 0], drawn[:, 1] = 0.0, -0.3
    return drawn


def weights() -> tuple[Weights, Weights]:
    return trained(small(), inputs(2, 5), torch.eye(3)[list(LABELS)], RECIPE)


def test_samples_come_back_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "STEPS", 5)  # enough for so few entries
    x, known = inputs(2, 5), {"premise": "replay", "recipe": RECIPE, "labels": list(LABELS)}
    options = {"samples": 2, "public": inputs(40, 6), "device": "cpu", "product_limit": 4000}
    options["controls"] = False
    found = exhume.audit(small(), *weights(), (6,), **known, **options)
    errors = torch.cdist(found.samples, x.double()).min(0).values / x.double().norm(dim=1)
    assert errors.max() < 1e-2
    assert found.found.outcome is exhume.Outcome.CONVERGED


def test_columns_that_did_not_move_hold_zeros_and_those_like_the_bias_hold_one_value() -> None:
    prior = signs.prior_of(posed(small(), weights(), Known(RECIPE, LABELS, inputs(40, 6))))
    assert prior.moved.tolist() == [False, True, True, True, True, True]
    assert prior.free.tolist() == [False, False, True, True, True, True]
    held = prior.held(torch.ones(2, 6))
    assert held[:, 0].tolist() == [0, 0]
    torch.testing.assert_close(held[:, 1], torch.full((2,), -0.3))
    early, late = (prior.basis(torch.ones(2, 6), shared) for shared in (False, True))
    assert early.shape == (12, 8)
    assert late.shape == (12, 9)
    assert not late[0].any()


def test_pooled_mean_squares_have_those_of_rows_and_columns() -> None:
    run = replace(posed(small(), weights(), Known(RECIPE, LABELS)).features, pooling=1.0)
    rows, columns = torch.rand(24), torch.rand(6)
    outer = torch.outer(rows, columns).flatten()  # of rank one: its own means tell all of it
    squares = torch.cat([outer, torch.rand(run.width - len(outer))])
    pooled = run.pooled(squares)
    torch.testing.assert_close(pooled[: len(outer)], outer)
    torch.testing.assert_close(pooled[144:168], squares[144:168].mean().expand(24))
