"""Numbers as a reader likes them; what is missing or not finite never raises."""

import sys
from datetime import datetime

NO_BREAK = "\N{NO-BREAK SPACE}"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def finite(value: object) -> float | None:
    """Return the value as a number, None if it is not a finite one.

    Example:
        >>> finite(2), finite(float("nan")), finite("2"), finite(None)
        (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def power_of_ten(exponent: int) -> str:
    """Write a power of ten in plain text.

    Example:
        >>> power_of_ten(-11)
        '10⁻¹¹'
    """
    return "10" + str(exponent).translate(SUPERSCRIPTS)


def number(value: object, missing: str = "n/a") -> str:
    """Write three digits, or two and a power of ten where shorter; whole numbers in full.

    Example:
        >>> number(25_000), number(0.0123), number(4.0), number(None)
        ('25,000', '0.0123', '4', 'n/a')
        >>> number(1.2e-11).replace(NO_BREAK, " ")
        '1.2 × 10⁻¹¹'
    """
    x = finite(value)
    if x is None:
        return missing
    if x == round(x) and abs(x) < 1e15:
        return f"{round(x):,}"
    if 1e-3 <= abs(x) < 999.5:
        return f"{x:.3g}"
    if 999.5 <= abs(x) < 1e6:
        return f"{x:,.0f}"
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{mantissa}{NO_BREAK}×{NO_BREAK}{power_of_ten(int(exponent))}"


def fixed(value: object, digits: int) -> str:
    """Write a column entry with so many decimals.

    Example:
        >>> fixed(0.99999, 4), fixed(None, 4)
        ('1.0000', '–')
    """
    x = finite(value)
    return "–" if x is None else f"{x:,.{digits}f}"


def percent(share: object) -> str:
    """Write a share in whole percent.

    Example:
        >>> percent(0.723).replace(NO_BREAK, " ")
        '72 %'
    """
    x = finite(share)
    return "n/a" if x is None else f"{100 * x:.0f}{NO_BREAK}%"


def plural(count: object, word: str) -> str:
    """Write a count with its noun.

    Example:
        >>> plural(1, "candidate"), plural(1200, "candidate")
        ('1 candidate', '1,200 candidates')
    """
    return f"{number(count)} {word}" if count == 1 else f"{number(count)} {word}s"


def duration(seconds: object) -> str:
    """Write a time span in the two units that matter.

    Example:
        >>> [duration(s).replace(NO_BREAK, " ") for s in (0.4213, 12.34, 59.96, 185, 7500)]
        ['0.421 s', '12.3 s', '1 min 0 s', '3 min 5 s', '2 h 5 min']
    """
    x = finite(seconds)
    if x is None:
        return "n/a"
    if x < 59.95:
        return f"{x:.3g}{NO_BREAK}s"
    if x < 3599.5:
        parts = (*divmod(round(x), 60), "min", "s")
    else:
        parts = (*divmod(round(x / 60), 60), "h", "min")
    return NO_BREAK.join(map(str, (parts[0], parts[2], parts[1], parts[3])))


def moment(stamp: object) -> str:
    """Make an ISO time stamp easier to read; anything else stays as it is.

    Example:
        >>> moment("2026-11-15T08:00:00Z"), moment("yesterday")
        ('2026-11-15 08:00 UTC', 'yesterday')
    """
    try:
        return datetime.fromisoformat(str(stamp)).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return str(stamp)


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval for a rate."""
    from scipy.stats import binomtest  # which takes a while to load

    found = binomtest(successes, total).proportion_ci(method="wilson")
    return found.low, found.high
