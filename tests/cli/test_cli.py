"""The command line: the whole flow, and what happens when something is wrong."""

import io
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

import exhume
from exhume import data
from exhume.auditing.folder import CANDIDATES, CONFIG, EVENTS, MATCHED, RESULT, SCORE
from exhume.cli.main import main
from exhume.cli.victim import _training
from exhume.methods import METHODS
from exhume.models.folder import CARD, INITIAL, TRAINED, TRUTH

REPORT = "report.html"
COMMANDS = ["victim", "audit", "score", "report", "identify", "demo", "bench"]
BENCHES = ["solvers", "threshold", "streaming", "images"]
AUDITED = {CONFIG, EVENTS, CANDIDATES, RESULT, REPORT}


def exhume_(*words: object) -> None:
    main([str(word) for word in words])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below, with what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and finished runs; not to be changed.

    model and run: vectors. stored: the same with its first layer. images and pictures: digits.
    """
    folder = tmp_path_factory.mktemp("workshop")
    sphere = ("victim", "sphere", "--dim", 20, "--samples", 4, "--ratio", 6, "--out")
    exhume_(*sphere, folder / "model")
    exhume_(*sphere, folder / "stored", "--store")
    exhume_("victim", "digits", "--samples", 10, "--ratio", 6, "--out", folder / "images")
    exhume_("audit", folder / "model", "--samples", 4, "--out", folder / "run")
    exhume_("audit", folder / "images", "--samples", 10, "--out", folder / "pictures")
    return folder


@pytest.fixture
def bench(workshop: Path, tmp_path: Path) -> Path:
    """A copy of the workshop, to be damaged."""
    shutil.copytree(workshop, tmp_path / "bench")
    return tmp_path / "bench"


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """A command that must end with code 2 and one paragraph, and write nothing."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> str:
        before = tree(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            exhume_(*words)
        assert ending.value.code == 2
        said = capsys.readouterr()
        assert said.err.startswith("exhume: ") and said.err.endswith("\n")
        assert "\n\n" not in said.err and "Traceback" not in said.err
        assert tree(tmp_path) == before
        return said.err

    return call


@pytest.fixture
def misused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """A command line that cannot be parsed: code 2, the usage, and what is wrong."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> str:
        with pytest.raises(SystemExit) as ending:
            exhume_(*words)
        assert ending.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("usage: exhume") and "error: " in said
        assert list(tmp_path.iterdir()) == []
        return said.partition("error: ")[2]

    return call


# Help


@pytest.mark.parametrize(
    "command",
    [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHES)],
    ids=" ".join,
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        exhume_(*command, "--help")
    assert ending.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: exhume")
    for inner in {"": COMMANDS, "bench": BENCHES}.get(" ".join(command), []):
        assert inner in said


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        exhume_("--version")
    assert ending.value.code == 0
    assert exhume.__version__ in capsys.readouterr().out


def test_the_words_of_the_shell_are_the_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["exhume", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert exhume.__version__ in capsys.readouterr().out


# The whole flow


def test_vectors_from_victim_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    exhume_("victim", "sphere", "--dim", 20, "--samples", 4, "--ratio", 6, "--out", model)
    said = capsys.readouterr().out
    assert "480 features" in said and "d = 20" in said and "ratio 6.00" in said
    assert names(model) == {CARD, TRAINED, TRUTH}

    exhume_("audit", model, "--samples", 4, "--out", run)
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


def test_the_next_step_that_is_printed_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exhume_("victim", "sphere", "--dim", 20, "--samples", 4, "--ratio", 6, "--out", "m")
    (line,) = re.findall(r"^next: exhume (.+)$", capsys.readouterr().out, re.MULTILINE)
    exhume_(*line.split())
    assert "converged" in capsys.readouterr().out


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
    page = (run / REPORT).read_text()
    assert "10 of 10 training samples recovered, 10 exactly." in page
    assert "data:image/png" in page


def test_a_redacted_report_shows_no_sample(bench: Path) -> None:
    run = bench / "pictures"
    exhume_("score", run)
    exhume_("report", run, "--redact")
    redacted = (run / "report-redacted.html").read_text()
    assert "10 of 10 training samples recovered" in redacted
    assert "data:image/png" not in redacted
    assert "data:image/png" in (run / REPORT).read_text()


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


def test_samples_may_be_left_out(workshop: Path, tmp_path: Path) -> None:
    exhume_("audit", workshop / "model", "--out", tmp_path / "a")
    exhume_("audit", workshop / "model", "--out", tmp_path / "b", "--samples", "null")
    for run in (tmp_path / "a", tmp_path / "b"):
        result = json.loads((run / RESULT).read_text())
        assert (result["samples_given"], result["candidates"]) == (None, 4)


# Networks


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

    blocks = ("--parameters", "first", "--point", "initial")
    exhume_("audit", model, "--samples", 3, "--time-limit", 0.1, *blocks, "--out", run)
    result = json.loads((run / RESULT).read_text())
    assert (result["parameters"], result["point"]) == ("first", "initial")
    capsys.readouterr()
    exhume_("score", run)
    said = capsys.readouterr().out
    assert "samples recovered" in said and "residual at the truth" in said


@pytest.fixture
def trained(tmp_path: Path) -> Callable[[str], dict[str, torch.Tensor]]:
    def call(name: str) -> dict[str, torch.Tensor]:
        words = ("--architecture", "mlp", "--widths", 30, "--samples", 3, "--steps", 200)
        exhume_("victim", "digits", *words, "--until", 0, "--out", tmp_path / name)
        return load_file(tmp_path / name / TRAINED)

    return call


def test_training_can_be_interrupted_and_goes_on(
    trained: Callable[[str], dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--architecture", "mlp"], ["widths", "mlp needs"]),
        (["--architecture", "resnet"], ["width", "resnet needs"]),
        (["--architecture", "resnet", "--ratio", 3], ["ratio", "resnet", "blocks"]),
        (["--architecture", "vit", "--patch", 3], ["patch", "8×8"]),
        (["--architecture", "two_layer", "--ridge", 1], ["ridge", "two_layer"]),
        (["--architecture", "two_layer", "--momentum", 2], ["momentum"]),
        (["--architecture", "two_layer", "--batch", 2], ["batch", "sgd"]),
        (["--optimizer", "adam"], ["optimizer", "random_features"]),
        (["--loss", "cross_entropy"], ["cross_entropy", "logistic"]),
        (["--device", "abacus"], ["abacus"]),
    ],
    ids=str,
)
def test_a_network_that_cannot_be(
    words: list[object], named: list[str], refused: Callable[..., str]
) -> None:
    said = refused("victim", "digits", "--samples", 3, *words, "--out", "new")
    assert all(word in said for word in named)


# Networks at rest


MARGIN = ("--architecture", "kkt_mlp", "--classes", "parity", "--samples", 4, "--widths", 30)


@pytest.fixture(scope="module")
def at_rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network trained to the margin; not to be changed."""
    folder = tmp_path_factory.mktemp("rest")
    exhume_("victim", "digits", *MARGIN, "--steps", 200, "--out", folder / "margin")
    return folder


def test_a_network_at_the_margin_from_victim_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    exhume_("victim", "digits", *MARGIN, "--steps", 1500, "--out", model)
    said = capsys.readouterr().out
    assert "the premise margin holds in direction" in said and "on their kinks" in said
    training = json.loads((model / CARD).read_text())["training"]
    assert training["premise"] == "margin" and training["stationarity"] <= 1e-3
    assert f"{training['violation']:.1e} of the weights" in said
    assert data.read(model / TRUTH).inputs.abs().max() <= 1

    exhume_("audit", model, "--samples", 4, "--time-limit", 1, "--out", run)
    said = capsys.readouterr().out
    assert "premise margin, as the model's card says" in said and "warning" not in said
    result = json.loads((run / RESULT).read_text())
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
    exhume_("victim", "digits", *MARGIN, *quick, "--out", tmp_path / "model")
    said = capsys.readouterr().out
    assert "the premise decay does not hold yet; give more --steps" in said and "kinks" not in said
    words = ("--samples", 4, "--time-limit", 0.5, "--method", "buzaglo2023")
    exhume_("audit", tmp_path / "model", *words, "--out", tmp_path / "run")
    assert "premise decay, as the model's card says" in capsys.readouterr().out
    result = json.loads((tmp_path / "run" / RESULT).read_text())
    assert (result["premise"], result["candidates"]) == ("decay", 8)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--method", "loo2023"], ["loo2023", "premise change", "haim2022"]),
        (["--method", "tansley2026"], ["tansley2026", "sphere", "box"]),
        (["--method", "haim2022", "--premise", "decay"], ["haim2022", "buzaglo2023"]),
        (["--method", "haim2022", "--premise", "change"], ["haim2022", "loo2023"]),
        (["--parameters", "last"], ["premise margin", "leave out", "premise change"]),
        (["--point", "both", "--premise", "decay"], ["premise decay", "leave out"]),
        (["--initial", "i.pt"], ["initial", "is a model folder"]),
    ],
    ids=str,
)
def test_an_audit_at_the_margin_that_cannot_be(
    words: list[object], named: list[str], at_rest: Path, refused: Callable[..., str]
) -> None:
    said = refused("audit", at_rest / "margin", "--samples", 4, *words, "--out", "new")
    assert all(word in said for word in named)


