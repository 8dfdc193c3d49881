"""What tests of audits share."""

from pathlib import Path

import pytest

from exhume.auditing.settings import Settings


@pytest.fixture
def settings(workshop: Path) -> Settings:
    return Settings(str(workshop / "model"), samples=4, controls=False)
