"""Schedule tables against torch's own, and their time and memory against theory.

Torch's schedule classes are built on bare stand-ins for stages: they read only ranks and counts from them, and so need
no process group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from helpers.planning import schedule_csv
from helpers.schedule_peaks import peak_held
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from dslc.compiler.cost.schedule_cost import (
    HeldBytes,
    Timeline,
    bytes_beside,
    microbatches_in_flight,
    timeline,
)
from dslc.compiler.placement.schedules import (
    NAMES,
    SPLITS_BACKWARD,
    ScheduledAction,
    ScheduleTable,
    accepted_microbatches,
    default_microbatches,
    default_virtual_stages,
    demands,
    placement,
    table,
)

TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
RANKS = (2, 3, 4, 8)
MICROBATCHES = (*range(1, 14), 16, 17, 24, 32)
VIRTUAL_STAGES = {name: (1,) if name in ("gpipe", "1f1b") else (1, 2, 3, 4) for name in NAMES}


def stand_in(ranks: int, virtual_stages: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(group_rank=0, group_size=ranks, num_stages=ranks * virtual_stages, submod=None, **more)


def torch_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Any:
    """Returns torch's schedule, or None if torch refuses the numbers."""
    kind = torch_schedules.get_schedule_class(TORCH_NAMES[name])
    stages = [stand_in(ranks, virtual_stages) for _ in range(virtual_stages)]
    single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
    try:
        return kind(stages[0] if single else stages, microbatches)
    except (ValueError, AssertionError):
        return None


def written(row: Any) -> list[str]:
    """Returns a row of either side in torch's notation, without the reductions that torch puts into some of its
    rows.
    """
    return [text for text in ("" if a is None else str(a) for a in row) if not text.endswith("REDUCE_GRAD")]


# ---------------------------------------------------------------------------------------------------------------------
# Against torch
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_the_rows_and_the_refusals_are_those_of_torch(name: str, ranks: int) -> None:
    accepted = 0
    for virtual_stages in VIRTUAL_STAGES[name]:
        for microbatches in MICROBATCHES:
            theirs = torch_schedule(name, ranks, microbatches, virtual_stages)
            unmet = demands(name, ranks, microbatches, virtual_stages)
            assert bool(unmet) == (theirs is None), (microbatches, virtual_stages, unmet)
            if theirs is None:
                continue
            accepted += 1
            ours = table(name, ranks, microbatches, virtual_stages)
            # The last row of torch's drawing of 1f1b is wrong; the test below takes the actions that torch runs.
            for rank in range(ranks - 1 if name == "1f1b" else ranks):
                assert written(ours.rows[rank]) == written(theirs.pipeline_order[rank]), (microbatches, virtual_stages)
            if name not in ("gpipe", "1f1b"):
                assert dict(enumerate(ours.placement)) == theirs.stage_index_to_group_rank
    assert accepted > 0


def test_torch_still_draws_the_last_rank_of_1f1b_one_forward_too_late() -> None:
    """If this fails, torch has fixed its drawing, and the exception in the test above can go."""
    row = written(torch_schedule("1f1b", 2, 2, 1).pipeline_order[1])
    assert row == ["1F1", "1B0", "1F2", "1B1"]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 5), (3, 3), (4, 4), (4, 9)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_single_stage_rows_are_what_torch_carries_out(name: str, ranks: int, microbatches: int) -> None:
    ours = table(name, ranks, microbatches, 1)
    for rank in range(ranks):
        done: list[str] = []

        def forward(m: int, *_: Any, done: list[str] = done, rank: int = rank, **__: Any) -> None:
            done.append(f"{rank}F{m}")

        def backward(m: int, done: list[str] = done, rank: int = rank, **_: Any) -> None:
            done.append(f"{rank}B{m}")

        transfers: dict[str, Any] = {
            f"get_{d}_{way}_ops": lambda m: [] for d in ("fwd", "bwd") for way in ("send", "recv")
        }
        stage = stand_in(
            ranks,
            1,
            stage_index=rank,
            is_first=rank == 0,
            is_last=rank == ranks - 1,
            forward_one_chunk=forward,
            backward_one_chunk=backward,
            perform_reduce_grad=lambda scale: None,
            release_fwd_send_outputs=lambda m: None,  # which torch 2.15 calls
            **transfers,
        )
        theirs = torch_schedules.get_schedule_class(TORCH_NAMES[name])(stage, microbatches)
        theirs._stage_forward_initialized = True  # no shapes to infer
        theirs._step_microbatches()
        assert written(ours.rows[rank]) == done


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_runtime_loads_the_csv(name: str, tmp_path: Path) -> None:
    virtual_stages = default_virtual_stages(name)
    ours = table(name, 4, 8, virtual_stages)
    path = tmp_path / "schedule.csv"
    path.write_text(schedule_csv(ours), newline="")
    stages = [stand_in(4, virtual_stages) for _ in range(virtual_stages)]
    make: Any = torch_schedules._PipelineScheduleRuntime
    runtime = make(stages, 8)
    runtime._load_csv(str(path), format="compute_only")
    assert [written(runtime.pipeline_order[rank]) for rank in range(4)] == [written(row) for row in ours.rows]
    assert runtime.stage_index_to_group_rank == dict(enumerate(ours.placement))
    for rank in range(4):  # no action is lost when torch adds the transfers
        loaded = [a for a in runtime.pipeline_order_with_comms[rank] if a.is_compute_op]
        assert written(loaded) == [text for text in written(ours.rows[rank]) if text]


