"""The account of a rank's memory agrees with measurements in real processes.

Within 10% at the median and 20% at worst, at the peak; within 5% between two steps. The page docs/memory.md shows the
figures.
"""

from __future__ import annotations

import importlib.util
import statistics
from dataclasses import replace

import pytest
import torch
from helpers.gang import gang
from helpers.measured_memory import CASES, MORE, Case, MeasuredMemory, measure
from helpers.paths import HELPERS

from dslc.runtime.measure import track_memory

FOUND: dict[Case, MeasuredMemory] = {}
# Torch 2.15 has nothing between two steps that stages receive into; the account is that of 2.13, which keeps it.
LETS_GO = importlib.util.find_spec("torch.distributed.pipelining._recv_buffers") is not None


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_holds_what_the_account_says(case: Case) -> None:
    found = FOUND[case] = measure(case.text)
    assert abs(found.error) <= 0.20, (found.error, found.predicted, found.at_peak, found.when)
    # Usually within 0.1%; releases by gloo's threads after the step are not reported (runtime/measure/track_memory.py).
    above = 0.20 if LETS_GO and case.pipeline > 1 else 0.05
    assert -0.05 <= found.error_at_rest <= above, (found.error_at_rest, found.predicted, found.at_rest)


@pytest.mark.long
@pytest.mark.parametrize("case", MORE, ids=str)
def test_and_with_more_of_each_axis(case: Case) -> None:
    test_a_rank_holds_what_the_account_says(case)


OF_GPT = '["embedding.*", "position.*", "blocks.0.*", "blocks.1.*"]'
OF_OWN = '["first.*", "blocks.0.*", "blocks.1.*", "blocks.2.*"]'
IN_STAGES = Case(ranks=2, pipeline=2, microbatches=4, freeze=OF_GPT)
OWN_IN_STAGES = replace(IN_STAGES, network="own", batch=256, freeze="[]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(freeze=OF_GPT),
        Case(network="own", batch=256, freeze=OF_OWN),
        replace(IN_STAGES, batch=64, microbatches=16),  # what was sent stays until the end of the step
        replace(OWN_IN_STAGES, adapter='lora(4, ["blocks.4.up", "blocks.5.up"])'),
        replace(IN_STAGES, schedule="zero_bubble"),  # the first half of a backward pass frees nothing
        replace(IN_STAGES, ranks=4, zero=2),  # units have gradients of what trains alone
        replace(OWN_IN_STAGES, adapter='lora(4, ["blocks.4.up", "blocks.5.up"])', schedule="zbv"),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                Case(freeze='["blocks.0.*", "blocks.1.*"]'),
                Case(freeze=OF_GPT, recompute="full"),
                Case(freeze=OF_GPT, precision="bf16"),
                Case(freeze=OF_GPT, ranks=2, zero=3),
                Case(freeze=OF_GPT, ranks=2, zero=3, microbatches=4),
                Case(network="own", batch=256, freeze=OF_OWN, recompute="full"),
                Case(network="own", batch=256, freeze='["blocks.1.*", "blocks.2.*"]'),
                Case(network="own frozen", batch=256),
                Case(network="own frozen", batch=256, precision="bf16"),
                Case(network="own", batch=256, adapter='lora(4, ["blocks.*.up"])'),
                Case(freeze='["embedding.*", "position.*", "blocks.0.*", "blocks.1.attention.*"]'),
                IN_STAGES,
                replace(IN_STAGES, schedule="gpipe"),
                replace(IN_STAGES, schedule="gpipe", freeze='["embedding.*", "position.*", "blocks.[012].*"]'),
                replace(IN_STAGES, freeze='["embedding.*", "position.*"]'),
                replace(IN_STAGES, freeze='["embedding.*", "position.*", "blocks.0.*"]', recompute="full"),
                replace(IN_STAGES, batch=64, microbatches=16, schedule="interleaved_1f1b"),
                replace(IN_STAGES, batch=64, microbatches=16, freeze="[]"),
                replace(IN_STAGES, ranks=4, zero=1),
                replace(IN_STAGES, ranks=4, zero=2, schedule="gpipe"),
                replace(OWN_IN_STAGES, ranks=4, zero=2, freeze=OF_OWN),
                replace(OWN_IN_STAGES, network="own frozen"),
                *(
                    replace(IN_STAGES, ranks=4, zero=3, freeze=freeze, schedule=schedule)
                    for schedule in ("gpipe", "1f1b", "interleaved_1f1b")  # units are gathered ahead, and wait
                    for freeze in ('["embedding.*", "position.*"]', OF_GPT)
                ),
                *(
                    replace(case, schedule=schedule)
                    for schedule in ("interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
                    for case in (
                        OWN_IN_STAGES,
                        replace(OWN_IN_STAGES, freeze=OF_OWN),
                        replace(OWN_IN_STAGES, adapter='lora(4, ["blocks.4.up", "blocks.5.up"])'),
                        replace(IN_STAGES, batch=64, microbatches=16),
                        replace(IN_STAGES, freeze="[]"),
                        replace(IN_STAGES, freeze='["embedding.*", "position.*", "blocks.0.*"]'),
                    )
                ),
            )
        ),
    ],
    ids=str,
)
def test_frozen_layers_keep_what_autograd_keeps(case: Case) -> None:
    """The account has each rank within 3 %; of ranks that do the same, gloo lets some free a copy later."""
    found, alike = measure(case.text), case.ranks // case.pipeline
    least = [max(found.errors[rank : rank + alike]) for rank in range(0, case.ranks, alike)]  # of each stage
    assert min(least) >= -0.02 and min(found.errors) >= -0.15 and max(found.errors) <= 0.03, (
        found.errors,
        found.predicted,
        found.at_peak,
        found.when,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(network="experts"),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                Case(network="experts", precision="bf16"),
                Case(network="balanced experts"),
                Case(network="softmax experts"),
                Case(network="softmax experts", precision="bf16"),
            )
        ),
    ],
    ids=str,
)
def test_routers_keep_what_autograd_keeps(case: Case) -> None:
    found = measure(case.text)
    assert abs(found.error) <= 0.0005, (found.error, found.predicted, found.at_peak, found.when)


