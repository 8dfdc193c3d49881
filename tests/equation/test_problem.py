"""The truth wall: who may import whom is import-linter's, what a problem may hold is here."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import exhume.errors
from exhume.equation.problem import Problem

SOURCE = Path(exhume.errors.__file__).parent
ATTACK = ["auditing", "theory", "methods", "search", "solvers", "equation", "features"]


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


@pytest.mark.parametrize("room", ATTACK)
def test_an_attack_imports_nothing_by_a_name_made_at_run_time(room: str) -> None:
    """import-linter reads imports, and would not see these; a factory alone needs them."""
    texts = [path.read_text() for path in (SOURCE / room).glob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert texts and not names & {"__import__", "import_module", "importlib"}
