"""Whole flows through the command line, one for each premise: victim, audit, score, report."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from commands import AUDITED, REPORT, exhume_, names, result_of
from exhume import data
from exhume.auditing.folder import CONFIG, MATCHED, SCORE
from exhume.cli.audit import audit
from exhume.models.folder import CARD, INITIAL, TRAINED, TRUTH

Patch = pytest.MonkeyPatch
Said = Callable[..., str]
FIRST = ("--parameters", "first", "--point", "initial")
MODEL, RUN = Path("model"), Path("RUN")
KKT = ("--architecture", "kkt_mlp", "--classes", "parity", "--samples", 4, "--widths", 30)


@pytest.fixture
def said(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch) -> Said:
    """A command in an empty folder, and what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> str:
        capsys.readouterr()
        exhume_(*words)
        return capsys.readouterr().out

    return call


def test_vectors_from_victim_to_report(tmp_path: Path, said: Said, monkeypatch: Patch) -> None:
    model = Path("my model")
    sizes = ("--dim", 20, "--samples", 4, "--ratio", 6)
    printed = said("victim", "sphere", *sizes, "--out", model)
    assert "480 features" in printed and "d = 20" in printed and "ratio 6.00" in printed
    assert names(model) == {CARD, TRAINED, TRUTH}
    (line,) = re.findall(r"^next: exhume (.+)$", printed, re.MULTILINE)  # it can be pasted
    printed = said(*shlex.split(line))
    assert "converged" in printed and "4 candidates" in printed and str(RUN / REPORT) in printed
    assert "recovered" not in printed and names(RUN) == AUDITED
    assert "before the run: 4 samples of 20 entries" in printed and "it takes " in printed
    assert "Reconstructed: all 4 candidates" in printed and printed.count("claim: ") == 2
    assert "explain the weights" in (RUN / REPORT).read_text()
    printed = said("score", RUN, "--truth", model / TRUTH)
    assert re.search(r"recovered\s+│\s+1\s", printed) and "residual at the truth" in printed
    assert names(RUN) == AUDITED | {SCORE}
    before = (RUN / REPORT).read_text()
    assert "4 of 4 training samples came back: 4 exact." in before
    assert str(RUN / REPORT) in said("report", RUN) and (RUN / REPORT).read_text() == before

    exhume_("audit", model, "--out", "new")  # samples may be left out, and names be relative
    result = result_of(Path("new"))
    assert (result["samples_given"], result["candidates"]) == (None, 4)
    monkeypatch.chdir(tmp_path.parent)
    assert "recovered" in said("score", tmp_path / "new")


def test_a_training_run_from_victim_to_score(said: Said) -> None:
    Path("recipe.yaml").write_text("lr: 0.5\nsteps: 4\nloss: logistic\n")
    network = ("--architecture", "mlp", "--widths", 20, "--activation", "gelu", "--bias")
    sizes = ("--dim", 6, "--samples", 1)
    printed = said("victim", "sphere", *sizes, *network, "--recipe", "recipe.yaml")
    assert "after 4 steps, first layer moved by" in printed
    (line,) = re.findall(r"^next: exhume (.+)$", printed, re.MULTILINE)
    assert "converged" in said(*shlex.split(line))
    assert result_of(RUN)["recipe"]["lr"] == 0.5
    assert "All 1 samples recovered" in said("score", RUN, "--truth", Path("victim") / TRUTH)


def test_public_images_beside_a_training_run(said: Said) -> None:
    Path("recipe.yaml").write_text("lr: 0.5\nsteps: 2\n")
    network = ("--architecture", "mlp", "--widths", 20, "--activation", "gelu", "--samples", 2)
    said("victim", "digits", *network, "--recipe", "recipe.yaml", "--out", "victim")
    Path("public").mkdir()
    audit = ("audit", "victim", "--samples", 2, "--premise", "replay", "--public", "public")
    for k, digit in enumerate(data.load("digits", 5).images()):
        Image.fromarray((255 * digit).byte().numpy()).save(f"public/{k}.png")
    said(*audit, "--product-limit", 5, "--out", RUN)
    assert "public inputs of the same kind" in result_of(RUN)["threat_model"]["knows"]
    told = said(*audit[:4], "--parameters", "all", "--product-limit", 5, "--out", "lazily")
    assert "--premise replay makes use of that" in " ".join(told.split())


