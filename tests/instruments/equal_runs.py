"""Counts runs of equal trainings in which `dslc bisect` would name a difference: `python -m instruments.equal_runs N`.

Model: jobs of three kinds with drawn seeds, optimizers and sizes are trained in one process, by which rounding is
measured. Each is then trained under drawn plans, which compute the same. A plan whose tensors differ by more than
rounding explains is a false alarm. A job is planned once for `SEEDS` seeds, and a gang of processes does many trainings
one after another: so a run takes no start of processes of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from helpers.gang import LIMIT, gang, preload
from helpers.job_texts import job_text

from dslc.commands.bisect import open_side, single_process
from dslc.compiler.ir.program import JobProgram, ObserveMode, RankPlace
from dslc.runtime.measure.observe import Observation
from dslc.terminal.exit_codes import CommandFailedError
from dslc.verification.bisection import Bisection, find_difference, tensor_text
from dslc.verification.observed_runs import observed_program
from dslc.verification.recordings import join_ranks
from dslc.verification.rounding_bounds import measure_bounds

STEPS, SEEDS = 3, 6
GANG = 24  # trainings of a gang
# Modules that take seconds to import in each process.
PRELOADED = (
    "__main__",
    "dslc.runtime.data.sources.open_sources",
    "dslc.runtime.train",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.parallel",
)
PLANS = 12  # of each job
NETWORKS = {
    "gpt": (
        "gpt(layers = 2, width = 16, heads = 2, context = 8, vocab = 256, tie = true, dropout = {dropout})",
        "stdlib()",
    ),
    "vit": ("vit(patch = 4, layers = 2, width = 16, heads = 2, dropout = {dropout})", "digits()"),
    "layers": ("[flatten(), linear(32), relu(), dropout({dropout}), linear(16), gelu(), linear(10)]", "digits()"),
}
OPTIMIZERS = ("sgd(lr = 0.1, momentum = 0.9)", "adamw(lr = 1e-3)", "adam(lr = 1e-2)", "rmsprop(lr = 1e-3)")
AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "gpt": (("parallelism.tensor=2",), ("parallelism.context=2",), ("parallelism.pipeline=2",)),
    "vit": (("parallelism.tensor=2",), ("parallelism.pipeline=2",)),
    "layers": (("parallelism.pipeline=2",),),
}


def drawn_job(draw: random.Random) -> tuple[str, str]:
    """Returns the kind of a job and its text."""
    kind = draw.choice(list(NETWORKS))
    network, source = NETWORKS[kind]
    text = job_text(
        model={"network": network.format(dropout=draw.choice(("0.0", "0.1")))},
        data={"source": source, "batch": draw.choice((24, 24, 48))},
        devices={"cpus": 2},
        train={
            "steps": 20,
            "seed": draw.randrange(1000),
            "optimizer": draw.choice(OPTIMIZERS),
            "clip": draw.choice(("none", "0.5")),
        },
        log=None,
    )
    return kind, text


def drawn_plans(kind: str, draw: random.Random) -> Iterator[tuple[str, ...]]:
    for _ in range(PLANS):
        axis = draw.choice(((), (), *AXES[kind]))
        pipeline = "parallelism.pipeline=2" in axis
        plan = [*axis, f"devices.cpus={draw.choice((2, 4) if axis else (1, 2, 3, 4))}"]
        plan.append(f"parallelism.microbatches={draw.choice((2, 4) if pipeline else (1, 2))}")
        plan.append(f"parallelism.zero={draw.choice((0, 1) if pipeline else (0, 0, 1, 2, 3))}")
        if draw.random() < 0.3 and kind != "layers":
            plan.append("memory.recompute=full")
        yield tuple(plan)


# ---------------------------------------------------------------------------------------------------- trainings


@dataclass(frozen=True, kw_only=True)
class ObservedTraining:
    """A training of a plan with a seed; `folder` takes its observations."""

    name: str
    program: JobProgram
    places: tuple[RankPlace, ...]
    folder: str


def train_on_rank(rank: int, trainings: Sequence[ObservedTraining]) -> None:
    """Does trainings one after another in an open process group."""
    import torch

    from dslc.runtime.data import sample_keys
    from dslc.runtime.data.sources.open_sources import open_source
    from dslc.runtime.measure.position_details import PositionReporter
    from dslc.runtime.parallel.tensor_parallel import noise_rank
    from dslc.runtime.process import random_numbers
    from dslc.runtime.process.stop import RunControl
    from dslc.runtime.step.assemble import assemble
    from dslc.runtime.train import train

    device = torch.device("cpu")
    for each in trainings:
        job, board = each.program, RunControl(len(each.places))
        os.makedirs(os.path.join(each.folder, "logs"), exist_ok=True)
        random_numbers.begin(job.seed, 0)
        splits = open_source(job.data, training=True)
        sample_keys.prepare(job.data, splits.train, device)
        parts = assemble(job, device, samples=splits.train)
        random_numbers.begin(job.seed, noise_rank(job, rank))
        requests, _ = os.pipe()
        train(job, each.places[rank], parts, splits, board, each.folder, PositionReporter(job, rank, board, requests))


def observe_all(trainings: Sequence[ObservedTraining]) -> dict[str, Observation]:
    """Returns the observations of trainings, by name; those of one number of ranks share processes."""
    for ranks in sorted({len(each.places) for each in trainings}):
        of_ranks = [each for each in trainings if len(each.places) == ranks]
        for start in range(0, len(of_ranks), GANG):
            gang(ranks, train_on_rank, of_ranks[start : start + GANG], limit=200 * LIMIT)  # also at the lowest priority
    return {each.name: Observation(each.folder, len(each.places)) for each in trainings}


class EqualJob:
    """A drawn job, in one process and under plans."""

    def __init__(self, draw: random.Random, folder: str) -> None:
        self.kind, self.text = drawn_job(draw)
        path = Path(folder) / "job.plt"
        path.write_text(self.text)
        base = open_side(str(path), [], folder)
        single = single_process(base)
        mode = ObserveMode(tensors=1)
        modes = {"plain": mode, "wide": replace(mode, exact=True)}
        modes |= {f"order {n}": replace(mode, reorder=n) for n in (1, 2)}
        self._programs = {
            name: (observed_program(replace(single.program, mode=mode), STEPS), single.places)
            for name, mode in modes.items()
        }
        self.plans: list[str] = []
        for plan in drawn_plans(self.kind, draw):
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # warnings of fields without effect
                    ready = open_side(str(path), plan, folder).ready
            except CommandFailedError:  # a plan that the rules refuse
                continue
            assert ready is not None
            self.plans.append(f"{len(self.plans)} {' '.join(plan)}")
            program = observed_program(replace(ready.program, mode=mode), STEPS)
            self._programs[self.plans[-1]] = program, ready.places

    def compare(self, seeds: Sequence[int]) -> Iterator[tuple[str, Bisection]]:
        """Trains with each seed; yields each plan with its seed, and what a bisection finds."""
        with tempfile.TemporaryDirectory() as folder:
            seen = observe_all(
                [
                    ObservedTraining(
                        name=f"{name} seed {seed}",
                        program=replace(program, seed=seed, data=replace(program.data, seed=seed)),
                        places=places,
                        folder=os.path.join(folder, f"{number}-{seed}"),
                    )
                    for number, (name, (program, places)) in enumerate(self._programs.items())
                    for seed in seeds
                ]
            )
            for seed in seeds:
                plain, reference, *orders = (
                    join_ranks(name, seen[f"{name} seed {seed}"]) for name in ("plain", "wide", "order 1", "order 2")
                )
                bounds = measure_bounds(reference, [plain, *orders])
                for plan in self.plans:
                    recording = join_ranks(plan, seen[f"{plan} seed {seed}"], plain)
                    yield f"{plan} seed {seed}", find_difference(plain, recording, bounds, reference)


def main(count: int, seed: int) -> int:
    """Returns the number of false alarms in at least `count` runs."""
    preload(*PRELOADED)
    draw, runs, alarms, tensors, highest = random.Random(seed), 0, 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        while runs < count:
            job = EqualJob(draw, folder)
            for plan, result in job.compare(draw.sample(range(1_000_000), SEEDS)):
                runs += 1
                tensors += len(result.compared)
                share = result.largest.share if result.largest is not None else 0.0
                if result.largest is not None and share > 4:
                    key = result.largest.key
                    print(f"{share:.1f} {tensor_text(key)} step {key.step} {job.kind} {plan}")
                highest = max(highest, share)
                if result.text:
                    alarms += 1
                    print(f"ALARM {plan}: {result.text}, step {result.step} {result.details}\n{job.text}")
            print(f"{runs} runs, {alarms} named, {tensors:,} tensors, highest share {highest:.1f}", flush=True)
    return alarms


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
