"""The truth wall: nothing that attacks can reach the data, the victims or the evaluation."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import exhume.equation.problem
from exhume.equation.problem import Problem

SOURCE = Path(exhume.equation.problem.__file__).parent
WALLED = [
    "problem",
    "objective",
    "coefficients",
    "domain",
    "features",
    "solvers",
    "search",
    "methods",
    "auditing",
    "run_folder",
    "data_card",
    "evidence",
    "checkpoint",
    "architectures",
    "network",
    "prepare",
    "formulation",
    "premises",
    "theory",
    "state",
    "files",
    "device",
]
FORBIDDEN = {"exhume.evaluate", "exhume.victims", "exhume.data"}


def modules(folder: Path, package: str) -> dict[str, Path]:
    """Every module of a package, by its name."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join((package, *parts))] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file names in any import, also under TYPE_CHECKING.

    `from exhume import data` is exhume.data; `import exhume`, which would reach everything through
    its attributes, is exhume itself; the version is no module.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            absolute = ".".join([*base, *filter(None, [node.module])])
            origin = absolute if node.level else node.module or ""
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                if alias.name != "__version__":
                    found.add(inner if inner in known else origin)
    return {module for module in found if module in known}


def reached(name: str, known: dict[str, Path], root: str) -> set[str]:
    """Everything that a module imports, however indirectly.

    A submodule's packages are imported with it, except the root: it offers all names to the user,
    so it reaches everything by design, and no module inside may import it by name.
    """
    seen: set[str] = set()
    todo = [name]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        if module == root:
            continue
        todo += imports(module, known[module], known)
        parent = module.rpartition(".")[0]
        if parent != root:
            todo.append(parent)
    return seen


KNOWN = modules(SOURCE, "exhume")


def inside(name: str) -> list[str]:
    prefix = f"exhume.{name}"
    return [module for module in KNOWN if module == prefix or module.startswith(f"{prefix}.")]


@pytest.mark.parametrize("module", [module for name in WALLED for module in inside(name)])
def test_an_attack_cannot_reach_the_truth(module: str) -> None:
    everything = reached(module, KNOWN, "exhume")
    assert "exhume" not in everything, "imports the whole package, and the truth with it"
    breaches = {m for m in everything if ".".join(m.split(".")[:2]) in FORBIDDEN}
    assert not breaches


@pytest.mark.parametrize("module", [module for name in WALLED for module in inside(name)])
def test_an_attack_imports_nothing_by_a_name_made_at_run_time(module: str) -> None:
    names = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(ast.parse(KNOWN[module].read_text()))
        if isinstance(node, ast.Name | ast.Attribute)
    }
    assert not names & {"__import__", "import_module", "importlib"}


def test_nor_can_the_factory_though_it_imports_what_the_user_names() -> None:
    everything = reached("exhume.models.factory", KNOWN, "exhume")
    assert not {m for m in everything if ".".join(m.split(".")[:2]) in FORBIDDEN}


def test_every_walled_name_exists() -> None:
    assert all(inside(name) for name in WALLED)


def test_the_wall_would_notice(tmp_path: Path) -> None:
    assert "exhume.data" in reached("exhume.evaluate.scoring", KNOWN, "exhume")
    for name, text in {
        "__init__": "from . import truth",
        "truth": "",
        "middle": "def late():\n    from .truth import answer",
        "attack/__init__": "from pkg import middle",
        "attack/deep": "import math",
        "attack/lazy": "import pkg",
        "attack/relative": "from ..truth import answer",
        "clean": "from pkg.other import x",
        "other": "from typing import Any",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    known = modules(tmp_path, "pkg")
    for module in ("middle", "attack", "attack.deep", "attack.relative"):
        assert "pkg.truth" in reached(f"pkg.{module}", known, "pkg")
    assert "pkg" in reached("pkg.attack.lazy", known, "pkg")
    assert reached("pkg.clean", known, "pkg") == {"pkg.clean", "pkg.other"}


def test_a_problem_has_no_field_that_could_hold_the_truth() -> None:
    assert {field.name for field in fields(Problem)} == {
        "target",
        "features",
        "threat_model",
        "shape",
        "domain",
        "display",
        "resolution",
        "drift",
        "first_layer",
        "premise",
    }
