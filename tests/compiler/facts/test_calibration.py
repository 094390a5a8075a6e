"""A calibration is read from its file as it was written, or refused with the place of what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dslc.compiler.facts.calibration import (
    CONSTANTS,
    CONSTANTS_VERSION,
    Calibration,
    CollectiveTime,
    LayerTime,
    PassTime,
    RunFit,
    calibration_text,
    fit_text,
    merge_calibrations,
)
from dslc.compiler.facts.catalogue import read_catalogue
from dslc.compiler.facts.hardware import CATALOGUE
from dslc.dsl.diagnostics import Report

BLOCK = LayerTime(forward=PassTime(fixed=1e-4, each=2.5e-3), backward=PassTime(fixed=0.0, each=5e-3))
TIMES = Calibration(
    machine='x86_64 "fast"',
    torch="2.13.0",
    processes=2,
    cores=4,
    layers={"transformer_block 838b430ebd": BLOCK},
    losses={"cross_entropy 8d1d66bd81": BLOCK},
    updates={"adamw clip": 2e-9},
    collectives={"all_reduce 2": CollectiveTime(latency=1e-4, byte=3e-10)},
    data={"digits 0f": 1e-5},
    overlap={"network 838b430ebd": 0.25},
)
TEXT = calibration_text("cpu", TIMES, "made by hand")


def read(path: Path, text: str) -> tuple[Report, Calibration | None]:
    path.write_text(text)
    report = Report()
    return report, report.collect(read_catalogue(str(path), None))["cpu"].calibration


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    report, found = read(tmp_path / "here.toml", TEXT)
    assert not report.found
    assert found == TIMES and CATALOGUE["cpu"].calibration is None


@pytest.mark.parametrize(
    "before, after, said",
    (
        ("fixed = 0.0001", "fixed = -0.0001", "fixed is -0.0001"),
        ("each = 0.0025", "each = inf", "each is inf"),
        ("latency = 0.0001", "latency = nan", "latency is nan"),
        ("latency = 0.0001, ", "", "latency is missing"),
        ("processes = 2", 'processes = "2"', "processes"),
        ('"network 838b430ebd" = 0.25', '"network 838b430ebd" = "most"', "overlap"),
        ("cores = 4", "cores = 4\nspeed = 1", "speed"),
    ),
)
def test_a_damaged_calibration_is_refused_with_its_place(tmp_path: Path, before: str, after: str, said: str) -> None:
    assert before in TEXT
    report, found = read(tmp_path / "here.toml", TEXT.replace(before, after))
    (fault,) = report.errors
    assert fault.code == "E0422" and said in fault.message and found is None
    assert fault.span is not None and fault.span.start == TEXT.index("calibration]")


@pytest.mark.parametrize("number", ("-1.0", "nan", "inf"))
def test_typical_constants_of_a_fit_that_are_no_times_are_refused(tmp_path: Path, number: str) -> None:
    fit = RunFit(machine="m", torch="2.13.0", cores=4, constants=CONSTANTS_VERSION, typical=(1.5,) * len(CONSTANTS))
    text = fit_text("cpu", fit, "made by hand")
    assert not read(tmp_path / "here.toml", text)[0].found
    (fault,) = read(tmp_path / "here.toml", text.replace("1.5", number, 1))[0].errors
    assert fault.code == "E0422" and f"typical is {number}" in fault.message


def test_calibrations_of_a_machine_are_merged() -> None:
    """What both measured has the newer times."""
    newer = replace(TIMES, layers={"linear 5e": BLOCK}, updates={"adamw clip": 3e-9, "sgd": 1e-9}, overlap={})
    merged = merge_calibrations(TIMES, newer)
    assert set(merged.layers) == {"transformer_block 838b430ebd", "linear 5e"}
    assert merged.updates == newer.updates and merged.overlap == TIMES.overlap
