"""The plan as a picture: its DOT text in golden files, and properties of every picture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import made_plans
from helpers.golden import hold
from helpers.planning import JOBS, compiled
from helpers.schedule_peaks import peak_held

from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.ir.records import StageTime, StepEnd
from dslc.compiler.placement.schedules import NAMES, default_microbatches, default_virtual_stages, table
from dslc.compiler.show.canvas import MEMORY_COLOURS, Canvas, escape, fitted
from dslc.compiler.show.describe import axis_of, devices_text
from dslc.compiler.show.draw import VIEWS, draw
from dslc.compiler.show.picture import svg

GOLDEN = Path(__file__).parent / "golden"
MADE: list[Callable[[], PlanView]] = [
    made_plans.digits,
    made_plans.four_stages,
    made_plans.sixteen,
    made_plans.thousand,
    made_plans.many_thousand,
]
ID = r'"(?:[^"\\]|\\.)*"|[\w.-]+'
NODE = re.compile(rf"^\t({ID}) \[(.*)\]$", re.M)
EDGE = re.compile(rf"^\t({ID}) -> ({ID}) \[", re.M)
ATTRIBUTE = re.compile(rf"(\w+)=({ID})")


def bare(name: str) -> str:
    """Returns a name or value of DOT without its quotes."""
    return name[1:-1].replace('\\"', '"') if name.startswith('"') else name


def nodes(dot: str) -> dict[str, dict[str, str]]:
    """Returns every node that is drawn, and its attributes."""
    return {
        bare(name): {key: bare(value) for key, value in ATTRIBUTE.findall(attributes)}
        for name, attributes in NODE.findall(dot)
        if "pos=" in attributes
    }


def edges(dot: str) -> list[tuple[str, str]]:
    return [(bare(tail), bare(head)) for tail, head in EDGE.findall(dot)]


def boxes(dot: str) -> dict[str, tuple[float, float, float, float]]:
    """Returns the left, lower, right and upper edge of every node that is drawn."""
    found = {}
    for name, each in nodes(dot).items():
        x, y = map(float, each["pos"].split(","))
        half, tall = 36 * float(each["width"]), 36 * float(each["height"])
        found[name] = (x - half, y - tall, x + half, y + tall)
    return found


def named(dot: str, pattern: str) -> list[str]:
    return [name for name in boxes(dot) if re.fullmatch(pattern, name)]


def made(**axes: int) -> PlanView:
    return made_plans.make_plan("some", made_plans.gpt_layers(16, 128, 64), **axes)  # type: ignore[arg-type]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("make", MADE, ids=lambda f: f.__name__)
def test_the_picture_of_a_plan(make: Callable[[], PlanView], view: str) -> None:
    text = draw(make(), view)
    if len(text) < 20_000:
        hold(text, GOLDEN / f"{make.__name__}.{view}.dot")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("make", MADE, ids=lambda f: f.__name__)
def test_lines_join_what_is_drawn_and_headings_tell_the_plan(make: Callable[[], PlanView], view: str) -> None:
    plan = make()
    dot = draw(plan, view)
    there = set(boxes(dot))
    assert {end for edge in edges(dot) for end in edge} <= there
    for said in (plan.job, plan.hash, "parameters", devices_text(plan)):
        assert said in dot
    if plan.schedule:
        assert "bubble" in dot


def overlaps(dot: str, pattern: str) -> list[tuple[str, str]]:
    """Returns nodes of a name that overlap."""
    places = boxes(dot)
    some = named(dot, pattern)
    return [
        (a, b)
        for n, a in enumerate(some)
        for b in some[n + 1 :]
        if places[a][0] < places[b][2] - 0.1
        and places[b][0] < places[a][2] - 0.1
        and places[a][1] < places[b][3] - 0.1
        and places[b][1] < places[a][3] - 0.1
    ]


@pytest.mark.parametrize(
    "axes",
    [
        {"processes": 1},
        {"processes": 12},
        {"processes": 16},
        {"nodes": 2, "processes": 8, "batch": 64},
        {"nodes": 16, "processes": 1},
        {"nodes": 4, "processes": 3, "tensor": 2, "batch": 60},
        {"processes": 4, "pipeline": 4, "microbatches": 4},
        {"nodes": 3, "processes": 4, "pipeline": 12, "microbatches": 12},
        {"nodes": 2, "processes": 8, "pipeline": 2, "tensor": 2, "context": 2, "microbatches": 4},
        {"nodes": 8, "processes": 2, "tensor": 4, "context": 2},
        {"nodes": 4, "processes": 4, "pipeline": 4, "tensor": 4, "microbatches": 4},
    ],
    ids=lambda axes: ",".join(f"{name}={size}" for name, size in axes.items()),
)
def test_few_devices_have_a_box_each_and_none_lies_over_another(axes: dict[str, int]) -> None:
    plan = made(**axes)
    dot = draw(plan)
    assert len(named(dot, r"rank \d+")) == plan.world_size
    for pattern in (r"rank \d+", r"data [\d.]+", r"share \d+|source|rank \d+", r"rank \d+|data [\d.]+|memory .*"):
        assert not overlaps(dot, pattern)


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_a_collective_of_a_group_is_one_bar_and_not_a_line_for_each_pair(ranks: int) -> None:
    dot = draw(made(processes=ranks))
    ends = Counter(head for _, head in edges(dot) if head.startswith("data "))
    assert sum(ends.values()) == ranks
    assert len(edges(dot)) <= 3 * ranks


def test_a_thousand_devices_are_a_few_boxes() -> None:
    for make, most in ((made_plans.thousand, 6), (made_plans.many_thousand, 6)):
        dot = draw(make())
        drawn = named(dot, r"pipeline \d+")
        assert 1 < len(drawn) <= most
        assert not overlaps(dot, r"pipeline \d+|more|share|source|memory .*")
        assert not named(dot, r"rank \d+")
    assert "ranks 0–1023, x1,024" in draw(made_plans.many_thousand())


def test_all_ranks_of_a_folded_picture_are_counted() -> None:
    dot = draw(made_plans.make_plan("flat", made_plans.image_layers(), nodes=8, processes=8, batch=128))
    assert "ranks 0–63, x64" in dot and "64 data ranks x 2 samples: 0–1, …, 126–127" in dot


def test_bars_are_coloured_by_kind_in_the_shares_of_the_account() -> None:
    plan = made_plans.digits()
    memory = plan.ranks[0].memory
    fill = nodes(draw(plan))["rank 0 bar"]["fillcolor"]
    shares = dict(part.split(";") for part in fill.split(":"))
    for kind, colour in MEMORY_COLOURS.items():
        share = getattr(memory, kind) / memory.peak
        assert float(shares.get(colour, 0)) == pytest.approx(share, abs=1e-3), kind


def test_a_bar_is_measured_against_the_limit() -> None:
    plan = made_plans.sixteen()
    fill = nodes(draw(plan))["rank 0 bar"]["fillcolor"]
    free = float(dict(part.split(";") for part in fill.split(":"))["#ffffff"])
    memory = plan.topology.memory
    assert memory is not None
    assert free == pytest.approx(1 - plan.ranks[0].memory.peak / memory, abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_drawn_and_its_boxes_do_not_overlap(name: str) -> None:
    virtual = default_virtual_stages(name)
    pieces = max(8, default_microbatches(name, 4, virtual))
    layers = made_plans.gpt_layers(14, 128, 64)
    plan = made_plans.make_plan(
        "s", layers, processes=4, pipeline=4, schedule=name, virtual=virtual, microbatches=pieces
    )
    dot = draw(plan, "schedule")
    for rank in range(4):
        assert not overlaps(dot, rf"row {rank}\.[\d.]+")
    assert edges(draw(plan, "graph"))


def test_a_schedule_is_drawn_from_its_rows_and_not_from_its_name() -> None:
    layers = made_plans.gpt_layers(8, 128, 64)
    drawn = made_plans.make_plan("s", layers, processes=2, pipeline=2, schedule="gpipe", microbatches=4)
    assert drawn.schedule is not None
    other = replace(drawn, schedule=replace(drawn.schedule, name="1f1b"))
    for view in ("schedule", "graph"):
        assert draw(other, view).replace("1f1b", "gpipe") == draw(drawn, view)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_a_rank_holds_under_a_schedule(name: str) -> None:
    virtual = default_virtual_stages(name)
    pieces = max(8, default_microbatches(name, 4, virtual))
    plan = made_plans.make_plan(
        "s",
        made_plans.gpt_layers(14, 128, 64),
        processes=4,
        pipeline=4,
        schedule=name,
        virtual=virtual,
        microbatches=pieces,
    )
    kept = [plan.data.microbatch * sum(x.kept for x in plan.layers[s.first : s.last + 1]) for s in plan.stages]
    peaks = peak_held(table(name, 4, pieces, virtual), kept)
    dot = draw(plan, "schedule")
    for rank, peak in enumerate(peaks):
        assert nodes(dot)[f"row {rank} holds"]["label"].split(": ")[1].removesuffix("\\l") == byte_text(peak)
        highest = max(boxes(dot)[box][3] - boxes(dot)[box][1] for box in named(dot, rf"held {rank}\.\d+"))
        if "row 0 gap" not in dot:
            assert highest == pytest.approx(16 * peak / max(peaks), abs=0.02)
        assert not overlaps(dot, rf"held {rank}\.\d+")
    idle = [float(share) for share in re.findall(r'label="idle ([\d.e-]+)%', dot)]
    assert len(idle) == 4


@pytest.mark.parametrize(
    "axes",
    [(), ("parallelism.tensor=2",), ("parallelism.tensor=2", "parallelism.sequence=true"), ("parallelism.context=2",)],
)
def test_what_is_held_is_what_the_account_says_of_a_rank(axes: tuple[str, ...]) -> None:
    """Eight micro-batches in flight, or seven beside the gradients of one; without a stage's output, and without
    working memory.
    """
    settings = ("parallelism.schedule=gpipe", "parallelism.microbatches=8", *axes)
    plan = compiled(JOBS / "pipeline.plt", *settings, f"devices.cpus={8 if axes else 4}").plan
    assert 7 < plan.ranks[0].memory.activations / plan.stages[0].kept < 8.8
    assert f'"holds 8: {byte_text(8 * plan.stages[0].kept)}' in draw(plan, "schedule")


def test_the_table_of_traffic_is_of_all_dtypes() -> None:
    plan = compiled(JOBS / "pipeline.plt", "parallelism.tensor=2", "devices.cpus=8", "train.precision=bf16").plan
    dtypes: dict[tuple[str, str, str], set[str]] = {}
    for t in plan.ranks[0].traffic:
        dtypes.setdefault((t.axis, t.operation, t.what), set()).add(t.dtype)
    axis, operation, what = next(key for key, kinds in dtypes.items() if len(kinds) > 1)
    sums = [
        [t for t in node.traffic if (t.axis, t.operation, t.what) == (axis, operation, what)] for node in plan.ranks
    ]
    cells = re.findall(r'"traffic (\d+)\.\d" .*?label="?(.*?)\\[lr]"', draw(plan))
    rows = [[cell for row, cell in cells if row == str(n)] for n in range(len(cells) // 5)]
    count, size = max(sum(t.count for t in some) for some in sums), max(sum(t.bytes for t in some) for some in sums)
    assert [f"{axis} x2", operation, what, f"{count:,}", byte_text(size)] in rows


def test_idle_shares_are_those_of_the_bubble() -> None:
    layers = made_plans.gpt_layers(16, 128, 64)
    plan = made_plans.make_plan("s", layers, processes=4, pipeline=4, microbatches=8, schedule="gpipe")
    assert plan.schedule is not None
    even = replace(plan, stages=tuple(replace(stage, flops=10**9) for stage in plan.stages))
    idle = [float(share) for share in re.findall(r'label="idle ([\d.e-]+)%', draw(even, "schedule"))]
    assert sum(idle) / 4 == pytest.approx(100 * plan.schedule.bubble, abs=0.1)


def test_a_short_step_shows_every_forward_and_backward_once() -> None:
    plan = made_plans.make_plan("p", made_plans.gpt_layers(6, 128, 64), processes=2, pipeline=2, microbatches=4)
    tips = re.findall(r'tooltip="(\w+), stage (\d), micro-batch (\d)"', draw(plan, "schedule"))
    assert Counter(tips) == {
        (k, str(s), str(m)): 1 for k in ("forward", "backward") for s in range(2) for m in range(4)
    }
    graph = draw(plan, "graph")
    assert len(named(graph, r"\d[FB]\d")) == 16
    assert not overlaps(graph, r"\d[FB]\d|update \d|exchange .*|source")


def test_accumulation_without_a_pipeline_is_one_row() -> None:
    plan = made_plans.make_plan("a", made_plans.image_layers(), microbatches=4)
    dot = draw(plan, "schedule")
    assert "4 micro-batches of 8, one after another, no bubble" in dot
    assert len(re.findall(r'tooltip="forward', dot)) == 4


def test_a_long_step_is_shown_by_its_beginning_and_end() -> None:
    dot = draw(made_plans.many_thousand(), "schedule")
    assert len(boxes(dot)) < 800
    labels = {each["label"] for each in nodes(dot).values()}
    assert {"0", "31"} <= labels and "row 0 gap" in dot


@pytest.mark.parametrize("made", [made_plans.digits, made_plans.four_stages])
def test_boxes_of_a_schedule_are_as_long_as_the_predicted_times(made: Callable[[], PlanView]) -> None:
    plan = made()
    step = replace(
        made_plans.STEP,
        stages=tuple(StageTime(forward=0.01 * (n + 1), backward=0.03 * (n + 1)) for n in range(len(plan.stages))),
        ends=(StepEnd(exposed=0.02, update=0.05),) * axis_of(plan, "pipeline").size,
        samples=0.02,
        rest=0.04,
    )
    dot = draw(replace(plan, step=step), "schedule")
    expected = {"exchange": 0.02, "update": 0.05, "rest": 0.06}
    seconds = {
        name: expected.get(node["tooltip"]) or step.stages[int(stage[1])].forward * (3 if "back" in stage[0] else 1)
        for name, node in nodes(dot).items()
        if name.startswith("row ") and "tooltip" in node
        for stage in re.findall(r"(\w+)(?:, stage (\d+))?", node["tooltip"])[:1]
    }
    lengths = {name: right - left for name, (left, _, right, _) in boxes(dot).items() if name in seconds}
    scale = lengths["row 0.0"] / seconds["row 0.0"]
    assert {name: length / scale for name, length in lengths.items()} == pytest.approx(seconds, rel=0.01)
    assert "update" in {nodes(dot)[name]["tooltip"] for name in seconds} and "not to scale" not in dot


def test_a_network_that_was_not_traced_is_drawn_as_unknown() -> None:
    plan = made_plans.digits()
    untraced = replace(plan, parameters=None, layers=(), stages=(), ranks=())
    for view in VIEWS:
        assert "unknown parameters" in draw(untraced, view)
    assert "layers unknown" in draw(untraced)
    many = made_plans.make_plan("flat", made_plans.image_layers(), nodes=8, processes=8, batch=128)
    assert "layers unknown" in draw(replace(many, parameters=None, layers=(), stages=(), ranks=()))


def test_names_of_the_users_are_quoted() -> None:
    canvas = Canvas('a "job" \\n')
    canvas.write("x", 0, 0, 100, 'b"\\l')
    assert 'digraph "a \\"job\\" \\\\n" {' in canvas.text()
    assert 'label="b\\"\\\\l\\l"' in canvas.text()
    assert escape("a\nb") == "a b"


@pytest.mark.processes
def test_names_of_the_users_are_no_html() -> None:
    """Graphviz would read them as HTML, and its WebAssembly build would refuse."""
    canvas = Canvas("<b>")
    canvas.cluster("c", 0, 0, 9, 9, "<i>c</i>", [canvas.write("<x>", 0, 0, 100, "<u>")])
    canvas.box("y", 0, 0, 9, 9, "<h1>", tip="<hr>")
    for text in ('digraph "<b>" {', 'label="<i>c</i>"', '"<x>"', '"<u>\\l"', 'label="<h1>"', 'tooltip="<hr>"'):
        assert text in canvas.text()
    assert "&lt;h1&gt;" in svg(canvas.text())


def test_text_is_cut_to_its_place() -> None:
    assert fitted("abc", 100, 10) == "abc"
    assert fitted("a" * 50, 54, 10) == "a" * 7 + "…"
    assert fitted("m" * 50, 54, 10) == "m" * 4 + "…"
    assert fitted("i" * 14, 54, 10) == "i" * 14


def test_there_is_no_such_view() -> None:
    with pytest.raises(ValueError, match="placement, graph, schedule"):
        draw(made_plans.digits(), "plan")


@pytest.mark.slow
def test_sixteen_thousand_devices_from_a_job() -> None:
    plan = compiled(JOBS / "vast.plt").plan
    assert plan.world_size == 16_384
    for view in VIEWS:
        dot = draw(plan, view)
        assert "16,384 h100" in dot and len(dot) < 120_000
