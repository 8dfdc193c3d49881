"""Factories: the user's own code, found, called and judged."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exhume.errors import InputError
from exhume.models.factory import load_factory

CODE = """
from __future__ import annotations
import sys
from dataclasses import dataclass
import torch
from torch import nn
{extra}

@dataclass
class Config:
    width: int = 3

def Net(width=3): return nn.Sequential(nn.Linear(2, width))
def make(width=3): return torch.manual_seed(1) and Net(Config(width).width)
def needs(width): return Net(width)
def fails(): raise RuntimeError("no weights\\nhere")
def leaves(): sys.exit(3)
def other(): return [Net()]
def _hidden(): return Net()
ready, number = Net(7), 3
"""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("my_", "exhume_factory_")):
            del sys.modules[name]


def write(path: str, extra: str = "") -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(CODE.format(extra=extra))
    return path


def width(spec: str, given: int | None = None) -> int:
    model = load_factory(spec, None if given is None else {"width": given})
    return next(model.parameters()).shape[0]


def test_files_and_modules_with_and_without_arguments() -> None:
    write("folder/model.py")
    write("my_package/inner.py")
    Path("my_package/__init__.py").touch()
    for where in ("folder/model.py", str(Path("folder/model.py").resolve()), "my_package.inner"):
        assert (width(f"{where}:make"), width(f"{where}:ready")) == (3, 7)
        assert (width(f"{where}:needs", 4), width(f"{where}:make", 5)) == (4, 5)
    write("my_model.py")
    assert width("my_model:make") == width("my_model.py:make") == 3


def test_a_file_may_import_its_neighbours_is_read_again_and_leaves_nothing_behind() -> None:
    write("folder/my_neighbour.py")
    write("folder/model.py", "from my_neighbour import Net as Other")
    assert width("folder/model.py:Other") == 3
    write("model.py", "sys.path.insert(0, 'mine'); torch.manual_seed(4)")
    path, state = list(sys.path), torch.get_rng_state()
    assert width("model.py:make") == 3
    with pytest.raises(InputError):
        load_factory("model.py:fails")
    assert sys.path == path and torch.equal(torch.get_rng_state(), state)
    Path("model.py").write_text("from torch import nn\nready = nn.Linear(2, 11)\n")
    assert width("model.py:ready") == 11


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        *((spec, "expected package.module:fac") for spec in ("model.py", ":make", "a:b.c", " :x")),
        ("my_gone:make", "no module 'my_gone', neither installed nor in this folder"),
        ("torch.my_gone:make", "no module 'torch.my_gone'"),
        ("gone.py:make", r"gone\.py: no such file"),
        ("./plain:make", "expected a name in .py"),
        ("..model:make", "cannot be imported"),
        ("model.py:gone", "no 'gone' there; it offers Config, Net, make, needs"),
        ("my_empty.py:gone", "it offers no function or class"),
        ("my_broken:make", "imported; ModuleNotFoundError: No module named 'my_lost'"),
        ("my_syntax:make", "cannot be imported; SyntaxError"),
        ("my_exit.py:make", "cannot be imported; SystemExit: 2"),
        ("model.py:number", "is a int; expected a function or class"),
        ("model.py:needs", r"missing a required argument: 'width'; it takes \(width\), and was"),
        ("model.py:fails", "fails with arguments {}; RuntimeError: no weights"),
        ("model.py:leaves", "fails with arguments {}; SystemExit: 3"),
        ("model.py:other", "returned a list; expected a torch.nn.Module"),
        ("model.py:make depth", "unexpected keyword argument 'depth'"),
        ("model.py:ready width", "is a model already"),
    ],
)
def test_factories_that_make_no_model_are_refused(spec: str, sentence: str) -> None:
    write("model.py")
    write("my_broken.py", "import my_lost")
    Path("my_empty.py").touch()
    Path("plain").touch()
    Path("my_syntax.py").write_text("def make(:\n")
    Path("my_exit.py").write_text("raise SystemExit(2)\n")
    spec, _, argument = spec.partition(" ") if ".py" in spec else (spec, "", "")
    with pytest.raises(InputError, match=sentence) as caught:
        load_factory(spec, {argument: 2} if argument else None)
    assert repr(spec) in str(caught.value) and "\n" not in str(caught.value)
    assert "exhume_factory_my_broken" not in sys.modules
