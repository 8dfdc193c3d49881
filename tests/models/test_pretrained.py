"""Models as others save them: output objects, a final log_softmax, prefixes, and whole folders."""

import copy
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from commands import exhume_, result_of
from exhume.errors import InputError
from exhume.features.network import dense_chain
from exhume.models.prepare import prepare
from exhume.models.pretrained import ELSEWHERE, load_pretrained
from exhume.models.state import Saved, fit_state
from odd_modules import Written, candidates, mlp

Patch = pytest.MonkeyPatch
OLD, NEW = "encoder.0.", "layers.0."  # a name in files, and in the module


class Output(dict[str, Any]):
    """An output object as Hugging Face's models return: a mapping with attributes."""

    logits = property(lambda self: self["logits"])


class Classifier(nn.Module):
    """A model as transformers has them: it writes other names to its files than it has itself."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, config.hidden_size)])
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        return Output(loss=None, logits=self.classifier(self.layers[0](pixel_values).tanh()))

    def save_pretrained(self, folder: Path) -> None:
        state = {name.replace(NEW, OLD): x for name, x in self.state_dict().items()}
        config = {"architectures": ["Classifier"], "hidden_size": 40}
        folder.mkdir()
        save_file(state, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))

    @classmethod
    def from_pretrained(cls, folder: str, **told: Any) -> Any:
        assert told["local_files_only"] and not told["trust_remote_code"]
        model = cls(read_config(folder))
        state = load_file(Path(folder, "model.safetensors"))
        state = {name.replace(OLD, NEW): x for name, x in state.items()}
        missing = model.load_state_dict(state, strict=False).missing_keys
        return model, {"missing_keys": set(missing)}


def read_config(folder: str, **_: Any) -> SimpleNamespace:
    return SimpleNamespace(**json.loads(Path(folder, "config.json").read_text()))


@pytest.fixture
def transformers(monkeypatch: Patch) -> None:
    module: Any = ModuleType("transformers")
    module.Classifier, module.Other = Classifier, "no class"
    module.AutoConfig = SimpleNamespace(from_pretrained=read_config)
    quiet = SimpleNamespace(disable_progress_bar=lambda: None)
    module.utils = SimpleNamespace(logging=quiet)
    monkeypatch.setitem(sys.modules, "transformers", module)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model as it was saved before and after a step of training."""
    torch.manual_seed(0)
    model = Classifier(SimpleNamespace(hidden_size=40))
    model.save_pretrained(tmp_path / "before")
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    model(x)["logits"].square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
    model.save_pretrained(tmp_path / "after")
    return tmp_path / "before", tmp_path / "after"


