"""The folders of the checkout."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
EXAMPLES = ROOT / "examples"
