"""Links to ports of this machine that can part in one direction.

`Proxies` passes bytes on and holds them back; it works everywhere. `Namespace` drops packets with
iptables, so that connections really lose them; it needs a network namespace of its own, for example
`unshare -rn sh -c 'ip link set lo up && exec ...'`.
"""

import asyncio
import shutil
import subprocess
from contextlib import AsyncExitStack
from typing import Self

from tests.support.tcp_proxy import TcpProxy


class Proxies:
    """Links through a TCP proxy each. An asynchronous context."""

    def __init__(self) -> None:
        self._proxies = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error) -> None:
        await self._stack.aclose()

    @property
    def names(self) -> list[str]:
        return list(self._proxies)

    async def route(self, name, port) -> str:
        """host:port that leads to `port`, over the link `name`."""
        proxy = self._proxies[name] = await self._stack.enter_async_context(TcpProxy(port))
        return f"127.0.0.1:{proxy.port}"

    async def hold(self, name, directions) -> None:
        """Pass nothing "up" (to the port), "down" (from it), or either way."""
        self._proxies[name].hold(*directions)

    async def heal(self, name) -> None:
        """Pass everything again."""
        self._proxies[name].heal()


class Namespace:
    """Links to an address each, whose packets can be dropped. An asynchronous context."""

    def __init__(self) -> None:
        self._addresses = {}
        self._dropped = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error) -> None:
        for name in list(self._dropped):
            await self.heal(name)

    @property
    def names(self) -> list[str]:
        return list(self._addresses)

    async def route(self, name, port) -> str:
        """host:port that leads to `port`, over the link `name`."""
        host = f"127.0.1.{len(self._addresses) + 1}"
        self._addresses[name] = host, port
        return f"{host}:{port}"

    async def hold(self, name, directions) -> None:
        """Drop packets "up" (to the port), "down" (from it), or both."""
        host, port = self._addresses[name]
        ends = {"up": ("-d", "--dport"), "down": ("-s", "--sport")}
        for direction in directions:
            address, number = ends[direction]
            rule = "INPUT", address, host, "-p", "tcp", number, str(port), "-j", "DROP"
            await _iptables("-A", *rule)
            self._dropped.setdefault(name, []).append(rule)

    async def heal(self, name) -> None:
        """Pass packets again."""
        for rule in self._dropped.pop(name, ()):
            await _iptables("-D", *rule)


IN_NAMESPACE = ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""Begins a command that runs in a network namespace of its own."""


def namespace_fault() -> str:
    """Why this machine cannot drop packets in a network namespace; empty if it can."""
    missing = [tool for tool in ("unshare", "ip", "iptables") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    words = [*IN_NAMESPACE, "iptables", "-A", "INPUT", "-s", "127.0.1.1", "-j", "DROP"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stderr.strip().partition("\n")[0] if done.returncode else ""


async def _iptables(*words) -> None:
    process = await asyncio.create_subprocess_exec("iptables", "-w", *words)
    assert await process.wait() == 0, words