def test_a_method_that_needs_the_number(at_rest: Path, refused: Callable[..., str]) -> None:
    for method in ("haim2022", "buzaglo2023", "shen2026"):
        said = refused("audit", at_rest / "margin", "--method", method, "--out", "new")
        assert "number of samples" in said


def test_the_change_of_a_network_at_the_margin_can_still_be_audited(
    at_rest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--premise", "change", "--point", "final", "--time-limit", 0, "--samples", 4)
    exhume_("audit", at_rest / "margin", *words, "--out", tmp_path / "run")
    assert "as the model's card says" not in capsys.readouterr().out
    config = yaml.safe_load((tmp_path / "run" / CONFIG).read_text())
    assert config["premise"] == "change"


def test_weights_that_contradict_a_premise_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--architecture", "two_layer", "--width", 40, "--classes", "parity", "--steps", 50)
    exhume_("victim", "digits", *words, "--samples", 4, "--out", tmp_path / "model")
    audit = ("--premise", "margin", "--samples", 4, "--time-limit", 0, "--out", tmp_path / "run")
    exhume_("audit", tmp_path / "model", *audit)
    assert "warning: The weights contradict the premise margin" in capsys.readouterr().out
    assert "contradict the premise" in (tmp_path / "run" / REPORT).read_text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["sphere"], ["[−1, 1]", "images"]),
        (["digits", "--normalise"], ["[−1, 1]", "--normalise"]),
        (["digits", "--centre", "all"], ["[−1, 1]", "--centre"]),
        (["digits", "--loss", "squared"], ["margin", "logistic", "squared"]),
        (["digits", "--loss", "cross_entropy"], ["margin", "logistic", "cross_entropy"]),
        (["digits", "--decay", 1, "--loss", "cross_entropy"], ["decay", "squared"]),
        (["digits", "--decay", -1], ["decay", "above 0"]),
        (["digits", "--level", 2], ["level"]),
        (["digits", "--until", 1e-3], ["until", "kkt_mlp", "level"]),
        (["digits", "--classes", "vehicles"], ["vehicles", "cifar10"]),
    ],
    ids=str,
)
def test_a_network_at_rest_that_cannot_be(
    words: list[object], named: list[str], refused: Callable[..., str]
) -> None:
    said = refused("victim", words[0], *MARGIN, *words[1:], "--out", "new")
    assert all(word in said for word in named)


