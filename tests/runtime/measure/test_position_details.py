"""Where a rank waits, by its stack: the functions of dslc that are looked for in it exist under their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from helpers.paths import ROOT

from dslc.runtime.measure import position_details


def _functions_in(code: CodeType) -> Iterator[str]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part.co_qualname
            yield from _functions_in(part)


def test_functions_that_wait_for_what_was_begun_before_exist() -> None:
    files = [
        Path(ROOT, "runtime", name)
        for name in ("step/stepper.py", "pipeline/pipeline.py", "exchange/exchange_groups.py")
    ]
    functions = {name for file in files for name in _functions_in(compile(file.read_text(), str(file), "exec"))}
    assert position_details._PENDING.keys() <= functions
