"""The plan as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import made_plans
from helpers.golden import hold
from helpers.paths import ROOT
from helpers.planning import JOBS, compiled

from dslc.compiler.ir.number_text import percent_text
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.ir.records import ShareNode
from dslc.compiler.placement.layout import Layout
from dslc.compiler.show.describe import coordinates, entries_of, group
from dslc.compiler.show.explain import explain, explain_rank
from dslc.compiler.show.text_table import table

GOLDEN = Path(__file__).parent / "golden"
MADE: list[Callable[[], PlanView]] = [
    made_plans.digits,
    made_plans.four_stages,
    made_plans.sixteen,
    made_plans.thousand,
    made_plans.many_thousand,
]


def section(text: str, heading: str) -> list[str]:
    """Returns the lines under a heading."""
    lines = text.split("\n")
    start = lines.index(heading) + 1
    return [line.strip() for line in lines[start : lines.index("", start)]]


@pytest.mark.parametrize("make", MADE, ids=lambda f: f.__name__)
def test_the_text_of_a_plan(make: Callable[[], PlanView]) -> None:
    plan = make()
    hold(explain(plan), GOLDEN / f"{make.__name__}.txt")
    hold(explain_rank(plan, plan.world_size - 1), GOLDEN / f"{make.__name__}.rank.txt")


def test_the_text_of_a_job() -> None:
    hold(explain(compiled(JOBS / "uneven.plt").plan), GOLDEN / "uneven.txt")


TEXTS = """
model { network = gpt(layers = 1, width = 8, heads = 1, context = 16, vocab = 256), loss = cross_entropy() }
data { source = stdlib(), batch = 8 }
train { steps = 9, optimizer = sgd(lr = 0.1) }
generate { every = EVERY, prompts = ["def ", "import "], max_tokens = 24 }
"""


@pytest.mark.parametrize(
    ("every", "when"), [("3 steps", "every 3 steps and after the last"), ("none", "after the last step")]
)
def test_a_row_has_the_texts_that_the_network_writes(tmp_path: Path, every: str, when: str) -> None:
    job = tmp_path / "job.plt"
    job.write_text(TEXTS.replace("EVERY", every))
    assert f"texts          2 prompts, at most 24 tokens each, {when}" in section(
        explain(compiled(job).plan), "Training"
    )


@pytest.mark.parametrize("make", MADE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("width", [60, 100])
def test_lines_keep_to_the_width(make: Callable[[], PlanView], width: int) -> None:
    plan = make()
    for text in (explain(plan, width), explain_rank(plan, 0, width)):
        assert max(map(len, text.split("\n"))) <= width
        assert not any(line != line.rstrip() for line in text.split("\n"))


@pytest.mark.parametrize("make", MADE, ids=lambda f: f.__name__)
def test_no_number_is_cut_at_the_usual_width(make: Callable[[], PlanView]) -> None:
    assert "…\n" not in explain(make(), 100)


def test_coordinates_are_those_of_the_layout() -> None:
    job = compiled(JOBS / "vast.plt")
    layout: Layout = job.analysis.layout
    for rank in (0, 1, 7, 8, 15, 16, 1023, 1024, 9999, 16383):
        assert coordinates(job.plan, rank) == layout.coordinates(rank)
        for axis in layout.sizes:
            members = group(job.plan, rank, axis)
            assert rank in members and len(members) == layout.sizes[axis]
            others = {name: {layout.coordinates(m)[name] for m in members} for name in layout.sizes}
            assert all(len(found) == (layout.sizes[axis] if name == axis else 1) for name, found in others.items())


def test_every_entry_of_an_uneven_batch_is_shown_once() -> None:
    shares = (ShareNode(first_rank=0, ranks=2, samples=4), ShareNode(first_rank=2, ranks=3, samples=3))
    dealt: list[int] = []
    for rank in range(5):
        got = entries_of(shares, rank)
        assert got is not None
        dealt += range(got[0], got[1] + 1)
    assert dealt == list(range(17))
    assert entries_of(shares, 5) is None


def test_ranks_with_smaller_shares_hold_less() -> None:
    plan = compiled(JOBS / "uneven.plt", "parallelism.data_shares=[9, 1, 1]").plan
    rows = [line.split()[:2] for line in section(explain(plan), "Memory of a rank, at its peak")]
    assert [row[0] for row in rows[1:3]] == ["0", "1–2"]
    peaks = [section(explain_rank(plan, rank), "Memory, at its peak") for rank in range(3)]
    assert peaks[0] != peaks[1] == peaks[2]


def test_a_rank_says_what_it_gets() -> None:
    plan = made_plans.digits()
    assert section(explain_rank(plan, 1), "Samples")[:2] == [
        "first batch  entries 32–63 of 64: 32 samples, in 1 micro-batch of up to 32",
        "last batch   entries 16–30 of 31: 15 samples, in 1 micro-batch of up to 32",
    ]


def test_ranks_that_share_samples_are_named() -> None:
    text = explain_rank(made_plans.many_thousand(), 17)
    assert "ranks 16–31 have the same samples" in text
    assert "of each sequence, part 1 of 2" in text


def test_a_rank_of_a_pipeline_has_its_own_row() -> None:
    plan = made_plans.four_stages()
    assert plan.schedule is not None
    for rank in range(4):
        shown = " ".join(section(explain_rank(plan, rank) + "\n", "Schedule")[1:-1])
        assert shown == plan.schedule.rows[rank]


def test_equal_blocks_are_one_line() -> None:
    lines = section(explain(made_plans.sixteen()), "Layers")
    blocks = [line for line in lines if "blocks" in line]
    assert len(blocks) == 1 and blocks[0].startswith("blocks.0 … blocks.31  x32")


def test_the_mesh_says_why_its_axes_lie_where_they_do() -> None:
    lines = section(explain(made_plans.many_thousand()), "Mesh")
    assert [line.split()[0] for line in lines[1:-2]] == ["pipeline", "data", "context", "tensor"]
    assert "between nodes" in lines[1] and "within a node" in lines[4]
    assert "within every layer" in lines[4] and lines[-1].startswith("ranks are numbered tensor first")


@pytest.mark.parametrize(
    ("devices", "written", "part"),
    [("cpus", "", "whole"), ("gpus", "", "a piece"), ("cpus", "true", "a piece"), ("gpus", "false", "whole")],
)
def test_the_mesh_says_what_a_tensor_rank_has_of_a_sequence(devices: str, written: str, part: str) -> None:
    settings = ("parallelism.tensor=2", *([f"parallelism.sequence={written}"] if written else []))
    plan = compiled(JOBS / "pipeline.plt", f"devices.{devices}=8", *settings).plan
    assert plan.sequence == (part == "a piece")
    assert f"tensor: between its layers a rank has {part}" in explain(plan)


def test_an_axis_over_both_kinds_of_links_says_how_many_ranks_share_a_node() -> None:
    layers = made_plans.image_layers()
    lines = section(explain(made_plans.make_plan("two", layers, nodes=4, processes=8, tensor=2)), "Mesh")
    assert "between nodes, 4 ranks on each" in lines[1]
    lines = section(explain(made_plans.make_plan("odd", layers, nodes=2, processes=3, tensor=2)), "Mesh")
    assert "between nodes  " in lines[1]


def test_the_cut_into_equal_numbers_of_layers_is_shown_beside_a_balanced_one() -> None:
    plan = compiled(ROOT / "benchmarks" / "jobs" / "heavy_head.plt").plan
    other = compiled(ROOT / "benchmarks" / "jobs" / "heavy_head.plt", "parallelism.stages=[4, 4]").plan
    assert plan.schedule is not None and other.schedule is not None
    assert plan.schedule.equal_bubble == other.schedule.bubble > plan.schedule.bubble
    balanced, equal = section(explain(plan), "Schedule")[1:3]
    assert balanced.startswith("slowest stage: ") and equal.startswith("equal numbers of layers: ")
    longer = (1 - plan.schedule.bubble) / (1 - other.schedule.bubble)
    assert equal.endswith(f"bubble {percent_text(other.schedule.bubble)}, {longer:.2f} x the time")
    assert section(explain(other), "Schedule")[1].endswith("all have equal numbers of layers")


def test_what_is_not_known_is_said() -> None:
    plan = made_plans.digits()
    data = replace(plan.data, train=None, last=None, last_shares=(), steps_per_epoch=None, steps=None)
    bare = replace(plan, parameters=None, layers=(), stages=(), ranks=(), data=data)
    text = explain(bare)
    for heading in ("Layers", "Memory of a rank, at its peak", "Traffic of a rank, each step"):
        assert "unknown" in section(text, heading)[0]
    assert "training     unknown, shuffled each epoch" in section(text, "Data")
    assert "unknown" in explain_rank(bare, 1)


def test_a_scaled_learning_rate_shows_both() -> None:
    assert "learning rate  0.05 -> 0.1, scaled to the batch (constant)" in explain(made_plans.digits())
    same = made_plans.digits()
    same = replace(same, training=replace(same.training, lr=0.05))
    assert "->" not in explain(same)


def test_there_is_no_such_rank() -> None:
    with pytest.raises(AssertionError, match="ranks are 0 to 1"):
        explain_rank(made_plans.digits(), 2)


EXAMPLES = [
    path for path in sorted((ROOT / "examples").glob("*.plt")) if "python(" not in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_explained(path: Path) -> None:
    plan = compiled(path).plan
    assert plan.hash in explain(plan)
    for rank in (0, plan.world_size - 1):
        assert section(explain_rank(plan, rank), "Place")[0].startswith("node")


def test_a_table_is_aligned_and_nothing_in_it_is_read_or_cut() -> None:
    rows = [("[bold]a[/]", "1", "x"), ("日本", "10"), ("b" * 500, "100", ":smile:")]
    lines = table(rows, right_columns=(1,), head=("name", "n", "what"))
    assert lines[0] == "name" + " " * 496 + "    n  what"
    assert lines[1] == "[bold]a[/]" + " " * 490 + "    1  x"
    assert lines[2] == "日本" + " " * 496 + "   10", "each of these letters takes two columns"
    assert lines[3] == "b" * 500 + "  100  :smile:"
    assert table([]) == []


def test_a_long_table_shows_its_beginning_and_its_end() -> None:
    rows = [(str(n), "x" * n) for n in range(100)]
    assert table(rows, limit=6) == [
        "0",
        "1   x",
        "2   xx",
        "3   xxx",
        "… 94 more",
        f"98  {'x' * 98}",
        f"99  {'x' * 99}",
    ]
    assert len(table(rows, limit=99)) == 100
    assert "… 2 more" in table(rows, limit=98)