def test_every_method_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        exhume_("audit", "--help")
    said = capsys.readouterr().out
    assert all(name in said for name in METHODS)


# How options may be written


def test_the_folder_may_stand_anywhere(workshop: Path, tmp_path: Path) -> None:
    exhume_("audit", "--samples", 4, "--time-limit=0", workshop / "model", "--out", tmp_path / "a")
    exhume_("audit", "--model", workshop / "model", "--time-limit", 0, "--out", tmp_path / "b")
    for run in (tmp_path / "a", tmp_path / "b"):
        config = yaml.safe_load((run / CONFIG).read_text())
        assert config["model"] == str(workshop / "model")


def test_a_model_must_be_named(refused: Callable[..., str]) -> None:
    assert "--model" in refused("audit", "--samples", 4)


def test_a_model_folder_takes_no_weights(workshop: Path, refused: Callable[..., str]) -> None:
    for words in (["--initial", "i.pt"], ["--head", "3"], ["--input-shape", "4,5"]):
        said = refused("audit", workshop / "model", *words, "--out", "new")
        assert "is a model folder" in said
    assert "random-features" in refused("audit", workshop / "model", "--point", "final")


def test_a_card_or_options_but_not_both(refused: Callable[..., str]) -> None:
    given = ("--model", "m:f", "--trained", "t.pt")
    assert "card" in refused("audit", *given, "--card", "c.yaml", "--range", "0,1")
    assert "c.yaml: no such file" in refused("audit", *given, "--card", "c.yaml")
    assert "--input-shape" in refused("audit", *given, "--classes", 3)