def on_other_plans(case: Case) -> list[Case]:
    """Returns a case with experts in other precision, recomputed, sharded, and on the axes of experts and tensors."""
    return [
        replace(case, precision="bf16"),
        replace(case, recompute="full"),
        replace(case, ranks=2, zero=3),
        replace(case, ranks=2, expert=2),
        replace(case, ranks=4, expert=2, tensor=2, sequence="true"),
    ]


EVEN = Case(network="even experts")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        EVEN,
        replace(EVEN, ranks=2, tensor=2, sequence="false"),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                *on_other_plans(EVEN),
                replace(EVEN, ranks=2, tensor=2, sequence="true"),
                Case(network="llama", ranks=2, tensor=2, sequence="false"),
            )
        ),
    ],
    ids=str,
)
def test_experts_keep_what_autograd_keeps_where_all_have_rows(case: Case) -> None:
    """Every token goes to all experts, so that each rank has its even share of rows."""
    found = measure(case.text)
    assert abs(found.error) <= 0.02, (found.error, found.predicted, found.at_peak, found.when)


ADAPTED = replace(EVEN, adapter='lora(8, ["experts.gate_up_proj", "experts.down_proj"])')


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ADAPTED,
        replace(ADAPTED, ranks=2, tensor=2, sequence="true"),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                *on_other_plans(ADAPTED),
                replace(ADAPTED, ranks=2, tensor=2, sequence="false"),
                replace(ADAPTED, ranks=2, pipeline=2, microbatches=2),
                replace(ADAPTED, adapter='lora(4, ["experts.gate_up_proj"])'),  # zeros widen the matrices to 8
                Case(network="llama", adapter='lora(8, ["o_proj"])'),
            )
        ),
    ],
    ids=str,
)
def test_adapters_of_experts_keep_copies_and_callers_their_inputs(case: Case) -> None:
    """No layer of a frozen network keeps what the embedding gives; the modules around the blocks hold it."""
    found = measure(case.text)
    # Beside a tensor axis gloo's threads may hold what was exchanged a moment longer.
    least = -0.01 if case.tensor == 1 else -0.02
    assert least <= found.error <= 0.005, (found.error, found.predicted, found.at_peak, found.when)


