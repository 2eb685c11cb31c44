"""A Redis server for tests: a free port, its own folder, and faults on demand."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import pytest

START_TIMEOUT_S = 120.0


class RedisServer:
    """A real `redis-server` that persists every write before it answers.

    Several may do things to it at once: what is asked of a server that does not run is not done.
    """

    def __init__(
        self, folder: Path, *, password: str = "", options: Mapping[str, object] | None = None
    ) -> None:
        self.folder = folder
        self.password = password
        self._options = dict(options or {})
        self.port = free_port()
        self._process: subprocess.Popen | None = None
        self._changing = threading.RLock()

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.kill()

    def start(self) -> None:
        with self._changing:
            if not self.running:
                self._start()

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.folder,
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "requirepass": self.password,
            **self._options,
        }
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        self._process = subprocess.Popen(
            ["redis-server", *words], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        for line in self._process.stdout:
            if "Ready to accept connections" in line:
                return
            assert time.monotonic() < deadline, "redis-server did not start in time"
        raise AssertionError(f"redis-server ended with {self._process.wait(5)}")

    def kill(self) -> None:
        with self._changing:
            if self._process is None:
                return
            process, self._process = self._process, None
            process.kill()
            process.wait(START_TIMEOUT_S)
            process.stdout.close()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart_empty(self) -> None:
        with self._changing:
            self.kill()
            shutil.rmtree(self.folder)
            self.start()

    def _signal(self, number: signal.Signals) -> None:
        with self._changing:
            if self._process is not None:
                self._process.send_signal(number)

    def back_up(self, folder: Path) -> None:
        """Copy what is on disk now; every write that was answered is in it."""
        self.pause()
        shutil.copytree(self.folder, folder)
        self.resume()

    def restart_from(self, folder: Path) -> None:
        """Return to what `back_up` copied; the server cannot notice that it is old."""
        self.kill()
        shutil.rmtree(self.folder)
        shutil.copytree(folder, self.folder)
        self.start()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def require_redis() -> None:
    """Skip without a redis-server, or fail where one is required."""
    if shutil.which("redis-server"):
        return
    reason = "redis-server is not installed: apt-get install redis-server"
    if os.environ.get("EQUIPOISE_REQUIRE_REDIS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
