"""Reports the details of a rank's position when its launcher asks: the module, the collective and the line of Python.

Model: a thread of the rank waits at a pipe. When the launcher asks, it reads the stack of the main thread. The frames
inside the innermost one of the user's show whether the main thread waits for other ranks. Their variables name the
module: no module needs a hook, so a training that goes on pays nothing.

Contract: the thread holds no lock and touches no tensor. Libraries that wait outside Python release its lock, so the
thread can run then.

Limits: a main thread that keeps Python's lock gives no details. The launcher then reads where it is from the stack that
a signal writes into its log (process/failure.py). In a backward pass of DistributedDataParallel the stack does not tell
a wait from the work (`backward`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import FrameType

from torch import nn

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.trace.private_torch import sharded_module
from dslc.runtime.process.failure import Kind, line_in_log, line_of_module, line_text
from dslc.runtime.process.frame_ownership import is_ours, is_users
from dslc.runtime.process.lifetime import children_of, handles_signal
from dslc.runtime.process.positions import Phase, PositionDetails, Waits, phase_of, position_number
from dslc.runtime.process.stop import RunControl

_WORKER_ANSWER = 0.2  # seconds in which a data worker writes its stack
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "all_to_all", "gather", "scatter")
_MESSAGES = {"send": "sending of a message", "recv": "receiving of a message", "wait": "exchange of a message"}
_SUBJECTS = {  # by the function of dslc that exchanges
    "agree": "the loss",
    "clipped": "the gradient norm",
    "evaluate": "the metrics",
    "_compare": "the order of modules",
    "global_count": "the count of targets",
}
_PENDING = {  # functions of dslc that wait for what they or others have begun, which torch does outside Python
    "global_count.<locals>.complete_pending": f"the all-reduce of {_SUBJECTS['global_count']}",
    "Pipeline.finish": "the sending of a message",
    "BucketQueue._further": "",  # the exchange of the job
}
_JOINED = "torch/distributed/"


class PositionReporter:
    """The thread of one rank. `model` is named when it is built."""

    def __init__(self, job: JobProgram, rank: int, board: RunControl, requests: int) -> None:
        self._job, self._rank, self._board, self._requests = job, rank, board, requests
        self._main = threading.get_ident()
        self.enter = board.position_writer(rank)
        self.model: nn.Module | None = None
        threading.Thread(target=self._serve, name="dslc-positions", daemon=True).start()

    def enter_phase(self, phase: Phase) -> None:
        self.enter(position_number(phase))

    def _serve(self) -> None:
        while os.read(self._requests, 64):
            _, _, since = self._board.position(self._rank)
            frame = sys._current_frames().get(self._main)
            details = self._details(since, _frames_from(frame))
            self._board.add_details(self._rank, json.dumps(asdict(details)))

    def record_error(self, error: BaseException, kind: Kind) -> None:
        """Reports the details of the position at which an exception ends the rank."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][:0:-1]  # but for `worker.work`
        details = self._details(self._board.position(self._rank)[2], frames)
        waits: Waits = "" if kind == "error" else details.waits or "collective"
        self._board.add_details(self._rank, json.dumps(asdict(replace(details, waits=waits))))

    def _details(self, since: int, frames: Sequence[FrameType]) -> PositionDetails:
        files = [frame.f_code.co_filename for frame in frames]
        user = next((n for n, file in enumerate(files) if is_users(file)), len(frames))
        names = {} if self.model is None else {id(part): name for name, part in self.model.named_modules()}
        module = next((name for frame in frames if (name := _module_at(frame, names)) is not None), "")
        exchange = self._job.gradients.exchange
        exchanged = f"the exchange of the {exchange.agrees}" if exchange is not None else ""
        waits, operation = _pending_wait(frames[:user], exchanged) or _wait_in(frames[:user], module)
        python = (files[user], frames[user].f_lineno, frames[user].f_code.co_name) if user < len(files) else None
        if python is None and phase_of(self._board.position(self._rank)[1]) == Phase.SAMPLES and not waits:
            python = self._line_of_threads()
        elif waits == "backward" and (line := self._line_of_threads(autograd=True)) is not None:
            waits, python = "", line
        if waits == "workers":
            python = self._line_of_workers() or python
        return PositionDetails(
            since=since,
            module=module,
            order=list(names.values()).index(module) if module in names.values() else 0,
            line=line_of_module(self._job, module),
            operation=operation,
            waits=waits,
            python=line_text(*python) if python is not None else "",
        )

    def _line_of_threads(self, *, autograd: bool = False) -> tuple[str, int, str] | None:
        """Returns the user's line that another thread is at: one that loads samples, or a thread of torch's `autograd`,
        which runs the backward pass of a GPU.
        """
        for thread, innermost in sys._current_frames().items():
            frames = _frames_from(innermost) if thread not in (self._main, threading.get_ident()) else []
            if autograd and frames and frames[-1].f_code.co_name == "_bootstrap":
                continue  # a thread of Python's
            for frame in frames:
                if is_users(frame.f_code.co_filename):
                    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        return None

    def _line_of_workers(self) -> tuple[str, int, str] | None:
        """Returns the user's line that a data worker is at, by the stack that it writes into this rank's log."""
        before = os.lseek(2, 0, os.SEEK_END)
        for child in children_of(os.getpid()):
            if handles_signal(child, signal.SIGUSR1):  # it would end a process of the user's
                os.kill(child, signal.SIGUSR1)
        time.sleep(_WORKER_ANSWER)
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(before)
            return line_in_log(log.read().decode(errors="replace"), users=True)


