"""Commands of `equipoise` in processes forked from one that has imported and compiled everything.

Three seconds of CPU less for a balancer as for a worker, and two for a process in which a balancer
plans. In every other way a process is as if it had been executed: a child of this process that ends
with it, in a process group of its own, with its own arguments, environment and files.

Run as a script, `python forked_commands.py FD MODULE...`, this file is the process that forks. It
imports the modules first. A forked balancer forks another one for the processes in which it plans.
"""

import asyncio
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from equipoise.balancer.planner import process as planner_process
from equipoise.cli.demo.fleet import Fleet

START_TIMEOUT_S = 300.0
"""Without a cache, the first process compiles the planner."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15
_MAX_BYTES = 2**17

_PLANNER = planner_process.PROGRAM + ".__main__"
_COMMANDS = (
    "equipoise.balancer.__main__",
    _PLANNER,
    "equipoise.cli.main",
    "equipoise.gateway.__main__",
    "equipoise.worker.__main__",
)
_PLANNER_NAME = "planner"

_servers = {}
"""Processes that fork, and connections to them, by the modules that they have imported."""


@contextmanager
def forked_planners():
    """Fork the processes in which balancers of this process plan."""
    executed = planner_process.execute
    planner_process.execute = _fork_planner
    _server(_PLANNER)
    try:
        yield
    finally:
        planner_process.execute = executed


def is_planner(process):
    """Whether a psutil.Process, forked or executed, is one in which a balancer plans."""
    return process.name() == _PLANNER_NAME or planner_process.PROGRAM in process.cmdline()


def _fork_planner(connection):
    command = ["-m", planner_process.PROGRAM, str(connection)]
    return ForkedProcess(command, pass_fds=[connection], modules=[_PLANNER])


class ForkedProcess:
    """A forked command, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, command, *, output=None, env=None, pass_fds=(), modules=_COMMANDS):
        """Run `python COMMAND...`, with this process's output and environment by default.

        It is forked from a process that has imported `modules`.
        """
        files = {number: number for number in pass_fds}
        files |= dict.fromkeys((1, 2), output.fileno()) if output else {1: 1, 2: 2}
        self.pid = _forked(command, files=files, env=env, modules=modules)
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

    def wait(self, timeout):
        """Block until it ends, this many seconds at most; returns its exit status."""
        if self.returncode is None:
            end = os.pidfd_open(self.pid)
            try:
                if not select.select([end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
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


def _forked(command, *, files, env, modules):
    """The id of a process that runs `python COMMAND...`, a module with a `main` or a script.

    `files` are ours by the number that each has there.
    """
    message = {"parent": os.getpid(), "command": [*command], "folder": str(Path.cwd())}
    message["env"] = dict(os.environ if env is None else env)
    message["files"] = [*files]
    connection = _server(*modules)
    # What forks the command ends at once, so that the command becomes a child of this process.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(connection, [json.dumps(message).encode()], [*files.values()])
        answer = connection.recv(_MAX_BYTES)
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
    assert answer, "the process that forks commands has ended"
    return int(answer)


def _server(*modules):
    """A connection to the process that forks, which ends with this one."""
    if modules not in _servers:
        ours, theirs = _connection()
        with theirs:
            process = subprocess.Popen(
                # -P: files beside this one are no modules. -u: as a fleet runs its processes.
                [sys.executable, "-P", "-u", __file__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        _servers[modules] = ours, process
    connection, _ = _servers[modules]
    return connection


def _connection():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(START_TIMEOUT_S)
    return ours, theirs


def _prctl(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _load(modules):
    """Import modules, and compile what plans."""
    from equipoise.planning.warm_up import warm_up

    for module in modules:
        importlib.import_module(module)
    warm_up()
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "other threads are missing after a fork"
    gc.freeze()


def _serve(connection):
    """Fork a process for each message, and return the command in it; None after the last one."""
    with connection:
        while True:
            data, files, _, _ = socket.recv_fds(connection, _MAX_BYTES, 3)
            if not data:
                return None
            between = os.fork()
            if between != 0:
                os.waitpid(between, 0)
            elif os.fork() != 0:
                os._exit(0)
            else:
                message = json.loads(data)
                _settle(message)
                connection.send(str(os.getpid()).encode())
                connection.close()
                _place(files, message["files"])
                return message["command"]
            for file in files:
                os.close(file)


def _settle(message):
    """Be as if the tests had executed the command."""
    between = os.getppid()
    while os.getppid() == between != message["parent"]:
        time.sleep(0.0005)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != message["parent"]:
        os._exit(1)
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(message["env"])
    os.chdir(message["folder"])


def _place(files, numbers):
    """Give files the numbers that the command knows them by."""
    free = max(numbers) + 1
    clear = [fcntl.fcntl(file, fcntl.F_DUPFD, free) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(numbers, clear, strict=True):
        os.dup2(file, number)
        os.close(file)


def _run(command):
    if command[:3] == ["-m", "equipoise.cli.main", "balancer"]:
        command = _forking_planners(command)
    if command is None:
        return
    if command[0] == "-m":
        name, *arguments = command[1:]
        if name == planner_process.PROGRAM:
            _prctl(_PR_SET_NAME, _PLANNER_NAME.encode())
        module = sys.modules.get(f"{name}.__main__") or sys.modules[name]
        sys.argv = [module.__file__, *arguments]
        sys.exit(module.main())
    else:
        sys.argv = [*command]
        runpy.run_path(command[0], run_name="__main__")


def _forking_planners(command):
    """The command for the balancer, which plans in processes forked from a copy of this one.

    In the copy it is what each forked process has to run, and None when the balancer has ended.
    """
    ours, theirs = _connection()
    if os.fork() == 0:
        ours.close()
        return _serve(theirs)
    theirs.close()
    _servers[_PLANNER,] = ours, None
    planner_process.execute = _fork_planner
    return command


if __name__ == "__main__":
    _load(sys.argv[2:])
    to_run = _serve(socket.socket(fileno=int(sys.argv[1])))
    if to_run is not None:
        _run(to_run)
