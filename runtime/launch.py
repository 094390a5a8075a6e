"""Starts the ranks of a training on this machine and stays with them to the end.

Model: the ranks are processes forked from this one by torch's elastic agent (agent.py), which notices how they end.
This process has imported torch and run nothing, which takes 0.1 s instead of the 3 s of a fresh interpreter. The ranks
find each other by a file that they inherit (transport/rendezvous.py). A world of one process takes the same way: it
costs 0.1 s, and Ctrl-C, logs and failures are the same. While it waits, this process draws the progress.

Contract: `launch` returns when no process of the training is left, in all cases: done, stopped (process/stop.py),
failed (process/failure.py). That includes threads and processes which the user's code leaves behind: they have
`PATIENCE` seconds, and are ended. A rank dies with this process, even if that is killed. If processes are stopped by a
signal, this is found after `launch.timeout`; a slow training is left alone. `launch` raises nothing for a training that
failed.

`run_in_subprocess` does the same from a program or notebook that may have used torch already: a process forked then can
hang in its first parallel operation (torch's thread pool does not survive the fork). It starts a fresh interpreter,
which acts as `python -m dslc.runtime.launch`: it reads `program.json` in the run directory.

Ranks that fail are started again, as often as the job says (restarts.py): each time as the first, and then
`launch` returns what the last of them came to.

With a `group` the same happens on each host, and the launchers keep together (hosts/coordination.py).

Limits: signals are only received in the main thread.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TextIO

from torch.distributed.elastic.agent.server.api import RunResult

from dslc.compiler.ir.codec import DecodeError, from_json, parse, to_json
from dslc.compiler.ir.program import JobProgram, PythonFunction, RankPlace, RankProgram
from dslc.runtime import worker
from dslc.runtime.agent import PATIENCE, Agent, AtOnce, agent_of, elastic_log
from dslc.runtime.checkpoint import checkpoint
from dslc.runtime.data import augmentation
from dslc.runtime.hosts.coordination import HostGroup
from dslc.runtime.hosts.elastic import TrainingOverError
from dslc.runtime.hosts.launcher_group import LauncherGroup
from dslc.runtime.hosts.rendezvous import StopRequestedError
from dslc.runtime.hosts.rendezvous_address import RendezvousError
from dslc.runtime.loop import stateful_metrics
from dslc.runtime.loop.step_sync import next_wait
from dslc.runtime.model import adapters, transformers_model
from dslc.runtime.parallel import fsdp, tensor_parallel, zero1
from dslc.runtime.pipeline import pipeline
from dslc.runtime.process import failure
from dslc.runtime.process.failure import Failure, Outcome
from dslc.runtime.process.lifetime import OrphanReaper, end_with
from dslc.runtime.process.positions import forget_positions
from dslc.runtime.process.program_file import read_program, write_program
from dslc.runtime.process.progress import Watch
from dslc.runtime.process.records import Record, RecordFollower
from dslc.runtime.process.screen import prepare
from dslc.runtime.process.stop import RunControl, listening
from dslc.runtime.process.user_code import hand_over, search_path, take_over
from dslc.runtime.restarts import Restarts
from dslc.runtime.technique import float8
from dslc.runtime.train import TrainingResult
from dslc.runtime.transport.barriers import StartupChannels
from dslc.runtime.transport.rendezvous import RankStore, shared_file

Gathered = Callable[[], tuple[JobProgram, tuple[RankPlace, ...]] | None]
_FUNCTIONS = "functions.pkl"
_LOOK = 0.1  # seconds between two looks for new records
# As `python -m dslc.runtime.launch`, except that Ctrl-C during torch's import ends it without a traceback.
_START = """
import signal, sys
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
from dslc.runtime.launch import main
sys.exit(main())
"""


def launch(
    program: JobProgram,
    places: tuple[RankPlace, ...],
    run_dir: str,
    *,
    screen: TextIO | None = None,
    before: Callable[[], None] | None = None,
    group: LauncherGroup | None = None,
    in_group: bool = False,
    gathered: Gathered = lambda: None,
) -> Outcome:
    """Trains `program` on this node and leaves metrics, logs and weights in `run_dir`, which may exist.

    `screen` receives progress and a summary (standard output if None); each rank calls `before` first. `group` are the
    launchers of a training on several nodes; this launcher starts the ranks of its own node. `gathered` is called when
    they have met again for a restart, and gives the program for the present hosts, if it changes. `in_group`: SIGTERM
    is sent to this process and its ranks at once. To be called from a process that has not used torch. Raises OSError
    if processes or files cannot be made.
    """
    assert program.world_size == len(places)
    os.makedirs(os.path.join(run_dir, "logs"), exist_ok=True)
    if group is None or group.is_coordinator:
        failure.forget(run_dir, goes_on=program.checkpoint.resume != "none" or (group is not None and group.start > 1))
    if group is None or (group.is_coordinator and group.start == 1):
        forget_positions(run_dir)
    ranks = group.ranks if group is not None else range(len(places))
    board = RunControl(len(ranks), ranks.start, alone=group is None)
    watch = Watch(program, run_dir, board, screen or sys.stdout, goes_on=group is not None and group.start > 1)
    board.attempt = group.start if group is not None else 1
    restarts = Restarts(program, run_dir, board)
    launching = _Launch(program, places, run_dir, board, watch, restarts, before, group, in_group)
    with elastic_log(run_dir), listening(board, AtOnce):
        outcome = Outcome(run_dir=run_dir, steps=0, stopped_at=0)
        try:
            outcome, again = launching.start()
            while again:
                outcome = launching.prepare_again(outcome, gathered)
                if outcome.failure is not None:
                    break
                outcome, again = launching.start()
        except (AtOnce, StopRequestedError):
            between = outcome.failure is None and outcome.stopped_at  # all had stopped, for another host
            outcome = outcome if between else Outcome(run_dir=run_dir, steps=_completed(board), stopped_at=0)
        except TrainingOverError as over:
            watch.delegate_display(over.host)
            outcome = Outcome(run_dir=run_dir, steps=over.steps, stopped_at=over.steps if over.stopped else None)
    outcome = replace(outcome, restarts=restarts.used)
    watch.close(outcome)
    return outcome


def _preload(program: JobProgram) -> None:
    """Imports the modules that each rank would otherwise import.

    On GPUs not what may import torchao (transformers, peft): its modules ask CUDA about the devices, and a process that
    is forked after that cannot use them.
    """
    checkpoint.preload(program)
    stateful_metrics.preload(program.metrics)
    augmentation.preload(program.data)
    if program.gradients.kind == "fsdp":
        fsdp.preload()
    if program.tensor is not None or program.experts is not None:
        tensor_parallel.preload()
    if program.pipeline is not None:
        pipeline.preload()
    if program.gradients.kind == "zero1":
        zero1.preload()
    if program.device == "cuda":
        return
    if program.model.transformers is not None:
        transformers_model.preload(program.model.transformers)
    if program.model.adapter is not None and program.model.root is None:
        adapters.preload()
    if program.precision.float8 is not None:
        float8.preload()


@dataclass
class _Launch:
    """The ranks of this node, which are started together. `places` are the places of all nodes."""

    program: JobProgram
    places: tuple[RankPlace, ...]
    run_dir: str
    board: RunControl
    watch: Watch
    restarts: Restarts
    before: Callable[[], None] | None
    group: LauncherGroup | None
    in_group: bool
    _left: tuple[int, float] = (0, 0.0)  # the step that was done when the ranks ended, and the time of the clock
    _changed: bool = False  # they are started again because hosts have come or gone

    def start(self) -> tuple[Outcome, bool]:
        """Starts the ranks; returns, when none is left, what they came to, and whether they are started again."""
        program, board, group = self.program, self.board, self.group
        own = [place for place in self.places if place.rank in board.ranks]
        self.watch.delegate_display(group.machines[0] if group is not None and not group.is_coordinator else "")
        self.restarts.changes = group.changes if group is not None else 0
        _preload(program)
        os.makedirs(failure.log_folder(self.run_dir, board.attempt), exist_ok=True)
        meeting, launcher = StartupChannels(board), os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()  # or each rank would write the rest of the buffers again
        adopted = OrphanReaper()
        with _store(group) as store:

            def rank() -> None:
                of_it = RankProgram(job=program, place=own[int(os.environ["LOCAL_RANK"])])
                worker.work(of_it, self.run_dir, meeting, launcher, store, self.before, in_group=self.in_group)

            agent = agent_of(program, rank, self.watch, meeting, self.run_dir)
            if group is not None:
                steps, wait = program.steps, functools.partial(next_wait, program)
                agent.together = HostGroup(group, board, steps, wait, self._follow)
            try:
                outcome = _outcome(program, self.run_dir, board, agent.run(), agent)
            finally:
                agent.end_all()
                meeting.close()
                left = adopted.end(PATIENCE if board.all_done else 0)
                adopted.close()
        if board.all_done:
            self.watch.say_of_left(left)
        self._left = board.furthest - (outcome.failure is not None), time.monotonic()
        together = agent.together
        if together is None and outcome.failure is None:
            return outcome, False
        if together is None:
            assert outcome.failure is not None
            again, seen = self._follow(outcome.failure, board.stop_requested, False)
            outcome = replace(outcome, failure=seen)
        else:
            again = together.again
        if again:
            self._tell(outcome, change=together is not None and together.change)
        return outcome, again

    def _tell(self, outcome: Outcome, *, change: bool) -> None:
        """Says why the ranks are started again."""
        group = self.group
        if change:
            assert group is not None
            group.changes += 1
        in_words = failure.change_in_words if change else failure.in_words
        said = in_words(outcome.failure) if outcome.failure is not None else "stops for a host that has come"
        quiet = change or (outcome.failure is not None and outcome.failure.rewinds)
        note = "" if quiet else f"restart {self.restarts.used + 1} of {self.program.restarts}"
        self._changed = change
        self.watch.restart(said, note)

    def _follow(self, seen: Failure, stopping: bool, lost: bool) -> tuple[bool, Failure]:
        group, folder = self.group, self.watch.has_folder()
        if group is not None and group.started_by and lost:
            return self.restarts.end_with(seen, group.started_by)
        if group is not None and group.elastic and lost:
            return self.restarts.go_on(seen, stopping=stopping, folder=folder)
        if group is not None and not group.is_coordinator:
            return self.restarts.await_coordinator(seen, group.hosts[0], stopping=stopping)
        return self.restarts.follow(seen, stopping=stopping, folder=folder)

    def prepare_again(self, outcome: Outcome, gathered: Gathered) -> Outcome:
        """Returns the outcome without its failure when the ranks can be started again; else with the reason."""
        group, board, attempt = self.group, self.board, self.board.attempt + 1
        if group is not None:
            until = time.monotonic() + self.program.timeout
            try:
                anew = group.gather(gathered, attempt, until, self.watch.is_stopping)
            except RendezvousError as error:
                step = outcome.failure.step if outcome.failure is not None else outcome.steps
                seen = Failure(rank=None, step=step, kind="ended", message=str(error))
                return replace(outcome, failure=self._follow(seen, False, True)[1] if group.lost else seen)
            if anew is not None:
                self.program, self.places = anew
            attempt = group.start
        board.start_again(attempt, group.ranks.start if group is not None else 0)
        if self._changed and group is not None and group.is_coordinator:
            self.watch.change(self._left, ", ".join(group.hosts))
        return replace(outcome, failure=None)


def _outcome(program: JobProgram, run_dir: str, board: RunControl, result: RunResult, agent: Agent) -> Outcome:
    if not result.is_failed():
        together = agent.together
        try:
            end = from_json(TrainingResult, parse(together.end if together is not None else board.last_message(0)))
        except DecodeError as error:  # the first host says so
            message = f"the first host does not say how the training ended: {error}"
            seen = Failure(rank=None, step=board.furthest, kind="ended", message=message)
            return Outcome(run_dir=run_dir, steps=_completed(board), failure=seen)
        return Outcome(run_dir=run_dir, steps=end.steps, stopped_at=end.stopped_at, early=end.early)
    cause = agent.cause or failure.cause(run_dir, board, agent.ends, program.timeout)
    return Outcome(run_dir=run_dir, steps=_completed(board), failure=cause)


def _completed(board: RunControl) -> int:
    return max(0, board.step(board.ranks.start) - 1)


@contextlib.contextmanager
def _store(group: LauncherGroup | None) -> Iterator[RankStore]:
    """Yields the store through which the ranks find each other."""
    if group is None:
        with shared_file() as store:
            yield store
        return
    address, port = group.store
    listening = group.listening.fileno() if group.listening is not None else None
    yield RankStore(address=address, port=port, listening=listening, interface=group.interface)


# ----------------------------------------------------------------------------------------- in a fresh interpreter


def run_in_subprocess(
    program: JobProgram,
    places: tuple[RankPlace, ...],
    run_dir: str,
    *,
    quiet: bool = False,
    callback: Callable[[Record], object] | None = None,
) -> Outcome:
    """Runs `launch` in a fresh interpreter; its output appears on this process's `sys.stdout`, line by line, unless it
    is to be `quiet`. `callback` is called here with each new record of metrics.jsonl.

    Functions of `__main__` (`python("__main__:f")`), and objects that the program gives, are passed by value. Ctrl-C
    here stops the training there, and so does an exception of `callback`, which is raised at its end. Raises
    RuntimeError if that interpreter ends without an outcome.
    """
    os.makedirs(run_dir, exist_ok=True)
    write_program(run_dir, program, places)
    hand_over((function.function for function in _functions(program)), os.path.join(run_dir, _FUNCTIONS))
    reading, writing = os.pipe()
    # -P: no module of the current folder hides those of Python and torch.
    command = [sys.executable, "-P", "-c", _START, run_dir]
    command += [f"--parent={os.getpid()}", f"--report={writing}"]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
        pass_fds=(writing,),
        start_new_session=True,  # only this process passes Ctrl-C to it
    )
    os.close(writing)
    try:
        if callback is None:
            _pass_through(child, quiet)
        else:
            _follow(child, quiet, RecordFollower(run_dir), callback)
        with open(reading, encoding="utf-8", closefd=False) as report:
            told = report.read()
    finally:
        os.close(reading)
        if child.poll() is None:
            child.kill()
        child.wait()
    if not told and child.returncode in (-signal.SIGINT, 130):
        raise KeyboardInterrupt  # before the training could begin
    if not told:
        raise RuntimeError(f"the process that runs the training left with status {child.returncode}")
    return from_json(Outcome, json.loads(told))


def _follow(
    child: subprocess.Popen[str], quiet: bool, lines: RecordFollower, callback: Callable[[Record], object]
) -> None:
    """Passes its output through, beside which each new record goes to `callback`, in this thread."""
    passing = threading.Thread(target=_pass_through, args=(child, quiet), daemon=True)
    passing.start()
    failed: BaseException | None = None
    while True:
        ended = False
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK)
                ended = True
            for record in lines.new() if failed is None else ():
                callback(record)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
        except BaseException as error:
            failed = error
            child.send_signal(signal.SIGINT)
        if ended:
            break
    passing.join()
    if failed is not None:
        raise failed


def _pass_through(child: subprocess.Popen[str], quiet: bool = False) -> None:
    assert child.stdout is not None
    with child.stdout:
        while True:
            try:
                for line in child.stdout:
                    if not quiet:
                        sys.stdout.write(line)
                        sys.stdout.flush()
                return
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)


def _functions(part: object) -> Iterator[PythonFunction]:
    """Yields each function of the user's in a program."""
    if isinstance(part, PythonFunction):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _functions(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _functions(getattr(part, field.name))


def main(arguments: list[str] | None = None) -> int:
    """`python -m dslc.runtime.launch RUN_DIR`: returns 0, 3 if the training failed, or 130 if it was stopped."""
    parser = argparse.ArgumentParser(prog="python -m dslc.runtime.launch", description=__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("--parent", type=int, help="end with this process, which is the parent")
    parser.add_argument("--report", type=int, help="file descriptor that the outcome is written to, as JSON")
    options = parser.parse_args(arguments)
    prepare()
    if options.parent is not None:
        end_with(options.parent)
    program, places = read_program(options.run_dir)
    functions = os.path.join(options.run_dir, _FUNCTIONS)
    before = (lambda: take_over(functions)) if os.path.exists(functions) else None
    outcome = launch(program, places, options.run_dir, before=before)
    if options.report is not None:
        with open(options.report, "w", encoding="utf-8") as report:
            json.dump(to_json(outcome), report)
    elif outcome.failure is not None:
        print(failure.describe(outcome), file=sys.stderr)
    if outcome.failure is not None:
        return 3
    return 130 if outcome.stopped_at is not None else 0


if __name__ == "__main__":
    sys.exit(main())