def _frames_from(frame: FrameType | None) -> list[FrameType]:
    """Returns the frames of a rank's stack, the innermost first: those that `worker.work` has called."""
    frames = []
    while frame is not None and not (frame.f_code.co_name == "work" and is_ours(frame.f_code.co_filename)):
        frames.append(frame)
        frame = frame.f_back
    return frames


def _module_at(frame: FrameType, names: dict[int, str]) -> str | None:
    """Returns the name of the module that a frame works for; None if it works for none."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    owner = frame.f_locals.get("self")
    return names.get(id(owner)) if isinstance(owner, nn.Module) else sharded_module(owner)


def _pending_wait(frames: Sequence[FrameType], exchanged: str) -> tuple[Waits, str] | None:
    """Returns for what the innermost frames wait that was begun before; None if they do not."""
    for frame in frames:
        code = frame.f_code
        if code.co_qualname in _PENDING and is_ours(code.co_filename):
            return "collective", _PENDING[code.co_qualname] or exchanged
        if code.co_name != "wait" and "/transport/" not in code.co_filename:
            return None
    return None


def _wait_in(frames: Sequence[FrameType], module: str) -> tuple[Waits, str]:
    """Returns how the innermost frames wait for others, and for what."""
    for n, frame in enumerate(frames):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("torch/utils/data/dataloader.py"):
            return "workers", "its data workers"
        if file.endswith("torch/autograd/graph.py") and function == "_engine_run_backward":
            return ("backward", "") if n == 0 else ("", "")
        if "/_fully_shard/" in file:
            kind = "reduce-scatter of the gradients" if "post_backward" in function or "reduce" in function else ""
            return "collective", f"the {kind or 'all-gather'} of {module or 'the model'}"
        if "/pipelining/" in file and (action := frame.f_locals.get("action")) is not None:
            return "collective", f"the exchange of {action}"
        if _JOINED not in file and not file.endswith("nn/parallel/distributed.py"):
            continue
        if (text := _collective_text(function)) and not _is_collective(frames[n + 1 :]):
            return "collective", f"the {text}{_subject(frames[n:], module)}"
    return "", ""


def _collective_text(function: str) -> str:
    """Returns the field's term for what a function of torch exchanges; "" for other functions."""
    name = function.strip("_")
    if name.startswith("init_process_group") or name == "new_group":
        return "opening of connections"
    if name in ("wait_tensor", "wait_batch_p2p"):
        return _MESSAGES["wait"]
    kind = next((kind for kind in _COLLECTIVES if kind in name), "")
    return kind.replace("_", "-") or _MESSAGES.get(name.removeprefix("i"), "")


def _is_collective(callers: Sequence[FrameType]) -> bool:
    """True if the caller, wrappers of torch's aside, is a collective as well: the outermost gives the name."""
    for frame in callers:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if _JOINED not in file:
            return False
        if function != "wrapper":
            return bool(_collective_text(function))
    return False


def _subject(frames: Sequence[FrameType], module: str) -> str:
    """Returns what is exchanged, by the function of dslc that does so: " of the loss"."""
    function = next((frame.f_code.co_name for frame in frames if is_ours(frame.f_code.co_filename)), "")
    subject = _SUBJECTS.get(function, module)
    return f" of {subject}" if subject else ""
