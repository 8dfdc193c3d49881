"""Run folders in tests: making them, reading them strictly, and comparing them bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from exhume.auditing.folder import CANDIDATES, CONFIG, EVENTS, RESULT
from exhume.auditing.run import run as attack
from exhume.auditing.settings import Settings

FINISHED = {CONFIG, EVENTS, CANDIDATES, RESULT}


def audit(settings: Settings, out: Path, **options: Any) -> dict[str, Any]:
    """The result of a run, as the command line makes it."""
    return attack(settings, settings.open(), out, **options)[1]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict(text: str) -> Any:
    """JSON as other readers know it: without NaN and infinities."""
    return json.loads(text, parse_constant=refuse_constant)


def result_of(run: Path) -> dict[str, Any]:
    record = strict((run / RESULT).read_text())
    assert isinstance(record, dict)
    return record


def events_of(run: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in (run / EVENTS).read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(a: Path, b: Path) -> bool:
    """Whether two runs found the same, to the last bit, at the same cost."""
    one, other = load_file(a / CANDIDATES), load_file(b / CANDIDATES)
    left, right = (
        {k: v for k, v in result_of(r).items() if k not in ("seconds", "started")} for r in (a, b)
    )
    return left == right and all(torch.equal(one[name], other[name]) for name in one)
