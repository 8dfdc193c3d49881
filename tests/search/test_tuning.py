"""Rungs of successive halving, and the ranges of what is tuned."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exhume.search.tuning import FACTOR, FINALISTS, Range, rungs


@given(st.integers(1, 1000))
def test_every_rung_has_fewer_settings_down_to_the_last_ones(trials: int) -> None:
    sizes = rungs(trials)
    assert sizes[0] == trials and 1 <= sizes[-1] <= FINALISTS
    for before, after in pairwise(sizes):
        assert after < before <= FACTOR * after


def test_a_range_begins_low_and_ends_high() -> None:
    for span in (Range(1e-5, 1.0, logarithmic=True), Range(0.01, 0.5)):
        assert span.at(0) == pytest.approx(span.low) and span.at(1) == pytest.approx(span.high)
