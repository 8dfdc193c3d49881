"""The command line and run folders in tests: making them, reading them strictly, comparing them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from exhume.auditing.folder import CANDIDATES, CONFIG, EVENTS, RESULT
from exhume.auditing.run import run
from exhume.auditing.settings import Settings
from exhume.cli import main

REPORT = "report.html"
FINISHED = {CONFIG, EVENTS, CANDIDATES, RESULT}
AUDITED = FINISHED | {REPORT}
PASSING = ("seconds", "started", "inputs")  # what differs between runs in different folders


def exhume_(*words: object) -> None:
    """Run a command; an audit without controls, which take three times its time."""
    quick = ("--no-controls",) if words[:1] == ("audit",) else ()
    main([str(word) for word in (*words[:1], *quick, *words[1:])])


def audit(settings: Settings, out: Path, **options: Any) -> dict[str, Any]:
    """The result of a run, as the command line makes it."""
    return run(settings, settings.open(), out, **options)[1]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below, with what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


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


def same(a: Path, b: Path) -> bool:
    """Whether two runs found the same, to the last bit, at the same cost."""
    one, other = load_file(a / CANDIDATES), load_file(b / CANDIDATES)
    left, right = ({k: v for k, v in result_of(r).items() if k not in PASSING} for r in (a, b))
    return left == right and all(torch.equal(one[name], other[name]) for name in one)


def make_workshop(folder: Path) -> Path:
    """Make models and finished runs.

    model and run: vectors. stored: the same with its first layer. images and pictures: digits.
    margin: a network that was trained to the margin.
    """
    sphere = ("victim", "sphere", "--dim", 20, "--samples", 4, "--ratio", 6, "--out")
    exhume_(*sphere, folder / "model")
    exhume_(*sphere, folder / "stored", "--store")
    exhume_("victim", "digits", "--samples", 6, "--ratio", 6, "--out", folder / "images")
    cpu = ("--device", "cpu", "--out")
    exhume_("audit", folder / "model", "--samples", 4, *cpu, folder / "run")
    exhume_("audit", folder / "images", "--samples", 6, *cpu, folder / "pictures")
    kkt = ("--architecture", "kkt_mlp", "--classes", "parity", "--samples", 4, "--widths", 30)
    exhume_("victim", "digits", *kkt, "--steps", 100, "--out", folder / "margin")
    return folder
