"""Models from outside: written and saved as users do, audited as they are, or refused in words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import odd_modules
from commands import exhume_
from exhume import data
from exhume.auditing.folder import CANDIDATES, CONFIG, RESULT
from exhume.cli.main import main
from exhume.features.network import moved
from lazy import Lazy

NETS = odd_modules.__file__  # a user's own file: nothing in it knows of exhume
MLP = ("--input-shape", 16, "--norm", "sqrt_d", "--samples", 3)
SINGLE = (torch.device("cpu"), torch.float32)
ENDS = ("initial.safetensors", "trained.pt")
TANSLEY, SHORT = ("--method", "tansley2026"), ("--samples", 3, "--product-limit", 1, "--anyway")


@pytest.fixture(scope="module")
def known() -> Lazy:
    return Lazy(odd_modules.wide, (16,))


@pytest.fixture(scope="module")
def desk(known: Lazy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: weights before (safetensors) and after (.pt) training, and the truth."""
    folder = tmp_path_factory.mktemp("desk")
    data.save(known.truth, folder / "truth.safetensors")
    pairs = {"wide": (known.initial, known.trained)}
    for make in (odd_modules.transformer, odd_modules.convolutional, odd_modules.headless):
        state = make().state_dict()
        changed = {name: 1.01 * w for name, w in state.items() if w.is_floating_point()}
        pairs[make.__name__] = (state, state | changed)
    for name, states in pairs.items():
        before, after = (moved(state, *SINGLE) for state in states)
        save_file(before, folder / f"{name}.{ENDS[0]}")
        torch.save({"model_state_dict": after}, folder / f"{name}.{ENDS[1]}")
    return folder


class Desk:
    def __init__(self, known: Lazy, folder: Path, out: Path, capsys: Any) -> None:
        self.known, self.folder, self.out, self.capsys = known, folder, out, capsys
        self.before, self.after = (moved(x, *SINGLE) for x in (known.initial, known.trained))

    def audit(self, name: str, *more: object, **files: object) -> str:
        initial, trained = (f"{self.folder / name}.{end}" for end in ENDS)
        named = {"initial": initial, "trained": trained, **files}
        weights = [word for key, file in named.items() if file for word in (f"--{key}", file)]
        always = ("--model", f"{NETS}:{name}", "--out", self.out, "--device", "cpu")
        self.capsys.readouterr()
        exhume_("audit", *always, *weights, *more)
        return self.capsys.readouterr().out

    def refused(self, name: str, *more: object, **files: object) -> str:
        with pytest.raises(SystemExit) as ending:
            self.audit(name, *more, **files)
        said = self.capsys.readouterr().err
        assert ending.value.code == 2 and not self.out.exists()
        assert said.startswith("exhume: ") and "Traceback" not in said
        return said

    @property
    def result(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.out / RESULT).read_text())
        return record

    @property
    def samples(self) -> Tensor:
        return load_file(self.out / CANDIDATES)["samples"]

    def distance(self) -> float:
        return self.known.error(self.samples)


