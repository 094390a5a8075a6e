"""The long form of each diagnostic: one page a code, `E0301.md`, whose first line is `# <title>`.

Whoever reports a code writes its page here. `dslc explain CODE` prints one; the reference is made of all of them.
A warning that is an error elsewhere shares the page of that error: W0309 is E0309's.
"""

from __future__ import annotations

import os
import re

from dslc.dsl.diagnostics import BESIDE, BLOCKING, PASSED_OVER

_SHARED = BLOCKING | PASSED_OVER | BESIDE  # warnings with the page of the error of the same number
FOLDER = os.path.dirname(os.path.abspath(__file__))
CODE = re.compile(r"[EWN][0-9]{4}")


def explain(code: str) -> str | None:
    """Returns the page of a code (`E0301`, `e0301`), or None if there is no such code."""
    code = code.upper()
    if code in _SHARED:
        code = f"E{code[1:]}"
    path = os.path.join(FOLDER, f"{code}.md")
    if not CODE.fullmatch(code) or not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read()


def titles() -> dict[str, str]:
    """Returns the title of each code, in order."""
    own = {name.removesuffix(".md") for name in os.listdir(FOLDER) if name.endswith(".md")}
    codes = sorted(own | _SHARED)
    pages = {code: explain(code) for code in codes}
    return {code: page.partition("\n")[0].removeprefix("# ") for code, page in pages.items() if page}