# ---------------------------------------------------------------------------------------------------------------------
# Demands
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (("1f1b", 4, 2, 1), "1f1b needs at least as many micro-batches as stages: 2 < 4"),
        (("dualpipev", 4, 6, 2), "dualpipev needs at least as many micro-batches as stages, 2 per rank: 6 < 8"),
        (("zbv", 4, 8, 3), "zbv has exactly 2 stages per rank, not 3"),
        (("gpipe", 4, 8, 2), "gpipe has exactly 1 stage per rank, not 2"),
        (("looped_bfs", 4, 8, 0), "looped_bfs needs at least 1 stage per rank: 0 < 1"),
        (("gpipe", 1, 8, 1), "gpipe needs at least 2 pipeline ranks: 1 < 2"),
        (("gpipe", 4, 0, 1), "gpipe needs at least 1 micro-batch: 0 < 1"),
        (
            ("interleaved_1f1b", 4, 9, 2),
            "interleaved_1f1b on 4 ranks works through 9 micro-batches in 2 equal rounds (9 // 4): "
            + "9 is not a multiple of 2",
        ),
    ],
)
def test_a_demand_says_what_is_wrong_with_numbers(numbers: tuple[str, int, int, int], words: str) -> None:
    assert demands(*numbers) == (words,)


def test_all_unmet_demands_are_listed_together() -> None:
    assert len(demands("dualpipev", 1, 1, 3)) == 3


def test_a_table_is_not_made_of_unmet_demands() -> None:
    with pytest.raises(AssertionError, match="1f1b needs at least as many"):
        table("1f1b", 4, 2, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_are_accepted(name: str) -> None:
    virtual_stages = default_virtual_stages(name)
    for ranks in range(2, 33):
        assert demands(name, ranks, default_microbatches(name, ranks, virtual_stages), virtual_stages) == ()


@given(name=st.sampled_from(NAMES), ranks=st.integers(2, 9), near=st.integers(-3, 80), data=st.data())
@settings(max_examples=150)
def test_the_accepted_microbatches_are_the_nearest(name: str, ranks: int, near: int, data: st.DataObject) -> None:
    virtual_stages = data.draw(st.sampled_from(VIRTUAL_STAGES[name]))
    good = [m for m in range(1, 120) if not demands(name, ranks, m, virtual_stages)]
    if near in good:
        expected = [near]
    else:
        expected = [m for m in good if m < near][-1:] + [m for m in good if m > near][:1]
    assert list(accepted_microbatches(name, ranks, virtual_stages, near)) == expected


def test_no_count_is_offered_where_something_else_is_wrong() -> None:
    assert accepted_microbatches("zbv", 4, 3, 8) == ()


# ---------------------------------------------------------------------------------------------------------------------
# Properties of every table
# ---------------------------------------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> ScheduleTable:
    name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(2, 7))
    virtual_stages = draw(st.sampled_from([v for v in VIRTUAL_STAGES[name] if not demands(name, ranks, 2 * ranks, v)]))
    near = draw(st.integers(1, 30))
    return table(name, ranks, accepted_microbatches(name, ranks, virtual_stages, near)[-1], virtual_stages)


