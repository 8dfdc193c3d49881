"""Devices by name, and what they are called."""

import importlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

from exhume.errors import InputError


def usable_device(name: str) -> str:
    """Return the name of a device that can be used here; `auto` is a GPU if there is one.

    A GPU that is told by its number becomes the current one, on which kernels are launched.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=name).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {name!r} cannot be used here; try cpu.") from error
    return name


def device_name(device: str) -> str:
    """Return the name of the hardware."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def hardware(device: str) -> str:
    """Return the name of the hardware and the number of cores beside it."""
    return f"{device_name(device).partition(',')[0]}, {os.cpu_count()} cores"


@cache  # what cannot be imported would be looked for again in every product
def kernels(name: str, device: torch.device) -> ModuleType | None:
    """Return a module of kernels for NVIDIA's GPUs, if the device is one and Triton is there."""
    if device.type == "cuda" and torch.version.hip is None:
        try:
            return importlib.import_module(name)
        except ImportError:  # it comes with torch on Linux alone; the rest does without
            pass
    return None


@contextmanager
def tensor_cores(allowed: bool, bfloat16: bool = False) -> Iterator[None]:
    """Let a GPU round the factors of float32 products and convolutions to TF32, or not.

    A CPU that multiplies bfloat16 may round those of products to that, where this is said.
    """
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    rounded = "medium" if bfloat16 else "high"
    torch.set_float32_matmul_precision(rounded if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
