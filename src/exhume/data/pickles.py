"""An unpickler that cannot run code, for the one published format that is a pickle."""

import pickle
from typing import Any, BinaryIO

import numpy as np


def load_inert(file: BinaryIO) -> Any:
    """Read a pickle of numbers, text, lists, dictionaries and uint8 arrays.

    Arrays come as objects with a field `array`. A broken or hostile file may raise anything, but
    runs nothing.
    """
    return _Unpickler(file, encoding="bytes").load()


class _PickledType:
    """Stands for a pickled numpy.dtype; keeps its code, e.g. "u1"."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        pass


class _PickledArray:
    """Stands for a pickled numpy.ndarray of bytes; any other type of array is refused."""

    def __init__(self, *_: object) -> None:
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, columns_first, raw = state
        if not isinstance(kind, _PickledType) or kind.code != "u1":
            raise pickle.UnpicklingError("an array that is not uint8")
        flat = np.frombuffer(raw, np.uint8)
        self.array = flat.reshape(shape, order="F" if columns_first else "C")


def _encode(text: str, _: object) -> bytes:
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """Builds numbers, text, lists, dictionaries and uint8 arrays; refuses every other name."""

    known: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledType,
        ("_codecs", "encode"): _encode,  # how Python 3 writes bytes in protocol 2
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The inert twin of a name, never the name itself."""
        try:
            return self.known[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it refers to {module_name}.{global_name}, which could run code"
            ) from None
