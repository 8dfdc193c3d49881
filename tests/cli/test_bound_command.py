"""`exhume bound` on sizes, model folders and factories; what it refuses, it refuses at once."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import exhume_
from exhume import data, victims
from exhume.cli.bound import bound
from exhume.errors import InputError
from exhume.models.factory import load_factory
from exhume.theory import counting, privacy, width
from exhume.theory.overview import Sizes, overview

Capture = pytest.CaptureFixture[str]
SIZED, UNSHAPED = {"dim": 8, "samples": 2}, {"model": "pkg.mod:make", "trained": "x.pt"}
WRONG: dict[str, Any] = {"subspace": 9, "activation": "swish", "tolerance": 0.0, "failure": 2.0}
WRONG |= {"rho": -1.0, "delta": 0.1, "trained": "x.pt"}
OUT = Path("bound.json")
SMALL: dict[str, Any] = {"tolerance": 0.5, "separation": 1.1}


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the smallest π in fewer steps: its own tests are elsewhere."""
    monkeypatch.setattr(width, "smallest_hit", partial(width.smallest_hit, starts=2, steps=4))
    monkeypatch.chdir(tmp_path)


def found(**options: Any) -> dict[str, Any]:
    bound(**options, out=OUT)
    return json.loads(OUT.read_text())


def test_sizes_alone(capsys: Capture) -> None:
    record = found(dim=8, samples=3, width=20, outputs=2, subspace=4, rho=2.0, **SMALL)
    assert record["counting"]["thresholds"] == {
        "label fitting": 3,
        "reconstruction in 4 known dimensions": counting.reconstruction(8, 3, 2, 4),
        "reconstruction in the samples' span": counting.reconstruction(8, 3, 2, "span"),
        "reconstruction in full space": counting.reconstruction(8, 3, 2),
    }
    assert record["counting"]["ratios"]["label fitting"] == pytest.approx(20 / 3)
    bounded = width.width_bound(3, 8, "relu", 4, coefficients=(0.1, 1.0), **SMALL)
    assert record["guarantee"]["certified"] == bounded.certified
    assert record["guarantee"]["failure_at_width"] == bounded.failure_at(20)
    assert record["hermite"]["coefficients"][1] == pytest.approx(0.5)
    assert record["hermite"]["sign"]["verdict"] == "weak"
    assert record["privacy"]["error_gaussian"] == privacy.error_bound(2.0, 4)
    assert any("continuum" in sentence for sentence in record["assumptions"])
    printed = capsys.readouterr().out
    for word in ("label fitting", "Hoeffding", "Hermite", "weak", "privacy", "assumptions"):
        assert word in printed


def test_the_verdict_turns_at_the_thresholds() -> None:
    fits, depends = "fits any labels, but has fewer", "depends on whether the attacker knows"
    turns = {4: "too narrow to fit", 5: fits, 24: fits, 25: depends, 39: depends}
    for size, said in {**turns, 40: "counting does not protect"}.items():
        record = overview(Sizes(8, 1, size, None, 5), {})
        assert said in record["counting"]["verdict"]
        assert "guarantee" not in record and "privacy" not in record


def test_no_width_and_rho_from_epsilon_and_delta(capsys: Capture) -> None:
    private = ("--epsilon", 3, "--delta", 1e-5, "--activation", "polynomial:0,0,0,1")
    exhume_("bound", "--dim", 8, "--samples", 5, *private, "--out", OUT)
    record = json.loads(OUT.read_text())
    assert "verdict" not in record["counting"]
    assert record["privacy"]["rho"] == privacy.rho_of(3.0, 1e-5)
    assert any("accountant" in sentence for sentence in record["assumptions"])
    assert "slope" in record["guarantee"]["none"]
    assert record["hermite"]["sign"]["verdict"] == "lost"
    printed = capsys.readouterr().out
    assert "if ε and δ come from that ρ" in printed and "no guarantee" in printed