IDLE_AND_CUT = Case(network="idle experts", ranks=4, expert=2, tensor=2, sequence="true", skew="2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(network="idle experts", ranks=2, expert=2, skew="2"),
        replace(IDLE_AND_CUT, zero=3, recompute="full"),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                IDLE_AND_CUT,
                replace(IDLE_AND_CUT, recompute="full"),
                replace(IDLE_AND_CUT, zero=3),
                replace(IDLE_AND_CUT, precision="bf16"),
                replace(IDLE_AND_CUT, sequence="none"),
                replace(IDLE_AND_CUT, sequence="none", recompute="full"),
                Case(network="idle experts", ranks=2, expert=2, skew="2", precision="bf16"),
                Case(network="idle experts", ranks=2, expert=2, skew="2", zero=3, recompute="full"),
                Case(network="idle experts", ranks=4, expert=2, skew="2", context=2),
            )
        ),
    ],
    ids=str,
)
def test_a_rank_that_gets_all_tokens_stays_within_the_stated_skew(case: Case) -> None:
    """Where the experts of one rank are idle the other works on twice its share."""
    found = measure(case.text)
    # Beside a tensor axis gloo's threads may hold what was exchanged a moment longer.
    least = -0.002 if case.tensor == 1 else -0.02
    assert least <= found.error <= 0.01, (found.error, found.predicted, found.at_peak, found.when)
    if case.skew != "none":
        assert measure(replace(case, skew="none").text).error < -0.05, "an even routing does not bound it"


LAST_BLOCK = '["embedding.*", "position.*", "blocks.[012].*"]'  # trains, with the head
SHARDED_STAGES = replace(IN_STAGES, ranks=4, zero=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        replace(SHARDED_STAGES, schedule="zero_bubble", freeze=LAST_BLOCK),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                *(
                    replace(SHARDED_STAGES, schedule=schedule)
                    for schedule in ("interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
                ),
                replace(SHARDED_STAGES, schedule="interleaved_1f1b", freeze=LAST_BLOCK),
                replace(SHARDED_STAGES, schedule="interleaved_1f1b", zero=3, microbatches=2),
                replace(IN_STAGES, schedule="zbv", freeze=LAST_BLOCK),
                replace(IN_STAGES, schedule="zero_bubble", freeze=LAST_BLOCK),
            )
        ),
    ],
    ids=str,
)
def test_a_stage_holds_the_gradients_that_its_backward_passes_have_made(case: Case) -> None:
    found = measure(case.text)
    assert max(map(abs, found.errors)) <= 0.02, (found.errors, found.predicted, found.at_peak, found.when)


