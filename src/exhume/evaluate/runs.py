"""Scoring a run folder against the truth: the only step that reads both."""

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exhume import data
from exhume.auditing.evidence import by_recognition, ratio_of
from exhume.auditing.folder import CANDIDATES, CONFIG, RESULT, SCORE, RunFolder
from exhume.auditing.hindsight import Missed, Posed, verdict
from exhume.auditing.settings import Settings
from exhume.equation.objective import fitted
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.evaluate import feature_space
from exhume.evaluate.controls import chance
from exhume.evaluate.recognition import Recognised, are_images, enough, recognised
from exhume.evaluate.scoring import RECOVERED, Score, paired, pictures, score
from exhume.files import digest_of
from exhume.models.folder import TRUTH
from exhume.models.opening import open_model
from exhume.models.state import inputs
from exhume.search.subspace import estimate


def score_run(
    run: Path,
    truth: Path | None = None,
    model: str | None = None,
    held_out: Path | None = None,
    trust: bool = False,
    renew: bool = False,
) -> dict[str, Any]:
    """Match the candidates of a run to the truth; write score.json, and return what it holds.

    For images and tables, the pairs are written too. A run folder may come from anyone: what its
    config names (a model's folder with its truth, weights, arguments of a factory) is used where
    this user began the run here, where `trust` says so, or where the truth is given in that very
    folder; and no factory is called because a run names it, only as `model`. A score made with
    another truth is kept, unless `renew` gives it up. Images for the control are drawn from the
    source of the truth, if that is a set of `exhume.data.load`, unless given.
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
    place = None if own else Path(settings.model or "").resolve()
    beside = truth is not None and truth.resolve().parent == place
    trust = trust or beside or folder.made_here
    if not trust and (truth is None or model is not None):
        made = "The run was not begun by you in this place, or its settings were changed since"
        advice = "give --trust if these are yours and meant, or --truth alone for another file"
        raise InputError(f"{run / CONFIG}: names {named(settings)}. {made}: {advice}.")
    truth = truth or Path(settings.model or "") / TRUTH
    known = data.read(truth)
    if known.dim != samples.shape[1]:
        theirs = f"but the candidates of {run} have {samples.shape[1]}; is it of another model?"
        raise InputError(f"{truth}: holds samples of dimension {known.dim}, {theirs}")
    if not renew:
        _check_same_truth(folder, truth)
    found, seen = score(samples, known), None
    if are_images(known.shape):
        seen = _seen(samples, known, held_out, result["seed"])
        found = found.seen(seen.clear)
    others = {"truth": truth, "held out": held_out}
    files = {"result": run / RESULT, "candidates": run / CANDIDATES} | others
    record: dict[str, Any] = {
        "data": known.name,
        "inputs": [asdict(entry) for entry in inputs(files)],
        "score": found.to_dict(),
        "chance": asdict(chance(known, len(samples), seed=result["seed"])),
    }
    if trust and (not own or model is not None):
        settings = settings if model is None else replace(settings, model=model)
        record |= _against_the_model(settings, folder, known, found)
    if seen is not None:
        record["recognised"] = seen.to_dict()
    shown = seen if by_recognition(result, record) else None
    folder.write_score(record, _pairs(folder, known, found, shown))
    return record


def _pairs(
    run: RunFolder, known: data.Data, found: Score, seen: Recognised | None
) -> dict[str, Tensor]:
    """Return what is shown beside its original: images in [0, 1], or rows as the model has them."""
    card, shown = run.settings.card, {}
    if card is not None and card.table is not None:
        shown[""] = known.inputs, paired(run.samples, found.matched, found.flipped)
    elif seen is not None:  # every image beside its nearest candidate, and those of the control
        sides = {"": seen, "held_out_": seen.control}
        shown = {side: (x.originals, x.pictures) for side, x in sides.items() if x is not None}
    elif len(known.shape) > 1:
        shown[""] = pictures(known, run.samples, found.matched, found.flipped)
    pairs = {f"{x}originals": pair[0].float() for x, pair in shown.items()}
    return pairs | {f"{x}reconstructions": pair[1].float() for x, pair in shown.items()}


def named(settings: Settings) -> str:
    """Say what the config of a run would have us read, or hand to a factory."""
    said = {"model": settings.model, "trained": settings.trained, "initial": settings.initial}
    if settings.model is not None and settings.trained is None:
        said["truth"] = str(Path(settings.model) / TRUTH)
    words = [f"{role} {file}" for role, file in said.items() if file is not None]
    return "; ".join([*words, *([f"arguments {settings.arguments}"] if settings.arguments else [])])


def _check_same_truth(folder: RunFolder, truth: Path) -> None:
    """Refuse to write over a score that was made with another truth."""
    scored = None
    with suppress(InputError):  # a damaged score is no loss
        scored = folder.scored
    if scored is None:
        return
    before = {entry["sha256"] for entry in scored["inputs"] if entry["role"] == "truth"}
    if digest_of(truth) not in before:
        made = f"was made with another truth than {truth}"
        advice = "Give --renew if this one is right: that score is gone then"
        raise InputError(f"{folder.path / SCORE}: {made}. {advice}.")


def _seen(samples: Tensor, known: data.Data, file: Path | None, seed: int) -> Recognised:
    """Compare with images that the model never saw, if any are at hand, too."""
    others = None
    if file is None:
        with suppress(InputError):
            others = data.held_out(known, enough(known), seed)
        return recognised(samples, known, others)
    try:
        return recognised(samples, known, data.read(file))
    except InputError as error:
        raise InputError(f"{file}: {str(error).removeprefix(f'{file}: ')}") from error


def _missed(problem: Problem, known: data.Data, score: Score) -> Missed | None:
    """Return what tells why samples were missed; None where none was."""
    missed = score.errors >= RECOVERED
    if not missed.any():
        return None
    share = None
    if problem.premise is not Premise.REPLAY:  # where labels stand in the place of coefficients
        sizes = fitted(problem, known.inputs).shares.norm(dim=1).cpu()
        share = float(sizes[missed].max() / sizes.max().clamp_min(torch.finfo(sizes.dtype).tiny))
    recognisable = int((score.likenesses & missed).sum())
    return Missed(float(score.cosines[missed].min()), share, recognisable)


def _against_the_model(
    settings: Settings, run: RunFolder, known: data.Data, score: Score
) -> dict[str, Any]:
    """Return what the features of the model say of the truth."""

    def posed(point: str | None) -> Problem:
        source, block = settings.source(), settings.parameters
        premise, target = settings.premise, settings.target
        return open_model(source, block, point, premise, check=False, target=target).problem

    problem, result, samples = posed(settings.point), run.result, run.samples
    premise, floor = problem.premise, feature_space.residual_at_truth(problem, known)
    moved = problem.drift > 0 and premise is Premise.CHANGE
    by_point = feature_space.floors(posed, known) if moved else {}
    features = getattr(problem.features, "lazy", problem.features)  # a training run has no rows
    found, enough = int((score.errors < RECOVERED).sum()), ratio_of(result)
    asked = Posed(premise, result["target"], by_point)
    told = result["residual"], floor, found, score.samples, enough, asked
    record: dict[str, Any] = {
        "span_residual": feature_space.span_residual(features, samples, known.inputs),
        "residual_at_truth": floor,
        "floors": by_point,
        "verdict": verdict(*told, _missed(problem, known, score)),
    }
    if problem.first_layer is None:
        return record
    try:
        span = estimate(problem.first_layer, result["rank"] or settings.rank or "gap")
    except InputError as error:  # how the model was trained hides the span
        near = "the weights lie near the samples' span, as at the end of training, and not in it"
        return record | {"subspace": near if premise.weights_alone else str(error)}
    record["subspace"] = {
        "rank": span.rank,
        "largest_angle": float(feature_space.principal_angles(span.basis, known).max()),
        "outside": float(feature_space.outside(span.basis, known).max()),
        "kept": span.kept,
    }
    return record
