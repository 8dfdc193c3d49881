"""Scores of whole run folders, of each kind of model."""

import json
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from exhume import data as datasets
from exhume.auditing import evidence
from exhume.auditing.folder import MATCHED, SCORE, RunFolder
from exhume.auditing.settings import Settings
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import recognised, residual_at_truth
from exhume.evaluate.runs import score_run
from exhume.files import read_tensors
from exhume.models.formulation import POINTS
from exhume.victims import Victim, random_features, two_layer
from problems import gaussian, on_sphere
from runs import images, make_run, result_of

Made = tuple[Victim, Path]
Patch = pytest.MonkeyPatch


def run_of(path: Path, model: Path | None, samples: Tensor, **entries: Any) -> Path:
    """A run on a model, with these entries in its result, and in its settings if they are some."""
    config = {k: entries[k] for k in ("parameters", "point", "rank") if k in entries}
    result = result_of(len(samples), (samples.shape[1],), **({"residual": 1e-9} | entries))
    return make_run(path, samples, {"model": model and str(model), **config}, result)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made = two_layer(datasets.sphere(16, 4), width=128, until=1e-6)
    folder = tmp_path_factory.mktemp("victim") / "model"
    made.save(folder)
    return made, folder


def test_a_network_has_floors_span_and_verdict(tmp_path: Path, model: Made) -> None:
    made, folder = model
    run = run_of(tmp_path / "run", folder, made.truth.inputs)
    record = score_run(run, trust=True)
    assert record == json.loads((run / SCORE).read_text())
    assert set(record["floors"]) == set(POINTS)
    assert record["floors"]["midpoint"] == record["residual_at_truth"]
    assert record["verdict"].startswith("All 4 samples recovered")
    assert record["subspace"]["rank"] == 4 and record["subspace"]["kept"] == 1
    assert record["subspace"]["largest_angle"] < 1e-4 and record["subspace"]["outside"] < 1e-6

    whole = run_of(tmp_path / "all", folder, on_sphere(4, 16), parameters="all", rank=3)
    record = score_run(whole, trust=True)
    floor = residual_at_truth(made.posed("all", "midpoint"), made.truth)
    assert record["residual_at_truth"] == pytest.approx(floor, rel=1e-4)
    assert record["subspace"]["rank"] == 3 and record["subspace"]["outside"] > 0.1
    assert record["subspace"]["largest_angle"] < 1e-4  # all three directions are in the span
    assert "None of 4 samples recovered. The attack fits below" in record["verdict"]


def test_unknowns_are_counted_in_the_subspace_of_the_run(tmp_path: Path) -> None:
    two_layer(datasets.sphere(16, 4), width=64, until=1e-4).save(tmp_path / "model")
    rests = {"equations": 60, "unknowns": 60, "slack": [0.1] * 4, "errors": [0.1] * 4}
    for told, words in (({"support": rests}, "1.00 equations"), ({"rank": 4}, "below the floor")):
        run = run_of(tmp_path / words, tmp_path / "model", on_sphere(4, 16), **told)
        assert words in score_run(run, trust=True)["verdict"]


def test_a_hidden_span_and_features_that_did_not_move(tmp_path: Path) -> None:
    made = two_layer(datasets.sphere(16, 4), width=128, until=1e-4, optimizer="adam")
    made.save(tmp_path / "adam")
    record = score_run(run_of(tmp_path / "one", tmp_path / "adam", made.truth.inputs), trust=True)
    assert "Adam" in record["subspace"] and set(record["floors"]) == set(POINTS)
    random_features(datasets.sphere(16, 4), 128).save(tmp_path / "random")
    run = run_of(tmp_path / "two", tmp_path / "random", on_sphere(4, 16), residual=1e-3)
    record = score_run(run, trust=True)
    assert record["residual_at_truth"] < 1e-12 and record["floors"] == {}
    assert "subspace" not in record and "although the trace is there" in record["verdict"]


