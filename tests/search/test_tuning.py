"""Tuning by successive halving, and what two starts have in common."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exhume.search.tuning import Range, Table, Trial, found_again, merit, rungs
from problems import gaussian


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.randoms(use_true_random=False), st.floats(0, 1))
def test_halving_tries_all_and_goes_on_with_the_best(
    trials: int, random: Random, bad: float
) -> None:
    scores = [
        [math.inf if random.random() < bad else random.random() + 1e-6 * i for i in range(trials)]
        for _ in rungs(trials)
    ]
    table, done = Table.empty(trials), list[Trial]()
    while batch := table.next_trials():
        assert len(done) < 10 * trials and len({here.rung for here in batch}) == 1
        done += batch
        for here in batch:
            if here.start == 0:
                table = table.entered(here, scores[here.rung][here.setting])
    alive = set(range(trials))
    for rung, size in enumerate(rungs(trials)):
        firsts = [trial for r, trial, start in done if (r, start) == (rung, 0)]
        assert set(firsts) == alive and len(firsts) == len(alive) <= size
        finite = sorted((scores[rung][trial], trial) for trial in alive if scores[rung][trial] < 2)
        if size <= 2:
            assert [trial for r, trial, start in done if start == 1] == firsts
        else:
            alive = {trial for _, trial in finite[: rungs(trials)[rung + 1]]}
    assert [r for r, _, _ in done] == sorted(r for r, _, _ in done)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 1000))
def test_what_two_starts_share_is_counted_once(found: int, other: int, seed: int) -> None:
    basis = torch.linalg.qr(gaussian(40, 40, seed=seed)).Q
    first = basis[: found + other]
    again = torch.cat([3 * basis[:found], basis[25 : 25 + other]])
    order = torch.randperm(len(again), generator=torch.Generator().manual_seed(seed))
    share = found / (found + other)
    assert found_again(first, again[order]) == pytest.approx(share)
    doubled = found_again(torch.cat([first, first]), torch.cat([again, again]))
    assert doubled == pytest.approx(share / 2)  # copies prove nothing
    assert found_again(first, -again) == 0
    x, y = math.cos(math.radians(20)), math.sin(math.radians(20))
    first = torch.tensor([[x, y, 0], [x, -y, 0]])
    second = torch.tensor([[1.0, 0, 0], [0, 0, 1]])  # near to both of the first, which differ
    assert found_again(first, second) == found_again(second, first) == 0.5


def test_merit_falls_with_the_residual_and_with_what_is_found_again() -> None:
    here = merit(0.01, 0.2, 20)
    assert merit(0.005, 0.2, 20) < here and merit(0.01, 0.3, 20) < here
    assert merit(0.02, 0.5, 20) < merit(0.01, 0.0, 20)
    assert merit(math.inf, 0.5, 20) == math.inf
    for span in (Range(1e-5, 1.0, logarithmic=True), Range(0.01, 0.5)):
        assert span.at(0) == pytest.approx(span.low) and span.at(1) == pytest.approx(span.high)