def test_images_from_victim_to_report(workshop: Path, said: Said) -> None:
    shutil.copytree(workshop / "pictures", RUN)  # a copy is not what was begun
    printed = said("score", RUN, "--trust")
    assert "trusting" in printed and str(workshop / "images" / TRUTH) in printed.replace("\n", "")
    assert "psnr" in printed and "ssim" in printed and "recognisable by" in printed
    assert names(RUN) == AUDITED | {SCORE, MATCHED}
    pairs = load_file(RUN / MATCHED)
    assert pairs["originals"].shape == pairs["reconstructions"].shape == (6, 8, 8)
    assert torch.allclose(pairs["originals"], pairs["reconstructions"], atol=1e-3)
    assert torch.allclose(pairs["originals"], data.load("digits", 6).images().float(), atol=1e-6)
    exhume_("report", RUN, "--redact")
    page, redacted = ((RUN / name).read_text() for name in (REPORT, "report-redacted.html"))
    assert all("6 of 6 training samples came back: 6 exact." in text for text in (page, redacted))
    assert "data:image/png" in page and "data:image/png" not in redacted


def test_a_demo_can_be_run_twice(said: Said, monkeypatch: Patch) -> None:
    digits, demo = data.load("digits", 10, classes="parity"), Path("demo")
    monkeypatch.setattr(data, "load", lambda name, *_, **__: {"faces": digits}[name])
    monkeypatch.setattr("exhume.cli.demo.audit", partial(audit, controls=False))
    for _ in range(2):
        printed = said("demo", "--out", demo)
        assert "10 of 10 faces exact." in printed and "faces.png" in printed
    assert names(demo) == {"model", "run", "faces.png", ".demo"}
    assert names(demo / "run") == AUDITED | {SCORE, MATCHED}


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
    words = ("--samples", 3, "--classes", "parity", "--steps", 20, *sizes.split(), "--out", MODEL)
    printed = said("victim", "digits", "--architecture", architecture, *words)
    assert "first layer moved by" in printed and "after 20 steps" in printed
    assert names(tmp_path) == {"model"} and names(MODEL) == {CARD, INITIAL, TRAINED, TRUTH}
    assert json.loads((MODEL / CARD).read_text())["architecture"]["name"] == architecture
    exhume_("audit", MODEL, "--samples", 3, "--product-limit", 10, *block, "--anyway", "--out", RUN)
    told = [result_of(RUN)[word] for word in ("parameters", "point", "premise", "outcome")]
    assert told == [*(("first", "initial") if block else ("last", "midpoint")), "change", "budget"]
    printed = said("score", RUN)
    assert "samples recovered" in printed and "residual at the truth" in printed


def test_training_can_be_interrupted_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    def trained(name: str) -> dict[str, torch.Tensor]:
        words = ("--architecture", "mlp", "--widths", 30, "--samples", 3, "--steps", 200)
        exhume_("victim", "digits", *words, "--until", 0, "--out", tmp_path / name)
        return load_file(tmp_path / name / TRAINED)

    def show(step: int, _: float) -> None:
        if step == 100:
            raise KeyboardInterrupt

    whole = trained("whole")
    monkeypatch.setattr("exhume.cli.victim._training", lambda *_: nullcontext(show))
    with pytest.raises(SystemExit, match=r"^130$"):
        trained("model")
    printed = capsys.readouterr().err
    assert "same command" in printed and str(tmp_path / ".model.training") in printed
    assert names(tmp_path) == {"whole", ".model.training"}
    monkeypatch.undo()
    again = trained("model")
    assert "going on from" in capsys.readouterr().out
    assert names(tmp_path) == {"whole", "model"}
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())


