"""The time from a keystroke to the diagnostics that an editor receives, and to those of the analysis.

A real server (`dslc lsp`) has a job of 300 lines: a network of 240 layers, one a line. Each keystroke writes or deletes
one digit of a layer's width and is sent as an incremental change.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.lsp_client import LspClient  # noqa: E402

KEYSTROKES = 200
ANALYSES = 20


def long_job() -> str:
    """Returns a job of 300 lines."""
    layers = "".join(f"    linear({width}), relu(),\n" for width in range(100, 340))
    start = (ROOT / "examples" / "digits.plt").read_text()
    network = start[start.index("[") : start.index("flatten()")]
    text = start.replace(network, f"[\n    flatten(),\n{layers}").replace("    flatten(), linear(10)", "    linear(10)")
    return text + "".join(f"# line {number}\n" for number in range(300 - text.count("\n")))


def main() -> None:
    """Prints the median and the slowest."""
    draw = random.Random(35)
    with tempfile.TemporaryDirectory() as folder:
        client = LspClient(Path(folder))
        try:
            uri = client.open(Path(folder) / "long.plt", long_job())
            client.diagnostics(uri, 1, analysed=True)
            seconds = [_keystroke(client, uri, draw) for _ in range(KEYSTROKES)]
            analyses = [_keystroke(client, uri, draw, analysed=True) for _ in range(ANALYSES)]
        finally:
            client.kill()
    for what, found in (("diagnostics", seconds), ("diagnostics of the analysis, with the pause", analyses)):
        median, slowest = statistics.median(found), max(found)
        print(f"{what}: median {1000 * median:.1f} ms, slowest {1000 * slowest:.1f} ms, {len(found)} keystrokes")


def _keystroke(client: LspClient, uri: str, draw: random.Random, *, analysed: bool = False) -> float:
    """Writes a digit into the width of a layer, or deletes it again; returns the seconds until the diagnostics."""
    width = draw.randint(100, 339)
    written = f"linear({width}5)" in client.texts[uri][1]
    pair = (f"linear({width}5)", f"linear({width})") if written else (f"linear({width})", f"linear({width}5)")
    begin = time.perf_counter()
    version = client.replace(uri, *pair)
    client.diagnostics(uri, version, analysed=analysed)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
