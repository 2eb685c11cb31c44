"""A checkpoint whose file system hangs: who waits for it, and for how long."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from equipoise.rank.errors import GroupError, TransferError, WorkerError
from equipoise.rank.waits import Waits
from equipoise.telemetry.loading import Loading
from equipoise.wire.messages import Wait
from equipoise.worker import core as core_module
from equipoise.worker import loading
from equipoise.worker.core import ModelCore
from equipoise.worker.joining import WorkerSlots
from equipoise.worker.loading import load_core
from equipoise.worker.reading import MAX_READS, CheckpointReader
from tests.support.worker_parts import join_epoch_of, parts_of


class HungDisk:
    """Returns nothing until the test ends."""

    def __init__(self):
        self.num_begun = 0
        self.is_back = threading.Event()

    def read_expert(self, layer, expert):
        self.num_begun += 1
        assert self.is_back.wait(60)
        return layer, expert


@pytest.fixture
def disk():
    hung = HungDisk()
    yield hung
    hung.is_back.set()


async def test_reads_that_hang_take_no_thread_from_other_work_and_end_at_the_timeout(disk):
    waits = Waits({Wait.READ: 0.3})
    reader = CheckpointReader(disk.read_expert, waits=waits, timeout_s=0.3)
    reads = [asyncio.create_task(reader.read(0, expert)) for expert in range(100)]
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "at once"), 30) == "at once"
    errors = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), 30)
    words = "the checkpoint did not return expert 3 of layer 0 within 0.3 s"
    assert {type(error) for error in errors} == {TransferError}
    assert words in str(errors[3])
    assert disk.num_begun == MAX_READS
    (read,) = waits.all()
    assert read.reached == 100
    disk.is_back.set()
    assert await asyncio.wait_for(reader.read(1, 2), 30) == (1, 2)


async def test_a_read_that_fails_names_the_fault(disk):
    def fail(layer, expert):
        raise OSError("the disk is gone")

    reader = CheckpointReader(fail, waits=Waits({}))
    with pytest.raises(TransferError, match="the disk is gone"):
        await reader.read(0, 0)


@pytest.mark.parametrize("end", ["join_timeout_s", "a later epoch"])
async def test_a_rank_whose_disk_hangs_gives_up_the_epoch(
    disk, settings, random_layout, monkeypatch, end
):
    chosen = settings()
    core, abandoned = ModelCore.load(chosen), threading.Event()
    monkeypatch.setattr(core.checkpoint, "read_expert", disk.read_expert)
    slots = WorkerSlots(parts_of(chosen, core=core), loading=Loading(say=lambda *_: None))
    if end == "a later epoch":
        threading.Timer(0.3, abandoned.set).start()
    timeout_s = 0.3 if end == "join_timeout_s" else 600.0
    join_epoch = join_epoch_of("", layout=random_layout(1), join_timeout_s=timeout_s)
    words = "did not get its experts within 0.3 s" if timeout_s == 0.3 else "was abandoned"
    async with asyncio.timeout(30):
        with pytest.raises(GroupError, match=words):
            await slots.stage(join_epoch, abandoned=abandoned)


async def test_a_worker_whose_disk_hangs_while_it_loads_says_so_and_can_be_stopped(
    disk, settings, monkeypatch, caplog
):
    monkeypatch.setattr(loading, "READ_TIMEOUT_S", 0.1)
    monkeypatch.setattr(core_module, "verified", lambda *_, **__: disk.read_expert(0, 0))
    stop = asyncio.Event()
    load = asyncio.create_task(load_core(settings(), stop))
    async with asyncio.timeout(60):
        words = "loading digests: nothing was read within 0.1 s, after 0"
        while words not in caplog.text:  # noqa: ASYNC110 - the log has no event
            await asyncio.sleep(0.05)
        stop.set()
        assert await load is None


async def test_what_ends_a_load_is_raised(settings, tmp_path):
    with pytest.raises(WorkerError, match="nowhere"):
        await load_core(settings(checkpoint=tmp_path / "nowhere"), asyncio.Event())


def test_a_process_whose_disk_hangs_while_it_loads_ends_at_once(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    program = "import sys; from equipoise.cli.main import main; sys.exit(main())"
    worker = subprocess.Popen(
        [
            *(sys.executable, "-c", program, "worker", f"--checkpoint={tmp_path}"),
            *("--balancer=127.0.0.1:1", "--slots-per-rank=12", "--listen=127.0.0.1:0"),
        ],
        stderr=subprocess.PIPE,
    )
    with worker, ExitStack() as opened:
        opened.callback(worker.kill)
        # Nothing is ever written to the file that the worker reads.
        opened.callback(os.close, opened_by_a_reader(tmp_path / "config.json"))
        worker.send_signal(signal.SIGTERM)
        _, said = worker.communicate(timeout=60)
        assert worker.returncode == 0, said.decode()


def opened_by_a_reader(pipe):
    """The writing end of a pipe, once somebody opens the other one."""
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        with suppress(OSError):
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.1)
    raise TimeoutError("nobody opens it")
