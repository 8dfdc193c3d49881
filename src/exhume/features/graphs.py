"""CUDA graphs: thousands of small kernels that are launched as one."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from exhume.features.network import derivatives

Recorded = tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]


@dataclass(frozen=True, eq=False)
class Graphs:
    """Functions of tensors, each recorded once by its name and the shapes that it is given.

    All are of the same first shape: with another, those before are forgotten.
    """

    recorded: dict[tuple[object, ...], Recorded] = field(default_factory=dict, repr=False)

    def __call__(
        self, name: str, function: Callable[..., Tensor], *inputs: Tensor, rounded: bool = False
    ) -> Tensor:
        """Return the function of the inputs; no value but theirs may change between calls."""
        key = name, rounded, *((given.shape, given.dtype) for given in inputs)
        if any(inputs[0].shape != places[0].shape for _, places, _ in self.recorded.values()):
            self.recorded.clear()  # each holds memory, and searches go on with other numbers
        with torch.cuda.device(inputs[0].device):  # on another one nothing would be recorded
            if key not in self.recorded:
                self.recorded[key] = record(function, inputs, rounded)
            graph, places, result = self.recorded[key]
            for place, given in zip(places, inputs, strict=True):
                place.copy_(given)
            graph.replay()
            return result.clone()


def record(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], rounded: bool) -> Recorded:
    """Run twice aside, as libraries set themselves up at first, then record.

    Meanwhile convolutions are tried in every way that there is, and the fastest is recorded.
    """
    places = tuple(given.clone() for given in inputs)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    rounds = torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=rounded)
    with torch.no_grad(), derivatives(rounded), rounds:
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(*places)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            result = function(*places)
    return graph, places, result
