"""The command line in tests."""

from functools import cache
from pathlib import Path

from exhume.auditing.folder import CANDIDATES, CONFIG, EVENTS, RESULT
from exhume.cli import main

REPORT = "report.html"
AUDITED = {CONFIG, EVENTS, CANDIDATES, RESULT, REPORT}


def exhume_(*words: object) -> None:
    """Run a command."""
    main([str(word) for word in words])


def names(folder: Path) -> set[str]:
    """What a folder holds."""
    return {path.name for path in folder.iterdir()}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below, with what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@cache
def make_workshop(base: Path) -> Path:
    """Models and finished runs; not to be changed.

    model and run: vectors. stored: the same with its first layer. images and pictures: digits.
    margin: a network that was trained to the margin.
    """
    folder = base / "workshop"
    folder.mkdir()
    sphere = ("victim", "sphere", "--dim", 20, "--samples", 4, "--ratio", 6, "--out")
    exhume_(*sphere, folder / "model")
    exhume_(*sphere, folder / "stored", "--store")
    exhume_("victim", "digits", "--samples", 10, "--ratio", 6, "--out", folder / "images")
    exhume_("audit", folder / "model", "--samples", 4, "--out", folder / "run")
    exhume_("audit", folder / "images", "--samples", 10, "--out", folder / "pictures")
    kkt = ("--architecture", "kkt_mlp", "--classes", "parity", "--samples", 4, "--widths", 30)
    exhume_("victim", "digits", *kkt, "--steps", 200, "--out", folder / "margin")
    return folder
