"""How commands may be written, their help, and what cannot be parsed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import exhume
from commands import exhume_
from exhume.auditing.folder import CANDIDATES, CONFIG
from exhume.auditing.settings import Settings
from exhume.cli import main
from exhume.methods import METHODS
from exhume.models.folder import CARD, INITIAL

Capture = pytest.CaptureFixture[str]

COMMANDS = ["victim", "audit", "score", "gate", "report", "identify", "bound", "law", "reproduce"]
COMMANDS += ["demo", "bench"]


def config_of(run: Path) -> dict[str, object]:
    config = yaml.safe_load((run / CONFIG).read_text())
    return {word: value for word, value in config.items() if value is not None}


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_every_command_has_help(command: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        exhume_(*command, "--help")
    said = capsys.readouterr().out
    assert said.startswith("usage: exhume")
    assert command or all(name in said for name in COMMANDS)


def test_the_options_of_an_audit_are_the_settings(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        exhume_("audit", "--help")
    said = " ".join(capsys.readouterr().out.split())
    told = ("passes over the features' derivative", "such as 3,32,32", *METHODS)
    assert all(f"--{name} " in said for name in Settings.__dataclass_fields__)
    assert all(words in said for words in told)
    with pytest.raises(SystemExit):
        exhume_("audit", "folder", "--samples", 3, "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["model"], printed["samples"], printed["device"]) == ("folder", 3, "auto")


def test_the_version_is_told(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["exhume", "--version"])
    for words in (["--version"], None):  # those of the shell are the default
        with pytest.raises(SystemExit, match=r"^0$"):
            main(words)
        assert exhume.__version__ in capsys.readouterr().out


def test_the_version_is_told_without_torch() -> None:
    told = "import sys; sys.argv[1:] = ['--version']; import runpy"
    told += "\ntry: runpy.run_module('exhume', run_name='__main__')"
    told += "\nexcept SystemExit: print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["exhume", exhume.__version__, "False"]


@pytest.mark.parametrize(
    "words", ["--product-limit 3 @", "--model @ --product_limit=3", "@ --product-limit=3"]
)
def test_words_may_stand_anywhere_with_dashes(words: str, workshop: Path, tmp_path: Path) -> None:
    model, out = str(workshop / "model"), tmp_path / "a-b"
    exhume_("audit", *words.replace("@", model).split(), "--out", out)
    assert (config_of(out)["model"], config_of(out)["product_limit"]) == (model, 3)


STORED = ("--store", "--store true", "--store=true", "--store --seed 3", "--data-seed 3 --store")


@pytest.mark.parametrize(
    ("words", "stored"), [("", False), ("--store false", False), *((x, True) for x in STORED)]
)
def test_switch_and_odd_folder(words: str, stored: bool, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "grün-√ a[b]c[" / "b]"  # markup, were it not escaped
    exhume_("victim", "sphere", "--dim", 5, "--samples", 2, *words.split(), "--out", out)
    assert (out / INITIAL).exists() == stored
    assert f"{out}: " in capsys.readouterr().out


def test_classes_are_chosen_by_a_list_or_a_word(tmp_path: Path) -> None:
    for classes, outputs in {"[3,8]": 1, "[1,2,3]": 3, "parity": 1, "all": 10}.items():
        out = tmp_path / classes
        exhume_("victim", "digits", "--samples", 20, "--classes", classes, "--out", out)
        assert json.loads((out / CARD).read_text())["outputs"] == outputs


def test_a_config_file_stands_for_options(workshop: Path, tmp_path: Path) -> None:
    asked = {"model": str(workshop / "model"), "samples": 4, "seed": 3, "device": "cpu"}
    asked["controls"] = False
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(asked))
    exhume_("audit", "--config", tmp_path / "audit.yaml", "--out", tmp_path / "a")
    exhume_("audit", "--config", tmp_path / "audit.yaml", "--seed", 5, "--out", tmp_path / "b")
    assert config_of(tmp_path / "a") == {**asked, "method": "exhume"}
    assert config_of(tmp_path / "b")["seed"] == 5
    exhume_("audit", "--config", workshop / "run" / CONFIG, "--out", tmp_path / "again")
    one, other = (load_file(run / CANDIDATES) for run in (workshop / "run", tmp_path / "again"))
    assert torch.equal(one["samples"], other["samples"])


WRONG = {
    "": {"": "subcommand", "dig": "dig", "bench": "subcommand", "victim": "data",
         "audit --config nowhere.yaml": "nowhere.yaml"},
    "victim digits": {"--samples many": "samples", "--loss hinge": "hinge",
                      "--classes odd": "classes", "--ratio nan": "ratio"},
    "audit model": {"other": "other", "--speed 3": "--speed", "--resume maybe": "maybe",
                    "--time-limit nan": "time_limit", "--product-limit 2.5": "product_limit",
                    "--rank most": "rank", "--point middle": "middle",
                    "--arguments 3": "arguments", "--input-shape a,b": "input_shape"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "named"),
    [(f"{name} {words}", named) for name, cases in WRONG.items() for words, named in cases.items()],
)
def test_a_wrong_command_line_is_explained(
    command: str, named: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        exhume_(*command.split())
    said = capsys.readouterr().err
    assert said.startswith("exhume: ") and named in said and said.count("\n") == 1
    assert re.search(r"; exhume [a-z ]*--help says", said)
    assert list(tmp_path.iterdir()) == []