@pytest.mark.long
@pytest.mark.parametrize("freeze", ["[]", OF_GPT])
def test_a_reduce_scatter_of_the_tensor_axis_runs_beside_what_it_splits(freeze: str) -> None:
    """The account has each rank within 1 %; of ranks that do the same, gloo lets one free a copy later."""
    found = measure(replace(IN_STAGES, ranks=4, tensor=2, sequence="true", schedule="zbv", freeze=freeze).text)
    assert max(found.errors) <= 0.02 and min(found.errors) >= -0.03, (found.errors, found.predicted, found.at_peak)
    assert max(found.errors[:2]) >= -0.01 and max(found.errors[2:]) >= -0.01, (found.errors, found.predicted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(network="convnet", batch=64, ranks=2, gradients="async_average()"),
        pytest.param(Case(network="resnet", batch=32, ranks=2, zero=2), marks=pytest.mark.long),
        pytest.param(Case(network="convnet", ranks=2, gradients="local_sgd(period = 2)"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_images_in_their_usual_order_are_copied_by_onednn_and_not_by_pooling(case: Case) -> None:
    found = measure(case.text)
    assert abs(found.error) <= 0.02, (found.error, found.predicted, found.at_peak, found.when)


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    ["strided", *(pytest.param(name, marks=pytest.mark.long) for name in ("grouped", "unstrided"))],
)
def test_convolutions_of_a_users_own(network: str) -> None:
    """OneDNN copies what a convolution takes and makes to its own memory order."""
    found = measure(Case(network=network, batch=256).text)
    assert abs(found.error) <= 0.01, (found.error, found.predicted, found.at_peak, found.when)


# Whether oneDNN has convolutions in 16 bits for this CPU. Those of torch copy an image for each kernel place.
CONVOLVES = {
    "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
BLOCKS = Case(network="residuals", batch=64, recompute="full", precision="bf16", optimizer="sgd(lr = 0.1)")


@pytest.mark.parametrize(
    "case",
    [
        BLOCKS,
        replace(BLOCKS, precision="fp32"),  # the activation before the first block keeps that block's input
        replace(BLOCKS, network="activated", recompute="every(2)"),
        replace(BLOCKS, ranks=2, pipeline=2, microbatches=4),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                replace(BLOCKS, recompute="selective"),
                replace(BLOCKS, recompute="every(2)"),
                replace(BLOCKS, network="resnet"),
                replace(BLOCKS, network="resnet", precision="fp32", recompute="every(2)"),
                replace(BLOCKS, network="resnet", precision="bf16(level = O2)"),
                replace(BLOCKS, network="activated"),
                replace(BLOCKS, network="summed"),
                replace(BLOCKS, network="summed", ranks=2, pipeline=2, microbatches=4),
                replace(BLOCKS, ranks=2, pipeline=2, microbatches=4, precision="fp16"),
                replace(BLOCKS, network="summed", precision="fp16(level = O2)"),
            )
        ),
    ],
    ids=str,
)
def test_recomputed_blocks_keep_inputs_in_the_dtype_that_they_have(case: Case) -> None:
    if not CONVOLVES.get(case.precision[:4], True):
        pytest.skip(f"oneDNN has no convolutions in {case.precision[:4]} for this CPU")
    found = measure(case.text)
    most = 0.08 if case.pipeline > 1 else 0.03  # the first stage counts the gradient of its output once more
    assert abs(found.error) <= most, (found.error, found.predicted, found.at_peak, found.when)


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (Case(network="mlp", ranks=2, gradients="async_average(warmup = 50)"), 0.03),
        (Case(network="mlp", ranks=2, gradients="low_precision_decentralized(interval = 50)"), 0.03),  # never
        *(
            pytest.param(Case(network=network, ranks=2, gradients=gradients), most, marks=pytest.mark.long)
            for network, gradients, most in (
                ("gpt", "low_precision_decentralized(interval = 3)", 0.03),
                ("gpt", "low_precision_decentralized(interval = 4)", 0.03),
                ("convnet", "async_average(warmup = 50)", 0.01),  # images keep their usual order
            )
        ),
    ],
    ids=str,
)
def test_exchanges_that_begin_late_or_never(case: Case, most: float) -> None:
    found = measure(case.text)
    assert min(found.errors) >= -0.02, (found.errors, found.predicted, found.at_peak, found.when)
    assert max(found.errors) <= most, (found.errors, found.predicted, found.at_peak, found.when)


