"""The server of `dslc ui`: a page, and what it asks for, on the loopback interface.

Contract: an answer needs the token of the address, and a `Host` that names this server, so that no other page and no
other name of this address reads it. There is no method but GET. No path names a file: `run` is a number that
`RunBoard` knows.
"""

from __future__ import annotations

import html
import json
import os
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from dslc.compiler.show.page.assets import PAGE, read_assets
from dslc.dsl.plain import plain
from dslc.ui.run_board import RunBoard

UI = "dslc.ui"
SHARED_SCRIPTS = ("plan_model.js", "movable_view.js", "curves.js")  # of the plan's page
SCRIPTS = ("runs_model.js", "parallel_axes.js", "runs_table.js", "runs_page.js")

HOST = "127.0.0.1"
_IDLE = 30.0  # seconds that a connection may be silent
_MOVED = (
    "This server answers to {host}:{port} and localhost:{port} alone. To reach it from another machine, forward the "
    "same port: `ssh -L {port}:{host}:{port} MACHINE`.\n"
)
_OLD = "This address needs the token that `dslc ui` has printed, which is another one at each start.\n"


class RunServer(ThreadingHTTPServer):
    """Serves the runs of a folder. Port 0 is a free one. Raises OSError if the port is not free."""

    daemon_threads = True

    def __init__(self, folder: str, port: int) -> None:
        self.board, self.token = RunBoard(folder), secrets.token_urlsafe(24)
        self.title = f"runs of {os.path.basename(os.path.abspath(folder))}"
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Names an error; a browser that has closed its connection is none."""
        error = sys.exception() if sys.version_info >= (3, 12) else sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(plain(f"dslc ui: {type(error).__name__}: {error}"), file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    server_version, sys_version = "dslc", ""
    timeout = _IDLE

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
            values = {name: texts[0] for name, texts in parse_qs(address.query).items()}
        except ValueError:  # a bracket without its other, too many fields
            self._reply(HTTPStatus.BAD_REQUEST, "This is no address.\n", "text/plain")
            return
        path, port = address.path, self.server.server_port
        if not secrets.compare_digest(values.get("token", "").encode(errors="replace"), self.server.token.encode()):
            self._reply(HTTPStatus.FORBIDDEN, _OLD, "text/plain")
        elif self.headers.get("Host") not in hosts(port):
            self._reply(HTTPStatus.FORBIDDEN, _MOVED.format(host=HOST, port=port), "text/plain")
        elif path == "/":
            nonce = secrets.token_urlsafe(12)
            self._reply(HTTPStatus.OK, runs_page(self.server.title, nonce), "text/html", nonce)
        elif path == "/runs":
            self._reply_json(self.server.board.changes(_number(values.get("after", ""))))
        elif path == "/curves":
            self._reply_json(self.server.board.curves(_number(values.get("run", "")), values.get("cursor", "")))
        else:
            self._reply_json(None)

    def _reply_json(self, value: object) -> None:
        status = HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK
        self._reply(status, json.dumps(value, separators=(",", ":")), "application/json")

    def _reply(self, status: HTTPStatus, text: str, kind: str, nonce: str = "") -> None:
        content = text.encode(errors="replace")
        own = f"'nonce-{nonce}'" if nonce else "'none'"
        policy = f"default-src 'none'; script-src {own}; style-src {own}; connect-src 'self'; base-uri 'none'"
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", f"{policy}; form-action 'none'; frame-ancestors 'none'"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        """Logs nothing: a request holds the token."""


def hosts(port: int) -> set[str]:
    """Returns the names of a server in `Host`; browsers leave out the port 80."""
    names = {HOST, "localhost"}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 16 else 0


def runs_page(title: str, nonce: str) -> str:
    """Returns the page. The browser runs no script and takes no style without its `nonce`."""
    name = html.escape(plain(title))
    style = read_assets(PAGE, ("base.css",)) + read_assets(UI, ("runs_page.css",))
    script = read_assets(PAGE, SHARED_SCRIPTS) + read_assets(UI, SCRIPTS)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n'
        f'<title>{name}</title>\n<style nonce="{nonce}">\n{style}</style>\n</head>\n<body>\n'
        f'<header><h1>{name}</h1><p id="status" role="status">This page needs JavaScript.</p></header>\n'
        '<aside id="filters" aria-label="filters"></aside>\n<main>\n'
        '<section aria-labelledby="title-runs"><h2 id="title-runs">runs</h2>'
        '<div class="wide" id="runs" tabindex="0" role="region" aria-labelledby="title-runs"></div></section>\n'
        '<section aria-labelledby="title-axes" id="axes" hidden><h2 id="title-axes">what differs</h2>'
        '<label class="outcome">outcome <select id="outcome"></select></label><div id="parallel"></div>'
        '<p id="readout" class="note"></p></section>\n'
        '<section aria-labelledby="title-curves"><h2 id="title-curves">curves</h2><div id="curves"></div>'
        '<details id="phases"><summary>phases of a step</summary><div></div></details></section>\n'
        f'</main>\n<script nonce="{nonce}">\n{script}</script>\n</body>\n</html>\n'
    )
