"""What an audit writes into result.json, made up for tests of who reads it."""

import math
from typing import Any


def result_of(samples: int, shape: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """The result of a run that converged."""
    dim = math.prod(shape)
    return {
        "schema": 1,
        "exhume": "0.1.0",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "numpy": "2.4.0"},
        "device": "cpu",
        "device_name": "CPU, 2 cores",
        "seed": 0,
        "method": "exhume",
        "started": "2026-11-15T08:00:00Z",
        "seconds": 33.4,
        "outcome": "converged",
        "sentence": "The residual reached its floor.",
        "residual": 1.2e-11,
        "candidates": samples,
        "samples_given": samples,
        "steps": 35,
        "products": 220,
        "problem": {
            "name": "random features",
            "dim": dim,
            "width": 4 * dim * samples,
            "outputs": 1,
            "shape": list(shape),
            "ratio": 4.0,
            "domain": "sphere of radius √d",
        },
        "threat_model": {"knows": ["the last layer", "relu"], "assumes": ["a norm of √d"]},
        "display": {"shift": 0.5, "scale": 0.25} if len(shape) > 1 else None,
        "claims": ["The candidates explain the weights up to rounding."],
        "limits": ["One seed, one model: other seeds may end elsewhere."],
    } | changes
