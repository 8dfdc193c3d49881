"""Where commands write to."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Return a console for plain text, which the terminal wraps, not we."""
    return Console(highlight=False, soft_wrap=True)


def table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of rows, each with its words by the heads of their columns."""
    made = Table(*rows[0])
    for row in rows:
        made.add_row(*row.values())
    return made
