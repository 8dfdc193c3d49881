"""Ranks: several processes that run one audit together, each with its own rows of the target.

All take the same steps with the same candidates. What leaves the rows is summed over all ranks, and
what a rank decides by its own clock or rounding, the first decides for all; it alone writes files.
`torchrun` starts them (docs/commands.md); without it nothing here does anything.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, distributed

from exhume.errors import InputError, quoted

# A rank waits so long for others, which may be busy with what only one does: one that ended is
# noticed at once, by its connections or by torchrun.
PATIENCE = timedelta(days=1)

T = TypeVar("T")
_joined: ContextVar[bool] = ContextVar("joined", default=False)


@contextmanager
def joined() -> Iterator[None]:
    """Be one of the ranks that `torchrun` has started, while this lasts; alone if it has not.

    Sums travel by NCCL where every rank has a GPU to itself, else by gloo. Where an error ends it,
    the others notice by their connections.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    backend, devices = "gloo", torch.cuda.device_count()
    if devices:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % devices)
        backend = "cpu:gloo,cuda:nccl" if _local() <= devices else "gloo"
    with _heard("the ranks cannot reach each other"):
        distributed.init_process_group(backend, timeout=PATIENCE)
    token, ended = _joined.set(True), False
    try:
        _alike()
        yield
        ended = True
    finally:
        _joined.reset(token)
        if ended or backend == "gloo":  # NCCL would wait for others, which may be waiting, too
            distributed.destroy_process_group()


def beside_each_other() -> int:
    """Return how many ranks share this machine, 1 where there are none."""
    return _local() if _joined.get() else 1


def _local() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def count() -> int:
    """Return how many ranks there are, 1 without any."""
    return distributed.get_world_size() if _joined.get() else 1


def rank() -> int:
    """Return which one this is; the first is 0."""
    return distributed.get_rank() if _joined.get() else 0


def total(part: Tensor) -> Tensor:
    """Return the sum of what all ranks hand in, the same bits on each."""
    if not _joined.get():
        return part
    result = part.detach().clone(memory_format=torch.contiguous_format)
    with _heard():
        distributed.all_reduce(result)
    return result


def first_of(value: Tensor) -> Tensor:
    """Return what the first rank hands in; shape and precision are the same on all."""
    if not _joined.get():
        return value
    result = value.detach().clone(memory_format=torch.contiguous_format)
    with _heard():
        distributed.broadcast(result, 0)
    return result


def agreed(number: float) -> float:
    """Return the number of the first rank, by which all decide.

    Example:
        >>> agreed(2.5)
        2.5
    """
    return first_of(torch.tensor(number, dtype=torch.float64)).item() if _joined.get() else number


def on_first(action: Callable[[], T]) -> T:
    """Return on every rank what the first one's action returns; the others only wait for it.

    An error of input there is one on every rank.
    """
    if not _joined.get():
        return action()
    told: list[tuple[T | None, str | None]] = [(None, None)]
    if rank() == 0:
        token = _joined.set(False)  # inside it is alone: the others take no part
        try:
            told = [(action(), None)]
        except InputError as error:
            told = [(None, str(error))]
        finally:
            _joined.reset(token)
    with _heard():
        distributed.broadcast_object_list(told, 0)
    value, refused = told[0]
    if refused is not None:
        raise InputError(refused)
    return value  # type: ignore[return-value]


def on_each(action: Callable[[], T]) -> T:
    """Return what the action returns here; an error of input on any rank is one on every rank."""
    if not _joined.get():
        return action()
    value, refused = None, None
    try:
        value = action()
    except InputError as error:
        refused = str(error)
    every: list[str | None] = [None] * count()
    with _heard():
        distributed.all_gather_object(every, refused)
    for other, words in enumerate(every):
        if words is not None:
            raise InputError(words if other == 0 else f"rank {other}: {words}")
    return value  # type: ignore[return-value]


def _alike() -> None:
    """Refuse ranks whose arithmetic may differ: their candidates would drift apart."""
    own = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    own += f", {torch.get_num_threads()} threads"
    own += f", {torch.cuda.get_device_name()}" if torch.cuda.device_count() else ""
    every: list[str] = [""] * count()
    with _heard():
        distributed.all_gather_object(every, own)
    if len(set(every)) > 1:
        other = next(i for i, words in enumerate(every) if words != every[0])
        raise InputError(
            f"ranks: rank 0 has {every[0]}, but rank {other} has {every[other]}; use machines of "
            "one kind, with the same software and OMP_NUM_THREADS."
        )


@contextmanager
def _heard(what: str = "a rank has ended, or cannot be reached") -> Iterator[None]:
    """Say what it means where the others do not answer."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch has no narrower class in common
        why = quoted(error).partition(". ")[0]  # gloo goes on with advice for its own developers
        raise ConnectionError(f"{what} ({why}); any number of ranks can go on") from error
