"""Where commands write to."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Return a console for plain text, which the terminal wraps, not we."""
    return Console(highlight=False, soft_wrap=True)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return rows of words below their heads."""
    made = Table(*heads)
    for row in rows:
        made.add_row(*map(str, row))
    return made
