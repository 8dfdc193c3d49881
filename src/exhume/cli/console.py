"""What commands share: where they write to, and how they refuse."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from exhume import ranks
from exhume.errors import InputError, printable


class _Console(Console):
    """A console that no name in a file can steer."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print texts without escape sequences; our own markup is made into them later."""
        safe = (printable(item) if isinstance(item, str) else item for item in objects)
        super().print(*safe, **options)

    def on_broken_pipe(self) -> None:
        """Leave it to the command line, which is asked while the error is handled."""
        raise BrokenPipeError


def new_console() -> Console:
    """Return a console for plain text, which the terminal wraps, not we; the first rank's only."""
    return _Console(highlight=False, soft_wrap=True, quiet=ranks.rank() > 0)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return rows of words below their heads."""
    made = Table(*heads)
    for row in rows:
        made.add_row(*(printable(str(cell)) for cell in row))
    return made


def named(model: str | None, command: str) -> str:
    """Return the model that a command is about; refuse none."""
    if model is None:
        own = "a factory of your own, --model package.module:factory, with --trained."
        raise InputError(f"model: name a model folder, exhume {command} FOLDER, or {own}")
    return model


def refuse(options: Mapping[str, object], why: str) -> None:
    """Refuse the first of these options that was given."""
    if told := [word for word, value in options.items() if value is not None]:
        raise InputError(f"{told[0]}: {why}.")
