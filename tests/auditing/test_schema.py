"""What result.json holds is what its schema says, and what its inputs were is there by hash."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

import exhume
from commands import exhume_, result_of
from exhume.auditing import forms
from exhume.auditing.folder import CONFIG, RESULT, SCORE
from exhume.checks import shaped
from exhume.errors import InputError
from exhume.models.folder import CARD, TRAINED, TRUTH
from runs import result_of as made_up

SCHEMA = forms.SCHEMA
check = jsonschema.Draft202012Validator(SCHEMA).validate


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small model of one's own, its weights before and after a step, and an audit of it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1)), torch.ones(1, 3)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    model(x).backward()
    after = {name: (w - 1e-5 * w.grad).detach() for name, w in model.named_parameters()}
    run = tmp_path_factory.mktemp("small") / "run"
    told = {"samples": 1, "device": "cpu", "product_limit": 1, "norm": "sqrt_d", "out": run}
    exhume.audit(model, before, after, (3,), **told)
    return {"run": run, "after": after, "before": before}


def test_results_are_what_the_schema_says(workshop: Path, small: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for result in (*(result_of(workshop / name) for name in ("run", "pictures")),
                   result_of(small["run"]), made_up(3, (4, 4))):  # fmt: skip
        check(result)
    for name, wrong in {"outcome": "good", "residual": -1.0, "inputs": [{}], "more": 1}.items():
        with pytest.raises(jsonschema.ValidationError):
            check(result | {name: wrong})


def test_what_must_be_there_to_be_read_is_what_the_schema_asks_for() -> None:
    good = made_up(3, (4, 4), advice=["so"], rank=None, display={"shift": [0.1], "scale": 2.0})
    shaped("good", good, forms.RESULT)
    for key in SCHEMA["required"]:
        with pytest.raises(InputError, match=f"has no {key}"):
            shaped("bad", {name: x for name, x in good.items() if name != key}, forms.RESULT)
    nested = good["problem"] | {"dim": 0}
    for name, bad in {"seed": -1, "advice": [1], "display": {}, "rank": "x", "method": None,
                      "residual": "x", "problem": nested, "claims": {}}.items():  # fmt: skip
        with pytest.raises(InputError, match=name):
            shaped("bad", good | {name: bad}, forms.RESULT)


def test_inputs_are_told_by_their_hash(workshop: Path, tmp_path: Path) -> None:
    model, run = workshop / "model", workshop / "run"
    told = {entry["role"]: entry for entry in result_of(run)["inputs"]}
    files = {"settings": run / CONFIG, "card": model / CARD, "trained": model / TRAINED}
    assert {role: (x["file"], x["sha256"]) for role, x in told.items()} == {
        role: (file.name, digest(file)) for role, file in files.items()
    }
    for name in (RESULT, "candidates.safetensors", CONFIG):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    exhume_("score", tmp_path, "--truth", model / TRUTH)
    entries = json.loads((tmp_path / SCORE).read_text())["inputs"]
    assert [entry["role"] for entry in entries] == ["result", "candidates", "truth"]
    assert entries[2]["sha256"] == digest(model / TRUTH)
    page = (tmp_path / "report.html").read_text()
    for entry in (*entries, *told.values()):
        assert page.count(entry["sha256"]) == 2  # to reproduce, and in the card


def test_weights_in_memory_have_a_hash_too(small: dict[str, Any]) -> None:
    entries = {entry["role"]: entry for entry in result_of(small["run"])["inputs"]}
    assert entries["trained"]["file"] is None is entries["initial"]["file"]
    assert entries["trained"]["sha256"] != entries["initial"]["sha256"]
