"""Jobs made without a file, for tests of the compiler alone."""

from __future__ import annotations

from typing import Any

from dslc.dsl.language import calls as c
from dslc.dsl.language import optimizers as o
from dslc.dsl.language.blocks import (
    CheckpointSpec,
    DataSpec,
    DevicesSpec,
    EvaluateSpec,
    GenerateSpec,
    LaunchSpec,
    LogSpec,
    MemorySpec,
    ModelSpec,
    ParallelismSpec,
    TrainSpec,
)
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import GPT, Flatten, Linear
from dslc.dsl.source import Source


def make_job(**blocks: Any) -> JobSpec:
    """A job of two dense layers on the digits, one process, ten steps; blocks replace these."""
    made: dict[str, Any] = {
        "model": ModelSpec(network=(Flatten(), Linear(features=32), Linear(features=10)), loss=c.CrossEntropy()),
        "data": DataSpec(source=c.Digits(), batch=64, validation=0.2),
        "devices": DevicesSpec(),
        "parallelism": ParallelismSpec(),
        "memory": MemorySpec(),
        "train": TrainSpec(steps=10, optimizer=o.SGD(lr=0.1)),
        "evaluate": EvaluateSpec(),
        "generate": GenerateSpec(),
        "checkpoint": CheckpointSpec(),
        "launch": LaunchSpec(),
        "log": LogSpec(),
    }
    return JobSpec(name="job", folder="", source=Source("job.plt", ""), **(made | blocks))


def gpt_model(**arguments: Any) -> ModelSpec:
    return ModelSpec(
        network=GPT(**({"layers": 4, "width": 64, "heads": 4, "context": 32, "vocab": 256} | arguments)),
        loss=c.CrossEntropy(),
    )
