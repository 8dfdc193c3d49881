"""A budget that is looked at between products: a step that takes long ends early, with what it has.

A step of Levenberg-Marquardt may take hundreds of products. Conjugate gradients lower the residual
of the linear equations with each of them, so that a step which was cut short is still one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_over: ContextVar[Callable[[], bool] | None] = ContextVar("over", default=None)


def spent() -> bool:
    """Tell whether the budget of the run at hand is used up; never outside of `until`."""
    over = _over.get()
    return over is not None and over()


@contextmanager
def until(over: Callable[[], bool]) -> Iterator[None]:
    """Let steps inside end early once `over` is true.

    Example:
        >>> with until(lambda: True):
        ...     spent()
        True
        >>> spent()
        False
    """
    before = _over.set(over)
    try:
        yield
    finally:
        _over.reset(before)
