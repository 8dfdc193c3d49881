"""Reading a run directory."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from exhume.errors import InputError

Array = NDArray[np.float64]

SCHEMA = 1
RESULT = """
    exhume versions device device_name seed method started seconds outcome sentence residual
    candidates samples_given steps products problem threat_model display claims limits
"""
PROBLEM = "name dim width outputs shape ratio domain"
SCORE = """
    samples candidates thresholds recovered exact error signed_error cosine psnr ssim
    recall precision flips ssim_window rows
"""
PUBLISHED = "samples top10_ssim good chance control"
ROW = "sample candidate error signed_error cosine psnr ssim"


@dataclass(frozen=True)
class Run:
    """What a run directory says, checked; arrays are read on demand.

    Attributes:
        path: The directory.
        result: `result.json`.
        config: The text of `config.yaml`.
        events: The lines of `events.jsonl` that are whole.
        scored: `score.json`, None where the truth was never given.
        card: `card.json` of the model that was attacked, empty where that is not at hand.
    """

    path: Path
    result: dict[str, Any]
    config: str
    events: list[dict[str, Any]]
    scored: dict[str, Any] | None
    card: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(map(int, self.result["problem"]["shape"]))

    def candidates(self) -> tuple[Array, Array]:
        """The candidates (n, d) and the size of each one's coefficients (n,)."""
        file = self.path / "candidates.safetensors"
        samples, coefficients = _arrays(file, ("samples", "coefficients"), "exhume audit")
        if len(samples) == 0 or coefficients.size % len(samples):
            return samples, np.zeros(len(samples))
        return samples, np.linalg.norm(coefficients.reshape(len(samples), -1), axis=1)

    def matched(self) -> tuple[Array, Array] | None:
        """Original and reconstructed pictures, (n, *shape) each, None where there are none."""
        file = self.path / "matched.safetensors"
        if self.scored is None or not file.exists():
            return None
        originals, found = _arrays(file, ("originals", "reconstructions"), "exhume score")
        if originals.shape != found.shape or len(originals) != len(self.scored["score"]["rows"]):
            raise InputError(f"{file} does not belong to score.json: run exhume score again")
        return originals, found

    def errors(self) -> list[float | None]:
        """The error of each true sample; empty where there is no score."""
        rows = self.scored["score"]["rows"] if self.scored else []
        return [row["error"] for row in rows]


def read(path: Path) -> Run:
    """Read and check a run directory.

    Raises:
        InputError: a file is missing or does not hold what it should.
    """
    result = _record(path / "result.json", RESULT, "exhume audit")
    if result.get("schema") != SCHEMA:
        raise InputError(
            f"{path / 'result.json'} has schema {result.get('schema')}, expected {SCHEMA}: "
            "run exhume audit again with this version"
        )
    _check_keys(result["problem"], PROBLEM, f"the problem in {path / 'result.json'}")
    config = _text(path / "config.yaml", "exhume audit")
    return Run(
        path=path,
        result=result,
        config=config,
        events=_events(path / "events.jsonl"),
        scored=_scored(path / "score.json"),
        card=_card(config),
    )


def _text(file: Path, command: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{file} does not exist: run {command} first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): run {command} again") from error


def _record(file: Path, keys: str, command: str) -> dict[str, Any]:
    text = _text(file, command)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}): run {command} again") from error
    return _check_keys(record, keys, str(file))


def _check_keys(record: object, keys: str, what: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise InputError(f"{what} should be a JSON object, found a {type(record).__name__}")
    if missing := [key for key in keys.split() if key not in record]:
        raise InputError(f"{what} has no {', '.join(missing)}: was it written by another version?")
    return record


def _scored(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    scored = _record(file, "score chance", "exhume score")
    score = _check_keys(scored["score"], SCORE, f"the score in {file}")
    _check_keys(scored["chance"], "sphere neighbour", f"the chance level in {file}")
    for row in score["rows"]:
        _check_keys(row, ROW, f"a row in {file}")
    if "published" in scored:
        figures = _check_keys(scored["published"], PUBLISHED, f"the published score in {file}")
        if figures["chance"] is not None:
            _check_keys(figures["chance"], "candidates top10_ssim good", f"its chance in {file}")
            _check_keys(figures["control"], "good ssim", f"its control in {file}")
            _check_keys(figures["control"]["ssim"], "p_value", f"its control in {file}")
    return scored


def _card(config: str) -> dict[str, Any]:
    """The card in the model's folder: the report is whole without it, so no fault of it counts."""
    try:
        folder = Path(yaml.safe_load(config)["model"])
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, LookupError, yaml.YAMLError):
        return {}
    return card if isinstance(card, dict) else {}


def _events(file: Path) -> list[dict[str, Any]]:
    """The whole lines: a crash may have cut one, and a run may not have come to the first."""
    events = []
    for line in file.read_bytes().splitlines() if file.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _arrays(file: Path, names: Iterable[str], command: str) -> list[Array]:
    if not file.exists():
        raise InputError(f"{file} does not exist: run {command} first")
    try:
        arrays = load_file(file)
        return [np.asarray(arrays[name], dtype=np.float64) for name in names]
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be used ({error!r}): run {command} again") from error
