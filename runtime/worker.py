"""Runs one rank, from the fork to the end of its training.

Model: the rank's output goes to `logs/rank-N.log`. It opens the process group if there are several ranks, assembles the
parts, trains, and reports how far it came. It leaves when all ranks are done (transport/barriers.py). An exception is
reported to the launcher (process/failure.py) and ends the process.

Contract: a rank never outlives its launcher, and ignores Ctrl-C (process/stop.py). It never closes its process group
and leaves by `os._exit`, as forked processes do. After a training that is done it first waits for the threads and
processes that the user's code began, as any program does. It waits at most until the launcher loses patience. Else it
leaves at once. The system closes its connections. The reason is gloo's own thread (torch 2.13,
`ProcessGroupGloo::runLoop`; pytorch/pytorch#190489): holding the group's lock, it drops the last reference to a
finished all-reduce, and with it a tensor that Python has seen. To drop the tensor it takes the interpreter's lock. So

- a thread that destroys the group, holding the interpreter's lock, waits for the group's lock for ever;
- an interpreter that exits by itself answers the thread, up to Python 3.13, by ending it with an exception, which
  passes through a destructor: "terminate called without an active exception", SIGABRT, in one plain process of ten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dslc.compiler.facts.untrusted_files import open_to_append
from dslc.compiler.ir.program import CalibrateMode, EvaluateMode, JobProgram, PredictMode, RankPlace, RankProgram
from dslc.runtime.data import sample_keys
from dslc.runtime.data.batches import of_dead_worker
from dslc.runtime.data.samples import Splits
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.loop import out_of_range, plain_loop, tasks
from dslc.runtime.measure.layer_times import measure_times
from dslc.runtime.measure.position_details import PositionReporter
from dslc.runtime.measure.replica_check import compare_samples
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.parallel.tensor_parallel import noise_rank
from dslc.runtime.process import failure, random_numbers, stop
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.lifetime import end_with
from dslc.runtime.process.positions import Phase
from dslc.runtime.process.records import note
from dslc.runtime.reference import add_reference
from dslc.runtime.step.assemble import TrainingComponents, assemble
from dslc.runtime.step.rank_speeds import with_measured_shares
from dslc.runtime.train import TrainingResult, train
from dslc.runtime.transport import gloo, hierarchical_group, shared_memory, unpickling
from dslc.runtime.transport.barriers import StartupChannels
from dslc.runtime.transport.rendezvous import RankStore


def work(
    program: RankProgram,
    run_dir: str,
    meeting: StartupChannels,
    launcher: int,
    store: RankStore,
    before: Callable[[], None] | None = None,
    *,
    in_group: bool = False,
) -> NoReturn:
    """Runs a rank. `launcher` is the process that forked it, `store` the ranks' store
    (transport/rendezvous.py); `before` is called first. `in_group`: see `stop.deaf`.

    Raises SystemExit when all ranks are done; a training that fails ends the process.
    """
    job, place, board = program.job, program.place, meeting.board
    stop.deaf(board, in_group=in_group)
    end_with(launcher)
    board.arrive(place.rank)
    made, positions = _RankObjects(job), None
    try:
        _print_to(failure.log_path(run_dir, board, place.rank), goes_on=job.checkpoint.resume != "none")
        positions = PositionReporter(job, place.rank, board, meeting.begin(place.rank))
        if before is not None:
            before()
        device = _prepare(job, place)
        positions.enter_phase(Phase.GROUP)
        _open_group(job, place, store)
        _note_backend(job, place, run_dir)
        end = _carry_out(program, device, run_dir, board, positions, made)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except BaseException as raised:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises in it when a loader worker ends, here as well
        error = of_dead_worker(raised, job.data.line)
        if made.splits is not None:
            out_of_range.explain(error, made.job, place, made.splits, board.step(place.rank))
        model = made.parts.plain if made.parts is not None else None
        told = failure.record(run_dir, board, place.rank, error, made.job, model)
        if positions is not None:
            positions.record_error(error, told.kind)
        failure.say(board, place.rank, told)
        meeting.tell()
        _flush()
        # At once, also for sys.exit(0): without waiting for threads and processes of the user's code.
        os._exit(1)
    _flush()
    board.say(place.rank, json.dumps(dataclasses.asdict(end)), done=True)
    meeting.tell()
    meeting.part()
    sys.exit()  # not 0, which torch's agent would take for a returned value


@dataclasses.dataclass
class _RankObjects:
    """The objects that a rank has made, which tell more of an exception that ends it. `job` has the shares of the ranks
    when they are measured.
    """

    job: JobProgram
    splits: Splits | None = None
    parts: TrainingComponents | None = None


def _carry_out(
    program: RankProgram,
    device: torch.device,
    run_dir: str,
    board: stop.RunControl,
    positions: PositionReporter,
    made: _RankObjects,
) -> TrainingResult:
    """Opens the data and does what the mode of the job says, in a process group that is open."""
    job, place = program.job, program.place
    positions.enter_phase(Phase.SOURCE)
    with mark_errors(job.data.line):
        made.splits = splits = open_source(job.data, training=not isinstance(job.mode, EvaluateMode | PredictMode))
        sample_keys.prepare(job.data, splits.train, device)
    compare_samples(job, place, splits, device)
    if isinstance(job.mode, CalibrateMode):
        measured_training = measure_times(job, place, splits, device, run_dir, board)
        if measured_training is None:
            return TrainingResult(steps=0, stopped_at=0)
        job = measured_training
    elif job.observation is not None and job.observation.plain:
        return TrainingResult(steps=plain_loop.train(job, place, splits, device, run_dir))
    positions.enter_phase(Phase.MODEL)
    if job.is_training and job.data.most_share:
        made.job = job = with_measured_shares(job, place, splits, device, run_dir)
    made.parts = parts = assemble(job, device, functools.partial(note, run_dir), splits.train)
    positions.model = parts.plain
    assert mesh_of(job).coordinates == place.coordinates, place
    random_numbers.begin(job.seed, noise_rank(job, place.rank))
    if job.is_training:
        return train(job, place, parts, splits, board, run_dir, positions)
    if isinstance(job.mode, EvaluateMode):  # while the network has the weights of the start
        positions.enter_phase(Phase.REFERENCE)
        add_reference(job, place, parts, splits, run_dir)(0)
    tasks.work_off(job, place, parts, splits, run_dir)
    return TrainingResult(steps=0)


def _flush() -> None:
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()


def _print_to(path: str, goes_on: bool) -> None:
    """Sends the output of this process and its libraries to a file, and stacks on SIGUSR1 or a crash as well. A resumed
    training appends to it.
    """
    try:
        _send_to(open_to_append(path, truncate=not goes_on))
    except OSError:
        _send_to(os.open(os.devnull, os.O_WRONLY))  # the launcher reports this, on the streams that are its own
        raise
    # The parent's streams may be something else than files (a test's, a notebook's).
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_Log(fd, "w", closefd=False)), "utf-8", "replace", line_buffering=True)
        for fd in (1, 2)
    )
    faulthandler.enable(file=2)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=2)


class _Log(io.FileIO):
    """Drops output that cannot be written to the log: a full disk ends a training only if something is lost that
    matters.
    """

    def write(self, content: Any, /) -> int:  # `content` is a buffer, a type without a name before Python 3.12
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def _send_to(log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _prepare(job: JobProgram, place: RankPlace) -> torch.device:
    """Returns the device, after setting the threads and all that makes a run repeatable."""
    torch.set_num_threads(job.threads or _threads_of(os.environ) or max(1, _cores() // job.processes))
    if job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    random_numbers.begin(job.seed, 0)  # a user's own model and data set draw the same on every rank
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", job.gpus[place.local_rank] if job.gpus else place.local_rank)
    torch.cuda.set_device(device)
    return device


def _threads_of(environ: Mapping[str, str]) -> int:
    """Returns the threads that the environment asks for; 0 if it does not. torchrun says 1 for everybody who does not,
    which is no wish of the user's.
    """
    said = environ.get("OMP_NUM_THREADS") or environ.get("MKL_NUM_THREADS") or ""
    first = said.partition(",")[0].strip()  # of nested regions, the outermost
    threads = int(first) if first.isdecimal() else 0
    return 0 if threads == 1 and "TORCHELASTIC_RUN_ID" in environ else threads


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _note_backend(job: JobProgram, place: RankPlace, run_dir: str) -> None:
    """Says it if the ranks of a host have no memory to share."""
    shares = isinstance(dist.group.WORLD, shared_memory.PythonGroup)
    if job.backend == shared_memory.NAME and not shares and job.processes > 1 and place.rank == 0:
        where = " of a host" * (job.world_size > job.processes)
        note(run_dir, f"the ranks{where} cannot map each other's memory: their collectives go over gloo")


def _open_group(job: JobProgram, place: RankPlace, store: RankStore) -> None:
    """Opens the process group. It is never closed: see above."""
    if job.world_size == 1 and job.gradients.kind != "fsdp":
        return
    if sys.platform == "linux" and store.interface:
        # On one node no other machine needs to reach the ranks, and the machine's name need not resolve.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", store.interface)
    gloo.short_names()
    hierarchical_group.register(place.node)
    unpickling.guard()
    dist.init_process_group(
        job.backend,
        store=store.open(place.rank, job.timeout),
        rank=place.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=job.timeout),
    )
