"""The repository itself: its commands, its documents, and what the control plane's image needs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

_IMPORT_WITHOUT_TORCH = """
import sys

class Reject:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "safetensors"}:
            raise ModuleNotFoundError(f"{name} is not in the control plane's image", name=name)

sys.meta_path.insert(0, Reject())
import pkgutil, importlib
import equipoise.cli.main, equipoise.cli.live.status
PACKAGES = "planning wire policy formats telemetry trust pool balancer gateway".split()
for package in map(importlib.import_module, (f"equipoise.{name}" for name in PACKAGES)):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
assert "torch" not in sys.modules
"""


def test_the_control_plane_imports_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_ci_runs_the_test_command_that_the_readme_names_and_then_lint():
    commands = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")
    ]
    assert [command.partition("  #")[0] for command in commands] == [
        "make test",
        "make test-cluster",
        "make lint",
    ]
    assert "make test" in (ROOT / "README.md").read_text()


def test_every_make_target_explains_itself():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE).group(1).split()
    explained = re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE)
    assert sorted(phony) == sorted(explained)


def test_the_files_that_run_first_exist():
    tests = ROOT / "tests"
    source = (tests / "conftest.py").read_text()
    names = re.findall(r'^    "(.+/test_.+[.]py)",$', source, re.MULTILINE)
    assert names
    assert [name for name in names if not (tests / name).exists()] == []


def test_torch_is_pinned_exactly_where_it_is_named():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    assert '"torch==2.13.0"' in (ROOT / "pyproject.toml").read_text()


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "kernels/README.md")),
    *(ROOT / "docs").rglob("*.md"),
]


def test_links_in_the_documents_lead_somewhere():
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken


_FOLDERS = [
    ROOT,
    *(ROOT / name for name in ("docs", "tests", "helm/equipoise")),
    *(ROOT / name for name in ("services/equipoise", "services/equipoise/worker")),
    *(ROOT / "model" / "equipoise_model" / name for name in ("", "checkpoints/tiny")),
    *(ROOT / "kernels" / "equipoise_kernels" / name for name in ("", "fp8")),
    ROOT / "model",
    ROOT / "kernels",
]
"""Folders that paths in a document may start from, besides the document's own."""


def test_files_that_the_documents_name_exist():
    """A path in backquotes that ends in .py or / is one of ours, or a placeholder in capitals."""
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in re.findall(r"`([a-z_0-9.-]+(?:/[a-z_0-9.-]*)+)(?::[^`]*)?`", page.read_text())
        if path.endswith((".py", "/")) and "://" not in path
        if not any((folder / path).exists() for folder in (*_FOLDERS, page.parent))
    ]
    assert not missing


def test_tests_that_the_list_of_faults_selects_exist():
    """A file and words of a test's name in it, `file.py`: words."""
    page = (ROOT / "docs" / "faults.md").read_text()
    pairs = re.findall(
        r"`([a-z0-9_/]+[.]py)`: ([A-Za-z][A-Za-z ]*?)(?= ·| [|]|$)", page, re.MULTILINE
    )
    assert pairs
    missing = [
        f"{file}: {words}"
        for file, words in pairs
        if not re.search(
            rf"def test_\w*{words.lower().replace(' ', '_')}", (ROOT / "tests" / file).read_text()
        )
    ]
    assert not missing


def _names(path):
    """What a file defines: functions, classes, constants, and `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
    return names


def test_functions_that_the_architecture_names_exist():
    """Pairs of a file and a name in it, `file.py:name`; see "The life of a load report"."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    pairs = re.findall(r"`([a-z_0-9/]+[.]py):([A-Za-z_.]+)`", page)
    assert len(pairs) > 30
    missing = [
        f"{file}:{name}"
        for file, name in pairs
        if not any(
            (folder / file).exists() and name in _names(folder / file) for folder in _FOLDERS
        )
    ]
    assert not missing


def test_every_package_has_its_line_in_the_architecture():
    table = (ROOT / "docs" / "architecture.md").read_text()
    inits = (ROOT / "services" / "equipoise").glob("*/__init__.py")
    packages = {path.parent.name for path in inits}
    assert {name for name in packages if f"| `services/equipoise/{name}/` |" not in table} == set()


def test_every_page_of_the_documents_is_linked_from_another():
    pages = [ROOT / "README.md", ROOT / "kernels" / "README.md", *(ROOT / "docs").glob("*.md")]
    linked = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    }
    assert {page.resolve() for page in (ROOT / "docs").glob("*.md")} <= linked
