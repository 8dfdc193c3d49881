"""Scoring a run folder against the truth: the only step that reads both."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from exhume import data
from exhume.auditing import evidence
from exhume.auditing.folder import CANDIDATES, MATCHED, RESULT, SCORE, RunFolder
from exhume.auditing.settings import Settings
from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.errors import InputError
from exhume.evaluate import (
    Score,
    chance,
    chance_level,
    floors,
    other_data,
    outside,
    principal_angles,
    published_score,
    residual_at_truth,
    score,
    span_residual,
    verdict,
)
from exhume.evaluate.published import is_published_for
from exhume.evaluate.scoring import pictures
from exhume.files import read_json, read_tensors, write_json, write_tensors
from exhume.models.folder import TRUTH
from exhume.models.opening import open_model
from exhume.search.subspace import estimate


def score_run(run: Path, truth: Path | None = None, model: str | None = None) -> dict[str, Any]:
    """Match the candidates of a run to the truth; write score.json and, for images, the pairs.

    A run folder may come from anyone, so no factory is called because the run names it: floors
    and angles of a model of one's own need the factory named again.

    Args:
        run: folder of an audit.
        truth: file with the training data; the one in the model's folder if None.
        model: the factory of the run's model, where it is not a model folder.

    Returns:
        What score.json holds.
    """
    if run.is_dir() and not (run / RESULT).exists():
        raise InputError(f"{run}: holds no finished audit; go on with exhume audit … --resume.")
    result = read_json(run / RESULT)
    samples = read_tensors(run / CANDIDATES, ("samples",))["samples"]
    settings = RunFolder(run).settings
    own = settings.model is None or settings.trained is not None
    if own and truth is None:
        raise InputError(f"{run}: is an audit of your own model; name its training data: --truth.")
    if model is not None and (settings.model is None or not own):
        raise InputError(
            f"model: {run} is an audit of a module in memory or of a model folder, which have no "
            "factory; leave it out."
        )
    truth = truth or Path(settings.model or "") / TRUTH
    known = data.read(truth)
    if known.dim != samples.shape[1]:
        raise InputError(
            f"{truth}: holds samples of dimension {known.dim}, but the candidates of {run} have "
            f"{samples.shape[1]}; is it the truth of another model?"
        )
    found = score(samples, known)
    record: dict[str, Any] = {
        "data": known.name,
        "score": found.to_dict(),
        "chance": chance(known, len(samples), seed=result["seed"]).to_dict(),
    }
    if not own or model is not None:
        settings = settings if model is None else replace(settings, model=model)
        record |= _against_the_model(settings, result, samples, known, found)
    if is_published_for(known.shape) and len(samples):
        record["published"] = _published(samples, known, result["seed"])
    if len(known.shape) > 1:
        pairs = pictures(known, samples, found.matched, found.flipped)
        names = ("originals", "reconstructions")
        write_tensors(run / MATCHED, {n: p.float() for n, p in zip(names, pairs, strict=True)})
    write_json(run / SCORE, record)
    return record


def _published(samples: torch.Tensor, known: data.Data, seed: int) -> dict[str, Any]:
    """The published figures, and what they are for images that the model never saw.

    Chance has as many held-out images as there are candidates, or all that there are; it is None
    where the images that the set was drawn from are not at hand.
    """
    record = published_score(samples, known).to_dict()
    try:
        others = data.held_out(known, len(samples), seed)
    except InputError:
        return {**record, "chance": None, "control": None}
    return {
        **record,
        "chance": chance_level(known, others).to_dict(),
        "control": other_data(samples, known, others).to_dict(),
    }


def _against_the_model(
    settings: Settings,
    result: dict[str, Any],
    samples: torch.Tensor,
    known: data.Data,
    found: Score,
) -> dict[str, Any]:
    """What the features of the model say of the truth."""
    problem = _problem(settings)
    floor = residual_at_truth(problem, known)
    moved = problem.drift > 0 and problem.premise is Premise.CHANGE
    by_point = floors(lambda point: _problem(settings, point), known) if moved else {}
    record: dict[str, Any] = {
        "span_residual": span_residual(problem.features, samples, known.inputs),
        "residual_at_truth": floor,
        "floors": by_point,
        "verdict": verdict(
            result["residual"],
            floor,
            round(found.recovered * found.samples),
            found.samples,
            evidence.ratio(problem, len(samples), result.get("rank")),
            by_point,
            problem.premise,
        ),
    }
    if problem.first_layer is not None:
        rank = result.get("rank") or settings.rank or "gap"
        record["subspace"] = _subspace(problem.first_layer, rank, known)
    return record


def _problem(settings: Settings, point: str | None = None) -> Problem:
    """The problem that a run was given, or with its features at another point."""
    where = point or settings.point
    source, block = settings.source(), settings.parameters
    return open_model(source, block, where, settings.premise, check=False).problem


def _subspace(layer: FirstLayer, rank: int | str, known: data.Data) -> dict[str, Any] | str:
    """How well the samples' span can be read off the first layer, or why it cannot."""
    try:
        subspace = estimate(layer, rank)
    except InputError as error:
        return str(error)
    return {
        "rank": subspace.rank,
        "largest_angle": float(principal_angles(subspace.basis, known).max()),
        "outside": float(outside(subspace.basis, known).max()),
        "kept": subspace.kept,
    }


__all__ = ["MATCHED", "SCORE", "score_run"]
