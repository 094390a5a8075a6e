"""Parses text to a tree, and formats a tree as text."""

import sys

# Lark imports `regex` if it is installed, as beside `transformers`. No grammar here needs it: 12 ms of each command.
_HIDDEN = "regex" not in sys.modules
if _HIDDEN:
    sys.modules["regex"] = None  # type: ignore[assignment]  # an import of it fails
try:
    import lark.utils  # noqa: F401
finally:
    if _HIDDEN:
        del sys.modules["regex"]
