"""Where commands write to."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console() -> "Console":
    """Plain text that is wrapped by the terminal, not by us."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)
