"""What tests of every room may use; each begins with the same random state, to fail again alike."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def state_of_no_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are noted in a place of the tests' own, and not in somebody's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and finished runs; not to be changed."""
    from commands import make_workshop

    return make_workshop(tmp_path_factory.mktemp("workshop"))