def test_a_printed_name_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exhume_("victim", "sphere", "--dim", 20, "--samples", 4, "--ratio", 6, "--out", "my model")
    (line,) = re.findall(r"^next: exhume (.+)$", capsys.readouterr().out, re.MULTILINE)
    exhume_(*shlex.split(line))
    assert "converged" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--time-limit=30", "--time_limit=30"])
def test_dashes_are_as_good_as_underscores(option: str, workshop: Path, tmp_path: Path) -> None:
    exhume_("audit", workshop / "model", "--samples", 4, option, "--out", tmp_path / "a-b")
    assert yaml.safe_load((tmp_path / "a-b" / CONFIG).read_text())["time_limit"] == 30


@pytest.mark.parametrize(
    ("words", "stored"),
    [
        ([], False),
        (["--store"], True),
        (["--store", "true"], True),
        (["--store=true"], True),
        (["--store", "false"], False),
        (["--store", "--seed", "3"], True),
        (["--data-seed", "3", "--store"], True),
    ],
    ids=str,
)
def test_a_switch_may_stand_alone(words: list[str], stored: bool, tmp_path: Path) -> None:
    exhume_("victim", "sphere", "--dim", 5, "--samples", 2, *words, "--out", tmp_path / "model")
    assert (tmp_path / "model" / INITIAL).exists() == stored


def test_classes_are_chosen_by_a_list_or_a_word(tmp_path: Path) -> None:
    outputs = {}
    for classes in ("[3,8]", "[1,2,3]", "parity", "all"):
        out = tmp_path / classes
        exhume_("victim", "digits", "--samples", 20, "--classes", classes, "--out", out)
        outputs[classes] = json.loads((out / CARD).read_text())["outputs"]
    assert outputs == {"[3,8]": 1, "[1,2,3]": 3, "parity": 1, "all": 10}


def test_a_config_file_stands_for_options(workshop: Path, tmp_path: Path) -> None:
    file = tmp_path / "audit.yaml"
    file.write_text(
        yaml.safe_dump({"model": str(workshop / "model"), "samples": 4, "seed": 3, "device": "cpu"})
    )
    exhume_("audit", "--config", file, "--out", tmp_path / "a")
    exhume_("audit", "--config", file, "--seed", 5, "--out", tmp_path / "b")
    config = yaml.safe_load((tmp_path / "a" / CONFIG).read_text())
    assert {word: value for word, value in config.items() if value is not None} == {
        **{"model": str(workshop / "model"), "samples": 4, "seed": 3},
        **{"method": "exhume", "device": "cpu"},
    }
    assert yaml.safe_load((tmp_path / "b" / CONFIG).read_text())["seed"] == 5


def test_the_config_of_a_run_starts_the_same_run(workshop: Path, tmp_path: Path) -> None:
    exhume_("audit", "--config", workshop / "run" / CONFIG, "--out", tmp_path / "again")
    one, other = (load_file(run / CANDIDATES) for run in (workshop / "run", tmp_path / "again"))
    assert torch.equal(one["samples"], other["samples"])


def test_a_model_may_be_named_from_where_one_is(
    bench: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench)
    exhume_("audit", "model", "--samples", 4, "--out", "new")
    monkeypatch.chdir(bench.parent)
    exhume_("score", "bench/new")
    assert "recovered" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "with spaces",
        "grün-√",
        pytest.param("runs[/b]"),
        pytest.param("a[b]c"),
    ],
)
def test_odd_names_of_folders_are_printed_as_they_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    exhume_("victim", "sphere", "--dim", 5, "--samples", 2, "--out", tmp_path / name)
    assert f"{tmp_path / name}: " in capsys.readouterr().out


