"""`protos/check.py` on copies of the contract with one fault each."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[2] / "protos"
WORKER_LINK = Path("equipoise_api/v1/worker_link.proto")


@pytest.fixture(scope="module")
def check():
    sys.path.insert(0, str(PROTOS))
    try:
        spec = importlib.util.spec_from_file_location("check", PROTOS / "check.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(PROTOS))


@pytest.fixture
def copy(tmp_path):
    return Path(
        shutil.copytree(
            PROTOS, tmp_path / "protos", ignore=shutil.ignore_patterns("__pycache__", "*.py[co]")
        )
    )


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new))


def test_the_committed_contract_is_valid(check, capsys):
    assert check.main() == 0
    assert "5 .proto files" in capsys.readouterr().out


def test_a_stub_that_differs_from_its_proto_is_named_with_the_remedy(check, copy):
    edit(copy / WORKER_LINK, "uint32 slot = 2;", "uint32 slot = 2;\n  // New.\n  bool near = 9;")
    faults = check.stale_stubs(copy)
    assert {fault.partition(":")[0] for fault in faults} == {
        "equipoise_api/v1/worker_link_pb2.py",
        "equipoise_api/v1/worker_link_pb2.pyi",
    }
    assert all("run `make protos`" in fault for fault in faults)
    assert check.style_faults(copy) == []
    assert check.breaking_changes(copy) == []


def test_a_missing_stub_and_an_orphaned_one_are_named(check, copy):
    (copy / "equipoise_api/v1/worker_pb2.pyi").unlink()
    (copy / "equipoise_api/v1/former_pb2.py").touch()
    assert [fault.rpartition(": ")[0] for fault in check.stale_stubs(copy)] == [
        "equipoise_api/v1/former_pb2.py: no .proto file generates this stub",
        "equipoise_api/v1/worker_pb2.pyi: the stub is missing",
    ]


def test_a_proto_that_does_not_compile_is_named_with_its_line(check, copy):
    edit(copy / WORKER_LINK, "uint32 slot = 2;", "uint32 slot = two;")
    (fault,) = check.stale_stubs(copy)
    assert "worker_link.proto:" in fault
    assert "field number" in fault


def test_style_is_checked(check, copy):
    edit(copy / WORKER_LINK, "uint32 slot = 2;", "uint32 physicalSlot = 2;")
    (fault,) = check.style_faults(copy)
    assert "physicalSlot" in fault


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("uint32 slot = 2;", "uint64 slot = 2;", '"uint32" to "uint64"'),
        ("uint32 slot = 2;", "uint32 place = 2;", '"slot" to "place"'),
        ("uint32 slot = 2;", "reserved 2;", 'field "2"'),
        ("PHASE_MIXED = 3;", "PHASE_MIXED = 4;", '"3"'),
    ],
)
def test_a_change_that_breaks_a_deployed_peer_is_rejected(check, copy, old, new, named):
    edit(copy / WORKER_LINK, old, new)
    faults = check.breaking_changes(copy)
    assert any(named in fault for fault in faults), faults
    assert all("Deployed peers would break" in fault for fault in faults)
