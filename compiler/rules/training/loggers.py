"""The rule of loggers (`log.loggers`): no two of them write to the same place. E0666."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.loggers import LibraryLogger


def check_loggers(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports a logger of a library that is given twice with the same arguments: each record would be there twice."""
    earlier: list[LibraryLogger] = []
    for logger in job.log.loggers:
        if not isinstance(logger, LibraryLogger):
            continue
        same = next((other for other in earlier if replace(other, required=logger.required) == logger), None)
        if same is not None:
            yield Diagnostic(
                "E0666",
                f"two loggers `{logger.word}` write to the same place",
                logger.span,
                notes=(Note("the other one", same.span),),
                help="remove one of them, or name another folder, project or experiment",
            )
        earlier.append(logger)
