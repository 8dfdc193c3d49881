"""Errors that are the caller's to mend, and words for them; the command line exits with code 2."""

from collections.abc import Iterable


class InputError(ValueError):
    """Something handed to exhume cannot be used; the message says what, and what to do."""


def listed(names: Iterable[str], most: int = 4) -> str:
    """Return names in a row, each once, and how many more there are beyond the first few.

    Example:
        >>> listed(["a", "b", "a", "c"], 2)
        'a, b and 1 more'
    """
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - most} more" if len(unique) > most else ""
    return ", ".join(unique[:most]) + more


def quoted(error: BaseException) -> str:
    """Return an error of somebody else's code in one line.

    Example:
        >>> quoted(KeyError("x"))
        "KeyError: 'x'"
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def printable(text: str) -> str:
    r"""Return a text without what would steer a terminal: names in files may be anybody's.

    Example:
        >>> printable("layer\x1b[2J\N{NO-BREAK SPACE}1")
        'layer�[2J\xa01'
    """
    kept = "\n\t\N{NO-BREAK SPACE}"
    return "".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in text)
