"""Published runs as jobs of dslc: their rows, and the analysis of each.

`measured/published_runs.csv` has the runs of two sources, with their addresses:

- llm-foundry: MPT networks under ZeRO-3 on A100 of 40 and of 80 GB, in bf16;
- vTrain: GPT networks by Megatron-DeepSpeed on one node of A100, over the tensor, pipeline and data axes, in fp16.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from functools import cached_property

from dslc.compiler.cost.estimate import StepEstimate, published_estimate
from dslc.compiler.facts.hardware import PublishedFit
from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load

HERE = os.path.dirname(os.path.abspath(__file__))
ROWS = os.path.join(HERE, "measured", "published_runs.csv")
JOB = os.path.join(HERE, "jobs", "published.plt")
KINDS = {"a100_80gb": "a100_80g", "a100_40gb": "a100_40g", "a100": "a100_40g"}
VOCABULARIES = {"mosaicml/llm-foundry": 50_368, "VIA-Research/vTrain": 50_304}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run. `replicas` are its data ranks."""

    source: str
    address: str
    model: str
    layers: int
    width: int
    heads: int
    length: int
    gpus: int
    kind: str
    precision: str
    zero: int
    tensor: int
    pipeline: int
    microbatch: int
    batch: int
    recomputes: bool
    seconds: float  # of a step

    @property
    def replicas(self) -> int:
        return self.gpus // self.tensor // self.pipeline

    @property
    def microbatches(self) -> int:
        return max(1, self.batch // self.replicas // self.microbatch)

    @property
    def settings(self) -> list[str]:
        """The run as settings of the job `published`."""
        vocab = VOCABULARIES[self.source]
        settings = [
            f"model.network.layers={self.layers}",
            f"model.network.width={self.width}",
            f"model.network.heads={self.heads}",
            f"model.network.context={self.length}",
            f"model.network.vocab={vocab}",
            f"model.network.bias={'true' if 'vTrain' in self.source else 'false'}",
            f"data.source.vocab={vocab}",
            f"data.batch={self.batch}",
            f"devices.nodes={max(1, self.gpus // 8)}",
            f"devices.gpus={min(8, self.gpus)}",
            f"devices.kind={self.kind}",
            f"train.precision={self.precision}(level = O2)",
            f"parallelism.tensor={self.tensor}",
            f"parallelism.pipeline={self.pipeline}",
            f"parallelism.microbatches={self.microbatches}",
            f"parallelism.zero={self.zero}",
            f"memory.recompute={'full' if self.recomputes else 'none'}",
        ]
        if (
            self.pipeline > 1
        ):  # equal numbers of blocks, as in Megatron; the ends have the embeddings and the head besides
            counts = [self.layers // self.pipeline] * self.pipeline
            counts[0], counts[-1] = counts[0] + 2, counts[-1] + 2
            schedule = "1f1b" if self.microbatches >= self.pipeline else "gpipe"  # alike, with so few micro-batches
            settings += [f"parallelism.stages={counts}", f"parallelism.schedule={schedule}"]
        return settings

    @cached_property
    def analysis(self) -> Analysis:
        """The analysis of the run's job, also if it would not fit into memory."""
        loaded = load(JOB, self.settings)
        assert loaded.job is not None, loaded.report.found
        report = Report()
        analysis = report.collect(analyse(loaded.job, Facts(), limits=False))
        assert analysis is not None, report.errors
        return analysis

    def estimate(self, fit: PublishedFit) -> StepEstimate:
        """Returns the estimate of a step by a fit."""
        assert self.analysis.staging is not None
        return published_estimate(self.analysis.staging, self.analysis.costs, fit)


def read_runs(path: str = ROWS) -> list[Run]:
    """Returns the runs of a table with the columns of `measured/published_runs.csv` that both sources describe."""
    with open(path, newline="") as file:
        return [_run(row) for row in csv.DictReader(file) if row["source"] in VOCABULARIES]


def _run(row: dict[str, str]) -> Run:
    gpus, batch, length = int(row["gpus"]), int(row["gbs"]), int(row["seq"])
    return Run(
        source=row["source"],
        address=f"{row['source']}@{row['commit']}/{row['file']}#L{row['line']}",
        model=row["model"] if row["model"] != "GPT" else f"GPT {row['layers']}x{row['hidden']}",
        layers=int(row["layers"]),
        width=int(row["hidden"]),
        heads=int(row["heads"]),
        length=length,
        gpus=gpus,
        kind=KINDS[row["gpu"]],
        precision="fp16" if row["precision"] == "fp16" else "bf16",
        zero=int(row["zero"]),
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        microbatch=int(row["mbs"]),
        batch=batch,
        recomputes=row["recompute"].startswith("full"),
        seconds=batch * length / gpus / float(row["tok_s_gpu"]),
    )
