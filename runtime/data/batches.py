"""The batches of a training: for each step the micro-batches of one rank, prepared in the order of the sampler.

Model: one operation gathers this rank's samples of as many steps as fit into `GATHERED` bytes; micro-batches are views
of the result. With `workers`, that many processes (torch's DataLoader) make samples that need computing (a user's data
set, images) ahead of the training. One process makes the samples of a stream, one thread all other samples.

Contract: step s is global batch `s % steps_per_epoch` of epoch `s // steps_per_epoch`; nothing depends on the step at
which iteration begins, so that a resumed run sees the very next sample.

Limits: worker processes are forked if the system can fork.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import threading
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dslc.compiler.ir.program import DataStep, RankPlace
from dslc.compiler.trace.private_torch import hide_worker
from dslc.compiler.trace.structures import map_tensors
from dslc.runtime.data.sampler import RankOrder, batch_samples, shares, sizes_of, split_indices, steps_per_epoch
from dslc.runtime.data.samples import Marks, Pair, Samples, SourceError, Splits, batch_aside
from dslc.runtime.data.splits import Split
from dslc.runtime.process.error_text import error_text
from dslc.runtime.process.failure import frames_of, message_of
from dslc.runtime.process.job_line import during, mark_during, mark_item_errors, mark_line
from dslc.runtime.process.lifetime import end_with, signal_name
from dslc.runtime.process.random_numbers import generator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GATHERED = 1 << 20  # bytes gathered at once, of several steps; a single step may take more
AHEAD = 2  # steps, or micro-batches of a worker, prepared before they are asked for
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The work of one rank in one step."""

    micro: list[Pair]  # (input, target) of each micro-batch: tensors, or structures of them
    samples: int  # samples of the whole global batch, over all ranks
    epoch: int  # from 0
    number: int = 0  # of the step, from 0
    marks: Marks | None = None  # of a stream: the places of the lanes after this step
    orders: tuple[Tensor, ...] = ()  # of each micro-batch, where `dslc verify` puts its samples in another order


def batches(
    step: DataStep,
    splits: Splits,
    place: RankPlace,
    microbatches: int,
    first_step: int,
    steps: int,
    device: torch.device,
) -> Iterator[StepBatch]:
    """Yields the batches of the steps `first_step` to `steps - 1`, counted from the beginning of the training."""
    numbers = range(first_step, steps)
    if splits.stream is not None:
        streamed = _StreamBatches(step, splits, place, microbatches, numbers)
        return mark_item_errors(step.line, streamed.prefetch(device) if step.workers else streamed.in_line(device))
    if step.workers and splits.train.by_process:
        return mark_item_errors(step.line, _by_processes(step, splits.train, place, microbatches, numbers, device))
    made = mark_item_errors(step.line, _in_line(step, splits.train, place, microbatches, numbers, device))
    return _prefetch(made, device) if step.workers else made


def split_batches(
    step: DataStep, splits: Splits, split: Split, place: RankPlace, size: int, device: torch.device
) -> Iterator[Pair]:
    """Yields this rank's share of the samples of a split, `size` at a time; nothing if its share is empty."""
    indices, samples = split_indices(step, split, place), splits.samples_of_split(split)
    if not len(indices):
        return iter(())
    return read_batches(step, samples, place, list(indices.split(size)), device)


def read_batches(
    step: DataStep, samples: Samples, place: RankPlace, chunks: list[Tensor], device: torch.device
) -> Iterator[Pair]:
    """Yields the samples of each of `chunks`, which are numbers of samples."""
    if step.workers and samples.by_process:
        return mark_item_errors(
            step.line, _loader(step, samples, place, [(chunk.numpy(), 0) for chunk in chunks], device)
        )
    made = mark_item_errors(step.line, (_moved(batch_aside(samples, chunk), device) for chunk in chunks))
    return _prefetch(made, device) if step.workers else made


