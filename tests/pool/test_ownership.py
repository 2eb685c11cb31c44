"""Parts of a pool own their fields: others read them, or call methods."""

import ast
from pathlib import Path

import equipoise.balancer
import equipoise.pool


def assignments_to_others(source):
    """Assignments to attributes of anything but `self`, as text."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for one in ast.walk(target):
                if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store | ast.Del):
                    owner = ast.unparse(one.value)
                    if owner != "self":
                        yield f"{owner}.{one.attr}"


def sources(package):
    return sorted(Path(package.__path__[0]).rglob("*.py"))


def test_no_part_of_a_pool_assigns_a_field_of_another():
    found = [
        f"{file.name}: {target}"
        for file in sources(equipoise.pool)
        for target in assignments_to_others(file.read_text())
    ]
    assert found == []


def test_the_balancer_assigns_no_field_of_a_pool():
    found = [
        f"{file.name}: {target}"
        for file in sources(equipoise.balancer)
        for target in assignments_to_others(file.read_text())
        if "pool." in target
    ]
    assert found == []


def test_such_an_assignment_would_be_found():
    source = "self.mine = 1\npool.layouts.current = None\nother.count += 1\na, b.c = 1, 2"
    assert list(assignments_to_others(source)) == ["pool.layouts.current", "other.count", "b.c"]
