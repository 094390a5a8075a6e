"""Decides when a training's state is saved, by which rank and into which folder; and resumes from it.

Model: all ranks save after the same step. Each copies the tensors that it writes (state.py) and continues training. A
thread of each rank writes the copies, over a process group of its own. Rank 0 publishes the folder when all of it is on
the disk (files.py). With `asynchronous = false` the training waits instead, and nothing is copied. To resume, rank 0
lists the checkpoints, the ranks check the candidates' files for damage, each its share, and all load the one chosen.
Ranks that are started `again` after a failure resume from the newest of the training's own, or begin where the first
ones did.

Contract: a checkpoint is complete or not there. A save waits for the previous save, and `finish` for the last. A save
that fails (storage that is full or read-only) is reported, and the training goes on; the second failure in a row is
raised on all ranks. Another error in a thread is raised in the training, at the next step at the latest. Publishing a
checkpoint removes older ones that this training wrote or could have resumed from, down to `keep` and the best. The link
`best` follows the best one that is published; a training that resumes without it has none until the next.

Limits: one training at a time writes into a folder. Copies take as much of the host's memory as the rank's own share of
the state. With `seconds`, rank 0's clock is read in the steps that are logged, where ranks exchange a number anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from dslc.compiler.facts.checkpoint_names import checkpoint_folder, name_of, step_of
from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.number_text import path_text
from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.runtime.checkpoint import files
from dslc.runtime.checkpoint.state import CheckpointError, Copies, ExtraState, State, StorageError, TrainingState, write
from dslc.runtime.data import sample_keys
from dslc.runtime.data.samples import Marks
from dslc.runtime.parallel.tensor_parallel import noise_rank
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.records import note
from dslc.runtime.step.assemble import TrainingComponents

# What a rank has written, to be sent: its files as JSON, its places in a stream, and why it could not write, or "".
RankReport: TypeAlias = tuple[dict[str, object], Marks, str]
LONGEST = datetime.timedelta(hours=2)  # time that one rank may take longer than another to write its files


@dataclass(frozen=True, kw_only=True)
class Start:
    """The beginning of a training: after `step` steps, `samples` and `seconds`, with this progress of its goals."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    goals: Mapping[str, files.Progress] = field(default_factory=dict)
    stream: Marks = field(default_factory=dict)
    skipped_steps: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()


def preload(job: JobProgram) -> None:
    """Imports, in the launcher, the modules that each rank would otherwise import (0.6 s)."""
    if _uses_checkpoints(job) or not job.is_training:
        import torch.distributed.checkpoint  # noqa: F401


def _uses_checkpoints(job: JobProgram) -> bool:
    return job.checkpoint.is_enabled or job.checkpoint.resume != "none"


class SpikeHistory(Protocol):
    """The state of the search for spikes of the loss (loop/loss_spikes.py): the steps to skip, the last losses, and the
    step from which or before which it begins after a rewind.
    """

    @property
    def skipped_steps(self) -> tuple[int, ...]: ...

    @property
    def losses(self) -> tuple[float, ...]: ...

    @property
    def rewind_to(self) -> int | None: ...