@pytest.mark.slow
def test_half_of_the_predictions_are_within_a_tenth() -> None:
    if len(FOUND) < 10:
        pytest.skip("only a few of the jobs were run")
    assert statistics.median(abs(found.error) for found in FOUND.values()) <= 0.10


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(ranks=2),
        Case(network="mlp", ranks=2, zero=1, optimizer=f'python("{HELPERS}/own_optimizers:Muon", lr = 0.02)'),
        Case(network="mlp", ranks=2, optimizer=f'python("{HELPERS}/own_optimizers:Adam8", lr = 0.02)'),
    ],
)
def test_kinds_at_rest_are_those_of_the_account(case: Case) -> None:
    found = measure(case.text)
    for kind in ("parameters", "gradients", "optimizer", "buffers"):
        assert found.at_rest[kind] == pytest.approx(getattr(found.predicted, kind), rel=0.001), kind


TINY = Case(network="tiny", batch=4, recompute="full")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        replace(TINY, microbatches=2),
        replace(TINY, microbatches=4),  # at its peak where a block is computed again
        replace(TINY, ranks=2, zero=1),
        replace(TINY, recompute="none"),
    ],
    ids=str,
)
def test_what_a_tiny_job_has_besides_its_tensors(case: Case) -> None:
    """Checks the generator states of each block that is computed again, and the steps of Adam."""
    found = measure(case.text)
    assert found.rest == found.predicted.rest
    assert abs(found.error) <= 0.005, (found.predicted, found.at_peak, found.when)
    for kind, size in found.at_peak.items():
        assert size == pytest.approx(found.predicted.kinds[kind], abs=300), kind


def _sees_what_is_made(rank: int) -> list[dict[str, int]]:
    """Runs steps that allocate so many bytes besides their gradients, and steps that do not."""
    import torch

    model = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peaks = []
    for extra in (0, 1_000_000):
        tracker = track_memory.Tracker(model, optimizer, torch.device("cpu"))
        for _ in range(2):
            with tracker.step():
                loss = model(torch.ones(1, 100)).sum()
                loss.backward()
                made = torch.empty(extra, dtype=torch.uint8)
                del made
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        peaks.append(tracker.peak)
    return peaks


@pytest.mark.slow
def test_the_tracker_counts_every_byte() -> None:
    ((without, made),) = gang(1, _sees_what_is_made)
    assert without["parameters"] == without["gradients"] == 40_000
    assert made["activations"] - without["activations"] == pytest.approx(1_000_000, abs=1000)


def _lets_go_in_another_thread(rank: int) -> dict[str, int]:
    """Broadcasts a million bytes as DistributedDataParallel does with its buckets, and then allocates two million."""
    import threading

    import torch
    import torch.distributed as dist
    from torch.autograd.profiler import record_function

    model = torch.nn.Linear(10, 10)
    tracker = track_memory.Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    with tracker.step():
        held = []
        with record_function("DistributedDataParallel.forward"):
            held.append(torch.empty(1_000_000, dtype=torch.uint8))
            dist.broadcast(held[0], 0)
        other = threading.Thread(target=held.clear)
        other.start()
        other.join()
        made = torch.empty(2_000_000, dtype=torch.uint8)
        del made
    return tracker.peak


def test_what_a_thread_of_gloos_lets_go_of_is_not_held_for_good() -> None:
    for peak in gang(2, _lets_go_in_another_thread):
        assert peak["activations"] == pytest.approx(2_000_000, abs=1000)


def _exchanges_rows(rank: int) -> dict[str, int]:
    """Sends a million bytes many times, and lets go of them, as experts do."""
    import torch
    import torch.distributed as dist

    model = torch.nn.Linear(10, 10)
    tracker = track_memory.Tracker(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    with tracker.step():
        kept = []
        for number in range(100):
            sent, arrived = (torch.empty(1_000_000, dtype=torch.uint8) for _ in range(2))
            dist.all_to_all_single(arrived, sent)
            del sent, arrived
            kept.append(torch.empty(1_000 * number, dtype=torch.uint8))  # in other places than what was sent
            kept.clear()
    return tracker.peak


def test_an_exchange_returns_when_gloos_threads_have_let_go() -> None:
    for peak in gang(2, _exchanges_rows):
        assert 2_000_000 <= peak["activations"] + peak["communication"] <= 5_000_000, "16 million without waiting"
