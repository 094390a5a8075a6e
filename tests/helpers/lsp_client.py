"""A client of `dslc lsp` that speaks the protocol as an editor does: JSON-RPC over the server's standard streams."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Message = dict[str, Any]  # what JSON holds


class LspClient:
    """One server process. `notifications` are those that no call has taken yet."""

    def __init__(self, folder: Path, capabilities: Message | None = None) -> None:
        command = [str(Path(sys.executable).with_name("dslc")), "lsp"]
        self.process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.notifications: list[Message] = []
        self.requests = 0
        self.texts: dict[str, tuple[int, str]] = {}
        self.capabilities: Message = self.request(
            "initialize", {"processId": None, "rootUri": folder.as_uri(), "capabilities": capabilities or {}}
        )["capabilities"]
        self.notify("initialized", {})

    def close(self) -> int:
        """Ends the server as an editor does; returns its exit status."""
        self.request("shutdown", None)
        self.notify("exit", None)
        status = self.process.wait(timeout=60)
        self.input.close()
        self.output.close()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    # ------------------------------------------------------------------------------------------------- messages

    def write(self, message: Message) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.input.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self.input.flush()

    def read(self) -> Message:
        size = 0
        while line := self.output.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name == b"Content-Length" else size
        assert size, "the server ended"
        message: Message = json.loads(self.output.read(size))
        return message

    def notify(self, method: str, params: Message | None) -> None:
        self.write({"method": method, "params": params})

    def request(self, method: str, params: Message | None) -> Any:
        """Returns the result. Raises AssertionError for an error."""
        message = self.exchange(method, params)
        assert "error" not in message, message["error"]
        return message["result"]

    def exchange(self, method: str, params: Message | None) -> Message:
        """Returns the answer to a request."""
        self.requests += 1
        self.write({"id": self.requests, "method": method, "params": params})
        while True:
            message = self.read()
            if message.get("id") == self.requests and "method" not in message:
                return message
            self.take(message)

    def take(self, message: Message) -> None:
        if "id" in message:  # a request of the server: a refresh
            self.write({"id": message["id"], "result": None})
        self.notifications.append(message)

    def wait_for(self, method: str, accepts: Callable[[Message], bool] = lambda _: True) -> Message:
        """Returns the parameters of the next notification of this method that is accepted."""
        at = 0
        while True:
            while at == len(self.notifications):
                self.take(self.read())
            message = self.notifications[at]
            params: Message = message.get("params") or {}
            if message["method"] == method and accepts(params):
                del self.notifications[: at + 1]
                return params
            at += 1

    # ------------------------------------------------------------------------------------------------ documents

    def open(self, path: Path, text: str | None = None) -> str:
        """Opens a file, with another text if one is given; returns its URI."""
        content = path.read_text() if text is None else text
        uri = path.as_uri()
        self.texts[uri] = (1, content)
        document = {"uri": uri, "languageId": "plt", "version": 1, "text": content}
        self.notify("textDocument/didOpen", {"textDocument": document})
        return uri

    def replace(self, uri: str, old: str, new: str) -> int:
        """Replaces the first `old` of a text, as an incremental change; returns the version."""
        version, text = self.texts[uri]
        start = text.index(old)
        change = {"range": self.range(uri, start, start + len(old)), "text": new}
        self.texts[uri] = (version + 1, text[:start] + new + text[start + len(old) :])
        document = {"uri": uri, "version": version + 1}
        self.notify("textDocument/didChange", {"textDocument": document, "contentChanges": [change]})
        return version + 1

    def diagnostics(self, uri: str, version: int, *, analysed: bool = False) -> list[Message]:
        """Returns the diagnostics of a version: the first that are published, or those of the analysis."""

        def accepts(params: Message) -> bool:
            return bool(params["uri"] == uri and params["version"] == version)

        for _ in range(2 if analysed else 1):
            found = self.wait_for("textDocument/publishDiagnostics", accepts)["diagnostics"]
        return list(found)

    def position(self, uri: str, offset: int) -> Message:
        before = self.texts[uri][1][:offset]
        column = before.rpartition("\n")[2]
        return {"line": before.count("\n"), "character": len(column.encode("utf-16-le")) // 2}

    def range(self, uri: str, start: int, end: int) -> Message:
        return {"start": self.position(uri, start), "end": self.position(uri, end)}

    def ask(self, method: str, uri: str, mark: str, **params: object) -> Any:
        """Returns the answer to a request about the position behind the first `mark`."""
        offset = self.texts[uri][1].index(mark) + len(mark)
        place = {"textDocument": {"uri": uri}, "position": self.position(uri, offset)}
        return self.request(f"textDocument/{method}", {**place, **params})

    def ask_all(self, method: str, uri: str, **params: object) -> Any:
        """Returns the answer to a request about the whole text."""
        return self.request(f"textDocument/{method}", {"textDocument": {"uri": uri}, **params})
