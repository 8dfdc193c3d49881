"""What the package asks for is what it imports: a wheel that lacks a dependency fails elsewhere."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {"scikit-image": "skimage", "scikit-learn": "sklearn", "pillow": "PIL", "pyyaml": "yaml"}


def asked(requirements: list[str]) -> set[str]:
    """The modules that requirements bring, by the names under which they are imported."""
    words = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return {NAMES.get(word, word) for word in words}


def test_every_import_of_the_package_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    allowed = asked([*project["dependencies"], *extras["dask"], *extras["ray"]])
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    brought = {"triton"}  # by torch, where it is built for GPUs; nothing needs it elsewhere
    assert found - sys.stdlib_module_names <= allowed | brought | {"exhume"}
