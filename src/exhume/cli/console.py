"""Where commands write to."""

from rich.console import Console


def console() -> Console:
    """Return a console for plain text, which the terminal wraps, not we."""
    return Console(highlight=False, soft_wrap=True)
