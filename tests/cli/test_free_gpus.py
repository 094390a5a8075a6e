"""`gpus = free(n)`: the GPUs that nobody uses, from what the driver says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.made_jobs import make_job

from dslc.compiler.ir.facts import MachineFacts
from dslc.compiler.placement.layout import lay_out
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.blocks import DevicesSpec
from dslc.dsl.language.calls import Free
from dslc.probe import gpus
from dslc.probe.gpus import GPU, choose_free, free_of, parse_used_memory

GIB = 2**30
TOLD = "GPU-aa, 3\nGPU-bb, 40215\nGPU-cc, 0\nGPU-dd, [N/A]\n"
SEEN = [GPU(80 * GIB, f"GPU-{name}") for name in ("bb", "cc", "aa", "dd")]


def test_gpus_with_a_context_or_an_untold_memory_are_in_use() -> None:
    assert [gpu.uuid for gpu in free_of(SEEN, parse_used_memory(TOLD))] == ["GPU-cc", "GPU-aa"]


@pytest.mark.parametrize("told", ["No devices were found\n", "0, 3\n", "GPU-aa\n"])
def test_other_words_of_the_driver_are_not_guessed_at(told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told.splitlines()[0])):
        parse_used_memory(told)


@pytest.mark.skipif(bool(gpus.gpus_here()), reason="this machine has GPUs")
def test_without_gpus_none_is_free_and_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "0")
    monkeypatch.setattr(gpus, "_BEFORE", [])
    assert choose_free(2) == ((), 0)
    assert os.environ[gpus.VISIBLE] == "0"


def test_a_driver_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'driver/library version mismatch'; exit 18\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RuntimeError, match="version mismatch"):
        choose_free(1)


@pytest.mark.parametrize(
    ("free", "in_use", "said"),
    [(1, 3, "asks for 2 free GPUs, and this machine has 1: 3 of its GPUs are in use"), (0, 0, "this machine has 0")],
)
def test_too_few_of_them_are_an_error(free: int, in_use: int, said: str) -> None:
    report = Report()
    machine = MachineFacts(cores=2, memory=GIB, gpus=(80 * GIB,) * free, gpus_in_use=in_use)
    assert report.collect(lay_out(make_job(devices=DevicesSpec(gpus=Free(count=2))), machine)) is None
    assert [d.code for d in report] == ["E0420"]
    assert said in report.errors[0].message


def test_enough_of_them_are_counted_from_0() -> None:
    machine = MachineFacts(cores=2, memory=GIB, gpus=(80 * GIB,) * 2, gpus_in_use=6)
    layout = Report().collect(lay_out(make_job(devices=DevicesSpec(gpus=Free(count=2))), machine))
    assert layout is not None
    assert (layout.gpus, layout.processes) == ((), 2)
