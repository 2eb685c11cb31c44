"""Commands of `equipoise` in processes forked from one that has imported and compiled everything.

Three seconds of CPU less for a balancer as for a worker. In every other way a process is as if it
had been executed: a child of this process that ends with it, in a process group of its own, with
its own arguments, environment and files.

Run as a script, `python forked_commands.py FD`, this file is the process that forks.
"""

import asyncio
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from equipoise.cli.demo.fleet import Fleet

START_TIMEOUT_S = 300.0
"""Without a cache, the first process compiles the planner."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_BYTES = 2**17


class ForkedProcess:
    """A forked command, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, command, *, output=None, env=None):
        """Run `python COMMAND...`, with this process's output and environment by default."""
        self.pid = _forked(command, output=output, env=env)
        self._returncode = None

    @property
    def returncode(self):
        """Its exit status, negative for a signal; None while it runs."""
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid != 0:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s):
        """Block until it ends; returns its exit status."""
        if self.returncode is None:
            end = os.pidfd_open(self.pid)
            try:
                if not select.select([end], [], [], timeout_s)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout_s)
            finally:
                os.close(end)
        return self.returncode


class _AwaitedProcess(ForkedProcess):
    """The same, with the methods of `asyncio.subprocess.Process`."""

    async def wait(self):
        if self.returncode is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            end = os.pidfd_open(self.pid)
            loop.add_reader(end, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(end)
                os.close(end)
        return self.returncode


class ForkedFleet(Fleet):
    """A fleet whose processes are forked."""

    async def _launch(self, command, *, output, env):
        return _AwaitedProcess(command, output=output, env=env)


def _forked(command, *, output, env):
    """The id of a process that runs `python COMMAND...`, a module with a `main` or a script."""
    message = {"parent": os.getpid(), "command": [*command], "folder": str(Path.cwd())}
    message["env"] = dict(os.environ if env is None else env)
    files = [output.fileno()] * 2 if output else [1, 2]
    connection, _ = _server()
    # What forks the command ends at once, so that the command becomes a child of this process.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(connection, [json.dumps(message).encode()], files)
        answer = connection.recv(_MAX_BYTES)
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
    assert answer, "the process that forks commands has ended"
    return int(answer)


@cache
def _server():
    """A connection to the process that forks, and that process, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(START_TIMEOUT_S)
    with theirs:
        process = subprocess.Popen(
            # -P: files beside this one are no modules. -u: as a fleet runs its processes.
            [sys.executable, "-P", "-u", __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    return ours, process


def _prctl(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _serve(connection):
    """Fork a process for each message, and return the command in it; None after the last one."""
    import equipoise.balancer.__main__
    import equipoise.cli.main
    import equipoise.gateway.__main__
    import equipoise.worker.__main__  # noqa: F401
    from equipoise.planning.warm_up import warm_up

    warm_up()
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "other threads are missing after a fork"
    gc.freeze()
    while True:
        data, files, _, _ = socket.recv_fds(connection, _MAX_BYTES, 2)
        if not data:
            return None
        between = os.fork()
        if between != 0:
            os.waitpid(between, 0)
        elif os.fork() != 0:
            os._exit(0)
        else:
            message = json.loads(data)
            _settle(message, files)
            connection.send(str(os.getpid()).encode())
            return message["command"]
        for file in files:
            os.close(file)


def _settle(message, files):
    """Be as if the tests had executed the command."""
    between = os.getppid()
    while os.getppid() == between != message["parent"]:
        time.sleep(0.0005)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != message["parent"]:
        os._exit(1)
    os.setpgid(0, 0)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(message["env"])
    os.chdir(message["folder"])


def _run(command):
    if command[0] == "-m":
        module, *arguments = command[1:]
        sys.argv = [sys.modules[module].__file__, *arguments]
        sys.modules[module].main()
    else:
        sys.argv = [*command]
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        command = _serve(connection)
    if command is not None:
        _run(command)
