"""Run folders: what they hold, what is refused, and that the truth is not read."""

import os
import shutil
import stat
import sys
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

import runs
from commands import AUDITED, FINISHED, audit, events_of, names, result_of, same, strict
from exhume import DataCard, data, files
from exhume.auditing.folder import CANDIDATES, CONFIG, EVENTS, RunFolder
from exhume.auditing.run import Event
from exhume.auditing.settings import Settings
from exhume.errors import InputError
from exhume.evaluate.runs import score_run
from exhume.models.folder import CARD, TRAINED, TRUTH
from exhume.victims import random_features

Patch = pytest.MonkeyPatch


def test_a_run_folder_holds_all_that_a_report_needs(workshop: Path) -> None:
    run = workshop / "run"
    assert names(run) == AUDITED
    config = yaml.safe_load((run / CONFIG).read_text())
    assert config == vars(
        Settings(str(workshop / "model"), samples=4, device="cpu", controls=False)
    )
    found = load_file(run / CANDIDATES)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert shapes == {"samples": (4, 20), "coefficients": (4, 1)}
    assert all(t.dtype == torch.float64 and t.isfinite().all() for t in found.values())
    assert torch.allclose(found["samples"].norm(dim=1), torch.tensor(20.0).sqrt().double())

    result = result_of(run)
    assert result.keys() == runs.result_of(4, (20,)).keys()
    assert result["verdict"] == "reconstructed" and min(result["probabilities"]) > 0.95
    assert RunFolder(run).events[-1]["residual"] == result["residual"]  # where the chart ends
    assert (result["schema"], result["seed"], result["method"]) == (1, 0, "exhume")
    assert (result["outcome"], result["candidates"], result["samples_given"]) == ("converged", 4, 4)
    assert 0 <= result["residual"] < 1e-11
    assert result["steps"] > 0 and result["products"] > 0 and result["seconds"] > 0
    sizes = {"dim": 20, "width": 480, "outputs": 1, "shape": [20], "ratio": 6.0}
    words = {"name": "random features, relu", "domain": "sphere of radius √d"}
    assert result["problem"] == sizes | words
    assert result["threat_model"]["knows"][-1] == "the number of samples"
    assert result["claims"] and result["limits"]


def test_a_folder_is_private_and_whole(settings: Settings, workshop: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    shown: list[Event] = []
    before = os.umask(0)
    try:
        result = audit(settings, run, show=shown.append)
    finally:
        os.umask(before)
    assert same(run, workshop / "run"), "the same seed gives the same bits"
    assert files.finite(result) == result_of(run)
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in run.iterdir()} == {0o600}
    events = events_of(run)
    assert [vars(event) for event in shown] == events
    assert events[-1]["residual"] == result["residual"], "the chart ends where the card says"
    for word in ("seconds", "step"):
        assert sorted(events, key=itemgetter(word)) == events
    assert all(0 <= event["settled"] <= event["candidates"] for event in events)
    assert {event["phase"] for event in events} >= {"explore", "tidy"}


@pytest.mark.parametrize(("samples", "seed"), [(4, 1), (None, 0)])
def test_the_samples_are_found(
    samples: int | None, seed: int, settings: Settings, workshop: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = audit(replace(settings, samples=samples, seed=seed), run)
    assert (result["candidates"], result["samples_given"]) == (4, samples)
    assert not same(run, workshop / "run")
    score = score_run(run, workshop / "model" / TRUTH)["score"]
    assert score["recovered"] == score["exact"] == score["precision"] == 1
    assert strict((run / "score.json").read_text())["score"] == score


@pytest.mark.parametrize("limit", [{"time_limit": 0.0}, {"product_limit": 30}], ids=str)
def test_a_budget_ends_a_run(limit: dict[str, Any], settings: Settings, tmp_path: Path) -> None:
    hard = replace(settings, samples=70, **limit)  # more unknowns than equations
    result = audit(hard, tmp_path / "run")
    assert (result["outcome"], result["candidates"]) == ("budget", 70)
    assert (result["products"] >= 30) == ("product_limit" in limit)
    assert "time" in result["sentence"]
    assert "Nothing can be claimed" in " ".join(result["claims"])
    assert names(tmp_path / "run") == FINISHED


def test_a_run_without_numbers_is_still_json(tmp_path: Path) -> None:
    steep = "polynomial:0,0,0,0,0,0,0,0,0,1e36"  # finite in double precision, infinite in single
    random_features(data.sphere(20, 4), 480, steep).save(tmp_path / "model")
    audit(Settings(str(tmp_path / "model"), samples=4), tmp_path / "run")
    result = result_of(tmp_path / "run")
    assert (result["outcome"], result["residual"]) == ("diverged", None)
    assert events_of(tmp_path / "run")


def test_settings_survive_the_file_and_older_files_are_read(tmp_path: Path) -> None:
    settings = Settings(
        *("f.py:make", 3, 1, "tansley2026", 2.5, 900, "cpu", "last", "both", "gap"),
        *("i.pt", "t.pt", {"width": 3}, "head"),
        *(DataCard((3, 2, 2), (0, 1), (0.1, 0.2, 0.3), 1.0, "sqrt_d", 2), "change"),
    )
    RunFolder(tmp_path / "run").begin(settings)
    assert RunFolder(tmp_path / "run").settings == settings
    old = {"model": "m", "samples": 4, "seed": 0, "method": "exhume"}
    assert Settings.of({**old, "time_limit": None, "device": "cpu"}) == Settings("m", 4)
    with pytest.raises(InputError, match="'speed'"):
        Settings.of({**old, "speed": 3})


def test_relative_names_become_absolute(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings("model").located() == Settings(str(tmp_path / "model"))
    named = Settings("a/b.py:f", initial="zero-head", trained="t.pt").located()
    assert (named.model, named.initial) == (f"{tmp_path}/a/b.py:f", "zero-head")
    assert named.trained == str(tmp_path / "t.pt")
    assert Settings("package.b:f", trained="t.pt").located().model == "package.b:f"


@pytest.mark.parametrize("change", ["missing", "damaged", "another"])
def test_truth_is_not_used(change: str, settings: Settings, workshop: Path, tmp_path: Path) -> None:
    blind = shutil.copytree(workshop / "model", tmp_path / "model")
    (blind / TRUTH).unlink()
    if change == "damaged":
        (blind / TRUTH).write_bytes(b"\xff" * 100)
    elif change == "another":
        data.save(data.sphere(20, 4, seed=9), blind / TRUTH)
    audit(replace(settings, model=str(blind)), tmp_path / "run")
    assert same(tmp_path / "run", workshop / "run")


def test_the_truth_is_not_opened(settings: Settings, tmp_path: Path, monkeypatch: Patch) -> None:
    opened: list[str] = []
    spy = Mock(wraps=safe_open)
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            opened.append(Path(os.fsdecode(arguments[0])).name)

    monkeypatch.setattr(files, "safe_open", spy)
    sys.addaudithook(hook)  # cannot be taken away again, so it is switched off
    audit(settings, tmp_path / "run")
    watching = False
    opened += [Path(call.args[0]).name for call in spy.call_args_list]
    assert {CARD, TRAINED, EVENTS} <= set(opened), "the watch works"
    assert TRUTH not in opened


def test_an_interruption_after_renaming_stays_one(tmp_path: Path, monkeypatch: Patch) -> None:
    rename = os.replace

    def interrupted_rename(source: str, target: Path) -> None:
        rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr("exhume.files.os.replace", interrupted_rename)
    with pytest.raises(KeyboardInterrupt):
        files.write_private(tmp_path / "file", b"whole")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]