def test_a_folder_of_random_features(tmp_path: Path) -> None:
    truth = data.sphere(dim=6, samples=3)
    victims.random_features(truth, 40, activation="relu+tanh").save(tmp_path / "model")
    record = found(model="model")
    (block,) = record["blocks"]
    assert block["parameters"] == 40 * truth.outputs
    assert block["samples"] == counting.most_samples(40 * truth.outputs, 6, truth.outputs)
    assert record["hermite"]["sign"]["verdict"] == "determined"
    assert "counting" not in record and "guarantee" not in record
    assert [row["samples"] for row in record["safe_widths"]] == [1, 10, 100, 1000, 10_000]
    assert record["safe_widths"][1]["full_space"] == counting.safe_width(6, 10, truth.outputs)
    with pytest.raises(InputError, match="activation"):
        bound(model="model", activation="tanh")


def test_a_folder_of_a_network(tmp_path: Path, capsys: Capture) -> None:
    victim = victims.two_layer(data.sphere(dim=6, samples=3), 30, activation="tanh", steps=3)
    victim.save(tmp_path / "model")
    record = found(model="model", samples=3, **SMALL)
    sizes = {block["name"]: block["parameters"] for block in record["blocks"]}
    assert [sizes[name] for name in ("first layer", "last layer", "all")] == [180, 30, 210]
    assert (record["sizes"]["width"], record["sizes"]["activation"]) == (30, "tanh")
    assert record["counting"]["thresholds"]["reconstruction in full space"] == 18
    assert [row["samples"] for row in record["safe_widths"]] == [3]
    assert "random features" in record["guarantee"]["none"]
    printed = capsys.readouterr().out
    assert "safe width" in printed and "no guarantee: it is for random features" in printed


OWN = """
from torch import nn
class Net(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.head = nn.Linear(hidden, 3)
        self.body = nn.Linear(8, hidden)
    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())
"""


def test_a_model_of_ones_own_with_its_head_first(tmp_path: Path) -> None:
    Path("own.py").write_text(OWN)
    model, trained = f"{tmp_path}/own.py:Net", "own.pt"
    torch.save(load_factory(model).state_dict(), trained)
    record = found(model=model, trained=trained, input_shape=[2, 4])
    sizes = {block["name"]: block["parameters"] for block in record["blocks"]}
    assert (sizes["last layer"], sizes["all"]) == (36, 36 + 3 + 96 + 12)
    sizes = {key: value for key, value in record["sizes"].items() if value is not None}
    assert sizes == {"dim": 8, "outputs": 3, "width": 12}
    assert "hermite" not in record
    with pytest.raises(InputError, match="another architecture"):
        bound(model, trained, {"hidden": 5}, 8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *((sizes, "dim and samples") for sizes in ({}, {"dim": 8})),
        *(({**SIZED, word: 0}, word) for word in ("dim", "samples", "width", "outputs")),
        *(({**SIZED, word: value}, word) for word, value in WRONG.items()),
        ({**SIZED, "rho": 1.0, "epsilon": 1.0}, "one of them"),
        ({**SIZED, "epsilon": 1.0, "delta": 1.5}, "delta"),
        ({**SIZED, "out": Path("mine")}, "already"), ({"model": "nowhere"}, "no such folder"),
        ({"model": "nowhere", "dim": 8}, "dim"), ({"model": "nowhere", "head": "x"}, "head"),
        ({"model": "pkg.mod:make"}, "is a factory"), (UNSHAPED, "input_shape"),
        ({**UNSHAPED, "input_shape": 8}, "no such file"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_any_work(
    options: dict[str, Any], said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine").touch()
    monkeypatch.setattr(width, "kernel_gap", None)  # a call would fail
    with pytest.raises(InputError, match=said):
        bound(**options)
    assert capsys.readouterr().out == "" and Path("mine").read_bytes() == b""
