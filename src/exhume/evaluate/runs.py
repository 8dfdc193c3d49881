"""Scoring a run folder against the truth: the only step that reads both."""

from pathlib import Path
from typing import Any

import torch

from exhume import data
from exhume.audit import CANDIDATES, RESULT, read_config
from exhume.checkpoint import TRUTH, read_model
from exhume.errors import InputError
from exhume.evaluate import chance, residual_at_truth, score, span_residual
from exhume.files import read_json, read_tensors, write_json, write_tensors

SCORE, MATCHED = "score.json", "matched.safetensors"


def score_run(run: Path, truth: Path | None = None) -> dict[str, Any]:
    """Match the candidates of a run to the truth; write score.json and, for images, the pairs.

    Args:
        run: folder of an audit.
        truth: file with the training data; the one in the model's folder if None.

    Returns:
        What score.json holds.
    """
    if run.is_dir() and not (run / RESULT).exists():
        raise InputError(f"{run}: holds no finished audit; go on with exhume audit … --resume.")
    result = read_json(run / RESULT)
    samples = read_tensors(run / CANDIDATES, ("samples",))["samples"]
    folder = Path(read_config(run)["model"])
    truth = truth or folder / TRUTH
    known = data.read(truth)
    if known.dim != samples.shape[1]:
        raise InputError(
            f"{truth}: holds samples of dimension {known.dim}, but the candidates of {run} have "
            f"{samples.shape[1]}; is it the truth of another model?"
        )
    found = score(samples, known)
    model = read_model(folder)
    record = {
        "data": known.name,
        "score": found.to_dict(),
        "chance": chance(known, len(samples), seed=result["seed"]).to_dict(),
        "span_residual": span_residual(model.features, samples, known.inputs),
        "residual_at_truth": residual_at_truth(model, known),
    }
    if len(known.shape) > 1:
        pairs = _pairs(samples, known, found)
        write_tensors(run / MATCHED, pairs)
    write_json(run / SCORE, record)
    return record


def _pairs(samples: torch.Tensor, known: data.Data, found: Any) -> dict[str, torch.Tensor]:
    """Originals and sign-aligned reconstructions as pixels, (n, *shape) each."""
    originals = known.images().clamp(0, 1)
    pairs = torch.full_like(known.inputs, torch.nan)
    hit = found.matched >= 0
    sign = torch.where(found.flipped[hit], -1.0, 1.0)[:, None]
    pairs[hit] = samples[found.matched[hit].long()].to(pairs) * sign
    return {
        "originals": originals.float(),
        "reconstructions": known.images(pairs, known.transform.norms).clamp(0, 1).float(),
    }


__all__ = ["MATCHED", "SCORE", "score_run"]
