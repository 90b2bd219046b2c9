"""A headless Chromium, driven over W3C WebDriver by plain HTTP: Debian's packages `chromium` and `chromium-driver`, nothing
of Python's. It reaches this machine and no other."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import free_port

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
MISSING = "" if CHROMIUM and CHROMEDRIVER else "no Chromium here: apt install chromium chromium-driver"
DEADLINE_S = 60.0
TAB, ENTER, RIGHT = "\ue004", "\ue007", "\ue014"


class Browser:
    def __init__(self, profile: Path, *, width: int = 1440, height: int = 900) -> None:
        port = free_port()
        self._driver = subprocess.Popen(
            [str(CHROMEDRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        ]
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                answer = self._http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline_s, "chromedriver does not answer"
                time.sleep(0.05)
        self._session = f"/session/{_value(answer)['sessionId']}"
        self.resize(width, height)

    def close(self) -> None:
        try:
            self._http.delete(self._session)
        finally:
            self._http.close()
            self._driver.terminate()
            self._driver.wait(20)

    def _post(self, path: str, **body: Any) -> Any:
        return _value(self._http.post(self._session + path, json=body))

    def cdp(self, command: str, parameters: dict[str, Any]) -> Any:
        """Sends a command of Chrome's own protocol."""
        return self._post("/goog/cdp/execute", cmd=command, params=parameters)

    def open(self, url: str) -> None:
        self._post("/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a function of this body returns in the page."""
        return self._post("/execute/sync", script=script, args=list(arguments))

    def find(self, selector: str) -> str:
        """An element, which must be there within the deadline."""
        found = self.until(lambda: self.run("return document.querySelector(arguments[0])", selector), selector)
        element: str = found[ELEMENT]
        return element

    def click(self, selector: str) -> None:
        """Clicks as a user does, where the element is seen."""
        self._post(f"/element/{self.find(selector)}/click")

    def write(self, selector: str, text: str) -> None:
        self._post(f"/element/{self.find(selector)}/value", text=text)

    def press(self, *keys: str) -> None:
        """On whatever has the focus."""
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    def text(self, selector: str = "body") -> str:
        """What is seen of it."""
        said: str = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return said

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline_s, (
                f"{what}: not within {DEADLINE_S:.0f} s\n{self.text()}\n{self.log()[:5]}"
            )
            time.sleep(0.05)
        return found

    def until_text(self, selector: str, *texts: str) -> None:
        self.until(lambda: all(text in self.text(selector) for text in texts), f"{texts} in {selector}")

    def screenshot(self, path: Path | None = None) -> bytes:
        image = base64.b64decode(_value(self._http.get(self._session + "/screenshot")))
        if path is not None:
            path.write_bytes(image)
        return image

    def log(self) -> list[str]:
        """What the page wrote to its console, or failed at, since the last call."""
        return [entry["message"] for entry in self._post("/se/log", type="browser")]

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", metrics)

    def set_dark(self, is_dark: bool) -> None:
        """What the system prefers."""
        value = "dark" if is_dark else "light"
        self.cdp("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": value}]})


def _value(answer: httpx.Response) -> Any:
    value = answer.json()["value"]
    assert answer.is_success, value
    return value
