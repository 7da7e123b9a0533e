"""One tab of a real Chromium for tests, spoken to through a pair of pipes: no port, no driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # Chromium's does not work for root
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)

CONTRAST = """(() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const poor = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !node.checkVisibility() || node.closest('.hidden, script')) continue;
    let [ground, solid, up] = [[255, 255, 255], 1, node];
    for (; up; up = up.parentElement) {
      solid *= Number(getComputedStyle(up).opacity);
      const found = rgb(getComputedStyle(up).backgroundColor);
      if (found.length === 3 || found[3] === 1) { ground = found; break; }
    }
    const ink = rgb(getComputedStyle(node).color).slice(0, 3)
      .map((v, at) => v * solid + ground[at] * (1 - solid));
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${node.className || node.tagName}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(poor)];
})()"""
"""Texts of a page that stand out too little from what is behind them."""


class Browser:
    """One tab of a Chromium. Its protocol is JSON with a zero byte after each message."""

    def __init__(self, profile: Path) -> None:
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{read_end} 4>&{write_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(read_end, write_end),
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._buffer = b""
        self._number = 0
        self._tab = ""
        self.events: list[dict[str, Any]] = []
        made = self._send("Target.createTarget", url="about:blank")
        attached = self._send("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        self._tab = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._tab:
            message["sessionId"] = self._tab
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    def open(self, page: Path, link: str = "", *, width: int = 1400, dark: bool = False) -> None:
        """Load a page anew and wait until it is drawn."""
        self.events.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        self._send("Page.navigate", url="about:blank")
        self._send("Page.navigate", url=page.as_uri() + link)
        self.wait("document.readyState === 'complete' && document.querySelector('main > *')")

    def ask(self, expression: str) -> Any:
        """The value of an expression on the page."""
        wanted = {"returnByValue": True, "awaitPromise": True}
        answer = self._send("Runtime.evaluate", expression=expression, **wanted)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a condition holds; at most some ten seconds."""
        poll = f"(async () => {{ for (let i = 0; i < 500; i += 1) {{ if ({condition}) return true; "
        poll += "await new Promise((done) => setTimeout(done, 20)); } return false; })()"
        assert self.ask(poll), f"never true: {condition}"

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = key if kind == "keyDown" and len(key) == 1 else ""
            self._send("Input.dispatchKeyEvent", type=kind, key=key, text=text)

    def type(self, text: str) -> None:
        self._send("Input.insertText", text=text)

    def print_media(self) -> None:
        self._send("Emulation.setEmulatedMedia", media="print")

    @property
    def troubles(self) -> list[str]:
        """What the page complained about, and what it asked for."""
        found = []
        for event in self.events:
            kind, params = event.get("method"), event.get("params", {})
            if kind == "Log.entryAdded":
                found.append(params["entry"]["text"])
            elif kind in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                found.append(json.dumps(params))
            elif kind == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "about:")):
                    found.append(f"asked for {url}")
        return found

    def close(self) -> None:
        os.close(self._write)
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._read)
