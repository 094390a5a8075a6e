"""The functions of dslc that are looked for in the stack of a rank."""

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


def test_the_functions_that_exchange_exist() -> None:
    files = list(Path(ROOT, "runtime").rglob("*.py"))
    functions = {name for file in files for name in _functions_in(compile(file.read_text(), str(file), "exec"))}
    assert position_details._PENDING.keys() <= functions
    assert position_details._SUBJECTS.keys() <= {name.rpartition(".")[2] for name in functions}
