"""A real browser for tests of the page: headless Chromium, driven over a pipe (DevTools)."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

BOUND_S = 60.0
AXE = Path(__file__).parents[2] / ".cache" / "tools" / "axe.min.js"


def require_chromium() -> str:
    """The browser's path; skips the test where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    pytest.skip("no Chromium here (apt-get install chromium)")


def require_axe() -> str:
    """The source of axe-core; skips the test where `make axe` could not fetch it."""
    if not AXE.exists():
        pytest.skip("no axe-core here (make axe)")
    return AXE.read_text()


class Page:
    """One tab. `faults` are messages of exceptions, console errors and rejected loads."""

    def __init__(self, send):
        self._send = send
        self._loaded = asyncio.Event()
        self.faults = []

    async def look(self, *, width, height, dark=False):
        """Have this window size and colour scheme from now on, and show times in UTC."""
        await self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._send("Emulation.setEmulatedMedia", features=[scheme])
        await self._send("Emulation.setTimezoneOverride", timezoneId="UTC")

    async def goto(self, url):
        """Load a page, to the end of its own files."""
        self._loaded.clear()
        await self._send("Page.navigate", url=url)
        async with asyncio.timeout(BOUND_S):
            await self._loaded.wait()

    async def value(self, expression):
        """What a JavaScript expression is, or what it promises."""
        answer = await self._send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return answer["result"].get("value")

    async def point(self, x, y):
        """Move the pointer there, in pixels of the window."""
        await self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def cpu_s(self):
        """CPU time of the page's main thread so far: script, style, layout and paint."""
        await self._send("Performance.enable", timeDomain="threadTicks")
        metrics = (await self._send("Performance.getMetrics"))["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    async def press(self, key):
        """Press a key, by its name."""
        for kind in ("keyDown", "keyUp"):
            await self._send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def until(self, expression):
        """Wait until a JavaScript expression is true."""
        look = f"const look = () => ({expression}) ? done() : setTimeout(look, 50)"
        await self._send(
            "Runtime.evaluate",
            expression=f"new Promise((done) => {{ {look}; look(); }})",
            awaitPromise=True,
        )

    async def screenshot(self, *, whole=True):
        """A PNG of the window, or of the whole page."""
        shot = await self._send("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def hear(self, method, parameters):
        """Handle a message of the browser."""
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.faults.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.faults.append(
                parameters["entry"]["text"] + " " + parameters["entry"].get("url", "")
            )


@asynccontextmanager
async def browsing(chromium: str):
    """A tab of a browser of its own, which ends with the block."""
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "bash",
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
            pass_fds=(their_in, their_out),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        os.close(their_in)
        os.close(their_out)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=2**26)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_in, "rb", buffering=0)
        )
        tab = _Tab(reader, our_out)
        task = asyncio.create_task(tab.read())
        try:
            yield await tab.open()
        finally:
            process.kill()
            await process.wait()
            await asyncio.gather(task, return_exceptions=True)
            os.close(our_out)


class _Tab:
    def __init__(self, reader, out):
        self._reader, self._out = reader, out
        self._numbers = itertools.count(1)
        self._waiting = {}
        self._session = None
        self._page = Page(self.send)

    async def open(self):
        targets = await self.send("Target.getTargets")
        tab = next(one for one in targets["targetInfos"] if one["type"] == "page")
        attached = await self.send("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        return self._page

    async def send(self, method, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        os.write(self._out, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(BOUND_S):
            return await answer

    async def read(self):
        while True:
            try:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                return
            if "id" in message:
                waiting = self._waiting.pop(message["id"])
                if "error" in message:
                    waiting.set_exception(AssertionError(message["error"]["message"]))
                else:
                    waiting.set_result(message["result"])
            elif message.get("sessionId"):
                self._page.hear(message["method"], message["params"])
