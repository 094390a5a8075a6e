"""The modules whose objects go to other processes by value: no file has them."""

from __future__ import annotations

GIVEN = "dslc_given"  # the module of objects that a program gives in place of `python(…)`
HANDED_OVER = ("__main__", GIVEN)
