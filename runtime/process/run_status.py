"""The state of a run: `status.json` in its run directory, and the request to stop it, from any machine.

Model: the launcher writes the file when its state changes, and every `BEAT` seconds as a heartbeat, at the moments at
which it wakes for the progress. Each writing says in how many seconds the next one is due. A reader on the same host,
and in the same process namespace, looks for the process instead, which tells a killed launcher at once. `dslc stop`
leaves the file `.stop`, which the launcher looks for at the same moments.

Contract: readers see a whole file, old or new. A disk that is full, or a folder that is gone, ends no training. The
clock is the file system's, so that hosts with different clocks agree.

Limits: on a file system that shows other hosts their files late, a state is as late.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from dslc.compiler.facts.untrusted_files import create_file, read_json, replacing
from dslc.compiler.ir.codec import from_json
from dslc.runtime.process.lifetime import process_state

NAME, STOP = "status.json", ".stop"
STATES = ("waiting", "starting", "running", "restarting", "done", "stopped", "failed")
ALIVE = ("starting", "running", "restarting")  # states that a launcher has to confirm
BEAT = 5.0  # seconds between two signs of life
_WITHIN = 60.0  # seconds after a sign of life in which the next one is due
_START = 600.0  # seconds in which the first step of a launcher is due: it imports, and lays out a model
_MOST = 1 << 20  # bytes of a file that is read


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The state of a run, one of `STATES`, as its launcher has written it last: `step` of `steps` are done. `message`
    says why it failed or ended early, `raised` whether by an exception, `lasting` whether another start would meet that
    again; `asked` what has stopped it: a signal's name, or `dslc stop`. The launcher is `process` on `host`, in `place`
    (the namespace of its number), and began at the tick `began`; it writes again within `within` seconds. `metrics`
    come from the last record. `step_time` is what a step took, and `expected` what the plan predicts, in seconds; 0 if
    unknown. At the end, the launcher has shown `notes_shown` bytes of the notes; None if
    that is unknown.
    """

    state: str
    step: int = 0
    steps: int = 0
    message: str = ""
    raised: bool = False
    lasting: bool = False
    asked: str = ""
    restarts: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_time: float = 0.0
    expected: float = 0.0
    notes_shown: int | None = None
    host: str = ""
    process: int = 0
    place: str = ""
    began: str = ""
    within: float = _WITHIN


def write_status(run_dir: str, status: RunStatus) -> None:
    """Writes the state of a run, with this process as its launcher. Raises nothing if the folder cannot be written."""
    here = replace(status, host=socket.gethostname(), process=os.getpid(), place=_place(), began=_began(os.getpid()))
    path = os.path.join(run_dir, NAME)
    with contextlib.suppress(OSError), replacing(path) as file:
        json.dump(asdict(here), file)
        file.write("\n")


def read_status(run_dir: str) -> RunStatus | None:
    """Returns the state of a run as written; None if there is no such file, or another program has written it."""
    try:
        told = read_json(os.path.join(run_dir, NAME), _MOST)
        # A later dslc may write more fields.
        status = from_json(RunStatus, {name: told[name] for name in RunStatus.__dataclass_fields__ if name in told})
    except (OSError, ValueError, TypeError):
        return None
    times = status.within, status.step_time, status.expected
    counts = status.step, status.steps, status.restarts, status.process, status.notes_shown or 0, *times
    return status if status.state in STATES and all(count >= 0 for count in counts) else None


def silence(run_dir: str, status: RunStatus, now: float | None = None) -> str:
    """Returns in words how it is known that the launcher of a run is gone; "" if it is there, or not overdue at `now`,
    as `file_age` has it.
    """
    if status.state not in ALIVE:
        return ""
    who = f"its launcher, process {status.process} on {status.host},"
    if status.place == _place():
        return "" if status.began == _began(status.process) else f"{who} is gone"
    seconds = file_age(os.path.join(run_dir, NAME), now)
    return f"{who} has given no sign of life for {seconds:.0f} s" if seconds > status.within else ""


