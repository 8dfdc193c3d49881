"""Addresses of cells: what they are, and the code that they rest on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import exhume
from exhume.sweep import sources, store
from exhume.sweep.store import address_of
from sweep_cells import Checked, Square


def test_the_address_is_the_content() -> None:
    cell = Square(1.5)
    assert address_of(cell) == address_of(Square(x=1.5, power=2, log=""))
    others = [Square(1.5, 3), Square(1.5000000000000002), Checked(1, "")]
    assert len({address_of(other) for other in [cell, *others]}) == 4
    number = store.identity(cell)["version"].partition("+")[0]
    assert exhume.__version__.startswith(number)


EDITS: dict[str, tuple[str, Callable[[str], str], bool]] = {
    "a comment": ("methods/iurada2025.py", lambda text: "# A comment.\n" + text, False),
    "a docstring": ("report/__init__.py", lambda text: '"""Other."""\n' + text, False),
    "a docstring of a solver": (
        "solvers/levenberg_marquardt.py",
        lambda text: text.replace('"""', '"""So: ', 1),
        False,
    ),
    "a module that it cannot import": ("sweep/driver.py", lambda text: text + "\nX = 1\n", False),
    "the root of the package": ("__init__.py", lambda text: text + "\nX = 1\n", False),
    "code of a method": ("methods/iurada2025.py", lambda text: text + "\nX = 1\n", True),
    "code of a solver": ("solvers/levenberg_marquardt.py", lambda text: text + "\nX = 1\n", True),
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of exhume's sources."""
    folder = tmp_path_factory.mktemp("copy") / "exhume"
    return Path(shutil.copytree(sources.ROOT, folder, ignore=shutil.ignore_patterns("*.pyc")))


@pytest.mark.parametrize("edit", EDITS)
def test_the_code_that_a_cell_can_import_is_in_its_address(edit: str, copied: Path) -> None:
    name, change, counts = EDITS[edit]
    module, file = "exhume.methods", copied / name
    before, text = sources.closure(module, copied), file.read_text()
    file.write_text(change(text))
    try:
        assert (sources.closure(module, copied) != before) == counts
    finally:
        file.write_text(text)


def test_imports_are_followed_wherever_they_stand(tmp_path: Path) -> None:
    texts = {
        "__init__": "from exhume import unused",
        "start": """
            import exhume.plain
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from exhume import unused
            def late():
                from exhume.inner import module, name
                import torch
        """,
        "plain": "from . import sibling",
        "sibling": "import exhume.start",
        "inner/__init__": "from .other import *",
        "inner/module": "",
        "inner/other": "",
        "unused": "",
    }
    (tmp_path / "inner").mkdir()
    for name, text in texts.items():
        lines = [line.removeprefix(" " * 12) for line in text.splitlines()]
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
    names = ("inner", "inner.module", "inner.other", "plain", "sibling", "start")
    assert list(sources.closure("exhume.start", tmp_path)) == [f"exhume.{name}" for name in names]
    # Nobody can tell what a notebook imports.
    assert len(sources.closure("of a notebook", tmp_path)) == len(texts)
    # A cell's own module counts, too.
    assert "sweep_cells" in sources.closure("sweep_cells")
