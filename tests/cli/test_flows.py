"""Whole flows through the command line, one for each premise: victim, audit, score, report."""

import io
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from commands import AUDITED, REPORT, exhume_, make_workshop, names
from exhume import data
from exhume.auditing.folder import CONFIG, MATCHED, RESULT, SCORE
from exhume.cli.victim import _training
from exhume.models.folder import CARD, INITIAL, TRAINED, TRUTH


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and finished runs; not to be changed."""
    return make_workshop(tmp_path_factory.getbasetemp())


@pytest.fixture
def bench(workshop: Path, tmp_path: Path) -> Path:
    """A copy of the workshop, to be damaged."""
    shutil.copytree(workshop, tmp_path / "bench")
    return tmp_path / "bench"


def result_of(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / RESULT).read_text())
    return record


def test_vectors_from_victim_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, run = Path("my model"), Path("RUN")
    exhume_("victim", "sphere", "--dim", 20, "--samples", 4, "--ratio", 6, "--out", model)
    said = capsys.readouterr().out
    assert "480 features" in said and "d = 20" in said and "ratio 6.00" in said
    assert names(model) == {CARD, TRAINED, TRUTH}

    (line,) = re.findall(r"^next: exhume (.+)$", said, re.MULTILINE)  # it can be pasted
    exhume_(*shlex.split(line))
    said = capsys.readouterr().out
    assert "converged" in said and "4 candidates" in said and str(run / REPORT) in said
    assert "recovered" not in said
    assert names(run) == AUDITED
    assert "explain the weights" in (run / REPORT).read_text()

    exhume_("score", run, "--truth", model / TRUTH)
    said = capsys.readouterr().out
    assert re.search(r"recovered\s+│\s+1\s", said) and "residual at the truth" in said
    assert names(run) == AUDITED | {SCORE}
    assert "4 of 4 training samples recovered, 4 exactly." in (run / REPORT).read_text()

    before = (run / REPORT).read_bytes()
    exhume_("report", run)
    assert str(run / REPORT) in capsys.readouterr().out
    assert (run / REPORT).read_bytes() == before


def test_images_from_victim_to_report(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = bench / "pictures"
    assert names(run) == AUDITED
    exhume_("score", run)  # the truth is in the folder of the model, which is in the config
    said = capsys.readouterr().out
    assert "psnr" in said and "ssim" in said
    assert names(run) == AUDITED | {SCORE, MATCHED}
    pairs = load_file(run / MATCHED)
    assert pairs["originals"].shape == pairs["reconstructions"].shape == (10, 8, 8)
    assert torch.allclose(pairs["originals"], pairs["reconstructions"], atol=1e-3)
    known = data.load("digits", 10)
    assert torch.allclose(pairs["originals"], known.images().float(), atol=1e-6)
    exhume_("report", run, "--redact")
    page, redacted = (run / REPORT).read_text(), (run / "report-redacted.html").read_text()
    for text in (page, redacted):
        assert "10 of 10 training samples recovered, 10 exactly." in text
    assert "data:image/png" in page and "data:image/png" not in redacted


def test_a_demo_can_be_run_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(name: str, samples: int, *_: object, **__: object) -> data.Data:
        assert name == "faces"
        return original("digits", samples, classes="parity")

    original = data.load
    monkeypatch.setattr(data, "load", small)
    for _ in range(2):
        exhume_("demo", "--out", tmp_path / "demo")
        said = capsys.readouterr().out
        assert "10 of 10 faces exact." in said and "faces.png" in said
    assert names(tmp_path / "demo") == {"model", "run", "faces.png", ".demo"}
    assert names(tmp_path / "demo" / "run") == AUDITED | {SCORE, MATCHED}


def test_samples_may_be_left_out_and_names_be_relative(
    bench: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench)
    exhume_("audit", "model", "--out", "new")
    result = result_of(bench / "new")
    assert (result["samples_given"], result["candidates"]) == (None, 4)
    monkeypatch.chdir(bench.parent)
    exhume_("score", "bench/new")
    assert "recovered" in capsys.readouterr().out


# Networks: the premise change


QUICK = ("--samples", 3, "--classes", "parity", "--steps", 50)
SIZES: dict[str, list[object]] = {
    "two_layer": ["--ratio", 2, "--bias"],
    "mlp": ["--widths", "30,20", "--activation", "tanh", "--loss", "logistic", "--decay", 0.01],
    "resnet": ["--width", 2, "--blocks", 1, "--optimizer", "sgd", "--batch", 2, "--rate", 0.01],
    "vit": ["--width", 8, "--heads", 2, "--blocks", 1, "--optimizer", "adam", "--dtype", "float32"],
}


@pytest.mark.parametrize("architecture", SIZES)
def test_a_network_from_victim_to_report(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    words = ("--architecture", architecture, *SIZES[architecture], *QUICK, "--out", model)
    exhume_("victim", "digits", *words)
    said = capsys.readouterr().out
    assert "first layer moved by" in said and "after 50 steps" in said
    assert names(tmp_path) == {"model"} and names(model) == {CARD, INITIAL, TRAINED, TRUTH}
    card = json.loads((model / CARD).read_text())
    assert card["architecture"]["name"] == architecture

    budget = ("--samples", 3, "--product-limit", 20)
    exhume_("audit", model, *budget, "--out", tmp_path / "default")
    default = result_of(tmp_path / "default")
    assert (default["parameters"], default["point"]) == ("last", "midpoint")
    blocks = ("--parameters", "first", "--point", "initial")
    exhume_("audit", model, *budget, *blocks, "--out", run)
    result = result_of(run)
    assert (result["parameters"], result["point"]) == ("first", "initial")
    assert (result["premise"], result["outcome"]) == ("change", "budget")
    capsys.readouterr()
    exhume_("score", run)
    said = capsys.readouterr().out
    assert "samples recovered" in said and "residual at the truth" in said


def test_training_can_be_interrupted_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(name: str) -> dict[str, torch.Tensor]:
        words = ("--architecture", "mlp", "--widths", 30, "--samples", 3, "--steps", 200)
        exhume_("victim", "digits", *words, "--until", 0, "--out", tmp_path / name)
        return load_file(tmp_path / name / TRAINED)

    @contextmanager
    def interrupting(*_: object) -> Iterator[Callable[[int, float], None]]:
        def show(step: int, _: float) -> None:
            if step == 100:
                raise KeyboardInterrupt

        yield show

    whole = trained("whole")
    monkeypatch.setattr("exhume.cli.victim._training", interrupting)
    with pytest.raises(SystemExit) as ending:
        trained("model")
    assert ending.value.code == 130
    said = capsys.readouterr().err
    assert "same command" in said and str(tmp_path / ".model.training") in said
    assert names(tmp_path) == {"whole", ".model.training"}
    monkeypatch.undo()
    again = trained("model")
    assert "going on from" in capsys.readouterr().out
    assert names(tmp_path) == {"whole", "model"}
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())


def test_a_bar_grows_while_it_trains() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with _training(console, 1e-4) as show:
        for step, loss in ((50, 1.0), (100, 1e-2), (150, 1e-5)):
            show(step, loss)
    output = console.file
    assert isinstance(output, io.StringIO)
    assert "step 150, loss 1.0e-05" in output.getvalue()


def test_ctrl_c_says_how_to_go_on(
    workshop: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    words = ("audit", workshop / "model", "--samples", 4, "--out", tmp_path / "run")
    monkeypatch.setattr("exhume.auditing.run.reconstruct", interrupt)
    with pytest.raises(SystemExit) as ending:
        exhume_(*words)
    assert ending.value.code == 130
    said = capsys.readouterr().err
    assert "--resume" in said and str(tmp_path / "run") in said
    monkeypatch.undo()
    exhume_(*words, "--resume")
    assert names(tmp_path / "run") == AUDITED


# Networks at rest: the premises margin and decay


KKT = ("--architecture", "kkt_mlp", "--classes", "parity", "--samples", 4, "--widths", 30)


def test_a_network_at_the_margin_from_victim_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    exhume_("victim", "digits", *KKT, "--steps", 1500, "--out", model)
    said = capsys.readouterr().out
    assert "the premise margin holds in direction" in said and "on their kinks" in said
    training = json.loads((model / CARD).read_text())["training"]
    assert training["premise"] == "margin" and training["stationarity"] <= 1e-3
    assert f"{training['violation']:.1e} of the weights" in said
    assert data.read(model / TRUTH).inputs.abs().max() <= 1

    exhume_("audit", model, "--samples", 4, "--product-limit", 100, "--out", run)
    said = capsys.readouterr().out
    assert "premise margin, as the model's card says" in said and "warning" not in said
    result = result_of(run)
    assert [result[word] for word in ("premise", "parameters", "point")] == [
        *("margin", "all", "final")
    ]
    assert yaml.safe_load((run / CONFIG).read_text())["premise"] is None
    assert "weak evidence" in (run / REPORT).read_text()

    exhume_("score", run)
    said = capsys.readouterr().out
    assert f"residual at the truth {training['violation']:.1e}" in said
    assert "floor with features at" not in said and "samples recovered" in said


def test_weight_decay_that_has_not_come_to_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ("--decay", 1e-3, "--steps", 100, "--loss", "squared", "--dtype", "float64")
    exhume_("victim", "digits", *KKT, *quick, "--out", tmp_path / "model")
    said = capsys.readouterr().out
    assert "the premise decay does not hold yet; give more --steps" in said and "kinks" not in said
    words = ("--samples", 4, "--product-limit", 50, "--method", "buzaglo2023")
    exhume_("audit", tmp_path / "model", *words, "--out", tmp_path / "run")
    assert "premise decay, as the model's card says" in capsys.readouterr().out
    result = result_of(tmp_path / "run")
    assert (result["premise"], result["candidates"]) == ("decay", 8)
    exhume_("score", tmp_path / "run")
    assert "samples recovered" in capsys.readouterr().out


def test_the_change_of_a_network_at_the_margin_can_still_be_audited(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--premise", "change", "--point", "final", "--product-limit", 1, "--samples", 4)
    exhume_("audit", workshop / "margin", *words, "--out", tmp_path / "run")
    assert "as the model's card says" not in capsys.readouterr().out
    config = yaml.safe_load((tmp_path / "run" / CONFIG).read_text())
    assert config["premise"] == "change"


def test_weights_that_contradict_a_premise_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--architecture", "two_layer", "--width", 40, "--classes", "parity", "--steps", 50)
    exhume_("victim", "digits", *words, "--samples", 4, "--out", tmp_path / "model")
    audit = ("--premise", "margin", "--samples", 4, "--product-limit", 1, "--out", tmp_path / "run")
    exhume_("audit", tmp_path / "model", *audit)
    assert "warning: The weights contradict the premise margin" in capsys.readouterr().out
    assert "contradict the premise" in (tmp_path / "run" / REPORT).read_text()
