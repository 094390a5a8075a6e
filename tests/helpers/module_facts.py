"""Facts of a traced module, made by hand."""

from __future__ import annotations

from typing import Any

from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.memory import LayerMemory
from dslc.compiler.ir.module_facts import LayerFacts, ModelFacts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.language import calls as c
from dslc.dsl.language import layers as s
from dslc.dsl.language.blocks import ModelSpec
from helpers.made_jobs import make_job
from helpers.networks_drawn import fact, of


def layer(name: str, kind: str, *parameters: str, **more: Any) -> LayerFacts:
    values: dict[str, Any] = {
        "block": kind == "Block",
        "parameters": parameters,
        "buffers": (),
        "input": fact(4),
        "output": fact(4),
        "forward_flops": 100,
        "backward_flops": 200,
        "float32": LayerMemory(saved=64, selective=40),
        "autocast": LayerMemory(saved=32, selective=20),
    }
    return LayerFacts(name=name, kind=kind, **(values | more))


FACTS = ModelFacts(
    parameters=(
        ("table.weight", (2**10, 2**8), True),
        ("blocks.0.weight", (8, 8), True),
        ("blocks.1.weight", (8, 8), True),
        ("scale", (8,), False),
    ),
    buffers=(("blocks.0.mask", (4,), "bool"),),
    ties=(("head.weight", "table.weight"),),
    layers=(
        layer("table", "Embedding", "table.weight", block=False),
        layer("blocks.0", "Block", "blocks.0.weight", buffers=("blocks.0.mask",)),
        layer("blocks.1", "Block", "blocks.1.weight"),
        layer("head", "Linear", "head.weight", output=fact(10)),
        layer("", "Net", "scale", input=None, output=None, block=False),
    ),
    output=fact(10),
    batch_norm=True,
    noise=False,
    unused=("scale",),
    without_reset=(),
    vocab=100,
)


IMAGES = SourceFacts(input=fact(4), target=fact(dtype="int64"), classes=10, samples=1000)


def analysed(facts: ModelFacts, source: SourceFacts = IMAGES, **blocks: Any) -> tuple[Analysis | None, Report]:
    network = of(s.PythonNetwork, function="mine:net")
    job = make_job(model=ModelSpec(network=network, loss=c.CrossEntropy()), **blocks)
    report = Report()
    return report.collect(analyse(job, Facts(source=source, model=facts))), report
