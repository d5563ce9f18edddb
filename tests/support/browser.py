# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium over its DevTools protocol on a pipe: needs no driver and no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0
TAB = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}


def find_browser() -> str | None:
    """The path of the program, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of one browser; ``complaints`` are the errors and warnings of its console."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        switches = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        # Chromium reads commands from descriptor 3 and answers on 4.
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", program, *switches),
                *("--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"),
            ],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = count(1)
        self._rest = b""
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    @property
    def complaints(self) -> list[str]:
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self._events if event.get("method") in kinds]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda found: found.get("id") == number)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, *, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._events = []
        self.call("Page.navigate", url=path.resolve().as_uri())
        if not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._wait(lambda found: found.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press_tab(self) -> None:
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **TAB)
        self.call("Input.dispatchKeyEvent", type="keyUp", **TAB)

    def screenshot(self, *, whole: bool = False) -> bytes:
        more: dict[str, Any] = {"captureBeyondViewport": True} if whole else {}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"])

    def _wait(self, is_it: Any) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while True:
            while b"\0" in self._rest:
                line, _, self._rest = self._rest.partition(b"\0")
                found: dict[str, Any] = json.loads(line)
                self._events.append(found)
                if is_it(found):
                    return found
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            content = os.read(self._in, 1 << 20) if ready else b""
            if not content:
                raise TimeoutError(f"the browser did not answer, exit code {self._process.poll()}")
            self._rest += content
