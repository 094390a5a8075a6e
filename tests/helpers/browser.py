"""A page in a real browser: Debian's Chromium without a window, which runs a script in it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def run_in_page(folder: Path, page: str, script: str) -> Any:
    """Opens the page from a file, and returns what the script returns: the body of a function, its value as JSON."""
    path = folder / "page.html"
    actions = f"<script>document.body.replaceChildren(JSON.stringify((() => {{{script}}})()));</script>"
    path.write_text(page.replace("</body>", f"{actions}</body>"), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    run = subprocess.run([str(CHROMIUM), *options, path.as_uri()], capture_output=True, text=True, check=False)
    body = re.findall(r"<body[^>]*>(\{.*\})\s*</body>", run.stdout, re.DOTALL)
    assert body, run.stdout[-2000:] + run.stderr[-2000:]
    return json.loads(html.unescape(body[0]))