class Checkpoints:
    """The checkpoints of one rank; a no-op if the job asks for none. To be made before the first step."""

    def __init__(
        self,
        job: JobProgram,
        place: RankPlace,
        parts: TrainingComponents,
        run_dir: str,
        extra: ExtraState | None = None,
        *,
        is_restart: bool = False,
        notify: Callable[[str], object] = lambda text: None,
        rate: Callable[[int], float | None] = lambda step: None,
        spikes: SpikeHistory | None = None,
    ) -> None:
        self._spikes = spikes
        self._rate = rate  # the learning rate after so many steps
        self._tell_watcher = notify  # in words, on rank 0
        self._written: tuple[int, str] | None = None  # the step of the last one, and why it could not be written
        self._missed = 0  # the step of the one before, if that could not be written
        self._unremoved = ""  # an older one that could not be removed, and why, until it is told
        self._job, self._rank, self._step, self._run_dir = job, place.rank, job.checkpoint, run_dir
        self._again = is_restart
        self.on = self._step.is_enabled
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.stalls: list[float] = []  # seconds that each save delayed the training
        self._good = ""  # the last that is written
        self.newest = ""  # the checkpoint resumed from, or the last that is written or being written
        if not _uses_checkpoints(job):
            return
        self._device = parts.device
        self._folder = files.folder_of(job, run_dir)
        self._state = TrainingState(
            parts,
            place.rank,
            job.world_size,
            counts=job.optimizer.counts,
            group_state=job.optimizer.group_state,
            noise=noise_rank(job, place.rank),
            extra=extra,
        )
        self._fit = files.fit_of(job, self._state.shapes, sample_keys.digest_of(job.data))
        # A group of its own, so that a thread's messages never come between those of the training.
        self._group: dist.ProcessGroup | None = (
            dist.new_group(backend="gloo", timeout=LONGEST) if job.world_size > 1 else None
        )
        self._copies = Copies()
        self._kept: list[str] = []  # rank 0: the oldest first
        self._best = ""  # rank 0: the one of these that the link names
        self._last = time.monotonic()

    # ------------------------------------------------------------------------------------------------- going on

    def resume(self) -> Start:
        with mark_errors(self._step.line):
            return self._resumed() if _uses_checkpoints(self._job) else Start()

    def _resumed(self) -> Start:
        if self._rank == 0 and self.on:
            self._prepare_folder()
        if self._step.resume == "none" and not self._again:
            return Start()
        is_own_folder = self._again or self._step.resume == "auto"
        folder = self._folder if is_own_folder else checkpoint_folder(self._step.resume)
        choice, candidates = self._choose(folder)
        if is_own_folder and choice.taken is None and self._step.resume not in ("none", "auto"):
            is_own_folder, folder = False, checkpoint_folder(self._step.resume)
            choice, candidates = self._choose(folder)
        candidate = choice.taken
        if candidate is None and (not is_own_folder or choice.whole):
            raise CheckpointError(_none_to_take(choice, folder))
        self._tell(choice, folder)
        if candidate is None or candidate.manifest is None:
            self._remove_newer(folder, 0)
            return Start()
        manifest = candidate.manifest
        self._remove_newer(self._folder, manifest.step)
        self._keep(manifest.step, candidates, folder)
        self._keep_best(candidate.path, manifest)
        self.newest = self._good = path_text(candidate.path)
        anew = self._state.load(candidate.path, manifest, self._job.seed)
        if anew and self._rank == 0:
            kind = self._job.gradients.exchange.kind if self._job.gradients.exchange is not None else ""
            reason = "as the checkpoint, of other ranks or another exchange, has nothing of it"
            note(self._run_dir, f"begins anew for `{kind}`, {reason}: {', '.join(anew)}")
        self._remove_older()  # a training killed after publishing may have left them
        self._tell_of_unremoved()
        return Start(
            step=manifest.step,
            samples=manifest.samples,
            seconds=manifest.seconds,
            goals=manifest.goals,
            stream=manifest.stream,
            skipped_steps=manifest.skipped_steps,
            losses=manifest.losses,
        )

    def _remove_newer(self, folder: str, step: int) -> None:
        """Removes the checkpoints of the training's own that a rewind to `step` leaves behind."""
        is_own_folder = self.on and os.path.realpath(folder) == os.path.realpath(self._folder)
        if self._rank != 0 or not is_own_folder or self._spikes is None or self._spikes.rewind_to is None:
            return
        for path in files.checkpoints_in(self._folder):
            if step_of(os.path.basename(path)) > step:
                files.remove(path)

    def _choose(self, place: str) -> tuple[files.Choice, list[files.CheckpointCandidate]]:
        candidates = self._of_rank_0(
            [files.look(path) for path in files.checkpoints_in(place)] if self._rank == 0 else []
        )
        limit = self._spikes.rewind_to if self._spikes is not None else None
        if limit is not None and place == self._folder:
            candidates = [each for each in candidates if each.manifest is None or each.manifest.step <= limit]
        return files.choose(candidates, self._fit, self._job.steps, self._damage), candidates

    def _prepare_folder(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        foreign = files.foreign(self._folder, best=self._step.best is not None)
        if foreign:
            raise CheckpointError(
                f"{foreign} holds something other than a checkpoint, and would be overwritten: move it away, or name "
                "another folder with `checkpoint.dir`"
            )
        files.clear_away(self._folder)
        checkpoints = files.checkpoints_in(self._folder)
        if checkpoints and self._step.resume == "none" and not self._again:
            raise CheckpointError(
                f"{self._folder} holds checkpoints already ({os.path.basename(checkpoints[0])}): "
                "`checkpoint.resume = auto` continues from them; otherwise name another folder, or remove them"
            )

    def _damage(self, path: str, manifest: files.Manifest) -> list[str]:
        own_reasons = files.damage(path, manifest, sorted(manifest.files)[self._rank :: self._job.world_size])
        if self._group is None:
            return own_reasons
        rank_reasons: list[list[str]] = [[]] * self._job.world_size
        dist.all_gather_object(rank_reasons, own_reasons, group=self._group)
        return [reason for reasons in rank_reasons for reason in reasons]

    def _keep(self, step: int, candidates: list[files.CheckpointCandidate], folder: str) -> None:
        """Chooses the checkpoints that count as this training's own, which resumes from the checkpoint of `step`."""
        if self._rank != 0 or not self.on:
            return
        if os.path.realpath(folder) != os.path.realpath(self._folder):
            candidates = [files.look(path) for path in files.checkpoints_in(self._folder)]
            newer = [
                candidate.path
                for candidate in candidates
                if candidate.manifest is not None and candidate.manifest.step > step
            ]
            if newer and not self._again:
                raise CheckpointError(
                    f"{newer[0]} is newer than the step to resume from, {step}: `checkpoint.resume = auto` continues "
                    "from there; to start again from an older one, write into another folder (`--out`, "
                    "`checkpoint.dir`)"
                )
        for candidate in reversed(candidates):
            manifest = candidate.manifest
            if manifest and manifest.step <= step and not files.misfits(manifest, self._fit, self._job.steps):
                self._kept.append(candidate.path)

    def _keep_best(self, path: str, manifest: files.Manifest) -> None:
        """Keeps the best checkpoint so far, if it is of the job's goal and lies here, and lets the link name it."""
        if self._rank != 0 or not self.on:
            return
        goal, progress = self._step.best, manifest.goals.get(files.BEST)
        is_same_goal = goal and progress and (goal.metric, goal.highest) == (progress.metric, progress.highest)
        is_local = os.path.realpath(os.path.dirname(path)) == os.path.realpath(self._folder)
        name = name_of(progress.step) if is_same_goal and is_local and progress else ""
        self._best = next((checkpoint for checkpoint in self._kept if os.path.basename(checkpoint) == name), "")
        if self._best:
            files.point(self._folder, name)
        else:
            files.point_nowhere(self._folder)

    def _tell(self, choice: files.Choice, folder: str) -> None:
        if self._rank != 0:
            return
        for candidate in choice.passed_over:
            note(self._run_dir, f"skipped {path_text(candidate.path)}: {candidate.reason}")
        if choice.taken is not None and choice.taken.manifest is not None:
            manifest = choice.taken.manifest
            note(self._run_dir, f"resumes after step {manifest.step}, from {path_text(choice.taken.path)}")
            self._tell_of_rate(manifest)
        else:
            note(self._run_dir, f"starts at the first step: no checkpoint to resume from in {path_text(folder)}")

    def _tell_of_rate(self, manifest: files.Manifest) -> None:
        rate, stored_rate = self._rate(manifest.step), manifest.next_rate
        if rate is None or stored_rate is None or math.isclose(rate, stored_rate, rel_tol=1e-6, abs_tol=1e-12):
            return
        steps = f", of {manifest.steps:,} steps where the job has {self._job.steps:,}"
        note(
            self._run_dir,
            f"the learning rate of step {manifest.step + 1} is {rate:.4g}, and was to be {stored_rate:.4g} in the "
            f"training that wrote the checkpoint{steps if manifest.steps != self._job.steps else ''}",
        )

    def _of_rank_0(self, candidates: list[files.CheckpointCandidate]) -> list[files.CheckpointCandidate]:
        if self._group is None:
            return candidates
        messages = [to_json(candidates)]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        return [from_json(files.CheckpointCandidate, candidate) for candidate in messages[0]]

    # -------------------------------------------------------------------------------------------------- saving

    @property
    def is_due_by_time(self) -> bool:
        """True if by this rank's clock a checkpoint is due. Rank 0's clock decides."""
        return self._step.seconds > 0 and time.monotonic() - self._last >= self._step.seconds

    def due(self, step: int, is_requested: bool) -> bool:
        """True if a checkpoint is due after `step`; `is_requested`: all ranks know of a request (rank 0's clock)."""
        period = self._step.every
        return self.on and (is_requested or step == self._job.steps or (period > 0 and step % period == 0))

    def save(
        self, step: int, samples: int, seconds: float, goals: Mapping[str, files.Progress], stream: Marks | None = None
    ) -> None:
        """Saves the state after `step` steps, or begins to: on all ranks, after the same step. `stream`: this rank's
        lanes.
        """
        began = time.monotonic()
        with mark_errors(self._step.line):
            self.finish()
            self._begin(Start(step=step, samples=samples, seconds=seconds, goals=dict(goals), stream=stream or {}))
        self._last = time.monotonic()
        self.stalls.append(self._last - began)

    def _begin(self, start: Start) -> None:
        step = start.step
        self.newest = path_text(os.path.join(self._folder, name_of(step)))
        tensors = self._state.mine()
        manifest = files.Manifest(
            format=files.FORMAT,
            step=step,
            samples=start.samples,
            seconds=start.seconds,
            job=self._job.job,
            plan_hash=self._job.plan_hash,
            world_size=self._job.world_size,
            fit=self._fit,
            files={},
            goals=start.goals,
            stream=start.stream,
            steps=self._job.steps,
            next_rate=self._rate(step),
            skipped_steps=self._spikes.skipped_steps if self._spikes is not None else (),
            losses=self._spikes.losses if self._spikes is not None else (),
        )
        if self._step.asynchronous:
            tensors = self._copies.take(tensors)
            self._thread = threading.Thread(
                target=self._in_thread, args=(tensors, manifest), name="dslc-checkpoint", daemon=True
            )
            self._thread.start()
        else:
            with _named(step):
                self._write(tensors, manifest)
            self._judge()

    def look(self) -> None:
        if self._failed is not None:
            error, self._failed = self._failed, None
            with mark_errors(self._step.line):
                raise error

    def finish(self) -> None:
        """Waits until the last checkpoint is published, or raises its failure."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.look()
            self._judge()

    def _judge(self) -> None:
        """Tells of checkpoints that could not be removed, or written. Raises StorageError if the last two could not be
        written.
        """
        self._tell_of_unremoved()
        if self._written is None:
            return
        (step, reason), self._written = self._written, None
        if not reason:
            self._missed, self._good = 0, self.newest
            return
        self.newest = self._good
        message = f"the checkpoint of step {step} could not be written: {reason}"
        if self._missed:
            with mark_errors(self._step.line):
                raise StorageError(f"{message}\nneither could the one of step {self._missed}")
        self._missed = step
        if self._rank == 0:
            last_text = f"the last is {self._good}" if self._good else "there is none yet"
            self._tell_watcher(
                f"{message}; the training goes on, {last_text}. It ends if the next one cannot be written either"
            )

    def _in_thread(self, tensors: State, manifest: files.Manifest) -> None:
        try:
            with _named(manifest.step):
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # or torch's queries would start another GPU
                self._write(tensors, manifest)
        except BaseException as error:
            self._failed = error

    def _write(self, tensors: State, manifest: files.Manifest) -> None:
        """Writes a checkpoint, and records whether that was possible, on all ranks alike. Raises what else fails."""
        part = os.path.join(self._folder, name_of(manifest.step) + ".part")
        descriptions, reason = {}, ""
        try:
            write(part, tensors, self._group)
            names = [name for name in os.listdir(part) if name.startswith(f"__{self._rank}_")]
            names += [files.METADATA] if self._rank == 0 else []
            descriptions = {name: files.describe_file(os.path.join(part, name)) for name in names}
        except (CheckpointError, OSError) as error:
            reason = str(error)
        report: RankReport = to_json(descriptions), manifest.stream, reason
        reports = [report]
        if self._group is not None:
            reports = [report] * self._job.world_size
            dist.gather_object(report, reports if self._rank == 0 else None, dst=0, group=self._group)
        outcome = [self._publish(part, manifest, reports)] if self._rank == 0 else [""]
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        self._written = manifest.step, outcome[0]

    def _publish(self, part: str, manifest: files.Manifest, reports: list[RankReport]) -> str:
        """Publishes what all ranks have written, on rank 0. Returns why it cannot be; "" if it is."""
        rank_reason = next((rank_reason for _, _, rank_reason in reports if rank_reason), "")
        if not rank_reason:
            files_by_name = {
                name: from_json(files.File, description)
                for rank_files, _, _ in reports
                for name, description in sorted(rank_files.items())
            }
            stream = {lane: mark for _, positions, _ in reports for lane, mark in positions.items()}
            try:
                self._kept.append(
                    files.publish(part, dataclasses.replace(manifest, files=files_by_name, stream=stream))
                )
                best = manifest.goals.get(files.BEST)
                if best is not None and best.step == manifest.step:
                    self._best = self._kept[-1]
                    files.point(self._folder, os.path.basename(self._best))
                self._remove_older()
            except OSError as error:
                rank_reason = str(error)
        if rank_reason:
            files.drop(part)
        return rank_reason

    def _remove_older(self) -> None:
        old_paths = [path for path in self._kept[: -self._step.keep] if path != self._best]
        if self._spikes is not None and self._job.on_spike is not None and self._kept:
            # A rewind from the next step on goes back so far.
            steps = {path: step_of(os.path.basename(path)) for path in self._kept}
            limit = max(steps.values()) + 1 - self._job.on_spike.steps
            needed = max((step for step in steps.values() if step <= limit), default=0)
            old_paths = [path for path in old_paths if steps[path] < needed]
        for path in old_paths:
            self._kept.remove(path)
            try:
                files.remove(path)
            except OSError as error:
                self._unremoved = f"{path_text(path)} could not be removed: {error}"

    def _tell_of_unremoved(self) -> None:
        if self._unremoved:
            self._tell_watcher(f"the older checkpoint {self._unremoved}; the training goes on")
            self._unremoved = ""


@contextlib.contextmanager
def _named(step: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"the checkpoint of step {step} could not be written: {error}") from error


def _none_to_take(choice: files.Choice, folder: str) -> str:
    """Names each reason once, after the checkpoints that it holds for."""
    names: dict[str, list[str]] = {}
    for candidate in choice.passed_over:
        names.setdefault(candidate.reason, []).append(os.path.basename(candidate.path))
    if not names:
        return f"there is no checkpoint in {folder}"
    reasons = (f"{', '.join(checkpoints)}: {reason}" for reason, checkpoints in names.items())
    return "\n".join([f"no checkpoint in {folder} can be resumed", *reasons])