def test_the_cause_of_a_miss_is_measured(tmp_path: Path) -> None:
    known = datasets.sphere(16, 4)
    made = random_features(known, 128)
    made.save(tmp_path / "model")
    shares = torch.tensor([[1.0], [1.0], [1.0], [0.03]], dtype=made.problem.target.dtype)
    target = made.problem.features.linearize(known.inputs).combine(shares)
    target += 1e-3 * target.std() * gaussian(128, 1)  # what training leaves, and hides it
    replace(made, problem=replace(made.problem, target=target)).save(tmp_path / "weak")
    lost = torch.cat([known.inputs[:3], on_sphere(1, 16, seed=9)])
    for model, samples, left, words in (
        ("model", 1.2 * known.inputs, 1e-14, r"Only their size is off.*cosine 1\.0000"),
        ("weak", lost, 1e-6, r"coefficients of at most .* of the largest, a trace too small"),
        ("model", lost, 1e-14, "explained in more than one way"),
    ):
        run = run_of(tmp_path / f"{model}{len(words)}", tmp_path / model, samples, residual=left)
        assert re.search(words, score_run(run, trust=True)["verdict"])


@pytest.mark.parametrize(
    ("config", "factory", "words"),
    [
        (None, None, "no finished audit"),
        ({"model": None}, None, "--truth"),
        ({"model": "package.module:factory", "trained": "a.pt"}, None, "--truth"),
        ({}, "a:b", "no factory"),
        ({}, None, "dimension 9, but the candidates .* have 16"),
    ],
)
def test_refusals(config: Any, factory: Any, words: str, tmp_path: Path, model: Made) -> None:
    run = run_of(tmp_path / "run", model[1], on_sphere(4, 16))
    if config is None:
        (run / "result.json").unlink()
    else:
        (run / "config.yaml").write_text(yaml.safe_dump({"model": str(model[1])} | config))
    datasets.save(datasets.sphere(9, 2), tmp_path / "nine")
    truth = tmp_path / "nine" if words.startswith("dimension") else None
    with pytest.raises(InputError, match=words):
        score_run(run, truth, factory)
    assert not (run / SCORE).exists()


def test_what_a_run_names_is_used_only_if_it_is_trusted(tmp_path: Path, model: Made) -> None:
    made, folder = model
    run = run_of(tmp_path / "run", folder, made.truth.inputs)
    with pytest.raises(InputError, match=f"names .*{folder}/truth.safetensors.*--trust"):
        score_run(run)
    assert not (run / SCORE).exists()
    shutil.copy(folder / "truth.safetensors", tmp_path / "truth")
    assert "floors" not in score_run(run, tmp_path / "truth")  # nothing of the folder was read
    assert "floors" in score_run(run, folder / "truth.safetensors")  # it was named by the user

    calls, config = tmp_path / "factory.py", {"model": "a:b", "trained": str(folder), "seed": 0}
    calls.write_text("def make(**arguments): raise RuntimeError(f'called with {arguments}')")
    config |= {"arguments": {"path": "/etc"}, "card": {"shape": [16]}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    asked = run, tmp_path / "truth", f"{calls}:make"
    with pytest.raises(InputError, match=r"arguments \{'path': '/etc'\}.*--trust"):
        score_run(*asked)


def test_a_run_of_ones_own_needs_no_word(tmp_path: Path, model: Made, monkeypatch: Patch) -> None:
    made, folder = model
    run = run_of(tmp_path / "run", None, made.truth.inputs)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    RunFolder(run).begin(Settings(model=str(folder)))
    assert RunFolder(run).made_here and "floors" in score_run(run)
    (noted,) = (tmp_path / "state/exhume/runs").iterdir()
    assert stat.S_IMODE(noted.stat().st_mode) == 0o600 and noted.stat().st_size == 0
    assert stat.S_IMODE(noted.parent.stat().st_mode) == 0o700
    shutil.copytree(run, tmp_path / "copied")
    assert not RunFolder(tmp_path / "copied").made_here
    config = run / "config.yaml"
    config.write_text(config.read_text() + "seed: 1")
    assert not RunFolder(run).made_here and not RunFolder(tmp_path).made_here
    with pytest.raises(InputError, match=r"not begun by you .* changed since: give --trust"):
        score_run(run)

    (tmp_path / "full").touch()  # no place to note it: the run is begun, and counts as another's
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "full"))
    RunFolder(run).begin(Settings(model=str(folder)))
    assert not RunFolder(run).made_here


