"""What tests of experiments share."""

from typing import Any

import pytest

from exhume.experiments.claims import subspace
from exhume.theory.width import WidthBound


@pytest.fixture(autouse=True)
def quick_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the bound on the width, which takes seconds and has tests of its own."""

    def stub(samples: int, dim: int, activation: str, **_: Any) -> WidthBound:
        certified = 1000.0 * samples * dim * len(activation)
        return WidthBound(2 * certified, certified, 64.0, 0.1, 0.01, 0.1, 5.0, 0.01, ())

    monkeypatch.setattr(subspace, "width_bound", stub)
