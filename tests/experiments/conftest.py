"""What tests of experiments share."""

from collections.abc import Iterator
from typing import Any

import pytest

from exhume.experiments.claims import subspace
from exhume.theory.width import WidthBound


@pytest.fixture(autouse=True, scope="package")
def quick_bound() -> Iterator[None]:
    """Replace the bound on the width, which takes seconds and has tests of its own."""

    def stub(samples: int, dim: int, activation: str, **_: Any) -> WidthBound:
        certified = 1000.0 * samples * dim * len(activation)
        return WidthBound(2 * certified, certified, 64.0, 0.1, 0.01, 0.1, 5.0, 0.01, ())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subspace, "width_bound", stub)
        yield