@pytest.mark.usefixtures("transformers")
def test_a_saved_folder_is_audited_at_the_first_attempt(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = folders
    sizes = ("--input-shape", 6, "--norm", "sqrt_d", "--samples", 1, "--product-limit", 2)
    exhume_("audit", after, "--initial", before, *sizes, "--device", "cpu", "--out", tmp_path / "r")
    result = result_of(tmp_path / "r")
    said = "Took the logits out of the Output that forward returns."
    assert said in result["prepared"]["changes"]
    files = [(entry["role"], entry["file"]) for entry in result["inputs"][1:]]
    weights = "model.safetensors"
    assert files == [("model", "config.json"), ("trained", weights), ("initial", weights)]


def test_what_a_folder_lacks_is_not_made_up(
    folders: tuple[Path, Path], transformers: None, monkeypatch: Patch
) -> None:
    before, _ = folders
    state = load_file(before / "model.safetensors")
    some = {name: state[name] for name in state if "bias" not in name}
    save_file(some, before / "model.safetensors")
    model = load_pretrained(before)
    partial = Saved.read(before, "initial").fitted(model, partial=True)
    assert set(partial.tensors) == {"layers.0.weight", "classifier.weight"}
    assert_close(partial.tensors["layers.0.weight"], state["encoder.0.weight"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="another architecture"):  # without the library's names
        Saved.read(before, "initial").fitted(model, partial=True)
    with pytest.raises(InputError, match="install transformers, or name a factory"):
        load_pretrained(before)


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "expected the configuration of a model"),
        ({}, "names no architecture"),
        ({"architectures": ["Nothing"]}, "transformers has no model 'Nothing'"),
        ({"architectures": ["Other"]}, "transformers has no model 'Other'"),
        ({"architectures": ["Classifier"]}, "cannot be made into a model"),
        ({"architecture": "resnet18"}, "install timm"),
    ],
)
def test_configurations_that_make_no_model(
    config: Any, words: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        load_pretrained(tmp_path)


def test_a_folder_of_timm(tmp_path: Path, monkeypatch: Patch) -> None:
    timm: Any = ModuleType("timm")
    asked: dict[str, Any] = {}
    timm.create_model = lambda name, **told: asked.update(told, name=name) or mlp()
    monkeypatch.setitem(sys.modules, "timm", timm)
    config = {"architecture": "tiny", "num_classes": 3, "model_args": {"img_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert isinstance(load_pretrained(tmp_path), nn.Sequential)
    assert asked == {"name": "tiny", "pretrained": False, "num_classes": 3, "img_size": 8}


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "hf-hub:stranger/model"},
        {"architecture": "local-dir:/home"},
        {"num_classes": {"checkpoint_path": "w.pt"}},
        *(
            {"model_args": {key: value}}
            for key, value in {
                **{"checkpoint_path": "w.pt", "pretrained": True, "cache_dir": "/tmp"},
                **{"pretrained_cfg": {"url": "http://a"}, "pretrained_cfg_overlay": "x"},
                **{"norm_layer": {"a": 1}, "layers": [[{}]]},
            }.items()
        ),
        *({"model_args": {}, key: "resnet"} for key in ELSEWHERE),
        {"parts": [{"backbone_config": {"use_pretrained_backbone": True}}]},
    ],
)
def test_a_configuration_has_nothing_fetched(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: Patch
) -> None:
    asked: list[Any] = []
    stub: Any = ModuleType("stub")
    stub.create_model = lambda *names, **told: asked.append((names, told)) or mlp()
    stub.Classifier, stub.AutoConfig = Classifier, SimpleNamespace(from_pretrained=asked.append)
    for name in ("timm", "transformers"):
        monkeypatch.setitem(sys.modules, name, stub)
    named = {"architecture": "tiny"}, {"architectures": ["Classifier"]}
    for config in named if set(changes) & {"parts", *ELSEWHERE} else named[:1]:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(InputError, match=r"config\.json: (has|takes|architecture)"):
            load_pretrained(tmp_path)
    assert not asked


def test_the_hub_is_not_asked(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    seen: list[str] = []

    def imported(name: str) -> Any:
        seen.append(os.environ["HF_HUB_OFFLINE"])  # which the library reads when it is imported
        return SimpleNamespace(create_model=lambda name, **_: mlp())

    monkeypatch.setattr("importlib.import_module", imported)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "tiny", "backbone": None}))
    load_pretrained(tmp_path)
    assert seen == ["1"]


def as_function() -> nn.Module:
    """The end of PyTorch's MNIST example."""
    torch.manual_seed(0)
    return Written(lambda self, x: self.b(self.a(x).tanh()).log_softmax(1), **parts())


def parts() -> dict[str, nn.Module]:
    return {"a": nn.Linear(5, 8), "b": nn.Linear(8, 3)}


def as_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.LogSoftmax(1))


def as_object() -> nn.Module:
    torch.manual_seed(0)
    return Written(lambda self, x: {"logits": self.b(self.a(x).tanh())}, **parts())


@pytest.mark.parametrize("make", [as_function, as_layer, as_object])
def test_a_copy_returns_the_logits_and_says_so(make: Any) -> None:
    model, x = make(), candidates(5).float()
    before = copy.deepcopy(model.state_dict())
    prepared = prepare(model, (5,))
    network, outputs = prepared.network, model(x)
    found = network(before, x)
    if make is as_object:
        assert_close(found, outputs["logits"])
        assert any("Took the logits out of the dict" in change for change in prepared.changes)
    else:
        assert_close(found.log_softmax(1), outputs)
        assert not torch.allclose(found, outputs)
        assert any("Left out the log_softmax after" in change for change in prepared.changes)
    assert set(network.module.state_dict()) == set(before)  # under their own names
    assert network.head in ("b", "2") and network.hidden(before, x).shape == (len(x), 8)
    assert (dense_chain(network) is not None) == (make is as_layer)  # the fast path is kept
    again = copy.deepcopy(network.module)
    assert_close(again(x), network.module(x))
    assert type(model) is not type(network.module) or make is as_layer  # the user's is as it was


def test_the_name_that_a_backbone_has_in_a_model_is_added() -> None:
    inside = Written(lambda self, x: self.head(self.net(x)), net=mlp(), head=nn.Linear(3, 3))
    backbone = fit_state(mlp().state_dict(), inside, "file", partial=True)
    assert set(backbone) == {f"net.{name}" for name in mlp().state_dict()}