def test_the_margin_from_victim_to_report(said: Said) -> None:
    printed = said("victim", "digits", *KKT, "--steps", 1500, "--out", MODEL)
    assert "the premise margin holds in direction" in printed and "on their kinks" in printed
    training = json.loads((MODEL / CARD).read_text())["training"]
    assert training["premise"] == "margin" and training["stationarity"] <= 1e-3
    assert f"{training['violation']:.1e} of the weights" in printed
    assert data.read(MODEL / TRUTH).inputs.abs().max() <= 1
    printed = said("audit", MODEL, "--samples", 4, "--product-limit", 100, "--out", RUN)
    assert "premise margin, as the model's card says" in printed and "warning" not in printed
    assert "Cannot tell whether any of" in printed and "advice: " in printed
    told = [result_of(RUN)[word] for word in ("premise", "parameters", "point")]
    assert told == ["margin", "all", "final"]
    assert yaml.safe_load((RUN / CONFIG).read_text())["premise"] is None
    assert "weak evidence" in (RUN / REPORT).read_text()
    printed = said("score", RUN)
    assert f"residual at the truth {training['violation']:.1e}" in printed
    assert "floor with features at" not in printed and "samples recovered" in printed

    words = ("--premise", "change", "--point", "final", "--product-limit", 1, "--samples", 4)
    words += ("--anyway",)
    assert "as the model's card says" not in said("audit", MODEL, *words, "--out", "change")
    assert yaml.safe_load(Path("change", CONFIG).read_text())["premise"] == "change"


def test_gradient_flow_by_a_preset_and_from_the_change(said: Said) -> None:
    printed = said("victim", "digits", *KKT, "--training", "flow", "--until", 1e-3, "--out", MODEL)
    training = json.loads((MODEL / CARD).read_text())["training"]
    assert training["loss"] <= 1e-3 and f"for a time of {training['time']:.3g}" in printed
    assert f"3.weight {training['layers']['3.weight']['start']:.0%} its start" in printed
    words = ("--samples", 4, "--product-limit", 50, "--method", "haim2022", "--preset", "b9")
    for target in ("weights", "change"):
        out = Path(target)
        said("audit", MODEL, *words, "--target", target, "--out", out)
        knows = result_of(out)["threat_model"]["knows"]
        assert result_of(out)["target"] == target
        assert ("the initial weights" in knows) == (target == "change")
        assert result_of(out)["steps"] == 50  # no trials
        assert "residual at the truth" in said("score", out)
        assert "<dt>Target</dt>" in (out / REPORT).read_text()
    with pytest.raises(SystemExit):
        said("audit", MODEL, *words[:-1], "decay1", "--out", "none")


def test_weight_decay_that_has_not_come_to_rest(said: Said) -> None:
    quick = ("--decay", 1e-3, "--steps", 100, "--loss", "squared", "--dtype", "float64")
    printed = said("victim", "digits", *KKT, *quick, "--out", MODEL)
    assert "does not hold yet; give more --steps" in printed and "kinks" not in printed
    words = ("--samples", 4, "--product-limit", 50, "--method", "buzaglo2023")
    printed = said("audit", MODEL, *words, "--out", RUN)
    assert "premise decay, as the model's card says" in printed
    assert (result_of(RUN)["premise"], result_of(RUN)["candidates"]) == ("decay", 8)
    assert "samples recovered" in said("score", RUN)


def test_weights_that_contradict_a_premise(said: Said) -> None:
    words = ("--architecture", "two_layer", "--width", 40, "--classes", "parity", "--steps", 20)
    exhume_("victim", "digits", *words, "--samples", 4, "--out", MODEL)
    audit = ("--premise", "margin", "--samples", 4, "--product-limit", 1, "--out", RUN)
    printed = said("audit", MODEL, *audit)
    assert "warning: The weights contradict the premise margin" in printed
    assert "contradict the premise" in (RUN / REPORT).read_text()