def _in_line(
    step: DataStep, samples: Samples, place: RankPlace, microbatches: int, numbers: range, device: torch.device
) -> Iterator[StepBatch]:
    if samples.is_structure:
        order = RankOrder(step, place, microbatches)
        for number in numbers:
            pieces = order.micro_batches(number)
            made = [_moved(samples.batch(indices, order.current_epoch), device) for indices in pieces]
            yield StepBatch(made, order.samples, order.current_epoch, number)
        return
    per_epoch, full = steps_per_epoch(step), step.visited // step.batch
    at_once = 1  # steps, until the size of one is known
    number = numbers.start
    while number < numbers.stop:
        epoch, k = divmod(number, per_epoch)
        count = max(1, min(at_once, full - k, numbers.stop - number))
        _, _, sizes = sizes_of(step, place, microbatches, k)
        pair = samples.batch(shares(step, place, epoch, k, count), epoch)
        if not samples.by_process:
            at_once = max(1, GATHERED * count // max(1, sum(tensor.nbytes for tensor in pair)))
        inputs, targets = (tensor.split(sizes * count) for tensor in _moved(pair, device))
        each = len(sizes)
        for n, at in enumerate(range(0, count * each, each)):
            micro = list(zip(inputs[at : at + each], targets[at : at + each], strict=True))
            yield StepBatch(micro, batch_samples(step, k), epoch, number + n)
        number += count


def _moved(pair: Pair, device: torch.device) -> Pair:
    """Copies a pair to the device. Page-locked memory lets the copy overlap with the device's computation."""
    if device.type == "cpu":
        return pair
    return _to(pair, device, pin=True)


def _to(pair: Pair, device: torch.device, pin: bool = False) -> Pair:
    def moved(tensor: Tensor) -> Tensor:
        return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=True)

    input, target = pair
    inputs = map_tensors(moved, input)
    return inputs, inputs if target is input else map_tensors(moved, target)


# ---------------------------------------------------------------------------------------------------- by a thread


class _ThreadFailure(NamedTuple):
    """The exception that ends the thread."""

    error: BaseException