def test_ctrl_c_says_how_to_go_on(
    workshop: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("exhume.auditing.run.reconstruct", interrupt)
    with pytest.raises(SystemExit) as ending:
        exhume_("audit", workshop / "model", "--samples", 4, "--out", tmp_path / "run")
    assert ending.value.code == 130
    said = capsys.readouterr().err
    assert "--resume" in said and str(tmp_path / "run") in said
    monkeypatch.undo()
    exhume_("audit", workshop / "model", "--samples", 4, "--out", tmp_path / "run", "--resume")
    assert names(tmp_path / "run") == AUDITED


# What cannot be parsed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["dig"], "dig"),
        pytest.param([], "subcommand"),
        (["bench"], "subcommand"),
        (["victim"], "data"),
        (["victim", "sphere", "--samples", "many"], "samples"),
        (["victim", "sphere", "--loss", "hinge"], "hinge"),
        (["victim", "sphere", "--depth", "3"], "--depth"),
        (["victim", "digits", "--classes", "odd"], "classes"),
        (["victim", "sphere", "--ratio", "nan"], "ratio"),
        (["audit", "model", "--samples", "1.5"], "samples"),
        (["audit", "model", "--time-limit", "nan"], "time_limit"),
        (["audit", "model", "--time-limit", "soon"], "time_limit"),
        (["audit", "model", "--resume", "maybe"], "maybe"),
        (["audit", "model", "other"], "other"),
        (["audit", "model", "--rank", "most"], "rank"),
        (["audit", "model", "--point", "middle"], "middle"),
        (["audit", "model", "--premise", "rest"], "rest"),
        (["victim", "digits", "--centre", "middle"], "middle"),
        (["audit", "model", "--arguments", "3"], "arguments"),
        (["audit", "model", "--input-shape", "a,b"], "input_shape"),
        (["audit", "--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
    ids=str,
)
def test_a_wrong_command_line_is_explained(
    words: list[str], named: str, misused: Callable[..., str]
) -> None:
    assert named in misused(*words)


# Bad input: victims


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["sphere", "--width", 9], ["width 9", "10"]),
        (["sphere", "--width", 0], ["width 0"]),
        (["sphere", "--samples", 0], ["samples"]),
        (["sphere", "--samples", -3], ["samples", "-3"]),
        (["sphere", "--dim", 0], ["dim"]),
        (["sphere", "--activation", "swish"], ["swish", "relu"]),
        (["sphere", "--activation", "polynomial:a,b"], ["polynomial", "a,b"]),
        (["sphere", "--ridge", -1], ["ridge", "-1"]),
        (["sphere", "--loss", "logistic"], ["ridge"]),
        (["imagenet"], ["imagenet", "digits"]),
        (["cifar10"], ["cifar10", "EXHUME_DATA"]),
        (["digits", "--samples", 100000], ["100000", "digits"]),
        (["digits", "--classes", "[3]"], ["3", "digits"]),
        (["digits", "--classes", "[3,33]"], ["33", "digits"]),
        (["faces", "--classes", "parity"], ["faces", "random"]),
        pytest.param(["imagenet"], ["sphere"]),
        pytest.param(["sphere", "--ratio", -1], ["ratio"]),
        pytest.param(["sphere", "--seed", -1], ["seed"]),
        pytest.param(["sphere", "--data-seed", -1], ["seed"]),
    ],
    ids=str,
)
def test_a_victim_that_cannot_be(
    words: list[object],
    named: list[str],
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EXHUME_DATA", raising=False)
    said = refused("victim", *words, "--out", "new")
    assert all(word in said for word in named)


def test_a_folder_of_data_without_the_set(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    said = refused("victim", "cifar10", "--out", "new")
    assert str(tmp_path) in said and "cifar10.npz" in said


def test_a_victim_where_something_is(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "notes").write_text("mine")
    for out in (tmp_path, "notes", "notes/model"):
        assert "notes" in refused("victim", "sphere", "--out", out) or out == tmp_path


# Bad input: models


def in_file(file: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A change to a tensor of a model."""

    def damage(model: Path) -> None:
        tensor = load_file(model / file)[name]
        save_file({name: change(tensor).contiguous()}, model / file)

    return damage


def in_card(**changes: Any) -> Any:
    """A change to the card."""

    def damage(model: Path) -> None:
        card = json.loads((model / CARD).read_text())
        (model / CARD).write_text(json.dumps({**card, **changes}))

    return damage


def as_bytes(file: str, change: Callable[[bytes], bytes]) -> Any:
    def damage(model: Path) -> None:
        (model / file).write_bytes(change((model / file).read_bytes()))

    return damage


def missing(file: str) -> Any:
    return lambda model: (model / file).unlink()


def spoiled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """One entry replaced."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[7] = value
        return tensor

    return change


def mapped(array: Callable[[np.ndarray], np.ndarray]) -> Any:
    """The first layer in a .npy file instead, with a change."""

    def damage(model: Path) -> None:
        np.save(model / "v.npy", array(load_file(model / INITIAL)["first"].numpy()))
        in_card(first={"source": "map", "file": "v.npy"})(model)

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        pytest.param(in_file(TRAINED, "last", spoiled(torch.nan)), ["NaN"], id="NaN"),
        pytest.param(in_file(TRAINED, "last", spoiled(torch.inf)), ["infinite"], id="infinite"),
        pytest.param(in_file(TRAINED, "last", spoiled(torch.nan)), [TRAINED], id="NaN in a file"),
        pytest.param(in_file(TRAINED, "last", torch.zeros_like), ["zero"], id="zero"),
        pytest.param(
            in_file(INITIAL, "first", spoiled(torch.inf)), ["first layer"], id="first infinite"
        ),
        pytest.param(
            in_file(INITIAL, "first", spoiled(torch.nan)), ["first layer"], id="first NaN"
        ),
        pytest.param(
            in_file(TRAINED, "last", lambda t: t[:-1]), [TRAINED, "(479, 1)", "480"], id="last rows"
        ),
        pytest.param(
            in_file(TRAINED, "last", lambda t: t.repeat(1, 2)), [TRAINED, "(480, 2)"], id="columns"
        ),
        pytest.param(
            in_file(TRAINED, "last", lambda t: t[:, 0]), [TRAINED, "(480,)"], id="last a vector"
        ),
        pytest.param(
            in_file(INITIAL, "first", lambda t: t[:-1]), [INITIAL, "(479, 20)"], id="first rows"
        ),
        pytest.param(
            in_file(INITIAL, "first", lambda t: t[:, :-1]), [INITIAL, "(480, 19)"], id="first cols"
        ),
        pytest.param(
            in_file(INITIAL, "first", lambda t: t.flatten()), [INITIAL], id="first a vector"
        ),
        pytest.param(
            in_file(INITIAL, "first", lambda t: t[:, :, None]), [INITIAL], id="first a cube"
        ),
        pytest.param(in_file(INITIAL, "first", torch.zeros_like), ["first"], id="first zero"),
        pytest.param(in_card(shape=[21]), ["21", "20"], id="shape"),
        pytest.param(in_card(dim=21), ["20", "21"], id="dim"),
        pytest.param(in_card(width=481), ["481"], id="width"),
        pytest.param(in_card(width="wide"), [CARD, "wide"], id="width in words"),
        pytest.param(in_card(kind="transformer"), [CARD, "random_features"], id="kind"),
        pytest.param(in_card(activation="swish"), ["swish"], id="activation"),
        pytest.param(in_card(shape=[-4, -5]), ["shape"], id="negative shape"),
        pytest.param(
            in_card(shape=[4, 5], display="loud"),
            ["display"],
            id="display",
        ),
        pytest.param(in_card(first={"source": "seed", "seed": -1}), ["seed"], id="negative seed"),
        pytest.param(in_card(first={"source": "cloud"}), ["cloud"], id="unknown source"),
        pytest.param(missing(CARD), [CARD], id="no card"),
        pytest.param(missing(TRAINED), [TRAINED], id="no last layer"),
        pytest.param(missing(INITIAL), [INITIAL], id="no first layer"),
        pytest.param(as_bytes(TRAINED, lambda b: b[:-100]), [TRAINED], id="cut"),
        pytest.param(as_bytes(TRAINED, lambda b: b[:20]), [TRAINED], id="cut in the header"),
        pytest.param(as_bytes(TRAINED, lambda _: b""), [TRAINED], id="empty"),
        pytest.param(as_bytes(INITIAL, lambda b: b[:-100]), [INITIAL], id="first cut"),
        pytest.param(as_bytes(CARD, lambda b: b[:-30]), [CARD, "JSON"], id="card cut"),
        pytest.param(as_bytes(CARD, lambda _: b"\xff\xfe"), [CARD, "JSON"], id="card bytes"),
        pytest.param(as_bytes(CARD, lambda _: b"[]"), [CARD], id="card a list"),
        pytest.param(mapped(lambda v: v[:-1]), ["v.npy", "(479, 20)"], id="mapped rows"),
        pytest.param(mapped(lambda v: v.ravel()), ["v.npy", "(9600,)"], id="mapped vector"),
        pytest.param(
            mapped(lambda v: v * np.where(np.arange(20) == 3, np.float32(np.nan), 1)),
            ["NaN"],
            id="mapped NaN",
        ),
        pytest.param(
            mapped(lambda v: v.astype(str)),
            ["v.npy"],
            id="mapped words",
        ),
    ],
)
def test_a_damaged_model(
    damage: Callable[[Path], None], named: list[str], bench: Path, refused: Callable[..., str]
) -> None:
    damage(bench / "stored")
    said = refused("audit", bench / "stored", "--samples", 4, "--out", "new")
    assert all(word in said for word in named)


# Bad input: audits


def test_a_model_that_is_not_there(bench: Path, refused: Callable[..., str]) -> None:
    assert "nowhere" in refused("audit", "nowhere", "--out", "new")
    assert CARD in refused("audit", bench / "model" / CARD, "--out", "new")
    assert CARD in refused("audit", bench, "--out", "new")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--samples", 0], ["samples", "0"]),
        (["--samples", -3], ["samples", "-3"]),
        (["--method", "magic"], ["magic", "exhume", "iurada2025"]),
        (["--device", "abacus"], ["abacus", "cpu"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--resume"], ["new", "resume"]),
        pytest.param(["--device", "meta"], ["meta"]),
        pytest.param(["--method", "iurada2025"], ["samples"]),
        (["--seed", -1], ["seed"]),
        (["--time-limit", -1], ["time"]),
    ],
    ids=str,
)
def test_an_audit_that_cannot_be(
    words: list[object], named: list[str], bench: Path, refused: Callable[..., str]
) -> None:
    said = refused("audit", bench / "model", "--out", "new", *words)
    assert all(word in said for word in named)


def test_an_audit_where_something_is(
    bench: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    audit = ("audit", bench / "model", "--samples", 4, "--out")
    assert "--resume" in refused(*audit, bench / "run")
    assert "complete" in refused(*audit, bench / "run", "--resume")
    (tmp_path / "notes").write_text("mine")
    assert "notes" in refused(*audit, "notes")
    assert "notes" in refused(*audit, "notes/run")


# Bad input: scores and reports


def test_a_truth_of_another_dimension(bench: Path, refused: Callable[..., str]) -> None:
    said = refused("score", bench / "run", "--truth", bench / "images" / TRUTH)
    assert "64" in said and "20" in said and TRUTH in said


@pytest.mark.parametrize("truth", ["nowhere.safetensors", f"model/{TRAINED}", f"model/{CARD}"])
def test_a_truth_that_is_none(truth: str, bench: Path, refused: Callable[..., str]) -> None:
    assert truth in refused("score", bench / "run", "--truth", bench / truth)


def test_a_truth_that_is_cut_short(bench: Path, refused: Callable[..., str]) -> None:
    as_bytes(TRUTH, lambda b: b[:-10])(bench / "model")
    assert TRUTH in refused("score", bench / "run", "--truth", bench / "model" / TRUTH)


def test_a_model_that_has_vanished(bench: Path, refused: Callable[..., str]) -> None:
    run = yaml.safe_load((bench / "run" / CONFIG).read_text())
    shutil.move(bench / "model", bench / "moved")
    (bench / "run" / CONFIG).write_text(yaml.safe_dump({**run, "model": str(bench / "model")}))
    said = refused("score", bench / "run", "--truth", bench / "moved" / TRUTH)
    assert str(bench / "model") in said
    assert str(bench / "model") in refused("score", bench / "run")


@pytest.mark.parametrize(
    "file",
    [
        RESULT,
        CANDIDATES,
        pytest.param(CONFIG),
    ],
)
def test_a_run_that_is_not_whole_cannot_be_scored(
    file: str, bench: Path, refused: Callable[..., str]
) -> None:
    (bench / "run" / file).unlink()
    said = refused("score", bench / "run", "--truth", bench / "model" / TRUTH)
    assert file in said or (file == RESULT and "--resume" in said)


@pytest.mark.parametrize("command", ["report", "score"])
def test_a_folder_without_a_run(command: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    for run in ("empty", "nowhere"):
        assert run in refused(command, run)


def test_a_result_that_is_not_json(bench: Path, refused: Callable[..., str]) -> None:
    as_bytes(RESULT, lambda b: b[:-10])(bench / "run")
    assert RESULT in refused("report", bench / "run")
    assert RESULT in refused("score", bench / "run", "--truth", bench / "model" / TRUTH)
