"""The plan of weights that are gathered in 8 bits, and the proof, which refuses plans broken on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.planning import compiled

from dslc.compiler.compile import Compiled
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir.actions import Collective, Payload
from dslc.compiler.ir.records import Weights

JOB = """
model {
  network = gpt(layers = 2, width = 32, heads = 2, context = 16, vocab = 64, tie = true)
  loss    = cross_entropy()
}
data {
  source = synthetic(vocab = 64)
  batch  = 16
}
devices {
  cpus = 4
}
parallelism {
  zero = 3
}
train {
  steps     = 2
  optimizer = adamw()
  precision = fp8(emulate = true, all_gather = true)
}
"""
LAYERS, DENSE = 2, 4  # dense layers of a block
NUMBERS = LAYERS * 12 * 32 * 32  # of their weights


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Compiled]:
    path = tmp_path_factory.mktemp("float8") / "job.plt"
    path.write_text(JOB)
    return lambda *settings: compiled(path, *settings)


def test_a_gather_has_a_byte_for_each_number(job: Callable[..., Compiled]) -> None:
    narrow, wide = (job(f"train.precision.all_gather={word}") for word in ("true", "false"))
    scales, gathers = (
        [[node for node in each.analysis.costs[0].traffic if node.what is what] for each in (narrow, wide)]
        for what in (Payload.WEIGHT_SCALES, Payload.PARAMETERS)
    )
    assert [(node.count, node.bytes, node.ranks) for node in scales[0]] == [(1, 4 * LAYERS * DENSE, 4)]
    assert not scales[1]
    narrow_bytes, wide_bytes = (sum(node.bytes for node in nodes) for nodes in gathers)
    less = wide_bytes - narrow_bytes
    assert less == 2 * 3 * NUMBERS // 4, "forward and backward; the head shares its weight and has 32 bits"
    kept = [each.analysis.costs[0].memory.parameters for each in (narrow, wide)]
    assert kept[0] == kept[1], "a rank keeps float32 rows"


def refusal(analysed: Compiled, change: Callable[[PlanGraph], None]) -> str:
    plan = build_graph(analysed.analysis)
    change(plan)
    with pytest.raises(Unsound) as found:
        verify(plan)
    return f"{found.value.proposition}: {found.value}"


def _scales(plan: PlanGraph) -> str:
    return next(name for name, each in plan.of_kind(Collective) if each.carries is Payload.WEIGHT_SCALES)


def _drop(plan: PlanGraph) -> None:
    name = _scales(plan)
    line = plan.lines()[0][0]
    plan.line([other for other in line if other != name], instead_of=line)
    plan.graph.remove_node(name)


def _delay(plan: PlanGraph) -> None:
    name = _scales(plan)
    line = plan.lines()[0][0]
    rest = [other for other in line if other != name]
    plan.line([*rest[:3], name, *rest[3:]], instead_of=line)


def _change_group(plan: PlanGraph) -> None:
    name = next(name for name, group in plan.of_kind(Weights) if group.scales)
    plan.change(name, scales=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_drop, "scaled: *without scales"),
        (_delay, "scaled: *without scales"),
        (_change_group, "scaled: *0 scales"),
        (lambda plan: plan.change(_scales(plan), bytes=4), "scaled: *no all-reduce of 8 numbers"),
        (lambda plan: plan.change(_scales(plan), weights=()), "scaled: "),
    ],
)
def test_a_broken_plan_is_refused(
    job: Callable[..., Compiled], change: Callable[[PlanGraph], None], reason: str
) -> None:
    beginning, _, end = reason.partition("*")
    text = refusal(job(), change)
    assert text.startswith(beginning) and end in text, text
