"""Over shared memory a job trains as over gloo, exchanges what was planned, and maps what was planned."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import agree, exchanges_as_planned, ready, train, train_job

from dslc.compiler.facts.hardware import segment_bytes
from dslc.runtime.transport.shared_segment import MESSAGE_BYTES

PLANS = {
    "data": ("devices.cpus=2",),
    "zero 3": ("devices.cpus=2", "parallelism.zero=3"),
    "pipeline": ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=4"),
    "tensor": ("devices.cpus=2", "parallelism.tensor=2"),
    "context": ("devices.cpus=2", "parallelism.context=2"),
    "two axes": ("devices.cpus=4", "parallelism.tensor=2", "parallelism.sequence=true", "parallelism.zero=2"),
    "experts": ("devices.cpus=2", "parallelism.expert=2"),
    "data on hosts": ("devices.nodes=2", "devices.cpus=2"),
    "zero 3 on hosts": ("devices.nodes=2", "devices.cpus=2", "parallelism.zero=3"),
    "pipeline on hosts": ("devices.nodes=2", "devices.cpus=2", "parallelism.pipeline=2"),
}
SHARED = "devices.backend=shared_memory"


def _slow(*plans: str) -> list[Any]:
    return [pytest.param(plan, marks=pytest.mark.slow) for plan in plans]


def _job(folder: Path, plan: str) -> Path:
    experts = ", experts = moe(4, 2, 8)" * (plan == "experts")
    path = folder / "job.plt"
    path.write_text(
        job_text(
            model={
                "network": f"llama(layers = 2, width = 16, heads = 2, hidden = 32, context = 16, vocab = 256{experts})",
                "loss": "cross_entropy()",
            },
            data={"source": "stdlib()", "batch": 16},
            devices={"cpus": 2},
            train={"steps": 6},
            log={"every": "1 step"},
        )
    )
    return path


@pytest.mark.parametrize(
    "plan",
    [
        *("zero 3", "pipeline"),
        *_slow("data", "tensor", "context", "two axes", "experts"),
        *_slow("zero 3 on hosts", "data on hosts", "pipeline on hosts"),
    ],
)
def test_a_job_trains_as_over_gloo(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    job = _job(tmp_path, plan)
    agree(train_job(launcher, job, *PLANS[plan]), train_job(launcher, job, *PLANS[plan], SHARED), 1e-6, 1e-6)


@pytest.mark.parametrize("plan", ["zero 3", *_slow("pipeline", "tensor", "zero 3 on hosts", "data on hosts")])
def test_a_step_exchanges_what_was_planned(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    exchanges_as_planned(launcher, tmp_path / "run", _job(tmp_path, plan), *PLANS[plan], SHARED)


# A data set that notes the segments which its process maps, as (file, length); the last note is of a late step.
NOTING = """
import json, os, re, torch

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        with open("/proc/self/maps") as text:
            lines = [line.split() for line in text if "memfd:dslc-segment" in line]
        ends = [(inode, *(int(end, 16) for end in span.split("-"))) for span, _, _, _, inode, *_ in lines]
        note = os.path.join(os.path.dirname(__file__), f"{os.getpid()}.json")
        with open(note + ".new", "w") as file:
            json.dump([(inode, end - start) for inode, start, end in ends], file)
        os.replace(note + ".new", note)
        tokens = torch.arange(index, index + 17) % 256
        return tokens[:-1], tokens[1:]
"""
EXCHANGE = "parallelism.gradients=async_average(interval = 10 ms)"


@pytest.mark.parametrize(
    "settings",
    [
        ("devices.cpus=4", "parallelism.tensor=2", "parallelism.zero=2"),
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in (
                ("devices.cpus=2",),
                ("devices.cpus=4", "parallelism.tensor=2"),
                ("devices.cpus=4", "parallelism.pipeline=2", "parallelism.microbatches=4"),
                ("devices.cpus=4", "parallelism.expert=2"),
                ("devices.cpus=4", "parallelism.zero=3", "parallelism.replicas=2"),
                ("devices.cpus=4", "parallelism.context=2", "parallelism.zero=2"),
                ("devices.cpus=4", "parallelism.expert=2", "parallelism.zero=3"),
                ("devices.cpus=8", "parallelism.expert=2", "parallelism.zero=3", "parallelism.replicas=2"),
                ("devices.cpus=8", "parallelism.expert=2", "parallelism.pipeline=2", "parallelism.microbatches=4"),
                ("devices.cpus=8", "parallelism.context=2", "parallelism.tensor=2", "parallelism.zero=1"),
                ("devices.cpus=8", "parallelism.context=2", "parallelism.pipeline=2", "parallelism.microbatches=4"),
                ("devices.cpus=2", EXCHANGE),
                ("devices.nodes=2", "devices.cpus=2", "parallelism.zero=3"),
                ("devices.nodes=2", "devices.cpus=2", "parallelism.tensor=2", "parallelism.zero=2"),
                ("devices.nodes=2", "devices.cpus=3", "parallelism.tensor=2", "data.batch=18"),
                ("devices.nodes=2", "devices.cpus=4", "parallelism.zero=3", "parallelism.replicas=2"),
            )
        ),
    ],
    ids=" ".join,
)
def test_ranks_map_the_segments_of_the_account(launcher: Launcher, tmp_path: Path, settings: tuple[str, ...]) -> None:
    job = _job(tmp_path, "experts" if any("expert" in setting for setting in settings) else "data")
    job.write_text(job.read_text().replace("stdlib()", 'python("noting:Tokens")'))
    (tmp_path / "noting.py").write_text(NOTING)
    made = ready(job, *settings, SHARED)
    train(launcher, tmp_path / "run", made.program, made.places)
    notes = [json.loads(note.read_text()) for note in tmp_path.glob("*.json")]
    ranks = [note for note in notes if note]
    assert len(ranks) == made.program.world_size
    lengths = {file: length - MESSAGE_BYTES for note in ranks for file, length in note}
    on_account = [node.memory.framework for node in made.compiled.plan.ranks for _ in range(node.first, node.last + 1)]
    assert sum(lengths.values()) == sum(on_account) > 0
    # Each rank maps a segment of each rank of its groups, and has made one of them.
    of_ranks = {segment_bytes(size): size for size in range(2, len(ranks) + 1)}
    made_by_rank = [sum(bytes // of_ranks[bytes] for bytes in (lengths[file] for file, _ in note)) for note in ranks]
    assert Counter(made_by_rank) == Counter(on_account)
