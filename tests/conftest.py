"""Every test begins with the same random state: what fails, fails again."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    torch.manual_seed(0)