def file_age(path: str, now: float | None = None) -> float:
    """Returns the seconds from when a file was written to `now`; None asks the clock of the file system, where this can
    be asked, by a file without a name.
    """
    try:
        written = os.stat(path).st_mtime
    except OSError:
        return 0.0
    if now is not None:
        return now - written
    now = time.time()
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=os.path.dirname(path)) as file:
        now = os.fstat(file.fileno()).st_mtime
    return now - written


def _place() -> str:
    """Returns the host, its boot and the namespace in which numbers of processes count; "?" if nobody says."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"? {socket.gethostname()} {os.getpid()}"


def _began(process: int) -> str:
    """Returns the tick at which a process began; "" if it is gone. A number is given to other processes later."""
    fields = process_state(process)
    return "" if not fields or fields[0] in "ZX" else fields[19]


# ------------------------------------------------------------------------------------------------ a request to stop


def ask_to_stop(run_dir: str) -> None:
    """Asks the launcher of a run to end it after its step. Raises OSError if the folder cannot be written."""
    with contextlib.suppress(FileExistsError):  # it is asked already; a link there is never followed
        os.close(create_file(os.path.join(run_dir, STOP)))


def is_asked_to_stop(run_dir: str) -> bool:
    return os.path.lexists(os.path.join(run_dir, STOP))


def begin(run_dir: str, steps: int) -> None:
    """Says that a run starts, or starts again, in a folder, and forgets the requests to the previous run."""
    before = read_status(run_dir)
    again = before is not None and before.state == "restarting"
    if not again:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(run_dir, STOP))
    step, restarts = (before.step, before.restarts if again else 0) if before is not None else (0, 0)
    write_status(run_dir, RunStatus(state="starting", step=step, steps=steps, restarts=restarts, within=_START))


def broke_off(run_dir: str, message: str) -> None:
    """Says that a run has failed, if its launcher has not said how it ended."""
    told = read_status(run_dir)
    if told is not None and told.state in ALIVE:
        write_status(run_dir, replace(told, state="failed", message=message))


class Heartbeat:
    """The launcher's part: signs of life, and the end. `keeps` is false on a host that leaves this to another.

    `expected` is the predicted time of a step, and `step_time` the measured one, in seconds.
    """

    def __init__(self, run_dir: str, steps: int, *, keeps: bool = True, expected: float = 0.0) -> None:
        self._run_dir, self.keeps = run_dir, keeps
        before = read_status(run_dir) if keeps else None
        restarts = before.restarts if before is not None and before.state == "starting" else 0
        self.step_time = 0.0
        self._last = RunStatus(state="starting", steps=steps, restarts=restarts, within=_START, expected=expected)
        self._at = time.monotonic()

    def look(self, step: int, metrics: Mapping[str, float | None]) -> bool:
        """Gives a sign of life if one is due, with the steps done; returns whether the run is asked to stop. Costs some
        microseconds if nothing is due.
        """
        if not self.keeps:
            return False
        changed = step > 0 and self._last.state != "running"
        if changed or time.monotonic() - self._at >= BEAT:
            state = "running" if step > 0 else self._last.state
            step = max(step, 0)
            self.say(replace(self._last, state=state, step=step, metrics=_plain(metrics), within=_WITHIN))
        return is_asked_to_stop(self._run_dir)

    def restart(self, step: int, restarts: int, message: str, within: float) -> None:
        told = replace(self._last, state="restarting", step=step, restarts=restarts, message=message)
        self.say(replace(told, within=within + _START))

    def end(
        self,
        state: str,
        step: int,
        metrics: Mapping[str, float | None],
        *,
        message: str = "",
        raised: bool = False,
        lasting: bool = False,
        asked: str = "",
        notes_shown: int = 0,
    ) -> None:
        """Says how the run has ended, and takes away the request to stop."""
        if self.keeps and is_asked_to_stop(self._run_dir):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._run_dir, STOP))
        told = replace(self._last, state=state, step=step, message=message, raised=raised, lasting=lasting)
        self.say(replace(told, asked=asked, metrics=_plain(metrics), notes_shown=notes_shown))

    def say(self, status: RunStatus) -> None:
        self._last, self._at = replace(status, step_time=self.step_time), time.monotonic()
        if self.keeps:
            write_status(self._run_dir, self._last)


def _plain(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}