@given(tables())
@settings(max_examples=80)
def test_each_microbatch_goes_forward_once_and_backward_once_at_each_stage(schedule: ScheduleTable) -> None:
    done: dict[tuple[int, int], str] = {}
    for rank in range(schedule.ranks):
        for action in schedule.work(rank):
            assert schedule.placement[action.stage] == rank
            key = (action.stage, action.microbatch)
            done[key] = done.get(key, "") + action.kind
    everything = {(s, m) for s in range(schedule.stages) for m in range(schedule.microbatches)}
    assert done.keys() == everything
    assert set(done.values()) <= ({"FB", "FIW"} if schedule.name in SPLITS_BACKWARD else {"FB"})


def check_order(schedule: ScheduleTable, simulated: Timeline, send: float) -> None:
    """Every action starts after what it needs, and no rank does two things at once."""
    ends = {(a.kind.replace("I", "B"), a.stage, a.microbatch): end for row in simulated.spans for a, _, end in row}
    last = schedule.stages - 1
    for rank, row in enumerate(simulated.spans):
        assert [span.action for span in row] == list(schedule.work(rank))
        for span, following in pairwise(row):
            assert span.end <= following.start
        for action, start, _ in row:
            if action.kind == "W":
                continue
            kind, step = ("F", -1) if action.kind == "F" else ("B", 1)
            source = action.stage + step
            if 0 <= source <= last:
                far = schedule.placement[source] != rank
                assert start >= ends[kind, source, action.microbatch] + (send if far else 0.0) - 1e-9
            elif kind == "B":
                assert start >= ends["F", last, action.microbatch] - 1e-9


@given(tables(), st.data())
@settings(max_examples=80)
def test_a_timeline_ends_and_respects_what_each_action_needs(schedule: ScheduleTable, data: st.DataObject) -> None:
    costs = st.lists(st.floats(0.1, 4), min_size=schedule.stages, max_size=schedule.stages)
    forward, backward = data.draw(costs), data.draw(costs)
    send = data.draw(st.sampled_from([0.0, 0.3]))
    simulated = timeline(schedule, forward, backward, send)
    check_order(schedule, simulated, send)
    work = [(f + b) * schedule.microbatches for f, b in zip(forward, backward, strict=True)]
    by_rank = [
        sum(w for w, r in zip(work, schedule.placement, strict=True) if r == rank) for rank in range(schedule.ranks)
    ]
    assert simulated.busy == pytest.approx(by_rank)
    assert simulated.total >= max(by_rank) - 1e-6
    assert simulated.bubble == pytest.approx(1 - sum(by_rank) / schedule.ranks / simulated.total)


# ---------------------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------------------


def equal_costs(schedule: ScheduleTable, input_share: float | None = None) -> Timeline:
    share = None if input_share is None else [input_share] * schedule.stages
    return timeline(schedule, [1.0] * schedule.stages, [2.0] * schedule.stages, input_share=share)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"]),
    ranks=st.integers(2, 8),
    rounds=st.integers(1, 5),
    data=st.data(),
)
@settings(max_examples=60)
def test_the_bubble_is_that_of_the_papers(name: str, ranks: int, rounds: int, data: st.DataObject) -> None:
    virtual_stages = data.draw(st.sampled_from(VIRTUAL_STAGES[name]))
    microbatches = ranks * rounds
    simulated = equal_costs(table(name, ranks, microbatches, virtual_stages))
    expected = (ranks - 1) / (microbatches * virtual_stages + ranks - 1)
    assert simulated.bubble == pytest.approx(expected)
    assert simulated.total == pytest.approx(3 * (microbatches * virtual_stages + ranks - 1))


@pytest.mark.parametrize("ranks", RANKS)
def test_zbv_has_no_gap_within_a_row(ranks: int) -> None:
    for microbatches in (2 * ranks - 1, 2 * ranks, 5 * ranks):
        simulated = equal_costs(table("zbv", ranks, microbatches, 2), input_share=0.5)
        for row in simulated.spans:
            assert row[-1].end - row[0].start == 6 * microbatches


@pytest.mark.parametrize("ranks", RANKS)
def test_splitting_the_backward_shrinks_the_bubble(ranks: int) -> None:
    microbatches = 4 * ranks
    whole = equal_costs(table("interleaved_1f1b", ranks, microbatches, 2)).total
    assert all(equal_costs(table(name, ranks, microbatches, 2)).total < whole for name in sorted(SPLITS_BACKWARD))


