"""Which code a cell rests on: its own module, and all modules of exhume that it can import.

Imports are read from the sources, those inside functions too, and followed from module to module.
Each module counts by its syntax tree without docstrings, so that prose and layout change nothing.
A package that only lies on the way to a module does not count: importing `exhume.a.b` runs
`exhume/a/__init__.py`, but uses no name of it. Imports from elsewhere are not followed.
"""

import ast
import hashlib
import sys
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

from exhume.version import VERSION

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).parents[1]


@cache
def version_of(module: str) -> str:
    """Return the version of exhume with a digest of the code that a module's cells rest on.

    It is such as 0.1.0+1f2e3d4c5b6a. The number alone stays the same while the code changes.
    """
    digests = "".join(f"{name} {digest}\n" for name, digest in closure(module).items())
    digest = hashlib.sha256(digests.encode()).hexdigest()
    return f"{VERSION.partition('+')[0]}+{digest[:12]}"


def closure(module: str, root: Path = ROOT) -> dict[str, str]:
    """Return digests of a module and of all modules of exhume that it can import, by name.

    Args:
        module: where a cell's class is defined. If it has no file, as in a notebook, nobody can
            tell what it imports, and every module of exhume counts.
        root: the folder of exhume.
    """
    waiting = [module]
    if _file(module, root) is None:
        parts = (path.relative_to(root).with_suffix("").parts for path in root.rglob("*.py"))
        waiting = [".".join((PACKAGE, *part)).removesuffix(".__init__") for part in parts]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        file = _file(name, root)
        if name in found or file is None:
            continue
        found[name], imports = _parsed(file.read_text(encoding="utf-8"))
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for base, member in imports:
            base = resolve_name(base, package)
            if base.partition(".")[0] == PACKAGE:
                inner = f"{base}.{member}"
                waiting.append(inner if member and _file(inner, root) else base)
    return dict(sorted(found.items()))


def _file(module: str, root: Path) -> Path | None:
    """Return the file of a module: of exhume by its name, of others if they are imported."""
    package, *parts = module.split(".")
    if package != PACKAGE:
        file = getattr(sys.modules.get(module), "__file__", None)
        return Path(file) if file is not None and Path(file).is_file() else None
    place = root.joinpath(*parts)
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


@cache
def _parsed(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return a digest of a module's code, and its imports as pairs of module and name."""
    reader = _Reader()
    tree = reader.visit(ast.parse(text))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(reader.imports)


class _Reader(ast.NodeTransformer):
    """Collects imports, and takes out bare strings, which are docstrings."""

    def __init__(self) -> None:
        self.imports: list[tuple[str, str]] = []

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        value = node.value
        bare = isinstance(value, ast.Constant) and isinstance(value.value, str)
        return None if bare else node

    def visit_Import(self, node: ast.Import) -> ast.Import:
        self.imports += [(alias.name, "") for alias in node.names]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        base = "." * node.level + (node.module or "")
        self.imports += [(base, alias.name) for alias in node.names]
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        if ast.unparse(node.test) != "TYPE_CHECKING":  # which never runs
            self.generic_visit(node)
        return node