@pytest.fixture
def at(known: Lazy, desk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(known, desk, tmp_path / "run", capsys)


def test_a_transformer_is_audited_as_it_is(at: Desk) -> None:
    said = at.audit("transformer", "--input-shape", "4,8", *SHORT)
    assert "LayerNorm" in said and "Attention" in said and "Dropout" in said
    result = at.result
    assert result["prepared"]["derivative_error"] < 1e-6
    dropout, few = result["prepared"]["warnings"]
    assert "Dropout" in dropout and "too few" in few
    assert (result["parameters"], result["point"], result["rank"]) == ("last", "midpoint", None)
    assert result["problem"]["width"] == 8 and result["problem"]["outputs"] == 3
    assert any("norm √d" in phrase for phrase in result["threat_model"]["assumes"])
    assert at.samples.shape == (3, 32) and 0 < result["residual"] < 1
    assert (at.out / "report.html").exists()
    at.out = at.out.with_name("block")
    block = ("--parameters", "encoder.layers.1.*,head.*", "--point", "initial")
    at.audit("transformer", "--input-shape", "4,8", *SHORT, *block)
    assert (at.result["parameters"], at.result["point"]) == (block[1], "initial")
    assert at.result["problem"]["outputs"] == 1


def test_a_convolutional_network_is_audited_with_a_warning(at: Desk, tmp_path: Path) -> None:
    card = tmp_path / "card.yaml"
    card.write_text("shape: [1, 8, 8]\nrange: [0, 1]\nmean: 0.5\nstd: 0.5\nclasses: 3\n")
    said = at.audit("convolutional", "--card", card, *SHORT)
    assert "in-place" in said and "warning: BatchNorm in 1, 6 uses" in said
    assert at.result["problem"]["domain"] == "box [-1, 1]"
    assert at.samples.abs().max() <= 1 + 1e-6
    assert at.result["display"] == {"shift": 0.5, "scale": 0.5}
    knows = at.result["threat_model"]["knows"]
    assert {"the range of the pixels (0 to 1)", "the number of classes"} <= set(knows)


def test_a_network_without_a_linear_layer_is_audited_as_a_whole(at: Desk) -> None:
    shape = ("--input-shape", "1,8,8", *SHORT)
    assert "--parameters all" in at.refused("headless", *shape)
    said = at.refused("headless", *shape, "--parameters", "all", initial=None)
    assert "All initial weights unlock" in said and "last layer" not in said
    assert "no last linear layer" in at.audit("headless", *shape, "--parameters", "all")
    assert at.result["problem"]["width"] == 4 * 9 + 4 + 3 * 4 + 3
    main(["bound", f"{NETS}:headless", "--trained", f"{at.folder}/headless.trained.pt", *shape[:2]])
    assert "2.weight" in at.capsys.readouterr().out


def test_a_dense_network_gives_its_samples_back(at: Desk) -> None:
    at.audit("wide", *MLP)
    assert at.distance() < 1e-2
    score = ["score", str(at.out), "--truth", str(at.folder / "truth.safetensors")]
    main(score)
    assert "give --model" in at.capsys.readouterr().out
    main([*score, "--model", yaml.safe_load((at.out / CONFIG).read_text())["model"]])
    assert "floor with features at: initial" in at.capsys.readouterr().out
    record = json.loads((at.out / "score.json").read_text())
    assert record["score"]["recovered"] == 1 and set(record["floors"]) >= {"final", "midpoint"}
    with pytest.raises(SystemExit):
        main(["score", str(at.out)])
    assert "--truth" in at.capsys.readouterr().err


UNLOCKS = (
    "4.weight unlocks exhume and iurada2025 / 4.weight and 1.weight unlock tansley2026 / "
    "midpoint / zero-head / --premise margin / --premise decay"
)


@pytest.mark.parametrize(
    ("name", "more", "kept", "words"),
    [
        ("wide", [], "all", "shape of one input / card"),
        ("wide", ["--input-shape", 15], "all", "15 / mend the shape"),
        ("wide", ["--input-shape", 16, "--classes", 10], "all", "10 classes / 1 outputs"),
        ("wide", ["--input-shape", 16, "--arguments", '{"depth": 2}'], "all", "depth / takes"),
        ("wide", [*MLP, "--parameters", "heads.*"], "all", "heads.* / 4.weight"),
        ("wide", ["--input-shape", 16], "all", "rows of 16 numbers / --range / --norm"),
        ("convolutional", ["--input-shape", "1,8,8", *TANSLEY], "all", "dense first layer / 'exh"),
        ("resnet", ["--input-shape", 16], "4.weight", "no 'resnet' / Written"),
        ("wide", MLP, None, UNLOCKS),
        ("wide", [*MLP, "--point", "midpoint"], "4.weight", "1.weight / 'midpoint'"),
        ("wide", [*MLP, "--parameters", "first"], "4.weight", "1.weight / 'first'"),
        ("wide", [*MLP, *TANSLEY, "--rank", 3], "4.weight", "first layer"),
        ("wide", MLP, "1.weight", "4.weight / unlock"),
    ],
    ids=str,
)
def test_what_cannot_be_audited_and_what_initial_weights_would_unlock_is_said(
    name: str, more: list[object], kept: str | None, words: str, at: Desk
) -> None:
    some = at.out.with_name("some.safetensors")
    files: dict[str, object] = {} if kept == "all" else {"initial": kept and some}
    if kept in at.before:
        save_file({kept: at.before[kept]}, some)
    if name == "resnet":
        files["trained"] = at.folder / "wide.trained.pt"
    said = at.refused(name, *more, **files)
    assert all(word in said for word in words.split(" / "))


def test_half_precision_is_enough_where_much_changed(at: Desk, tmp_path: Path) -> None:
    before, after = ({n: w.bfloat16() for n, w in part.items()} for part in (at.before, at.after))
    files = {"initial": tmp_path / "before.safetensors", "trained": tmp_path / "after.pt"}
    save_file(before, files["initial"])
    torch.save({name: (1 + 2**-7) * w for name, w in before.items()}, files["trained"])
    said = at.refused("wide", *MLP, **files)
    assert "bfloat16" in said and "more digits" in said
    torch.save(after, files["trained"])
    assert "stored in bfloat16" in at.audit("wide", *MLP, **files)
    assert at.distance() < 0.1


def test_the_head_will_do_and_the_first_layer_opens_the_subspace(at: Desk, tmp_path: Path) -> None:
    some = tmp_path / "some.safetensors"
    save_file({"module.4.weight": at.before["4.weight"]}, some)
    said = at.audit("wide", *MLP, initial=some)
    assert "warning: Initial weights of" in said and "1.weight" in said
    assert at.result["point"] == "final" and at.distance() < 0.05
    assert "some of the initial weights" in at.result["threat_model"]["knows"]
    save_file({name: at.before[name] for name in ("1.weight", "4.weight")}, some)
    at.out = tmp_path / "subspace"
    at.audit("wide", *MLP, *TANSLEY, initial=some)
    assert at.result["rank"] == 3 and at.distance() < 0.05


def test_a_linear_probe_needs_no_initial_weights(at: Desk, tmp_path: Path) -> None:
    x, y = at.known.truth.inputs.float(), at.known.truth.targets.float()
    hidden = (x @ at.after["1.weight"].T + at.after["1.bias"]).relu()
    head = torch.linalg.lstsq(hidden, y, driver="gelsd").solution.T
    probe = {**at.after, "4.weight": head.contiguous(), "4.bias": torch.zeros(1)}
    torch.save(probe, tmp_path / "probe.pt")
    at.audit("wide", *MLP, initial="zero-head", trained=tmp_path / "probe.pt")
    assert at.result["outcome"] == "converged" and at.distance() < 1e-3
    assert "the initial weights" not in at.result["threat_model"]["knows"]
    assert "zero" in at.result["threat_model"]["assumes"][0]
    assert "initial: zero-head" in (at.out / CONFIG).read_text()
    at.out = tmp_path / "refused"
    said = at.refused("wide", *MLP, "--parameters", "all", initial="zero-head")
    assert "zero-head" in said and "leave out" in said
    at.audit("wide", *MLP, "--premise", "decay", *SHORT, initial=None)
    assert (at.result["premise"], at.result["parameters"]) == ("decay", "all")
