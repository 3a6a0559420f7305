"""A headless Chromium to look at pages with, driven through a pipe; no packages."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "ArrowDown": 40}
KEYS |= {"Home": 36, "End": 35, "Tab": 9, "Enter": 13, " ": 32}
KEYS |= {"Escape": 27}


def find() -> str | None:
    """The browser's program, if this machine has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser. Speaks the DevTools protocol through two pipes."""

    def __init__(self, program: str) -> None:
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox"]
        options += ["--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        options += [f"--user-data-dir={self.home.name}", "about:blank"]
        # Chromium reads its file 3 and writes its file 4.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, program, *options],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.received = b""
        self.number = 0
        self.session = ""
        self.errors: list[str] = []  # what the page's console complains about
        self.requests: list[str] = []  # the addresses that pages have asked for
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result. Raises RuntimeError if it fails."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def receive(self, seconds: float = 60) -> dict[str, Any]:
        """The next message; complaints of the page are kept."""
        end = time.monotonic() + seconds
        while b"\0" not in self.received:
            ready, _, _ = select.select([self.answers], [], [], end - time.monotonic())
            if not ready:
                raise TimeoutError("the browser does not answer")
            if not (part := os.read(self.answers, 1 << 16)):
                raise RuntimeError("the browser has ended")
            self.received += part
        first, _, self.received = self.received.partition(b"\0")
        message = json.loads(first)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            thrown = params["exceptionDetails"]
            about = thrown.get("exception", {}).get("description", thrown["text"])
            self.errors.append(about)
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def open(self, address: str, width: int = 700, dark: bool = False) -> None:
        """Show a page as a screen of this width would, and wait until it is there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of what it promises."""
        options = {"awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in found:
            raise RuntimeError(found["result"].get("description", str(found)))
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> None:
        """Until an expression is true. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Put text into what has the focus, as a keyboard would."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """A key, as a keyboard sends it to what has the focus."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper()))}
        text = "\r" if key == "Enter" else key if len(key) == 1 else None
        down = code | ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write what is seen as a PNG."""
        options = {"format": "png", "captureBeyondViewport": whole}
        data = self.call("Page.captureScreenshot", **options)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.commands)
        os.close(self.answers)
        self.home.cleanup()
