"""What tests of every room may use; each begins with the same random state, to fail again alike."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and finished runs; not to be changed."""
    from commands import make_workshop

    return make_workshop(tmp_path_factory.mktemp("workshop"))
