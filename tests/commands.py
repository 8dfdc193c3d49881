"""The command line in tests."""

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
