"""One warm process that analyses texts, and the client that cancels what it computes.

The process reads requests from its standard input and writes a reply for each: a length of four bytes, and pickled
records. SIGUSR1 cancels the analysis that runs; its reply is None, and the process stays warm. Where the system has no
such signal, the process is ended and another one started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys

from dslc.editor.analysis import AnalysisReply, AnalysisRequest, analyse_text

_CANCEL = getattr(signal, "SIGUSR1", None)


class AnalysisCancelledError(Exception):
    """The client asks for no reply any more."""


class WorkerEndedError(Exception):
    """The process ended during an analysis; its traceback is on standard error."""


class AnalysisWorker:
    """The client. One request at a time, with `lock` held."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.lock = asyncio.Lock()
        self.is_busy = self.is_cancelled = False

    async def start(self) -> asyncio.subprocess.Process:
        """Starts the process if none runs, with `lock` held."""
        if self.process is None or self.process.returncode is not None:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "dslc.editor.worker"),  # -P: no module of the folder that is edited
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        return self.process

    async def analyse(self, request: AnalysisRequest) -> AnalysisReply | None:
        """Returns the reply; None if it was cancelled. Raises WorkerEndedError."""
        process = await self.start()
        assert process.stdin is not None and process.stdout is not None
        self.is_busy, self.is_cancelled = True, False
        try:
            process.stdin.write(_framed(request))
            await process.stdin.drain()
            size = int.from_bytes(await process.stdout.readexactly(4), "big")
            reply: AnalysisReply | None = pickle.loads(await process.stdout.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await process.wait()
            if self.is_cancelled:
                return None
            raise WorkerEndedError(f"the analysis of {request.path} ended with status {status}") from None
        finally:
            self.is_busy = False
        return reply

    def cancel(self) -> None:
        if not self.is_busy or self.is_cancelled or self.process is None or self.process.returncode is not None:
            return
        self.is_cancelled = True
        with contextlib.suppress(ProcessLookupError):
            if _CANCEL is None:
                self.process.kill()
            else:
                self.process.send_signal(_CANCEL)

    async def close(self) -> None:
        """Ends the process."""
        if self.process is not None and self.process.returncode is None:
            self.is_cancelled = True
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


def _framed(message: object) -> bytes:
    data = pickle.dumps(message)
    return len(data).to_bytes(4, "big") + data


class _Server:
    """The process: `computes` is true while an analysis runs, which alone is cancelled."""

    def __init__(self) -> None:
        self.computes = False
        if _CANCEL is not None:
            signal.signal(_CANCEL, self.on_cancel)

    def on_cancel(self, number: int, frame: object) -> None:
        if self.computes:
            self.computes = False
            raise AnalysisCancelledError

    def reply(self, request: AnalysisRequest) -> AnalysisReply | None:
        try:
            self.computes = True
            found = analyse_text(request)
            self.computes = False
        except AnalysisCancelledError:
            return None
        return found

    def serve(self) -> None:
        requests = sys.stdin.buffer
        replies = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # what a library prints is no reply
        while size := requests.read(4):
            request = pickle.loads(requests.read(int.from_bytes(size, "big")))
            replies.write(_framed(self.reply(request)))
            replies.flush()


if __name__ == "__main__":
    _Server().serve()
