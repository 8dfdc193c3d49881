"""Models and runs that commands are tried on, and commands that must be refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import exhume_, tree


@pytest.fixture(scope="package")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and finished runs; not to be changed.

    model and run: vectors. stored: the same with its first layer. images and pictures: digits.
    margin: a network that was trained to the margin.
    """
    folder = tmp_path_factory.mktemp("workshop")
    sphere = ("victim", "sphere", "--dim", 20, "--samples", 4, "--ratio", 6, "--out")
    exhume_(*sphere, folder / "model")
    exhume_(*sphere, folder / "stored", "--store")
    exhume_("victim", "digits", "--samples", 10, "--ratio", 6, "--out", folder / "images")
    exhume_("audit", folder / "model", "--samples", 4, "--out", folder / "run")
    exhume_("audit", folder / "images", "--samples", 10, "--out", folder / "pictures")
    kkt = ("--architecture", "kkt_mlp", "--classes", "parity", "--samples", 4, "--widths", 30)
    exhume_("victim", "digits", *kkt, "--steps", 200, "--out", folder / "margin")
    return folder


@pytest.fixture
def bench(workshop: Path, tmp_path: Path) -> Path:
    """A copy of the workshop, to be damaged."""
    shutil.copytree(workshop, tmp_path / "bench")
    return tmp_path / "bench"


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """A command that must end with code 2 and one paragraph, and write nothing."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> str:
        before = tree(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            exhume_(*words)
        assert ending.value.code == 2
        said = capsys.readouterr()
        assert said.err.startswith("exhume: ") and said.err.endswith("\n")
        assert "\n\n" not in said.err and "Traceback" not in said.err
        assert tree(tmp_path) == before
        return said.err

    return call
