"""Load a page in headless Chromium, by its DevTools protocol over two pipes.

Width, colour scheme and JavaScript can be set.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
TIMEOUT = 600.0  # seconds: the machine may be busy


class Browser(AbstractContextManager["Browser"]):
    """One tab of a new Chromium; `complaints` are its console's errors and warnings."""

    def __init__(self) -> None:
        self._stack, self._last, self._unread = ExitStack(), 0, b""
        self.complaints: list[str] = []

    def __enter__(self) -> "Browser":
        home = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # Chromium expects the pipes at descriptors 3 and 4.
        link = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", link, "chromium", CHROMIUM, "--headless", "--no-sandbox",
             "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
             f"--user-data-dir={home}", "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        os.set_blocking(self._read, False)
        self._session = ""
        tabs = self.ask("Target.getTargets")["targetInfos"]
        (tab,) = [target["targetId"] for target in tabs if target["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._stack.close()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; collect the page's errors meanwhile."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._unread:
            assert self._process.poll() is None, "Chromium has ended"
            assert time.monotonic() < deadline, "Chromium does not answer"
            try:
                self._unread += os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        message, _, self._unread = self._unread.partition(b"\0")
        result: dict[str, Any] = json.loads(message)
        return result

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.complaints.append(params["entry"]["text"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))

    def look_as(self, *, width: int, dark: bool = False, script: bool = True) -> None:
        """Set the window's width, colour scheme, and whether scripts run."""
        phone = width < 700
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=800, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Emulation.setScriptExecutionDisabled", value=not script)

    def go(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        self.ask("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def see(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + TIMEOUT
        while not self.see(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def picture(self, path: Path) -> bytes:
        """Take a picture of the whole page into a PNG file, and return it."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        data = base64.b64decode(shot["data"])
        path.write_bytes(data)
        return data
