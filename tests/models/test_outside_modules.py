"""Models from outside: written and saved as users do, audited as they are, or refused in words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from exhume import data
from exhume.auditing.folder import CANDIDATES, CONFIG, RESULT
from exhume.cli.main import main
from exhume.models.factory import load_factory

NETS = '''
"""A user's own file: nothing in it knows of exhume."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, width=16, classes=3):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.positions = nn.Parameter(0.1 * torch.randn(5, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, x, mask=None):
        x = self.encoder(self.embed(x) + self.positions)
        return self.head(self.drop(self.norm(x).mean(dim=1)))


def cnn(channels=4):
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16 * channels, 4)),
    )


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 600), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(600, 1)
    )
'''

MLP = ("--input-shape", 16, "--norm", "sqrt_d", "--samples", 3)
ENDS = ("initial.safetensors", "trained.pt")
TANSLEY, SHORT = ("--method", "tansley2026"), ("--samples", 3, "--product-limit", 1)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: nets.py, and weights before (safetensors) and after (.pt) training."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "nets.py").write_text(NETS)
    known = data.sphere(16, 3)
    data.save(known, folder / "truth.safetensors")
    random = torch.Generator().manual_seed(0)

    def entropy(outputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, torch.arange(3))

    def squares(outputs: Tensor) -> Tensor:
        return (outputs - known.targets.float()).square().mean()

    tasks: dict[str, tuple[Tensor, Callable[[Tensor], Tensor], float, int]] = {
        "Classifier": (torch.randn(3, 5, 4, generator=random), entropy, 0.1, 8),
        "cnn": (torch.rand(3, 1, 8, 8, generator=random), entropy, 0.1, 8),
        "mlp": (known.inputs.float(), squares, 2e-3, 300),
    }
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        for name, (x, loss, rate, steps) in tasks.items():
            model = load_factory(f"{folder / 'nets.py'}:{name}")
            save_file(model.state_dict(), folder / f"{name}.{ENDS[0]}")
            optimiser = torch.optim.SGD(model.parameters(), lr=rate)
            for _ in range(steps):
                optimiser.zero_grad()
                loss(model(x)).backward()
                optimiser.step()
            torch.save({"model_state_dict": model.state_dict()}, folder / f"{name}.{ENDS[1]}")
    return folder


class Desk:
    def __init__(self, folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.out, self.capsys = folder, out, capsys
        self.before = load_file(folder / "mlp.initial.safetensors")
        self.after = torch.load(folder / "mlp.trained.pt", weights_only=True)["model_state_dict"]

    def audit(self, name: str, *more: object, **files: object) -> str:
        initial, trained = (f"{self.folder / name}.{end}" for end in ENDS)
        named = {"initial": initial, "trained": trained, **files}
        weights = [word for key, file in named.items() if file for word in (f"--{key}", file)]
        factory = f"{self.folder / 'nets.py'}:{name}"
        words = ["audit", "--model", factory, *weights, *more, "--out", self.out, "--device", "cpu"]
        self.capsys.readouterr()
        main([str(word) for word in words])
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
        """From a true sample to the nearest candidate at most, over its norm."""
        truth = data.read(self.folder / "truth.safetensors").inputs
        return float(torch.cdist(truth, self.samples).amin(1).max()) / 4


@pytest.fixture
def at(desk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(desk, tmp_path / "run", capsys)


def test_a_transformer_is_audited_as_it_is(at: Desk) -> None:
    said = at.audit("Classifier", "--input-shape", "5,4", *SHORT)
    assert "LayerNorm" in said and "Attention" in said and "Dropout" in said
    result = at.result
    assert result["prepared"]["derivative_error"] < 1e-6
    assert ["Dropout" in warning for warning in result["prepared"]["warnings"]] == [True]
    assert (result["parameters"], result["point"], result["rank"]) == ("last", "midpoint", None)
    assert result["problem"]["width"] == 16 and result["problem"]["outputs"] == 3
    assert any("norm √d" in phrase for phrase in result["threat_model"]["assumes"])
    assert at.samples.shape == (3, 20) and 0 < result["residual"] < 1
    assert (at.out / "report.html").exists()
    at.out = at.out.with_name("block")
    block = ("--parameters", "encoder.layers.1.*,head.*", "--point", "initial")
    at.audit("Classifier", "--input-shape", "5,4", *SHORT, *block)
    assert (at.result["parameters"], at.result["point"]) == (block[1], "initial")
    assert at.result["problem"]["outputs"] == 1


def test_a_convolutional_network_is_audited_with_a_warning(at: Desk, tmp_path: Path) -> None:
    card = tmp_path / "card.yaml"
    card.write_text("shape: [1, 8, 8]\nrange: [0, 1]\nmean: 0.5\nstd: 0.5\nclasses: 4\n")
    said = at.audit("cnn", "--card", card, *SHORT)
    assert "in-place" in said and "warning: BatchNorm in 1 uses" in said
    assert at.result["problem"]["domain"] == "box [-1, 1]"
    assert at.samples.abs().max() <= 1 + 1e-6
    assert at.result["display"] == {"shift": 0.5, "scale": 0.5}
    knows = at.result["threat_model"]["knows"]
    assert {"the range of the pixels (0 to 1)", "the number of classes"} <= set(knows)


def test_a_dense_network_gives_its_samples_back(at: Desk) -> None:
    at.audit("mlp", *MLP)
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


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("mlp", [], "shape of one input / card"),
        ("mlp", ["--input-shape", 15], "15 / mend the shape"),
        ("mlp", ["--input-shape", 16, "--classes", 10], "10 classes / 1 outputs"),
        ("mlp", ["--input-shape", 16, "--arguments", '{"depth": 2}'], "depth / takes"),
        ("mlp", ["--input-shape", 16, "--parameters", "heads.*"], "heads.* / 4.weight"),
        ("resnet", ["--input-shape", 16], "no 'resnet' / Classifier"),
        ("cnn", ["--input-shape", "1,8,8", *TANSLEY], "dense first layer / 'exhume'"),
    ],
    ids=str,
)
def test_what_cannot_be_audited_is_said(
    name: str, more: list[object], words: str, at: Desk
) -> None:
    files = dict.fromkeys(("initial", "trained"), at.folder / "mlp.trained.pt")
    said = at.refused(name, *more, **(files if name == "resnet" else {}))
    assert all(word in said for word in words.split(" / "))


def test_half_precision_is_enough_where_much_changed_and_refused_where_little(
    at: Desk, tmp_path: Path
) -> None:
    before, after = ({n: w.bfloat16() for n, w in part.items()} for part in (at.before, at.after))
    files = {"initial": tmp_path / "before.safetensors", "trained": tmp_path / "after.pt"}
    save_file(before, files["initial"])
    torch.save({name: (1 + 2**-7) * w for name, w in before.items()}, files["trained"])
    said = at.refused("mlp", *MLP, **files)
    assert "bfloat16" in said and "more digits" in said
    torch.save(after, files["trained"])
    assert "stored in bfloat16" in at.audit("mlp", *MLP, **files)
    assert at.distance() < 0.1


def test_the_head_alone_will_do_and_the_first_layer_opens_the_subspace(
    at: Desk, tmp_path: Path
) -> None:
    some = tmp_path / "some.safetensors"
    save_file({"module.4.weight": at.before["4.weight"]}, some)
    said = at.audit("mlp", *MLP, initial=some)
    assert "warning: Initial weights of" in said and "1.weight" in said
    assert at.result["point"] == "final" and at.distance() < 0.05
    assert "some of the initial weights" in at.result["threat_model"]["knows"]
    save_file({name: at.before[name] for name in ("1.weight", "4.weight")}, some)
    at.out = tmp_path / "subspace"
    at.audit("mlp", *MLP, *TANSLEY, initial=some)
    assert at.result["rank"] == 3 and at.distance() < 0.05


UNLOCKS = (
    "4.weight unlocks exhume and iurada2025 / 4.weight and 1.weight unlock tansley2026 / "
    "midpoint / zero-head / --premise margin / --premise decay"
)


@pytest.mark.parametrize(
    ("kept", "more", "words"),
    [
        (None, [], UNLOCKS),
        ("4.weight", ["--point", "midpoint"], "1.weight / 'midpoint'"),
        ("4.weight", ["--parameters", "first"], "1.weight / 'first'"),
        ("4.weight", [*TANSLEY, "--rank", 3], "first layer"),
        ("1.weight", [], "4.weight / unlock"),
    ],
    ids=str,
)
def test_what_missing_initial_weights_would_unlock(
    kept: str | None, more: list[object], words: str, at: Desk, tmp_path: Path
) -> None:
    some = tmp_path / "some.safetensors"
    if kept is not None:
        save_file({kept: at.before[kept]}, some)
    said = at.refused("mlp", *MLP, *more, initial=some if kept else None)
    assert all(word in said for word in words.split(" / "))


def test_a_linear_probe_needs_no_initial_weights(at: Desk, tmp_path: Path) -> None:
    known = data.read(at.folder / "truth.safetensors")
    hidden = (known.inputs.float() @ at.after["1.weight"].T + at.after["1.bias"]).relu()
    head = torch.linalg.lstsq(hidden, known.targets.float(), driver="gelsd").solution.T
    probe = {**at.after, "4.weight": head.contiguous(), "4.bias": torch.zeros(1)}
    torch.save(probe, tmp_path / "probe.pt")
    at.audit("mlp", *MLP, initial="zero-head", trained=tmp_path / "probe.pt")
    assert at.result["outcome"] == "converged" and at.distance() < 1e-3
    assert "the initial weights" not in at.result["threat_model"]["knows"]
    assert "zero" in at.result["threat_model"]["assumes"][0]
    assert "initial: zero-head" in (at.out / CONFIG).read_text()
    at.out = tmp_path / "refused"
    said = at.refused("mlp", *MLP, "--parameters", "all", initial="zero-head")
    assert "zero-head" in said and "leave out" in said
    at.audit("mlp", *MLP, "--premise", "decay", *SHORT, initial=None)
    assert (at.result["premise"], at.result["parameters"]) == ("decay", "all")
