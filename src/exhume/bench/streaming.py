"""A model that does not fit in memory: one objective and gradient from a seed."""

import resource
import sys
import time

import torch

from exhume.bench.common import console, heading
from exhume.equation.objective import fitted, gradient
from exhume.features.weights import Seeded
from exhume.models.folder import random_features_problem


def streaming(samples: int = 100, dim: int = 3072, width: int = 3_072_000, seed: int = 0) -> None:
    """One objective and gradient with V regenerated block by block; time and peak memory.

    Args:
        samples: candidates.
        dim: d.
        width: p; V would take 4·p·d bytes.
        seed: of V.
    """
    heading(f"streaming: n={samples} d={dim} p={width:,}; V would take {4e-9 * width * dim:.1f} GB")
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(width, 1, generator=generator)
    problem = random_features_problem(Seeded(width, dim, seed), "relu", target, (dim,))
    candidates = problem.domain.start(samples, dim, generator)
    start = time.perf_counter()
    with console.status("objective"):
        point = fitted(problem, candidates)
    middle = time.perf_counter()
    with console.status("gradient"):
        slope = gradient(problem, point)
    end = time.perf_counter()
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    console.print(
        f"objective {point.value:.6f} in {middle - start:.0f} s, gradient of norm "
        f"{slope.norm():.3e} in {end - middle:.0f} s; peak memory of the process "
        f"{peak / 2**30:.2f} GiB"
    )
