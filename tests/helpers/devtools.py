"""Chromium without a window, driven over a pipe by the DevTools protocol, which needs no driver and no library."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from helpers.browser import CHROMIUM


class Browser:
    """One page. `evaluate` runs an expression in it."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        commands, self._commands = os.pipe()
        self._messages, messages = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        options.append("--disable-features=IsolateSandboxedIframes")  # a sandboxed frame would be a target of its own
        command = shlex.join([CHROMIUM, *options, "--remote-debugging-pipe"])
        # The protocol is spoken on the descriptors 3 and 4.
        script = f"exec 13<&{commands} 14>&{messages}; exec 3<&13 4>&14 13<&- 14>&-; exec {command}"
        self._process = subprocess.Popen(
            ["bash", "-c", script], pass_fds=(commands, messages), stderr=subprocess.DEVNULL, start_new_session=True
        )
        os.close(commands)
        os.close(messages)
        self._count, self._rest = 0, b""
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._commands)  # which ends the browser
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.close(self._messages)

    def _send(self, method: str, session: str = "", **values: Any) -> dict[str, Any]:
        """Returns the result of a command. Raises AssertionError if the browser refuses it."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": values} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._count:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._messages, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, address: str, width: int = 1280, height: int = 800, scheme: str = "light") -> None:
        """Loads a page at a size and in a colour scheme, `light` or `dark`."""
        self.resize(width, height, scheme)
        self._send("Page.navigate", self._session, url=address)

    def resize(self, width: int, height: int, scheme: str) -> None:
        self._send("Emulation.setDeviceMetricsOverride", self._session, width=width, height=height,
                   deviceScaleFactor=1, mobile=False)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._send("Emulation.setEmulatedMedia", self._session, features=features)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression of JavaScript, of a promise when it is kept. Raises AssertionError."""
        reply = self._send(
            "Runtime.evaluate", self._session, expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Returns when an expression is true; the timeout of the test ends a wait in vain."""
        self.evaluate(_promise_of(condition))

    def evaluate_in_frame(self, expression: str, condition: str = "true") -> Any:
        """Returns the value of an expression in the page's only frame, once a condition is true there. Its origin may
        be another than that of the page. A frame that loads another document meanwhile is asked again.
        """
        while True:
            try:
                return self._evaluate_in_document(expression, condition)
            except AssertionError as error:
                if "context" not in str(error):
                    raise

    def _evaluate_in_document(self, expression: str, condition: str) -> Any:
        (frame,) = self._send("Page.getFrameTree", self._session)["frameTree"]["childFrames"]
        world = self._send("Page.createIsolatedWorld", self._session, frameId=frame["frame"]["id"])[
            "executionContextId"
        ]
        for each in (_promise_of(condition), expression):
            values = {"expression": each, "awaitPromise": True, "returnByValue": True, "contextId": world}
            reply = self._send("Runtime.evaluate", self._session, **values)
            assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")


def _promise_of(condition: str) -> str:
    return (
        "new Promise((resolve) => { const poll = () => { try { if (" + condition + ") return resolve(true); } "
        "catch {} setTimeout(poll, 20); }; poll(); })"
    )
