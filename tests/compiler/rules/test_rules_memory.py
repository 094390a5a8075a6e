"""A job that does not fit is reported with changes that make it fit, and they do."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.module_facts import FACTS, analysed, layer
from helpers.networks_drawn import fact

from dslc.compiler.ir.facts import Facts, MachineFacts
from dslc.compiler.ir.memory import LayerMemory, MemoryNode
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.memory import blame
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.language.blocks import MemorySpec
from dslc.dsl.meaning.load import load
from dslc.dsl.show import render

GPT = job_text(
    model={"network": "gpt(layers = 8, width = 256, heads = 4, context = 128, vocab = 1000)"},
    data={"source": "synthetic(samples = 10_000, vocab = 1000)", "batch": 256},
    devices={"gpus": 2, "kind": "h100"},
    train={"steps": 10, "optimizer": "adamw()"},
    log=None,
)

LARGE_GPT = GPT.replace("width = 256", "width = 2048").replace("context = 128", "context = 2048")


def checked(
    folder: Path, text: str, *settings: str, machine: MachineFacts | None = None
) -> tuple[list[Diagnostic], Analysis]:
    (folder / "made.plt").write_text(text)
    loaded = load(str(folder / "made.plt"), list(settings))
    assert loaded.job is not None, loaded.report.found
    report = Report()
    analysis = report.collect(analyse(loaded.job, Facts(machine=machine)))
    assert analysis is not None, report.found
    return report.errors, analysis


def peak(analysis: Analysis) -> int:
    return max(cost.memory.peak for cost in analysis.costs)


def settings_of(line: str) -> list[str]:
    """Returns the settings in a line of the help."""
    return [quoted.replace(" = ", "=", 1) for quoted in re.findall(r"`([^`]+)`", line.split(": peak", maxsplit=1)[0])]


@pytest.mark.parametrize("share", [0.97, 0.9, 0.8])
def test_each_remedy_makes_it_fit(share: float, tmp_path: Path) -> None:
    _, whole = checked(tmp_path, GPT)
    limit = f"memory.limit={int(share * peak(whole))}B"
    (error,), _ = checked(tmp_path, GPT, limit)
    assert error.code == "E0501"
    first, *lines = error.help.split("\n")
    assert "makes it fit" in first and lines
    for line in lines:
        found, after = checked(tmp_path, GPT, limit, *settings_of(line))
        assert not found, (line, found)
        assert peak(after) < peak(whole)


def test_another_mistake_does_not_hide_what_makes_it_fit(tmp_path: Path) -> None:
    text = GPT + "memory { offload = [optimizer] }"  # which two ranks cannot have
    _, whole = checked(tmp_path, text)
    errors, _ = checked(tmp_path, text, f"memory.limit={int(0.9 * peak(whole))}B")
    found = {error.code: error.help for error in errors}
    assert set(found) == {"E0501", "E0716"} and "makes it fit" in found["E0501"], found
    assert "no change" not in found["E0501"]


def test_where_a_job_runs_the_memory_of_the_gpus_that_it_uses_is_the_limit(tmp_path: Path) -> None:
    """Also if it does not name their kind, or if they have less memory than their kind."""
    _, whole = checked(tmp_path, GPT)
    small, large = int(0.9 * peak(whole)), 2 * peak(whole)
    for text in (GPT, GPT.replace("kind = h100", "")):
        for gpus, refused in (((large, large), False), ((large, small), True), ((large, large, small), False)):
            errors, analysis = checked(tmp_path, text, machine=MachineFacts(cores=2, memory=2**40, gpus=gpus))
            assert [error.code for error in errors] == (["E0501"] if refused else [])
            assert analysis.layout.hardware.memory == min(gpus[:2])


def test_what_leaves_the_training_as_it_is_comes_first(tmp_path: Path) -> None:
    _, whole = checked(tmp_path, GPT)
    (error,), _ = checked(tmp_path, GPT, f"memory.limit={peak(whole) - 1}B")
    words = [line.split(" = ")[0].strip("` ") for line in error.help.split("\n")[1:]]
    precise = [n for n, word in enumerate(words) if word.startswith("train.precision")]
    assert words[0].startswith(("parallelism", "memory"))
    assert all(n > max(m for m, w in enumerate(words) if w.startswith(("parallelism", "memory"))) for n in precise)


def test_a_price_names_arithmetic_and_traffic(tmp_path: Path) -> None:
    _, whole = checked(tmp_path, GPT)
    (error,), _ = checked(tmp_path, GPT, f"memory.limit={int(0.9 * peak(whole))}B")
    lines = error.help.split("\n")[1:]
    assert all(re.search(r": peak \d", line) for line in lines)
    assert any("a step instead of" in line for line in lines if "devices.gpus" in line)
    (error,), _ = checked(tmp_path, GPT, f"memory.limit={peak(whole) - 1}B")
    (sharded,) = [line for line in error.help.split("\n") if "parallelism.zero" in line]
    assert "traffic a step" in sharded


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_moves_to_the_host_comes_last_and_its_bound_is_compared_with_no_time(
    precision: str, tmp_path: Path
) -> None:
    """Published runs tell the time of trainings in 16 bits. All else has a bound by the data sheet."""
    settings = (f"train.precision={precision}", "data.batch=64")
    _, whole = checked(tmp_path, LARGE_GPT, *settings)
    (error,), _ = checked(tmp_path, LARGE_GPT, *settings, f"memory.limit={int(0.8 * peak(whole))}B")
    lines = render([error], color=False).partition("help: ")[2].strip().split("\n")[1:-2]
    assert len(lines) > 4 and all(": peak " in line and "…" not in line for line in lines), lines
    moved = [n for n, line in enumerate(lines) if "memory.offload" in line]
    others = [n for n, line in enumerate(lines) if line.startswith(("  `parallelism", "  `memory.recompute"))]
    assert moved and others and min(moved) > max(others), lines
    if precision == "bf16":
        assert all("at best" in lines[n] and "instead of" not in lines[n] for n in moved), lines
        assert any("a step instead of" in lines[n] for n in others), lines


def test_the_message_names_rank_kind_layer_and_moment(tmp_path: Path) -> None:
    text = GPT.replace("kind = h100", "").replace("gpus = 2", "cpus = 2")
    (error,), analysis = checked(tmp_path, text, "memory.limit=200MiB")
    memory = analysis.costs[0].memory
    assert error.message.startswith("rank 0 would hold ")
    assert "most of it is activations" in error.label
    assert memory.layers[0].name in error.label and memory.when in error.label


@pytest.mark.parametrize("name", ["lookahead", "between two steps", "pass", "loss"])
def test_no_name_of_a_layer_changes_the_culprit(name: str) -> None:
    """The layer that holds most is named whatever it is called, and so is the moment of the peak."""

    def label_of(name: str) -> str:
        big = LayerMemory(saved=2**20, selective=2**20)
        layers = [layer(name, "Mine", "a", block=False, float32=big, autocast=big), layer("last", "Mine", "b")]
        parameters = (("a", (2**10, 2**10), True), ("b", (2, 2), True))
        facts = replace(FACTS, layers=tuple(layers), parameters=parameters, buffers=(), ties=(), output=fact(10))
        analysis, report = analysed(replace(facts, unused=()), memory=MemorySpec(limit=2**20))
        assert analysis is not None and [each.code for each in report.errors] == ["E0501"]
        return report.errors[0].label

    wanted = label_of("plain")
    assert "of which plain " in wanted and "pass of plain" in wanted, wanted
    assert label_of(name) == wanted.replace("plain", name)


def test_a_peak_between_two_steps_is_said_in_plain_words() -> None:
    memory = MemoryNode(
        parameters=1, gradients=0, optimizer=0, activations=0, buffers=0, communication=0, when="between two steps"
    )
    assert blame(memory) == "most of it is parameters: 1 B, between two steps"


def test_two_changes_where_one_is_not_enough(tmp_path: Path) -> None:
    text = GPT.replace("kind = h100", "").replace("gpus = 2", "cpus = 2").replace("batch  = 256", "batch  = 2")
    _, whole = checked(tmp_path, text)
    for share in (0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1):
        (error,), _ = checked(tmp_path, text, f"memory.limit={int(share * peak(whole))}B")
        lines = error.help.split("\n")[1:]
        if lines and all(len(settings_of(line)) >= 2 for line in lines):
            break
    else:
        raise AssertionError("one change, or none, was enough for each")
    limit = f"memory.limit={int(share * peak(whole))}B"
    for line in lines:
        assert not checked(tmp_path, text, limit, *settings_of(line))[0], line


def test_two_settings_come_before_one_change_that_needs_the_host(tmp_path: Path) -> None:
    settings = ("train.precision=bf16", "data.batch=8", "devices.gpus=4", "model.network.heads=1")
    _, whole = checked(tmp_path, LARGE_GPT, *settings)
    (error,), _ = checked(tmp_path, LARGE_GPT, *settings, f"memory.limit={int(0.5 * peak(whole))}B")
    first, *lines = error.help.split("\n")
    assert first == "any of these makes it fit, the cheapest first"
    assert [settings_of(line) for line in lines] == [
        ["parallelism.zero=3", "memory.recompute=selective"],
        ["memory.offload=[optimizer, parameters]"],
    ]


def test_of_more_changes_each_is_the_cheapest_that_is_enough(tmp_path: Path) -> None:
    """Eight micro-batches gather the weights eight times, and two are enough."""
    settings = ("train.precision=bf16", "data.batch=32", "devices.gpus=4")
    _, whole = checked(tmp_path, LARGE_GPT, *settings)
    limit = f"memory.limit={int(0.2 * peak(whole))}B"
    (error,), _ = checked(tmp_path, LARGE_GPT, *settings, limit)
    changes = settings_of(error.help.split("\n")[1])
    assert len(changes) > 2 and "parallelism.microbatches=2" in changes
    assert not checked(tmp_path, LARGE_GPT, *settings, limit, *changes)[0]


def llama_of_80_layers(batch: int, nodes: int, parallelism: dict[str, object]) -> str:
    return job_text(
        model={
            "network": "llama(layers = 80, width = 8192, heads = 64, kv_heads = 8, hidden = 28672, context = 8192, "
            "vocab = 128_256)"
        },
        data={"source": "synthetic(samples = 10_000, vocab = 128_256)", "batch": batch},
        devices={"nodes": nodes, "gpus": 8, "kind": "h100"},
        parallelism=parallelism,
        train={"steps": 10, "optimizer": "adamw()", "precision": "bf16"},
        log=None,
    )


def test_the_work_that_is_allowed_reaches_what_makes_a_large_job_fit(tmp_path: Path) -> None:
    text = llama_of_80_layers(128, 8, {"tensor": 8, "pipeline": 2, "schedule": '"1f1b"', "microbatches": 4})
    (error,), _ = checked(tmp_path, text)
    first, line = error.help.split("\n")
    assert first == "this makes it fit"
    assert set(settings_of(line)) == {"memory.recompute=full", "parallelism.zero=3"}
    assert not checked(tmp_path, text, *settings_of(line))[0]


def test_the_tensor_axis_grows_with_micro_batches_of_as_many_rows(tmp_path: Path) -> None:
    text = llama_of_80_layers(512, 16, {"pipeline": 4, "data": 32})
    (error,), _ = checked(tmp_path, text)
    settings = settings_of(error.help.split("\n")[1])
    axes = {"parallelism.tensor=8", "parallelism.microbatches=32", "parallelism.data=4"}
    assert set(settings) == axes | {"memory.recompute=full"}
    assert not checked(tmp_path, text, *settings)[0]


def test_more_changes_where_two_are_not_enough(tmp_path: Path) -> None:
    text = GPT.replace("kind = h100", "").replace("gpus = 2", "gpus = [0, 1]").replace("batch  = 256", "batch  = 16")
    (error,), _ = checked(tmp_path, text, "memory.limit=1MiB")
    best = settings_of(error.help.split(": with ")[1])
    _, after = checked(tmp_path, text, *best)
    limit = f"memory.limit={peak(after)}B"
    (error,), _ = checked(tmp_path, text, limit)
    first, line = error.help.split("\n")
    assert first == "this makes it fit" and settings_of(line) == best and len(best) > 2
    assert not checked(tmp_path, text, limit, *best)[0]


def test_it_is_said_where_nothing_makes_it_fit(tmp_path: Path) -> None:
    (error,), _ = checked(tmp_path, GPT, "memory.limit=1MiB")
    assert error.help.startswith("no change of")
    changes, least = error.help.split(": with ")[1].split(" it is ")
    _, after = checked(tmp_path, GPT, *settings_of(changes))
    assert byte_text(peak(after)) == least


def test_a_promise_about_memory_is_answered_like_a_limit(tmp_path: Path) -> None:
    text = GPT.replace("kind = h100", "").replace("gpus = 2", "cpus = 2")
    _, whole = checked(tmp_path, text)
    (error,), _ = checked(tmp_path, text + f"expect {{\n  peak_memory < {int(0.9 * peak(whole))}B\n}}\n")
    assert error.code == "E0502"
    assert "rank 0" in error.label and "most of it is" in error.label
    for line in error.help.split("\n")[1:]:
        _, after = checked(tmp_path, text, *settings_of(line))
        assert peak(after) < 0.9 * peak(whole)


def test_a_promise_that_a_mistake_leaves_unknown_is_not_warned_of(tmp_path: Path) -> None:
    """A network that failed in its trial is an error already, and the help would be to try it."""
    network: dict[str, object] = {"network": 'python("net:Net")'}
    text = job_text(model=network, data={"source": "digits()", "batch": 32}, train={"steps": 2}, log=None)
    (tmp_path / "made.plt").write_text(text + "expect {\n  peak_memory < 1MB\n}\n")
    job = load(str(tmp_path / "made.plt")).job
    assert job is not None
    for sound in (True, False):
        report = Report()
        report.collect(analyse(job, Facts(), sound=sound))
        assert [each.code for each in report.found if each.code == "W0503"] == ["W0503"] * sound
