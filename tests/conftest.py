"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# No test has a time to keep; in CI each run draws the same examples. HYPOTHESIS_PROFILE=fresh draws others.
settings.register_profile("same", derandomize=True)
settings.register_profile("fresh")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