def _prefetch(made: Iterator[Item], device: torch.device) -> Iterator[Item]:
    """Yields the same items, made by a thread up to `AHEAD` of them before they are asked for."""
    ready: queue.Queue[tuple[Item] | _ThreadFailure | None] = queue.Queue(AHEAD)  # None: the end
    stopped = threading.Event()

    def put(entry: tuple[Item] | _ThreadFailure | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # set for each thread: without it memory is locked for the first GPU
            for item in made:
                if not put((item,)):
                    return
            put(None)
        except BaseException as error:
            put(_ThreadFailure(error))

    threading.Thread(target=work, name="dslc-batches", daemon=True).start()
    try:
        while True:
            entry = ready.get()
            if entry is None:
                return
            if isinstance(entry, _ThreadFailure):
                raise entry.error
            yield entry[0]
    finally:
        stopped.set()


# -------------------------------------------------------------------------------------------------- from a stream


class _StreamBatches(IterableDataset["StepBatch | HandedError"]):
    """The steps of one rank, read from a stream."""

    def __init__(self, step: DataStep, splits: Splits, place: RankPlace, microbatches: int, numbers: range) -> None:
        self.step, self.splits, self.place, self.microbatches, self.numbers = step, splits, place, microbatches, numbers

    def __iter__(self) -> Iterator[StepBatch | HandedError]:
        order, stream = RankOrder(self.step, self.place, self.microbatches), self.splits.stream
        assert stream is not None
        for number in self.numbers:
            pieces = order.micro_batches(number)
            try:
                made = [self.splits.train.batch(indices, order.current_epoch) for indices in pieces]
            except BaseException as error:  # any kind, that of `sys.exit` too: the user's code runs
                yield _to_be_raised(error)
                return
            yield StepBatch(made, order.samples, order.current_epoch, number, stream.marks())

    def in_line(self, device: torch.device) -> Iterator[StepBatch]:
        return self._moved_batches(self, device)

    def prefetch(self, device: torch.device) -> Iterator[StepBatch]:
        """Yields the steps that a process reads ahead."""
        return self._moved_batches(_worker_batches(self.step, self.place, self, batch_size=None), device)

    def _moved_batches(self, steps: Iterable[StepBatch | HandedError], device: torch.device) -> Iterator[StepBatch]:
        for batch in steps:
            if isinstance(batch, WorkerError | SourceError):
                raise batch
            yield replace(batch, micro=[_moved(pair, device) for pair in batch.micro])


# -------------------------------------------------------------------------------------------------- by processes


class WorkerError(Exception):
    """An exception of a loader worker, as the rank raises it: text, frames of the user's code, and the sample."""

    def __init__(self, message: str, frames: tuple[str, ...] = (), during_what: str = "") -> None:
        super().__init__(message, frames, during_what)
        self.frames = frames
        mark_during(self, during_what)

    def __str__(self) -> str:
        return str(self.args[0])


HandedError: TypeAlias = WorkerError | SourceError


def _to_be_raised(error: BaseException) -> HandedError:
    """Returns an exception as a worker hands it to its rank: a user's after writing all of it into the rank's log."""
    if isinstance(error, SourceError):
        return error
    traceback.print_exception(error)
    return WorkerError(message_of(error), frames_of(error), during(error))


_WORKERS: list[tuple[int, int, BaseProcess]] = []  # the workers of this process: number, how many, process


def _iterated(loader: DataLoader[Item]) -> Iterator[Item]:
    """Returns what a loader makes, and notes its workers."""
    before = multiprocessing.active_children()
    iterator = iter(loader)
    workers = [child for child in multiprocessing.active_children() if child not in before]
    workers.sort(key=lambda child: child.pid or 0)
    _WORKERS[:] = [each for each in _WORKERS if each[2].is_alive()]
    _WORKERS.extend((number, len(workers), child) for number, child in enumerate(workers, 1))
    return iterator


def of_dead_worker(error: BaseException, line: str) -> BaseException:
    """Returns the exception that names the loader worker whose end was noticed as `error`; other errors as they are."""
    if not isinstance(error, ConnectionError | EOFError) and "DataLoader worker" not in error_text(error):
        return error
    for number, count, worker in _WORKERS:
        worker.join(_END)
        status = worker.exitcode
        if not status:
            continue
        text = f"loader worker {number} of {count} (process {worker.pid}) "
        name_of_signal = ""
        if status > 0:
            text += f"left with exit status {status}, without an exception"
        else:
            name_of_signal = signal_name(-status)
            text += f"was ended by {name_of_signal}"
        ended = SourceError(text)
        ended.__cause__ = error
        mark_line(ended, line)
        if name_of_signal in _REASONS:
            ended.add_note(_REASONS[name_of_signal])
        return ended
    return error


_END = 1.0  # seconds within which a worker that closed its connection is gone
_REASONS = {
    "SIGKILL": "the system does this when memory runs out (see dmesg): fewer `data.workers` take less",
    "SIGBUS": "the system does this when /dev/shm, through which workers hand over batches, is full",
    "SIGSEGV": "code of a library did this that reads samples; the rank's log has the place, if it was written",
}


class _Batched(Dataset[Pair | HandedError]):
    """A data set of micro-batches: an item is the pair of the samples at some indices, in an epoch.

    Indices come as an array, whose bytes are sent. A tensor would be sent as shared memory, a file for each batch.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitems__(self, asked: tuple[NDArray[np.int64], int]) -> Pair | HandedError:
        indices, epoch = asked
        try:
            return self.samples.batch(torch.from_numpy(indices), epoch)
        except BaseException as error:  # any kind, that of `sys.exit` too: the user's code runs
            return _to_be_raised(error)


def _order(
    step: DataStep, place: RankPlace, microbatches: int, numbers: range
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yields the indices of a rank's micro-batches, step after step, each with the epoch."""
    order = RankOrder(step, place, microbatches)
    for number in numbers:
        for indices in order.micro_batches(number):
            yield indices.numpy(), order.current_epoch


def _by_processes(
    step: DataStep, samples: Samples, place: RankPlace, microbatches: int, numbers: range, device: torch.device
) -> Iterator[StepBatch]:
    loaded = _loader(step, samples, place, _order(step, place, microbatches, numbers), device)
    order = RankOrder(step, place, microbatches)
    for number in numbers:
        micro = [next(loaded) for _ in order.micro_batches(number)]
        yield StepBatch(micro, order.samples, order.current_epoch, number)


def _loader(
    step: DataStep,
    samples: Samples,
    place: RankPlace,
    order: Iterable[tuple[NDArray[np.int64], int]],
    device: torch.device,
) -> Iterator[Pair]:
    pin = device.type == "cuda"
    for pair in _worker_batches(step, place, _Batched(samples), batch_sampler=order, pin_memory=pin):
        if isinstance(pair, WorkerError | SourceError):
            raise pair
        yield pair if device.type == "cpu" else _to(pair, device)


def _worker_batches(step: DataStep, place: RankPlace, dataset: Dataset[Item], **how: Any) -> Iterator[Item]:
    """Yields what worker processes read of a data set ahead of the training; one worker reads all of a stream."""
    streamed = step.stream is not None
    loader: DataLoader[Item] = DataLoader(
        dataset,
        num_workers=1 if streamed else step.workers,
        collate_fn=_as_it_is,
        prefetch_factor=AHEAD,
        generator=generator(step.seed, f"workers of rank {place.data_rank}"),
        multiprocessing_context=_context(),
        worker_init_fn=functools.partial(_begin, os.getpid(), streamed),
        **how,
    )
    return _iterated(loader)


def _begin(rank: int, alone: bool, worker: int) -> None:
    """Ends a worker with its rank, however that ends. A stream is read by one worker, whole: `alone`."""
    end_with(rank)
    if alone:
        hide_worker()


def _as_it_is(item: object) -> object:
    return item


def _context() -> str | None:
    # A forked worker needs no picklable data set. Workers run torch with one thread each, which keeps them from the
    # locks of the thread pool that a fork leaves behind.
    return "fork" if "fork" in torch.multiprocessing.get_all_start_methods() else None
