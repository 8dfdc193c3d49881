"""A small model, what is asked of it, and a finished run."""

from pathlib import Path

import pytest

from exhume import data
from exhume.auditing.settings import Settings
from exhume.victims import random_features
from folders import audit


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    random_features(data.sphere(20, 4), 480).save(folder)
    return folder


@pytest.fixture
def settings(model: Path) -> Settings:
    return Settings(str(model), samples=4)


@pytest.fixture(scope="package")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    audit(Settings(str(model), samples=4), folder)
    return folder
