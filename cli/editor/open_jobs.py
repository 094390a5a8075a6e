"""The open jobs of a language server, and the analysis of each after a pause.

Each change publishes syntax and names at once. After a pause, the worker analyses the text, unless another change comes
first. Every answer carries the version of its text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from lsprotocol import types
from pygls.lsp.server import LanguageServer

from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.editor.diagnose import carry_over
from dslc.dsl.editor.figures import JobFigures
from dslc.dsl.editor.navigation import find_neighbours
from dslc.dsl.editor.snapshot import Snapshot
from dslc.editor.analysis import AnalysisRequest
from dslc.editor.positions import LineTable
from dslc.editor.protocol_types import show_diagnostic
from dslc.editor.worker import AnalysisWorker, WorkerEndedError
from dslc.terminal.version import __version__

PAUSE = 0.15  # seconds without a change before the analysis


class DocumentId(Protocol):
    @property
    def uri(self) -> str: ...


class DocumentParams(Protocol):
    """The parameters of a request about a text."""

    @property
    def text_document(self) -> DocumentId: ...


class OpenJob:
    """A job that is open in the editor, and the last answer of its analysis."""

    def __init__(self, uri: str, encoding: str, version: int, snapshot: Snapshot) -> None:
        self.uri, self.encoding = uri, encoding
        self.analysed: tuple[Diagnostic, ...] = ()
        self.analysed_snapshot = snapshot
        self.published: list[Diagnostic] = []
        self.figures: JobFigures | None = None
        self.update(version, snapshot)

    def update(self, version: int, snapshot: Snapshot) -> None:
        self.version, self.snapshot = version, snapshot
        self.lines = LineTable(snapshot.text, self.encoding)


class JobServer(LanguageServer):
    """The open jobs, and the worker that analyses them."""

    def __init__(self) -> None:
        super().__init__("dslc", __version__)
        self.jobs: dict[str, OpenJob] = {}
        self.worker = AnalysisWorker()
        self.analysing: OpenJob | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    def job(self, params: DocumentParams) -> OpenJob:
        """Returns the job that a request is about."""
        return self.jobs[params.text_document.uri]

    def neighbours(self, job: OpenJob) -> list[Snapshot]:
        """Returns the jobs that import this one."""
        return find_neighbours(job.snapshot, [other.snapshot for other in self.jobs.values()])

    def check(self, job: OpenJob) -> None:
        """Publishes what is known at once, and analyses the text after a pause."""
        if self.analysing is job:
            self.worker.cancel()
        self.publish(job, carry_over(job.analysed, job.analysed_snapshot, job.snapshot))
        task = asyncio.get_running_loop().create_task(self.analyse(job, job.snapshot))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def analyse(self, job: OpenJob, snapshot: Snapshot) -> None:
        await asyncio.sleep(PAUSE)
        async with self.worker.lock:  # one analysis at a time
            if self.jobs.get(job.uri) is not job or job.snapshot is not snapshot:
                return
            self.analysing = job
            try:
                request = AnalysisRequest(path=snapshot.path, text=snapshot.text, repaired=snapshot.repaired())
                reply = await self.worker.analyse(request)
            except WorkerEndedError as error:
                self.window_log_message(types.LogMessageParams(types.MessageType.Error, str(error)))
                return
            finally:
                self.analysing = None
        if reply is not None and job.snapshot is snapshot:
            job.analysed, job.analysed_snapshot, job.figures = reply.diagnostics, snapshot, reply.figures
            self.publish(job, reply.diagnostics)
            workspace = self.client_capabilities.workspace
            if workspace and workspace.inlay_hint and workspace.inlay_hint.refresh_support:
                self.workspace_inlay_hint_refresh(None)

    def publish(self, job: OpenJob, found: Iterable[Diagnostic]) -> None:
        job.published = list(found)
        diagnostics = [show_diagnostic(diagnostic, job.snapshot, job.lines) for diagnostic in job.published]
        self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(job.uri, diagnostics, job.version))
