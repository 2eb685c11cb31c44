"""A policy file that is edited, swapped as a ConfigMap is, broken, taken away and brought back."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from equipoise.balancer import policy_file as policy_file_module
from equipoise.balancer.policy_file import PolicyFile
from equipoise.balancer.readiness import Readiness
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.policy.reading import MAX_BYTES

HEAD = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\n"
WAIT_S = 120.0


class Mount:
    """A folder in which the kubelet keeps a ConfigMap: files behind a link that is swapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._versions = 0
        self.path = folder / "policy.yaml"

    def put(self, interval):
        """A new version of the whole, in place of the old one at one moment."""
        self._versions += 1
        version = self.folder / f"..version-{self._versions}"
        version.mkdir()
        (version / "policy.yaml").write_text(f"{HEAD}defaults: {{interval: {interval}}}")
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self.folder / "..data")
        if not self.path.is_symlink():
            self.path.symlink_to("..data/policy.yaml")


@pytest.fixture
def mount(tmp_path):
    return Mount(tmp_path)


@pytest.fixture
def book():
    return PolicyBook(Policy(), needs_file=True)


@pytest.fixture
def heard():
    return []


@pytest.fixture
def file(mount, book, heard):
    async def hear(reason):
        heard.append(reason)

    return PolicyFile(
        mount.path, book=book, readiness=Readiness(), clock=lambda: 77.0, on_rejection=hear
    )


async def test_every_swap_of_the_mounted_folder_is_seen(mount, book, file):
    for interval in (11, 12, 13):
        mount.put(f"{interval}s")
        await file.look()
        assert book.of("any", None).values.interval_s == interval
    assert book.of("any", None).loaded_s == 77.0


async def test_the_same_contents_are_offered_once(mount, book, file):
    mount.put("11s")
    await file.look()
    revision = book.revision
    mount.put("11s")
    await file.look()
    assert book.revision == revision


async def test_a_wrong_file_is_rejected_once_and_reported(mount, book, file, heard):
    mount.put("11s")
    await file.look()
    mount.put("11")
    await file.look()
    await file.look()
    assert book.of("any", None).values.interval_s == 11
    assert book.num_rejected == len(heard) == 1
    assert "line 3: defaults.interval: a duration needs a unit" in heard[0]


async def test_a_file_that_a_bug_keeps_from_being_read_is_rejected(
    mount, book, file, heard, monkeypatch
):
    def fail(*_args, **_named):
        raise KeyError("a bug")

    mount.put("11s")
    await file.look()
    monkeypatch.setattr(book, "offer", fail)
    mount.put("12s")
    await file.look()
    assert book.of("any", None).values.interval_s == 11
    assert "cannot be read because of a bug: KeyError: 'a bug'" in heard[0]
    assert len(heard) == book.num_rejected == 1


async def test_a_file_that_goes_away_leaves_the_last_good_policy(mount, book, file):
    mount.put("11s")
    await file.look()
    mount.path.unlink()
    await file.look()
    assert book.of("any", None).values.interval_s == 11
    assert "cannot be read: No such file" in book.latest_rejection.reason
    mount.put("12s")
    await file.look()
    assert book.of("any", None).values.interval_s == 12
    assert book.latest_rejection is None


@pytest.mark.parametrize("contents", [b"\xff\xfe", b"", b"#" * (MAX_BYTES + 5)])
async def test_values_that_are_not_text_are_rejected(mount, book, file, contents):
    mount.path.write_bytes(contents)
    await file.look()
    assert book.num_rejected == 1
    assert book.missing == book.latest_rejection.reason, "there was no good one before"


async def test_it_follows_by_itself(mount, book, file, monkeypatch):
    monkeypatch.setattr(policy_file_module, "POLL_S", 0.01)
    monkeypatch.setattr(policy_file_module, "SETTLE_S", 0.01)
    mount.put("11s")
    task = asyncio.create_task(file.run())
    async with asyncio.timeout(WAIT_S):
        for interval in (11, 12):
            mount.put(f"{interval}s")
            while book.of("any", None).values.interval_s != interval:  # noqa: ASYNC110 - it polls itself
                await asyncio.sleep(0.01)
    task.cancel()


async def test_a_mount_that_hangs_keeps_one_thread(mount, book, file, monkeypatch):
    monkeypatch.setattr(policy_file_module, "READ_TIMEOUT_S", 0.05)
    before = threading.active_count()
    os.mkfifo(mount.path)
    for _ in range(5):
        await file.look()
    assert "cannot be read within 0.05 s" in book.latest_rejection.reason
    assert threading.active_count() == before + 1
    mount.path.write_text(f"{HEAD}defaults: {{interval: 11s}}")  # The mount answers.
    mount.path.unlink()
    mount.put("12s")
    async with asyncio.timeout(WAIT_S):
        while book.of("any", None).values.interval_s != 12:
            await file.look()
