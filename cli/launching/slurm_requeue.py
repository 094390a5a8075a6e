"""Decides what follows a training under SLURM, for the script of `dslc submit`:

    python -m dslc.launching.slurm_requeue RUN STATUS --restarts N [--requeue]

Model: the run directory says how the training ended (runtime/process/run_status.py). The answer is the exit status: 0
starts it again in this allocation, 1 ends the job.

- Warned of the time limit, or preempted: the job goes back into the queue, where `--requeue` allows it. After `N` times
  without a step done since, it ends.
- Failed: started again up to `N` times in all. The same exception in the same step ends it the second time; a fault of
  the job itself, or storage that takes no checkpoints, the first.
- Done, or stopped by `dslc stop` or `scancel`: the end.

`.restarts` in the run directory counts across starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
from dataclasses import asdict, dataclass, replace

from dslc.compiler.facts.untrusted_files import read_json, replacing
from dslc.compiler.ir.codec import from_json
from dslc.dsl.plain import plain
from dslc.dsl.words import plural
from dslc.launching.run_state import command
from dslc.runtime.process.run_status import RunStatus, is_asked_to_stop, read_status, write_status
from dslc.terminal.exit_codes import GOOD, INTERRUPTED, JOB_AT_FAULT, WRONG_USAGE

AGAIN, THE_END = 0, 1
_KEPT = ".restarts"
_MOST = 1 << 24  # bytes of that file
_WARNING = "SIGUSR1"
_STARTS = 600.0  # seconds in which the next start says that it begins
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True, kw_only=True)
class _RunHistory:
    """The past of a run: failures, messages of exceptions by step, and requeues without progress since a step."""

    failures: int = 0
    exceptions: tuple[str, ...] = ()
    step: int = -1
    in_vain: int = 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dslc.launching.slurm_requeue")
    parser.add_argument("run")
    parser.add_argument("status", type=int)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--requeue", action="store_true")
    told = parser.parse_args(words)
    if told.status in (GOOD, JOB_AT_FAULT, WRONG_USAGE):
        return THE_END
    found = read_status(told.run) or RunStatus(state="failed")
    before = _read_history(told.run)
    if told.status == 128 + signal.SIGUSR1:  # it was warned before it could listen
        found = replace(found, asked=_WARNING)
    if told.status in (INTERRUPTED, 128 + signal.SIGUSR1):
        return _after_stop(told.run, found, before, told.restarts) if told.requeue else THE_END
    return _after_failure(told.run, found, before, told.restarts)


def _after_failure(run: str, found: RunStatus, before: _RunHistory, restarts: int) -> int:
    known = f"{found.step} {_ADDRESS.sub('0x', found.message)}" if found.raised else ""
    if not restarts or is_asked_to_stop(run):
        return THE_END
    if found.lasting:
        return _refuse_restart("not restarted: that would not mend it")
    if known and known in before.exceptions:
        return _refuse_restart("not restarted: the same exception ended the same step before")
    if before.failures >= restarts:
        return _refuse_restart(
            f"not restarted: it was, {before.failures} times, the most that `launch.restarts` allows"
        )
    kept = (*before.exceptions, *([known] if known else []))
    count = before.failures + 1
    _write_history(run, replace(before, failures=count, exceptions=kept))
    _say(f"restart {count} of {restarts}")
    write_status(run, replace(found, state="restarting", restarts=count, within=_STARTS))
    return AGAIN


def _after_stop(run: str, found: RunStatus, before: _RunHistory, restarts: int) -> int:
    """Puts the job back into the queue, if the cluster has stopped it, and it is to go on."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job or not (found.asked == _WARNING or (found.asked == "SIGTERM" and _was_preempted(job))):
        return THE_END
    in_vain = 0 if found.step > before.step else before.in_vain + 1
    if in_vain > restarts:
        write_status(
            run, replace(found, state="failed", message=f"no step was done since the start before: {found.asked}")
        )
        starts = plural(in_vain, "start")
        return _refuse_restart(f"not requeued: no step was done in {starts}, and `launch.restarts` is {restarts}")
    _write_history(run, replace(before, step=max(found.step, before.step), in_vain=in_vain))
    write_status(run, replace(found, state="waiting"))
    if command(["scontrol", "requeue", job]) is None:
        write_status(run, found)
        return _refuse_restart(f"`scontrol requeue {job}` failed: `dslc submit` the job again to go on")
    _say(f"requeued as job {job}, to go on after step {found.step}")
    return THE_END


def _was_preempted(job: str) -> bool:
    told = command(["scontrol", "show", "job", job, "--oneliner"]) or ""
    state = re.search(r"\bJobState=(\w+)", told)
    return state is not None and state[1] in ("RUNNING", "PREEMPTED")


def _read_history(run: str) -> _RunHistory:
    try:
        return from_json(_RunHistory, read_json(os.path.join(run, _KEPT), _MOST))
    except FileNotFoundError:
        return _RunHistory()
    except (OSError, ValueError) as error:
        _say(f"{os.path.join(run, _KEPT)} cannot be read ({error}): the count of restarts begins anew")
        return _RunHistory()


def forget(run: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(run, _KEPT))


def _write_history(run: str, before: _RunHistory) -> None:
    with replacing(os.path.join(run, _KEPT)) as file:
        json.dump(asdict(before), file)


def _refuse_restart(why: str) -> int:
    _say(why)
    return THE_END


def _say(text: str) -> None:
    print(plain(f"dslc: {text}"), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
