"""Each object's fields are changed by its own methods only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "services" / "equipoise"
FILES = [path for room in ("pool", "balancer") for path in sorted((ROOT / room).rglob("*.py"))]


def foreign_assignments(source):
    """Assignments to an attribute of what is neither `self` nor made in the same function."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        made = {"self", "cls"} | {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                is_own = isinstance(node.value, ast.Name) and node.value.id in made
                if not is_own:
                    found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_assigns_to_a_field_of_another_object(path):
    assert foreign_assignments(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["pool.revision += 1", "self.pool.hold = hold", "member.rank = None", "del pool.loads"],
)
def test_assignments_to_fields_of_other_objects_are_found(line):
    assert foreign_assignments(f"def change(self, pool, member, hold):\n    {line}\n")


def test_the_revision_of_a_pool_grows_in_one_place():
    grows = [path for path in FILES if "self.revision += 1" in path.read_text()]
    assert grows == [ROOT / "pool" / "pool.py"]
    callers = [path.name for path in FILES if ".note_change()" in path.read_text()]
    assert callers == ["controller.py"]
