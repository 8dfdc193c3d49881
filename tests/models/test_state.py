"""State dicts: every way they are stored, and files that must be refused without running them."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
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
from exhume.models.state import check_pair, fit_state, read_state, state_files


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


STATE: dict[str, Tensor] = network().state_dict()
INDEX = "model.safetensors.index.json"


def assert_same(given: dict[str, Tensor], expected: dict[str, Tensor] = STATE) -> None:
    assert sorted(given) == sorted(expected)
    assert all(torch.equal(given[name], expected[name]) for name in expected)


def written(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


BARE = {name: nn.Parameter(w) if "weight" in name else w for name, w in STATE.items()}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        *((suffix, BARE) for suffix in ("pt", "pth", "bin", "ckpt", "PT")),
        *(("pt", {"epoch": 3, key: STATE}) for key in ("state_dict", "model_state_dict", "model")),
        ("ckpt", {"model": {"state_dict": OrderedDict(STATE)}, "optimizer": {"lr": 0.1}}),
    ],
)
def test_bare_and_wrapped_states(tmp_path: Path, suffix: str, content: Any, zipped: bool) -> None:
    file = tmp_path / f"model.{suffix}"
    read = read_state(written(file, content, _use_new_zipfile_serialization=zipped))
    assert_same(read)
    assert all(type(w) is Tensor and not w.requires_grad for w in read.values())


def test_safetensors_and_folders_as_hugging_face_writes_them(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", STATE)
    assert_same(read_state(tmp_path / "x.safetensors"))
    pickled = written(tmp_path / "pytorch_model.bin", {"state_dict": STATE})  # timm's folders
    assert_same(read_state(tmp_path))
    assert state_files(tmp_path) == [pickled]
    written(pickled, {"w": torch.zeros(2)})  # only where there is nothing safer
    names = list(STATE)
    shards = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, part in shards.items():
        write_tensors(tmp_path / file, {name: STATE[name] for name in part})
    files = {name: file for file, part in shards.items() for name in part}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_same(read_state(tmp_path))
    write_tensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    assert list(read_state(tmp_path)) == ["w"]


class Hostile:
    """Makes a folder when it is unpickled, also with builtins only."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("sneaky", [True, False])
@pytest.mark.parametrize("force", ["0", "1"])
def test_no_code_from_a_file_runs(
    tmp_path: Path, sneaky: bool, force: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force)
    trace = tmp_path / "trace"
    code = f"__import__('os').mkdir({str(trace)!r})"
    hostile = Hostile(eval, code) if sneaky else Hostile(os.mkdir, str(trace))
    content = {"state_dict": STATE, "extra": hostile}
    bare, newer = tmp_path / "bare2.bin", tmp_path / "bare4.bin"
    bare.write_bytes(pickle.dumps(hostile, protocol=2))
    newer.write_bytes(pickle.dumps(content, protocol=4))
    old = written(tmp_path / "old.pt", content, _use_new_zipfile_serialization=False)
    for path in (written(tmp_path / "new.pt", content), old, bare, newer):
        with pytest.raises(InputError, match=r"torch\.save\(model\.state_dict\(\), …\)") as caught:
            read_state(path)
        assert str(path) in str(caught.value) and not trace.exists()
        assert path is newer or "holds more than tensors" in str(caught.value)
    pickle.loads(bare.read_bytes())  # the file does what it should not, when it is let
    assert trace.exists()


def saved(content: Any) -> Callable[[Path], Path]:
    return lambda folder: written(folder / "a.pt", content)


def indexed(shards: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_tensors(folder / "x.safetensors", {"w": torch.ones(2)})
        (folder / INDEX).write_text('{"weight_map": ' + shards)
        return folder

    return write


def script(folder: Path) -> Path:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(folder / "a.pt"))
    return folder / "a.pt"


