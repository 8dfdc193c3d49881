"""Run folders: the one place that writes and reads them; private, and safe to interrupt.

A run folder holds config.yaml (the settings), events.jsonl (one line a moment),
checkpoint.safetensors and the one before it (while it runs), candidates.safetensors and result.json
(at the end); and once it was compared with the truth, score.json and, for pictures,
matched.safetensors. While it is written to, a lock in it says by whom.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save as serialise
from torch import Tensor

from exhume import files
from exhume.auditing import forms
from exhume.auditing.settings import Settings
from exhume.checks import shaped
from exhume.errors import InputError
from exhume.methods.progress import Checkpoint, Progress, pack

CONFIG, EVENTS = "config.yaml", "events.jsonl"
# The last checkpoint, and the one before, which is good where the last one was damaged on the disk
CHECKPOINT, BEFORE = "checkpoint.safetensors", "checkpoint-before.safetensors"
CANDIDATES, RESULT = "candidates.safetensors", "result.json"
SCORE, MATCHED = "score.json", "matched.safetensors"

SCHEMA = 1  # The version of result.json that is written; another one cannot be read

JUDGING = "judging"  # The phase of the last event, after every search: it comes again on resuming
EVENT = {"seconds": float, "phase?": str}  # what a line of the events must hold

AUDIT, SCORING = "exhume audit", "exhume score"  # The commands that write the files


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run at `path`; what its files hold is checked when it is first asked for."""

    path: Path

    # Reading

    @cached_property
    def result(self) -> dict[str, Any]:
        """What result.json holds."""
        file = self.path / RESULT
        result = _record(file, {}, AUDIT)
        if (schema := result.get("schema", SCHEMA)) != SCHEMA:
            raise InputError(f"{file} has schema {schema}, expected {SCHEMA}: run {AUDIT} again")
        found: dict[str, Any] = shaped(str(file), result, forms.RESULT)
        return found

    @cached_property
    def config(self) -> str:
        """The text of config.yaml."""
        with _made_by(AUDIT, self.path / CONFIG) as file:
            return files.read_text(file)

    @cached_property
    def settings(self) -> Settings:
        """What the audit was asked for."""
        with _made_by(AUDIT, self.path / CONFIG) as file:
            config = shaped(str(file), files.read_yaml(file), {"model": str | None})
            return Settings.of(config, str(file))

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The whole lines of events.jsonl; a crash may have cut the last one."""
        file, events = self.path / EVENTS, []
        for line in files.regular(file).read_bytes().splitlines() if file.exists() else []:
            with suppress(ValueError, RecursionError):  # InputError too
                events.append(shaped(EVENTS, json.loads(line), EVENT))
        return events

    @cached_property
    def scored(self) -> dict[str, Any] | None:
        """What score.json holds; None where the truth was never given."""
        file = self.path / SCORE
        if not file.exists():
            return None
        return _record(file, forms.SCORE, SCORING)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(map(int, self.result["problem"]["shape"]))

    @cached_property
    def samples(self) -> Tensor:
        """The candidates, (n, d)."""
        (samples,) = self._tensors(CANDIDATES, ("samples",), AUDIT)
        if samples.ndim != 2 or samples.shape[1] != math.prod(self.shape):
            found = f"samples of shape {tuple(samples.shape)}, where {RESULT} says {self.shape}"
            raise InputError(f"{self.path / CANDIDATES}: holds {found}; run {AUDIT} again.")
        return samples

    @cached_property
    def sizes(self) -> Tensor:
        """The norm of each candidate's coefficients, (n,)."""
        count = len(self.samples)
        (coefficients,) = self._tensors(CANDIDATES, ("coefficients",), AUDIT)
        if count == 0 or coefficients.numel() % count:
            return coefficients.new_zeros(count)
        sizes: Tensor = coefficients.reshape(count, -1).norm(dim=1)
        return sizes

    def matched(self, control: bool = False) -> tuple[Tensor, Tensor] | None:
        """Return original and recovered pictures, (n, *shape) each; None where there are none.

        Those of the control are there where `evidence.by_recognition` says so of the pairs.
        """
        file, scored = self.path / MATCHED, self.scored
        if scored is None or not file.exists():
            return None
        side, rows = "", scored["score"]["rows"]
        if control:
            side, rows = "held_out_", scored["recognised"]["control"]["ssims"]
        names = f"{side}originals", f"{side}reconstructions"
        originals, found = self._tensors(MATCHED, names, SCORING)
        if originals.shape != found.shape or len(originals) != len(rows):
            raise InputError(f"{file} does not belong to {SCORE}: run {SCORING} again")
        return originals, found

    @property
    def made_here(self) -> bool:
        """Whether this user began the run, in this very place and with the settings it has now."""
        with suppress(InputError, OSError, RuntimeError):
            return self._register.is_file()
        return False

    @property
    def _register(self) -> Path:
        """The file, in the user's own state, that says so: its name hashes place and settings.

        So neither a folder that was received or copied has it, nor one whose settings were changed.
        """
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        if not state.is_absolute():
            state = Path.home() / ".local" / "state"
        run = os.fsencode(self.path.resolve()) + files.digest_of(self.path / CONFIG).encode()
        return state / "exhume" / "runs" / hashlib.sha256(run).hexdigest()

    def _tensors(self, name: str, names: tuple[str, ...], command: str) -> list[Tensor]:
        with _made_by(command, self.path / name) as file:
            tensors = files.read_tensors(file, names)
        return [tensors[word].double() for word in names]

    # Writing

    @contextmanager
    def held(self, resume: bool) -> Iterator[None]:
        """Be the only one that writes here, where a run is to begin or to be resumed."""
        self.check(resume)
        created = not self.path.exists()
        files.private_folder(self.path)
        try:
            with files.held(self.path):
                self.check(resume)  # once more: another may have been here until now
                yield
        finally:
            if created and not any(self.path.iterdir()):
                self.path.rmdir()

    def check(self, resume: bool) -> None:
        """Refuse a folder in which no run can begin, or none be resumed."""
        if resume and not (self.path / CONFIG).is_file():
            raise InputError(f"{self.path}: holds no run to resume; start one without --resume.")
        if resume and (self.path / RESULT).exists():
            raise InputError(f"{self.path}: this run is complete; see {self.path / RESULT}.")
        there = {x.name for x in self.path.iterdir()} if self.path.is_dir() else {self.path.name}
        if not resume and self.path.exists() and there - {files.LOCK}:
            other = "choose another --out, or go on by --resume"
            raise InputError(f"{self.path}: is there already and not empty; {other}.")

    def begin(self, settings: Settings) -> None:
        """Write the settings, and no events yet."""
        files.write_private(self.path / CONFIG, config_of(settings))
        files.write_private(self.path / EVENTS, b"")
        self._remember()

    def _remember(self) -> None:
        """Note that this user named the settings of the run; without a place for it, do not."""
        with suppress(InputError, OSError, RuntimeError):
            files.private_folder(self._register.parent)
            self._register.touch(0o600)

    def discard(self) -> None:
        """Remove a run that was refused before its first step."""
        for name in (CONFIG, EVENTS):
            (self.path / name).unlink(missing_ok=True)

    def note(self, event: Mapping[str, Any]) -> None:
        """Add a line to the events."""
        file = self.path / EVENTS
        with files.writing(file), file.open("a", encoding="utf-8") as events:
            events.write(json.dumps(files.finite(event), allow_nan=False) + "\n")

    def save(self, progress: Progress, seconds: float) -> None:
        """Write a checkpoint, with its hash; the last one becomes the one before."""
        packed, file = pack(progress, seconds), self.path / CHECKPOINT
        record = json.dumps({"progress": packed.record, "seconds": seconds})
        tensors = files.dense(packed.tensors)
        if file.exists():
            with files.writing(file):
                os.replace(file, self.path / BEFORE)
        told = {"checkpoint": record, "sha256": _digest(tensors, record)}
        files.write_tensors(file, tensors, told)

    def resume(self, settings: Settings) -> Checkpoint | None:
        """Return the checkpoint of an unfinished run with these settings; None if it has none yet.

        Events after it are forgotten, as is a last line that was cut short.
        """
        config = self.path / CONFIG
        before, now = vars(self.settings), vars(settings)
        changed = [name for name in now if name != "controls" and before[name] != now[name]]
        if changed:
            names = ", ".join(changed)
            raise InputError(f"{config}: was started with other settings ({names}); use the same.")
        self._remember()
        begun = self._checkpoint()
        for leftover in self.path.glob(".*.????????"):  # from a kill while a file was written
            leftover.unlink()
        last = round(begun.seconds, 3) if begun else 0.0
        kept = (e for e in self.events if e["seconds"] <= last and e.get("phase") != JUDGING)
        lines = "".join(json.dumps(event) + "\n" for event in kept)
        files.write_private(self.path / EVENTS, lines.encode())
        return begun

    def _checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint that is whole; a damaged one after it is removed."""
        there = [file for file in (self.path / CHECKPOINT, self.path / BEFORE) if file.exists()]
        if not there:
            return None
        try:
            return _read_checkpoint(there[0])
        except InputError as error:
            try:
                found = _read_checkpoint(there[-1])
            except InputError:
                raise error from None
            there[0].unlink()  # else it would take the place of the good one
            return found

    def keep(self, found: Mapping[str, Tensor]) -> None:
        """Write what was found: the samples and coefficients."""
        files.write_tensors(self.path / CANDIDATES, found)

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result; there is nothing to resume then."""
        files.write_json(self.path / RESULT, result)
        for name in (CHECKPOINT, BEFORE):
            (self.path / name).unlink(missing_ok=True)

    def write_score(self, record: dict[str, Any], pairs: Mapping[str, Tensor]) -> None:
        """Write the score, and for pictures the originals beside what was recovered of them."""
        with files.held(self.path):
            if pairs:
                files.write_tensors(self.path / MATCHED, pairs)
            files.write_json(self.path / SCORE, record)


