"""A job with some of its values set anew, and what the analysis says of it."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.record import Record, positional
from dslc.python_api.python_objects import settings_of

if TYPE_CHECKING:
    from dslc.compiler.compile import Compiled
    from dslc.compiler.rules.analysis import Analysis

_KEPT = 4_096  # analyses; hypothesis repeats examples as it shrinks them


@positional
class JobVariant(Record):
    """A job file with settings, as `--set` takes them. It is shown as the command that checks it."""

    path: str
    settings: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Returns the command that shows what is wrong with it."""
        settings = "".join(f" --set {shlex.quote(setting)}" for setting in self.settings)
        return f"dslc check {shlex.quote(self.path)}{settings}"

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        return _check(self, _version(self.path))[0]

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(diagnostic for diagnostic in self.diagnostics if diagnostic.severity == "error")

    @property
    def analysis(self) -> Analysis:
        """Returns the analysis of the job. Raises AssertionError with its mistakes if it has some."""
        from dslc.dsl.show import render

        diagnostics, analysis = _check(self, _version(self.path))
        assert analysis is not None and not self.errors, f"{self.command}\n\n{render(diagnostics, color=False)}"
        return analysis

    @property
    def compiled(self) -> Compiled:
        """Returns the plan of the job. Raises AssertionError with its mistakes if it has some."""
        return _compile(self, _version(self.path))

    def __repr__(self) -> str:
        return f"<{self.command}>"


def load_variant(job: str | os.PathLike[str], values: Mapping[str, object] | None = None) -> JobVariant:
    """Returns a job with values by their paths, such as `{"devices.nodes": 2}`."""
    return JobVariant(os.fspath(job), tuple(settings_of(values or {})))


def _version(path: str) -> int:
    """Returns what changes when the file does; 0 if it cannot be read, which the check reports."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=_KEPT)
def _check(variant: JobVariant, version: int) -> tuple[tuple[Diagnostic, ...], Analysis | None]:
    from dslc.jobs.check_job import check_one

    report, analysis = check_one(variant.path, list(variant.settings))
    return tuple(report), analysis


@functools.lru_cache(maxsize=_KEPT)
def _compile(variant: JobVariant, version: int) -> Compiled:
    from dslc.compiler.compile import compile_plan

    return compile_plan(variant.analysis)
