"""Scoring a run folder against the truth: the only step that reads both."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from exhume import data
from exhume.auditing.evidence import counts, ratio, verdict
from exhume.auditing.folder import MATCHED, RESULT, SCORE, RunFolder
from exhume.auditing.settings import Settings
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.evaluate import feature_space
from exhume.evaluate.controls import chance, other_data
from exhume.evaluate.published import chance_level, is_published_for, published_score
from exhume.evaluate.scoring import pictures, score
from exhume.models.folder import TRUTH
from exhume.models.opening import open_model
from exhume.search.subspace import estimate

__all__ = ["MATCHED", "SCORE", "score_run"]


def score_run(run: Path, truth: Path | None = None, model: str | None = None) -> dict[str, Any]:
    """Match the candidates of a run to the truth; write score.json, and return what it holds.

    For images, the pairs are written too. A run folder may come from anyone, so no factory is
    called because the run names it: floors and angles of a model of one's own need it named again,
    as `model`. The truth is the file in the model's folder unless given.
    """
    if run.is_dir() and not (run / RESULT).exists():
        raise InputError(f"{run}: holds no finished audit; go on with exhume audit … --resume.")
    folder = RunFolder(run)
    result, settings, samples = folder.result, folder.settings, folder.samples
    own = settings.model is None or settings.trained is not None
    if own and truth is None:
        raise InputError(f"{run}: is an audit of your own model; name its training data: --truth.")
    if model is not None and (settings.model is None or not own):
        raise InputError(f"model: {run} is an audit of a model that has no factory; leave it out.")
    truth = truth or Path(settings.model or "") / TRUTH
    known = data.read(truth)
    if known.dim != samples.shape[1]:
        theirs = f"but the candidates of {run} have {samples.shape[1]}; is it of another model?"
        raise InputError(f"{truth}: holds samples of dimension {known.dim}, {theirs}")
    found = score(samples, known)
    record: dict[str, Any] = {
        "data": known.name,
        "score": found.to_dict(),
        "chance": chance(known, len(samples), seed=result["seed"]).to_dict(),
    }
    if not own or model is not None:
        settings = settings if model is None else replace(settings, model=model)
        record |= _against_the_model(settings, folder, known, record["score"])
    if is_published_for(known.shape) and len(samples):
        record["published"] = _published(samples, known, result["seed"])
    pairs = None
    if len(known.shape) > 1:
        originals, candidates = pictures(known, samples, found.matched, found.flipped)
        pairs = {"originals": originals.float(), "reconstructions": candidates.float()}
    folder.write_score(record, pairs)
    return record


def _published(samples: Tensor, known: data.Data, seed: int) -> dict[str, Any]:
    """Return the published figures, and those of held-out images, None where none are at hand."""
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
    settings: Settings, run: RunFolder, known: data.Data, score: dict[str, Any]
) -> dict[str, Any]:
    """Return what the features of the model say of the truth."""

    def posed(point: str | None) -> Problem:
        source, block = settings.source(), settings.parameters
        return open_model(source, block, point, settings.premise, check=False).problem

    problem, result, samples = posed(settings.point), run.result, run.samples
    premise, floor = problem.premise, feature_space.residual_at_truth(problem, known)
    moved = problem.drift > 0 and premise is Premise.CHANGE
    by_point = feature_space.floors(posed, known) if moved else {}
    features = getattr(problem.features, "lazy", problem.features)  # a training run has no rows
    recovered, _, total = counts(score)
    enough = ratio(problem, len(samples), result.get("rank"))
    record: dict[str, Any] = {
        "span_residual": feature_space.span_residual(features, samples, known.inputs),
        "residual_at_truth": floor,
        "floors": by_point,
        "verdict": verdict(result["residual"], floor, recovered, total, enough, by_point, premise),
    }
    if problem.first_layer is None:
        return record
    try:
        span = estimate(problem.first_layer, result.get("rank") or settings.rank or "gap")
    except InputError as error:  # how the model was trained hides the span
        return record | {"subspace": str(error)}
    record["subspace"] = {
        "rank": span.rank,
        "largest_angle": float(feature_space.principal_angles(span.basis, known).max()),
        "outside": float(feature_space.outside(span.basis, known).max()),
        "kept": span.kept,
    }
    return record
