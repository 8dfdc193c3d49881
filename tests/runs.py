"""Images and runs, made up for the tests of scores, evidence and reports."""

import math
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from exhume.data import Data, Transform
from exhume.files import write_json, write_tensors


def pictures(count: int, *shape: int, seed: int = 0) -> Tensor:
    """Uniform pixels, (count, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *shape, generator=generator, dtype=torch.float64)


def images(
    count: int, *shape: int, rescale: bool = False, centre: bool = False, seed: int = 0
) -> Data:
    """Random pictures as data: shifted and scaled, and on the sphere; or less their mean."""
    pixels = pictures(count, math.prod(shape), seed=seed)
    mean = pixels.mean(0) if centre else None
    transform = Transform(0.5, 0.25) if mean is None else Transform(mean.mean().item(), mean=mean)
    norms = transform.apply(pixels).norm(dim=1) if rescale else None
    whole = Transform(transform.shift, transform.scale, norms, mean)
    targets = torch.ones(count, 1, dtype=torch.float64)
    return Data(transform.apply(pixels, norms), targets, shape, "random", whole)


def make_run(path: Path, samples: Tensor, config: dict[str, Any], result: dict[str, Any]) -> Path:
    """A run directory as an audit leaves it."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    write_json(path / "result.json", result)
    sizes = torch.randn(len(samples), 1, generator=torch.Generator().manual_seed(0))
    found = {"samples": samples.double(), "coefficients": sizes.double()}
    write_tensors(path / "candidates.safetensors", found)
    return path


def result_of(samples: int, shape: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """The result of a run that converged."""
    dim = math.prod(shape)
    problem = {"name": "random features", "domain": "sphere of radius √d", "shape": list(shape)}
    problem |= {"dim": dim, "width": 4 * dim * samples, "outputs": 1, "ratio": 4.0}
    rests = {"equations": 4 * dim * samples, "unknowns": dim * samples}
    return {
        **{"schema": 1, "exhume": "0.1.0", "seed": 0, "method": "exhume", "seconds": 33.4},
        "versions": {"python": "3.11.9", "torch": "2.13.0", "numpy": "2.4.0"},
        **{"device": "cpu", "device_name": "CPU, 2 cores", "started": "2026-11-15T08:00:00Z"},
        **{"outcome": "converged", "sentence": "The residual reached its floor."},
        **{"residual": 1.2e-11, "candidates": samples, "samples_given": samples},
        **{"steps": 35, "products": 220, "problem": problem, "model": None, "recipe": None},
        **{"premise": "change", "target": None, "parameters": "last", "point": None, "rank": None},
        "prepared": {"changes": [], "warnings": [], "derivative_error": None},
        "threat_model": {"knows": ["the last layer", "relu"], "assumes": ["a norm of √d"]},
        "display": {"shift": 0.5, "scale": 0.25} if len(shape) > 1 else None,
        "claims": ["The candidates explain the weights up to rounding."],
        "limits": ["One seed, one model: other seeds may end elsewhere."],
        **{"verdict": "cannot tell", "reason": "So it is.", "advice": []},
        "support": {**rests, "slack": [0.0] * samples, "errors": [0.0] * samples},
        **{
            "probabilities": [0.5] * samples,
            "again": [None] * samples,
            "controls": [],
            "inputs": [],
        },
    } | changes