def archive(folder: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(folder / "a.pt", "w", compression) as file:
        file.writestr("a.txt", "hello")
    return folder / "a.pt"


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (saved(network()), r"holds more than tensors \("),
        (saved({"loss": np.float64(1)}), r"holds more than tensors \("),
        (saved([torch.ones(2)]), "holds a list, expected a dict"),
        (saved({"w": torch.ones(2), "epoch": 3}), "'epoch' is a int, expected a tensor"),
        (saved({3: torch.ones(2)}), "entry 3"),
        (saved({}), "holds no tensors"),
        (saved({"w": torch.ones(2, device="meta")}), "'w' is quantised, sparse"),
        (saved({"w": torch.eye(2).to_sparse()}), "'w' is quantised, sparse"),
        (script, "TorchScript archive"),
        (archive, "cannot be read as what torch.save writes"),
        (lambda folder: archive(folder, zipfile.ZIP_DEFLATED), "holds compressed entries"),
        (lambda folder: folder / "b.pt", "no such file"),
        (lambda folder: written(folder / "a.pkl", {}), "expected one of .safetensors, .pt"),
        (lambda folder: folder, "holds none of model.safetensors, pytorch_model.bin,"),
        (indexed("{"), "cannot be read as JSON"),
        (indexed('{"w": 3}}'), "is damaged"),
        (indexed('{"w": "../x.safetensors"}}'), "not a file of this folder"),
        (indexed('{"w": "gone.safetensors"}}'), "gone.safetensors: no such file"),
        (indexed('{"v": "x.safetensors"}}'), "holds no tensor 'v'"),
        (indexed("{}}"), "holds no tensors"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch:FutureWarning", "ignore:`torch:DeprecationWarning")
def test_what_is_no_state_is_refused(
    tmp_path: Path, write: Callable[[Path], Path], sentence: str
) -> None:
    path = write(tmp_path)
    with pytest.raises(InputError, match=sentence):
        read_state(path)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello\n", b"PK\x03\x04no", bytes(9), b"\x80\x02}."])
def test_garbage_is_refused(tmp_path: Path, content: bytes, name: str) -> None:
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
    whole = written(path, STATE, _use_new_zipfile_serialization=zipped).read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(InputError, match=r"truncated.pt"):
        read_state(path)


@pytest.mark.parametrize(
    ("make", "prefix"),
    [
        *(
            (network, prefix)
            for prefix in ("", "module.", "_orig_mod.module.", "a.b.", "l.model.m.")
        ),
        (lambda: nn.Sequential(OrderedDict(model=network())), ""),  # the model's own prefix stays
        (lambda: nn.Sequential(OrderedDict(model=network())), "model."),
    ],
)
def test_a_state_fits_its_model_with_and_without_what_wrappers_add(
    make: Callable[[], nn.Module], prefix: str
) -> None:
    state = make().state_dict()
    fitted = fit_state({f"{prefix}{name}": w for name, w in state.items()}, make(), "a.pt")
    assert list(fitted) == list(state)
    assert_same(fitted, state)
    make().load_state_dict(fitted)


def test_compiled_parts_counters_tied_weights_and_precisions() -> None:
    bare = {name: w for name, w in STATE.items() if "num_batches" not in name}
    inside = {name.replace("0.w", "0._orig_mod.w"): w for name, w in bare.items()}
    fitted = fit_state(inside, network(), "a.pt")
    assert_same(fitted)
    assert fitted["1.num_batches_tracked"] == 0
    model = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3)))
    model.b.weight = model.a.weight
    for kept in ("a.weight", "b.weight"):
        state = {n: x for n, x in model.state_dict().items() if "bias" in n or n == kept}
        assert_same(fit_state(state, model, "a.safetensors"), model.state_dict())
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        state = {n: x.to(kind) if x.is_floating_point() else x for n, x in STATE.items()}
        fitted = fit_state(state, network(), "a.pt")
        expected = torch.float64 if kind == torch.float64 else torch.float32
        assert fitted["0.weight"].dtype == expected
        assert fitted["1.num_batches_tracked"].dtype == torch.int64
        assert torch.equal(fitted["0.weight"], state["0.weight"].to(expected))


CHANGED = {**STATE, "4.weight": torch.ones(7), "0.weight": torch.ones(5, 3)}
del CHANGED["3.bias"]


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (CHANGED, r"a.pt: is of another architecture than .* expected \(4, 3\), found \(5, 3\)"),
        ({f"module.{n}": x for n, x in CHANGED.items()}, r"missing: 3.bias \(2,\); unexpected: 4"),
        ({}, "and 5 more"),
        *(
            ({**STATE, "3.bias": torch.tensor([0, x])}, "'3.bias' holds NaN or infinite")
            for x in (np.nan, np.inf, -np.inf)
        ),
        ({**STATE, "0.weight": STATE["0.weight"].to(torch.int8)}, "'0.weight' is torch.int8"),
        ({**STATE, "1.num_batches_tracked": torch.tensor(1.5)}, "tracked' is torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(state: dict[str, Tensor], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        fit_state(state, network(), "a.pt")


@pytest.mark.parametrize(
    ("trained", "sentence"),
    [
        (network(1).state_dict(), None),
        ({**STATE, "3.bias": STATE["3.bias"] + 1e-3}, None),
        ({n: x.double() * (1 + 1e-12) for n, x in STATE.items()}, None),
        ({n: x.clone() for n, x in STATE.items()}, r"a.pt and b.pt: nothing was trained"),
        ({n: x for n, x in STATE.items() if n != "3.bias"}, r"'3.bias' is in a.pt only"),
        ({**STATE, "extra": torch.ones(1)}, r"'extra' is in b.pt only"),
        ({**STATE, "3.bias": torch.ones(3)}, r"'3.bias' has shape \(2,\) in the first and \(3,\)"),
    ],
)
def test_pairs_before_and_after_training(trained: dict[str, Tensor], sentence: str | None) -> None:
    with nullcontext() if sentence is None else pytest.raises(InputError, match=sentence):
        check_pair(STATE, trained, "a.pt", "b.pt")
