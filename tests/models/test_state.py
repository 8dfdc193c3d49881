"""State dicts: every way they are stored, and files that must be refused without running them."""

import argparse
import json
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exhume.errors import InputError
from exhume.files import write_tensors
from exhume.models.state import check_pair, fit_state, read_state


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


STATE: dict[str, Tensor] = network().state_dict()


def assert_same(given: dict[str, Tensor], expected: dict[str, Tensor] = STATE) -> None:
    assert list(given) == list(expected)
    assert all(torch.equal(given[name], expected[name]) for name in expected)


def written(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


class Sneaky(Hostile):
    """The same with builtins only."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"__import__('os').mkdir({str(self.trace)!r})",)


# What can be read


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt", "PT"])
@pytest.mark.parametrize("zipped", [True, False])
def test_bare_state_dicts(tmp_path: Path, suffix: str, zipped: bool) -> None:
    path = tmp_path / f"model.{suffix}"
    assert_same(read_state(written(path, STATE, _use_new_zipfile_serialization=zipped)))


def test_safetensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", STATE)
    assert_same({name: read_state(tmp_path / "x.safetensors")[name] for name in STATE})


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_wrapped_state_dicts(tmp_path: Path, key: str) -> None:
    content = {"epoch": 3, key: STATE, "optimizer": {"state": {}, "lr": 0.1}}
    assert_same(read_state(written(tmp_path / "a.ckpt", content)))
    twice = {"model": {"state_dict": OrderedDict(STATE)}}
    assert_same(read_state(written(tmp_path / "b.ckpt", twice)))


def test_parameters_are_read_as_tensors(tmp_path: Path) -> None:
    content = {"w": nn.Parameter(torch.ones(2))}
    read = read_state(written(tmp_path / "a.pt", content))["w"]
    assert type(read) is Tensor
    assert not read.requires_grad


def test_folders_as_hugging_face_writes_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds neither model.safetensors nor"):
        read_state(tmp_path)
    names = list(STATE)
    shards = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, part in shards.items():
        write_tensors(tmp_path / file, {name: STATE[name] for name in part})
    index = tmp_path / "model.safetensors.index.json"
    files = {name: file for file, part in shards.items() for name in part}
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_same({name: read_state(tmp_path)[name] for name in names})
    write_tensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    assert list(read_state(tmp_path)) == ["w"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is damaged"),
        ('{"weight_map": {"w": 3}}', "is damaged"),
        ('{"weight_map": {"w": "../x.safetensors"}}', "not a file of this folder"),
        ('{"weight_map": {"w": "gone.safetensors"}}', "gone.safetensors: no such file"),
        ('{"weight_map": {"v": "x.safetensors"}}', "holds no tensor 'v'"),
        ('{"weight_map": {}}', "holds no tensors"),
    ],
)
def test_damaged_indices_are_refused(tmp_path: Path, content: str, sentence: str) -> None:
    write_tensors(tmp_path / "x.safetensors", {"w": torch.ones(2)})
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=sentence):
        read_state(tmp_path)


# What must be refused


@pytest.mark.parametrize("kind", [Hostile, Sneaky])
@pytest.mark.parametrize("force", ["0", "1"])
def test_no_code_from_a_file_runs(
    tmp_path: Path, kind: type[Hostile], force: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force)
    trace = tmp_path / "trace"
    hostile = kind(trace)
    content = {"state_dict": STATE, "extra": hostile}
    paths = [
        written(tmp_path / "new.pt", content),
        written(tmp_path / "old.pt", content, _use_new_zipfile_serialization=False),
        tmp_path / "bare2.bin",
        tmp_path / "bare4.bin",
    ]
    paths[2].write_bytes(pickle.dumps(hostile, protocol=2))
    paths[3].write_bytes(pickle.dumps(content, protocol=4))
    for path in paths:
        with pytest.raises(InputError, match=r"torch\.save\(model\.state_dict\(\), …\)") as caught:
            read_state(path)
        assert str(path) in str(caught.value)
        assert not trace.exists()
    for path in paths[:3]:
        with pytest.raises(InputError, match="holds more than tensors"):
            read_state(path)
    pickle.loads(paths[2].read_bytes())  # the file does what it should not, when it is let
    assert trace.exists()


def test_whole_modules_and_other_objects_are_refused(tmp_path: Path) -> None:
    for content in (network(), {"hyper": argparse.Namespace(a=1)}, {"loss": np.float64(1)}):
        with pytest.raises(InputError, match=r"holds more than tensors \("):
            read_state(written(tmp_path / "a.pt", content))


def test_scripts_are_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(tmp_path / "a.pt"))
    with pytest.raises(InputError, match="TorchScript archive"):
        read_state(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([torch.ones(2)], "holds a list, expected a dict"),
        (torch.ones(2), "holds a Tensor, expected a dict"),
        ({"w": torch.ones(2), "epoch": 3}, "'epoch' is a int, expected a tensor"),
        ({3: torch.ones(2)}, "entry 3"),
        ({}, "holds no tensors"),
        ({"state_dict": {}}, "holds no tensors"),
        ({"w": torch.ones(2, device="meta")}, "'w' is quantised, sparse"),
        ({"w": torch.eye(2).to_sparse()}, "'w' is quantised, sparse"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_state(written(tmp_path / "a.pt", content))


@pytest.mark.parametrize("name", ["a.pt", "a.ckpt", "a.safetensors"])
@pytest.mark.parametrize(
    "content",
    [b"", b"hello world\n" * 5, b"PK\x03\x04nothing", bytes(range(256)), b"\x80\x02}q\x00."],
)
def test_garbage_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name) as caught:
        read_state(tmp_path / name)
    assert "weights_only" not in str(caught.value)  # torch's advice would be to run it


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 0.999), zipped=st.booleans())
def test_truncated_files_are_refused(
    tmp_path_factory: pytest.TempPathFactory, share: float, zipped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "truncated.pt"
    written(path, STATE, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(InputError, match=r"truncated.pt"):
        read_state(path)


def test_other_archives_and_names_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(InputError, match=r"cannot be read as what torch.save writes"):
        read_state(tmp_path / "a.pt")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({}))
    with pytest.raises(InputError, match=r"expected one of .safetensors, .pt"):
        read_state(tmp_path / "a.pkl")
    with pytest.raises(InputError, match="no such file"):
        read_state(tmp_path / "b.pt")


# Fitting to a model


def test_a_state_fits_its_own_model() -> None:
    fitted = fit_state(STATE, network(1), "a.pt")
    assert_same(fitted)
    network(1).load_state_dict(fitted)


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.", "model.module."],
)
def test_prefixes_of_wrappers_are_dropped(prefix: str) -> None:
    wrapped = {f"{prefix}{name}": tensor for name, tensor in STATE.items()}
    assert_same(fit_state(wrapped, network(), "a.pt"))


def test_compiled_parts_are_found() -> None:
    inside = {
        name.replace("0.", "0._orig_mod.", 1) if name.startswith("0.") else name: tensor
        for name, tensor in STATE.items()
    }
    assert_same(fit_state(inside, network(), "a.pt"))


def test_prefixes_that_belong_to_the_model_stay() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

    state = Wrapped().state_dict()
    assert all(name.startswith("model.") for name in state)
    assert_same(fit_state(state, Wrapped(), "a.ckpt"), state)
    lightning = {f"model.{name}": tensor for name, tensor in state.items()}
    assert_same(fit_state(lightning, Wrapped(), "a.ckpt"), state)


def test_counters_of_batches_may_be_missing() -> None:
    name = "1.num_batches_tracked"
    fitted = fit_state({n: x for n, x in STATE.items() if n != name}, network(), "a.pt")
    assert list(fitted) == list(STATE)
    assert fitted[name] == 0


def test_tied_weights_may_be_stored_once() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3)))
    model.b.weight = model.a.weight
    for kept in ("a.weight", "b.weight"):
        state = {n: x for n, x in model.state_dict().items() if "bias" in n or n == kept}
        assert_same(fit_state(state, model, "a.safetensors"), model.state_dict())


def test_precisions() -> None:
    half = {n: x.half() if x.is_floating_point() else x for n, x in STATE.items()}
    brain = {n: x.bfloat16() if x.is_floating_point() else x for n, x in STATE.items()}
    double = {n: x.double() if x.is_floating_point() else x for n, x in STATE.items()}
    for state, expected in ((half, torch.float32), (brain, torch.float32), (double, torch.float64)):
        fitted = fit_state(state, network(), "a.pt")
        assert fitted["0.weight"].dtype == expected
        assert fitted["1.num_batches_tracked"].dtype == torch.int64
        assert torch.equal(fitted["0.weight"], state["0.weight"].to(expected))


def test_another_architecture_is_refused_with_names_and_shapes() -> None:
    changed = {**STATE, "4.weight": torch.ones(7), "0.weight": torch.ones(5, 3)}
    del changed["3.bias"]
    with pytest.raises(InputError) as caught:
        fit_state(changed, network(), "a.pt")
    assert str(caught.value) == (
        "a.pt: the checkpoint is of another architecture than the factory's model; missing: "
        "3.bias (2,); unexpected: 4.weight (7,); of another shape: 0.weight, expected (4, 3), "
        "found (5, 3). Name the factory, and its arguments, of the model that was trained."
    )
    with pytest.raises(InputError, match=r"and 7 more"):
        fit_state({}, nn.Sequential(network(), nn.Linear(2, 2)), "a.pt")
    wrapped = {f"module.{name}": tensor for name, tensor in changed.items()}
    with pytest.raises(InputError, match=r"missing: 3.bias \(2,\); unexpected: 4.weight"):
        fit_state(wrapped, network(), "a.pt")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_damaged_values_are_refused(bad: float) -> None:
    damaged = STATE["0.weight"].clone()
    damaged[1, 2] = bad
    with pytest.raises(InputError, match=r"a.pt: tensor '0.weight' holds NaN or infinite"):
        fit_state({**STATE, "0.weight": damaged}, network(), "a.pt")


def test_numbers_of_another_kind_are_refused() -> None:
    for name, tensor in (
        ("0.weight", STATE["0.weight"].to(torch.int8)),
        ("0.weight", STATE["0.weight"].to(torch.complex64)),
        ("1.num_batches_tracked", torch.tensor(1.5)),
    ):
        with pytest.raises(InputError, match=f"tensor '{name}' is {tensor.dtype}"):
            fit_state({**STATE, name: tensor}, network(), "a.pt")


# Pairs


def test_pairs_before_and_after_training() -> None:
    trained = network(1).state_dict()
    check_pair(STATE, trained)
    only_one = {**STATE, "3.bias": STATE["3.bias"] + 1e-3}
    check_pair(STATE, only_one)
    check_pair(STATE, {n: x.double() * (1 + 1e-12) for n, x in STATE.items()})
    with pytest.raises(InputError, match=r"a.pt and b.pt: nothing was trained: the two files hold"):
        check_pair(STATE, {n: x.clone() for n, x in STATE.items()}, "a.pt", "b.pt")
    with pytest.raises(InputError, match=r"'3.bias' is in a.pt only"):
        check_pair(STATE, {n: x for n, x in STATE.items() if n != "3.bias"}, "a.pt", "b.pt")
    with pytest.raises(InputError, match=r"'extra' is in b.pt only"):
        check_pair(STATE, {**STATE, "extra": torch.ones(1)}, "a.pt", "b.pt")
    with pytest.raises(InputError, match=r"'3.bias' has shape \(2,\) in the first and \(3,\)"):
        check_pair(STATE, {**STATE, "3.bias": torch.ones(3)}, "a.pt", "b.pt")
