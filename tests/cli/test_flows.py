"""Whole flows through the command line, one for each premise: victim, audit, score, report."""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from commands import AUDITED, REPORT, exhume_, names, result_of
from exhume import data
from exhume.auditing.folder import CONFIG, MATCHED, SCORE
from exhume.models.folder import CARD, INITIAL, TRAINED, TRUTH

Patch = pytest.MonkeyPatch
Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """A command, and what it prints."""

    def call(*words: object) -> str:
        capsys.readouterr()
        exhume_(*words)
        return capsys.readouterr().out

    return call


def test_vectors_from_victim_to_report(tmp_path: Path, said: Said, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    model, run = Path("my model"), Path("RUN")
    sizes = ("--dim", 20, "--samples", 4, "--ratio", 6)
    printed = said("victim", "sphere", *sizes, "--out", model)
    assert "480 features" in printed and "d = 20" in printed and "ratio 6.00" in printed
    assert names(model) == {CARD, TRAINED, TRUTH}

    (line,) = re.findall(r"^next: exhume (.+)$", printed, re.MULTILINE)  # it can be pasted
    printed = said(*shlex.split(line))
    assert "converged" in printed and "4 candidates" in printed and str(run / REPORT) in printed
    assert "recovered" not in printed
    assert names(run) == AUDITED
    assert "explain the weights" in (run / REPORT).read_text()

    printed = said("score", run, "--truth", model / TRUTH)
    assert re.search(r"recovered\s+│\s+1\s", printed) and "residual at the truth" in printed
    assert names(run) == AUDITED | {SCORE}
    assert "4 of 4 training samples recovered, 4 exactly." in (run / REPORT).read_text()

    before = (run / REPORT).read_bytes()
    assert str(run / REPORT) in said("report", run)
    assert (run / REPORT).read_bytes() == before

    exhume_("audit", model, "--out", "new")  # samples may be left out, and names be relative
    result = result_of(Path("new"))
    assert (result["samples_given"], result["candidates"]) == (None, 4)
    monkeypatch.chdir(tmp_path.parent)
    assert "recovered" in said("score", tmp_path / "new")


def test_images_from_victim_to_report(workshop: Path, tmp_path: Path, said: Said) -> None:
    run = tmp_path / "run"
    shutil.copytree(workshop / "pictures", run)
    printed = said("score", run)  # the truth is in the folder of the model, which is in the config
    assert "psnr" in printed and "ssim" in printed
    assert names(run) == AUDITED | {SCORE, MATCHED}
    pairs = load_file(run / MATCHED)
    assert pairs["originals"].shape == pairs["reconstructions"].shape == (6, 8, 8)
    assert torch.allclose(pairs["originals"], pairs["reconstructions"], atol=1e-3)
    known = data.load("digits", 6)
    assert torch.allclose(pairs["originals"], known.images().float(), atol=1e-6)
    exhume_("report", run, "--redact")
    page, redacted = (run / REPORT).read_text(), (run / "report-redacted.html").read_text()
    for text in (page, redacted):
        assert "6 of 6 training samples recovered, 6 exactly." in text
    assert "data:image/png" in page and "data:image/png" not in redacted


def test_a_demo_can_be_run_twice(tmp_path: Path, said: Said, monkeypatch: Patch) -> None:
    def small(name: str, samples: int, *_: object, **__: object) -> data.Data:
        assert name == "faces"
        return original("digits", samples, classes="parity")

    original = data.load
    monkeypatch.setattr(data, "load", small)
    for _ in range(2):
        printed = said("demo", "--out", tmp_path / "demo")
        assert "10 of 10 faces exact." in printed and "faces.png" in printed
    assert names(tmp_path / "demo") == {"model", "run", "faces.png", ".demo"}
    assert names(tmp_path / "demo" / "run") == AUDITED | {SCORE, MATCHED}


FIRST = ("--parameters", "first", "--point", "initial")


@pytest.mark.parametrize(
    ("architecture", "sizes", "block"),
    [
        ("two_layer", "--ratio 2 --bias", ()),
        ("mlp", "--widths 30,20 --activation tanh --loss logistic --decay 0.01", FIRST),
        ("resnet", "--width 2 --blocks 1 --optimizer sgd --batch 2 --rate 0.01", ()),
        ("vit", "--width 8 --heads 2 --blocks 1 --optimizer adam --dtype float32", FIRST),
    ],
)
def test_a_network_from_victim_to_report(
    architecture: str, sizes: str, block: tuple[str], tmp_path: Path, said: Said
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    words = ("--samples", 3, "--classes", "parity", "--steps", 20, *sizes.split(), "--out", model)
    printed = said("victim", "digits", "--architecture", architecture, *words)
    assert "first layer moved by" in printed and "after 20 steps" in printed
    assert names(tmp_path) == {"model"} and names(model) == {CARD, INITIAL, TRAINED, TRUTH}
    card = json.loads((model / CARD).read_text())
    assert card["architecture"]["name"] == architecture

    exhume_("audit", model, "--samples", 3, "--product-limit", 10, *block, "--out", run)
    result = result_of(run)
    asked = ("first", "initial") if block else ("last", "midpoint")
    assert (result["parameters"], result["point"]) == asked
    assert (result["premise"], result["outcome"]) == ("change", "budget")
    printed = said("score", run)
    assert "samples recovered" in printed and "residual at the truth" in printed


def test_training_can_be_interrupted_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
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
    printed = capsys.readouterr().err
    assert "same command" in printed and str(tmp_path / ".model.training") in printed
    assert names(tmp_path) == {"whole", ".model.training"}
    monkeypatch.undo()
    again = trained("model")
    assert "going on from" in capsys.readouterr().out
    assert names(tmp_path) == {"whole", "model"}
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())


KKT = ("--architecture", "kkt_mlp", "--classes", "parity", "--samples", 4, "--widths", 30)


def test_the_margin_from_victim_to_report(tmp_path: Path, said: Said) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    printed = said("victim", "digits", *KKT, "--steps", 1500, "--out", model)
    assert "the premise margin holds in direction" in printed and "on their kinks" in printed
    training = json.loads((model / CARD).read_text())["training"]
    assert training["premise"] == "margin" and training["stationarity"] <= 1e-3
    assert f"{training['violation']:.1e} of the weights" in printed
    assert data.read(model / TRUTH).inputs.abs().max() <= 1

    printed = said("audit", model, "--samples", 4, "--product-limit", 100, "--out", run)
    assert "premise margin, as the model's card says" in printed and "warning" not in printed
    result = result_of(run)
    told = [result[word] for word in ("premise", "parameters", "point")]
    assert told == ["margin", "all", "final"]
    assert yaml.safe_load((run / CONFIG).read_text())["premise"] is None
    assert "weak evidence" in (run / REPORT).read_text()
    printed = said("score", run)
    assert f"residual at the truth {training['violation']:.1e}" in printed
    assert "floor with features at" not in printed and "samples recovered" in printed

    words = ("--premise", "change", "--point", "final", "--product-limit", 1, "--samples", 4)
    printed = said("audit", model, *words, "--out", tmp_path / "change")
    assert "as the model's card says" not in printed
    assert yaml.safe_load((tmp_path / "change" / CONFIG).read_text())["premise"] == "change"


def test_weight_decay_that_has_not_come_to_rest(tmp_path: Path, said: Said) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    quick = ("--decay", 1e-3, "--steps", 100, "--loss", "squared", "--dtype", "float64")
    printed = said("victim", "digits", *KKT, *quick, "--out", model)
    assert "the premise decay does not hold yet; give more --steps" in printed
    assert "kinks" not in printed
    words = ("--samples", 4, "--product-limit", 50, "--method", "buzaglo2023")
    printed = said("audit", model, *words, "--out", run)
    assert "premise decay, as the model's card says" in printed
    result = result_of(run)
    assert (result["premise"], result["candidates"]) == ("decay", 8)
    assert "samples recovered" in said("score", run)


def test_weights_that_contradict_a_premise(tmp_path: Path, said: Said) -> None:
    words = ("--architecture", "two_layer", "--width", 40, "--classes", "parity", "--steps", 20)
    exhume_("victim", "digits", *words, "--samples", 4, "--out", tmp_path / "model")
    audit = ("--premise", "margin", "--samples", 4, "--product-limit", 1, "--out", tmp_path / "run")
    printed = said("audit", tmp_path / "model", *audit)
    assert "warning: The weights contradict the premise margin" in printed
    assert "contradict the premise" in (tmp_path / "run" / REPORT).read_text()