def _digest(tensors: Mapping[str, Tensor], record: str) -> str:
    """Return the SHA-256 of a checkpoint: of the file that it would be without it."""
    return hashlib.sha256(serialise(dict(tensors), {"checkpoint": record})).hexdigest()


def _read_checkpoint(file: Path) -> Checkpoint:
    tensors, metadata = files.read_tensors(file), files.read_metadata(file)
    try:
        text = metadata["checkpoint"]
        if metadata["sha256"] != _digest(tensors, text):
            raise ValueError("its hash is another")
        record = json.loads(text)
        return Checkpoint(tensors, record["progress"], float(record["seconds"]), str(file))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: is damaged ({error}); start again in another folder.") from error


def config_of(settings: Settings) -> bytes:
    """Return what config.yaml holds."""
    return yaml.safe_dump(asdict(settings), sort_keys=False).encode()


def read_run(path: Path) -> RunFolder:
    """Return the folder of a finished run, after checking its result, settings and score."""
    run = RunFolder(path)
    _ = run.result, run.config, run.scored
    return run


@contextmanager
def _made_by(command: str, file: Path) -> Iterator[Path]:
    """Say which command writes a file, in whatever is wrong with it."""
    if not file.exists():
        raise InputError(f"{file} does not exist: run {command} first")
    try:
        yield file
    except InputError as error:
        raise InputError(f"{error} Run {command} again.") from error


def _record(file: Path, form: dict[str, Any], command: str) -> dict[str, Any]:
    with _made_by(command, file):
        found: dict[str, Any] = shaped(str(file), files.read_json(file), form)
    return found