def test_a_small_timeline_by_hand() -> None:
    simulated = timeline(table("1f1b", 2, 2, 1), [1.0, 2.0], [3.0, 4.0], send=0.5)
    assert [[(str(a), start, end) for a, start, end in row] for row in simulated.spans] == [
        [("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0), ("0B0", 8.0, 11.0), ("0B1", 14.0, 17.0)],
        [("1F0", 1.5, 3.5), ("1B0", 3.5, 7.5), ("1F1", 7.5, 9.5), ("1B1", 9.5, 13.5)],
    ]
    assert simulated.total == 17.0
    assert simulated.busy == (8.0, 12.0)
    assert simulated.bubble == pytest.approx(1 - 20 / 34)


def test_an_overlapped_pair_hands_on_after_its_second_part() -> None:
    schedule = table("dualpipev", 2, 4, 2)
    pairs = [action for row in schedule.rows for action in row if action is not None and action.overlapped]
    assert pairs
    spans = {span.action: span for row in equal_costs(schedule).spans for span in row}
    for pair in pairs:
        first, second = pair.parts
        assert (first.kind, second.kind) == ("F", "B")
        assert spans[second].start >= spans[first].end
        following = spans.get(ScheduledAction("F", first.stage + 1, first.microbatch))
        if following is not None and schedule.placement[first.stage + 1] != schedule.placement[first.stage]:
            assert following.start >= spans[second].end


def test_at_the_first_stage_torch_does_the_whole_backward_in_w() -> None:
    rows = equal_costs(table("zero_bubble", 2, 4, 2)).spans
    taken = {(a.kind, a.stage): end - start for row in rows for a, start, end in row}
    assert (taken["I", 0], taken["W", 0]) == (0.0, 2.0)
    assert (taken["I", 1], taken["W", 1]) == (1.0, 1.0)


def test_a_table_that_waits_for_itself_is_found() -> None:
    rows = (
        (
            ScheduledAction("F", 0, 0),
            ScheduledAction("B", 0, 0),
            ScheduledAction("F", 0, 1),
            ScheduledAction("B", 0, 1),
        ),
        (
            ScheduledAction("F", 1, 1),
            ScheduledAction("F", 1, 0),
            ScheduledAction("B", 1, 1),
            ScheduledAction("B", 1, 0),
        ),
    )
    schedule = ScheduleTable(name="made up", ranks=2, virtual_stages=1, microbatches=2, rows=rows, placement=(0, 1))
    with pytest.raises(AssertionError, match="rank 0 at 0B0, rank 1 at 1F1") as caught:
        timeline(schedule, [1.0, 1.0], [1.0, 1.0])
    assert "waits for itself" in str(caught.value)


def lines_run(work: Callable[[], object]) -> int:
    """Counts executed lines of Python."""
    count = 0

    def line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", NAMES)
def test_the_work_of_a_table_is_in_proportion_to_its_actions(name: str) -> None:
    def work(microbatches: int) -> None:
        schedule = table.__wrapped__(name, 4, microbatches, default_virtual_stages(name))
        equal_costs(schedule)
        peak_held(schedule, [1.0] * schedule.stages)

    assert lines_run(lambda: work(64)) < 2.02 * lines_run(lambda: work(32))


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def bound(schedule: ScheduleTable, rank: int) -> int:
    """Returns the most stage activations that theory lets a rank hold."""
    p, m, v = schedule.ranks, schedule.microbatches, schedule.virtual_stages
    size = m // max(1, m // p)
    lead = {
        "1f1b": p - rank,
        "interleaved_1f1b": (v - 1) * size + 2 * (p - 1 - rank) + 1,
        "zero_bubble": (v - 1) * size + p,  # the shorter lead, and the W put off
        "zbv": 2 * p,  # as many whole ranks as 1f1b at its first, a stage being half a rank
        "dualpipev": 2 * p + 1,
    }
    return min(m * v, lead.get(schedule.name, m * v))


@given(tables())
@settings(max_examples=80)
def test_no_rank_holds_more_than_theory_allows(schedule: ScheduleTable) -> None:
    peaks = peak_held(schedule, [1.0] * schedule.stages)
    for rank, peak in enumerate(peaks):
        assert 1 <= peak <= bound(schedule, rank)
        own = [h for h, r in zip(microbatches_in_flight(schedule), schedule.placement, strict=True) if r == rank]
        assert max(own) <= peak <= sum(own)


def test_gpipe_holds_all_and_1f1b_the_depth_of_the_pipeline() -> None:
    assert microbatches_in_flight(table("gpipe", 4, 8, 1)) == (8, 8, 8, 8)
    assert microbatches_in_flight(table("1f1b", 4, 8, 1)) == (4, 3, 2, 1)
    assert microbatches_in_flight(table("looped_bfs", 2, 3, 2)) == (3, 3, 3, 3)


@given(tables(), st.data())
@settings(max_examples=40)
def test_the_peak_is_that_of_the_spans(schedule: ScheduleTable, data: st.DataObject) -> None:
    """Bytes held depend only on the order: the intervals of any timeline give the same peak."""
    size = data.draw(st.lists(st.integers(1, 9), min_size=schedule.stages, max_size=schedule.stages))
    for row, peak in zip(equal_costs(schedule).spans, peak_held(schedule, size), strict=True):
        opened = {(a.stage, a.microbatch): k for k, (a, _, _) in enumerate(row) if a.kind == "F"}
        closed = {(a.stage, a.microbatch): k for k, (a, _, _) in enumerate(row) if a.kind in "BW"}
        at = [sum(size[key[0]] for key in opened if opened[key] <= k <= closed[key]) for k in range(len(row))]
        assert peak == max(at)


def most_beside(schedule: ScheduleTable, rank: int, held: HeldBytes) -> dict[tuple[int, str, bool], float]:
    """Returns the most beside each kind of action of a stage, after the first micro-batch and in it."""
    most: dict[tuple[int, str, bool], float] = {}
    backward = False  # a backward pass has run
    for action, beside in bytes_beside(schedule, rank, held):
        key = (action.stage, action.kind, backward if action.kind == "F" else action.microbatch > 0)
        backward |= action.kind in ("B", "W")
        most[key] = max(most.get(key, beside), beside)
    return most


def test_less_is_held_beside_gradients() -> None:
    def most(schedule: ScheduleTable, rank: int) -> tuple[float, float]:
        """Returns the micro-batches held before a forward pass without gradients of weights, and beside a later B."""
        beside = most_beside(schedule, rank, HeldBytes(kept=[1.0] * 2, between=[1.0] * 2))
        return beside[rank, "F", False], beside[rank, "B", True]

    assert [most(table("gpipe", 2, 4, 1), rank) for rank in range(2)] == [(3.0, 2.0), (3.0, 2.0)]
    assert [most(table("1f1b", 2, 2, 1), rank) for rank in range(2)] == [(1.0, 0.0), (0.0, 0.0)]
    assert [most(table("1f1b", 2, 4, 1), rank) for rank in range(2)] == [(1.0, 1.0), (0.0, 0.0)]


def test_what_was_sent_is_held_until_the_end_of_a_step() -> None:
    held = HeldBytes(kept=[10.0] * 2, between=[10.0] * 2, output=[1.0, 0.0], gradient=[0.0, 3.0])
    schedule = table("1f1b", 2, 8, 1)
    assert most_beside(schedule, 0, held)[0, "B", True] == 18.0, "in the backward pass of the 7th"
    assert most_beside(schedule, 1, held)[1, "B", True] == 7 * 3
    split = table("zero_bubble", 2, 8, 1)
    assert most_beside(split, 1, held)[1, "I", True] >= 7 * 3


def test_what_is_held_between_i_and_w_can_be_said() -> None:
    schedule = table("zero_bubble", 4, 8, 2)
    same = peak_held(schedule, [10.0] * 8)
    assert peak_held(schedule, [10.0] * 8, [10.0] * 8) == same
    less, more = peak_held(schedule, [10.0] * 8, [0.0] * 8), peak_held(schedule, [10.0] * 8, [15.0] * 8)
    assert less[3] < same[3] < more[3]
    assert peak_held(table("1f1b", 4, 8, 1), [10.0] * 4, [0.0] * 4) == (40.0, 30.0, 20.0, 10.0)


@pytest.mark.parametrize("name", NAMES)
def test_placement_is_looped_or_a_v(name: str) -> None:
    looped = {1: (0, 1, 2), 2: (0, 1, 2, 0, 1, 2)}[default_virtual_stages(name)]
    expected = (0, 1, 2, 2, 1, 0) if name in ("zbv", "dualpipev") else looped
    assert placement(name, 3, default_virtual_stages(name)) == expected