def test_a_score_is_not_lost_to_another_truth(tmp_path: Path, model: Made) -> None:
    made, folder = model
    run, other = run_of(tmp_path / "run", folder, made.truth.inputs), tmp_path / "other"
    datasets.save(datasets.sphere(16, 4, seed=7), other)
    score_run(run, folder / "truth.safetensors")
    before = (run / SCORE).read_bytes()
    with pytest.raises(InputError, match=r"score\.json: was made with another truth.*--renew"):
        score_run(run, other)
    assert (run / SCORE).read_bytes() == before
    assert score_run(run, other, renew=True)["score"]["recovered"] == 0
    assert score_run(run, other)["score"]["recovered"] == 0  # the same once more
    (run / SCORE).write_text("{")
    assert score_run(run, folder / "truth.safetensors")["score"]["recovered"] == 1


def scored(tmp_path: Path, known: Data, samples: Tensor, **changes: Any) -> dict[str, Any]:
    """The score of a run of a model of one's own, against its truth in a file."""
    held_out = changes.pop("held_out", None)
    datasets.save(known, tmp_path / "truth")
    run = run_of(tmp_path / "run", None, samples, **changes)
    return score_run(run, tmp_path / "truth", held_out=held_out)


def test_a_score_of_images_counts_what_can_be_recognised(tmp_path: Path) -> None:
    known = datasets.load("digits", 20, centre="pixels")
    found = known.inputs + 0.05 * gaussian(20, 64)
    others = datasets.held_out(known, seed=0)
    seen = recognised(2 * found, known, others)
    record = scored(tmp_path, known, 2 * found, premise="margin")
    assert record["recognised"] == seen.to_dict()
    pairs = read_tensors(tmp_path / "run" / MATCHED)
    torch.testing.assert_close(pairs["originals"], known.images().float())
    torch.testing.assert_close(pairs["reconstructions"], seen.pictures.float())
    torch.testing.assert_close(pairs["held_out_originals"], others.images().float())
    assert evidence.recognition_rows(record["recognised"])[2] == (
        "cosine over 0.9", "20 of 20", f"{seen.control.cosine90} of 20",
    )  # fmt: skip
    assert "than held-out ones" in evidence.recognition(record["recognised"])
    (tmp_path / "other").mkdir()
    datasets.save(others, tmp_path / "held-out")
    again = scored(tmp_path / "other", known, 2 * found, held_out=tmp_path / "held-out")
    assert again["recognised"] == record["recognised"]


def test_a_set_that_happens_to_be_called_digits(tmp_path: Path) -> None:
    pixels = datasets.load("digits", 4, normalise=False).images()
    for name, rows in (("theirs", pixels), ("own", pixels.flip(2))):
        known = datasets.from_arrays(rows, torch.eye(4), name="digits")
        known = replace(known, shape=(1, 8, 8))  # with a channel, as a network takes them
        (tmp_path / name).mkdir()
        record = scored(tmp_path / name, known, known.inputs)
        assert record["score"]["exact"] == 1
        assert (record["recognised"]["control"] is None) == (name == "own")


def test_pairs_have_their_sign_set_right_and_none_is_nan(tmp_path: Path) -> None:
    known = images(4, 7, 6, rescale=True)
    record = scored(tmp_path, known, -known.inputs[[2, 0, 1]])
    assert record["recognised"]["control"] is None
    assert "Too few held-out images are at hand" in evidence.recognition(record["recognised"])
    assert evidence.recognition_rows(record["recognised"])[0][2] == "none at hand"
    pairs = read_tensors(tmp_path / "run" / MATCHED)
    torch.testing.assert_close(pairs["originals"], known.images().float())
    torch.testing.assert_close(pairs["reconstructions"][:3], pairs["originals"][:3])
    assert pairs["reconstructions"][3].isnan().all()
    (tmp_path / "vectors").mkdir()
    vectors = datasets.sphere(16, 4)
    assert "recognised" not in scored(tmp_path / "vectors", vectors, vectors.inputs)
    assert not (tmp_path / "vectors/run" / MATCHED).exists()
