"""The calibrations in the user's configuration folder, and the machine that a calibration serves.

Model: `$XDG_CONFIG_HOME/dslc` or `~/.config/dslc` has a catalogue file for each kind of device and number of processes,
`cpu-2.toml`. `dslc calibrate JOB` writes it without `-o`. One file for any number, `cpu.toml`, has a fit. A job that
names no `devices.catalogue` is predicted by them, if they are of this machine: the same processor, as many cores, the
same version of torch.

Contract: nothing fails because of the folder. A file in it that cannot be used is a warning with its name (W0881).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from dslc.compiler.facts.calibration import Calibration, RunFit
from dslc.compiler.facts.catalogue import read_catalogue
from dslc.compiler.facts.hardware import Hardware
from dslc.compiler.ir.number_text import path_text
from dslc.dsl.diagnostics import Diagnostic, Findings, Report
from dslc.dsl.record import Record, record
from dslc.dsl.words import plural


@record
class Machine(Record):
    """The machine that the times of a calibration depend on: the processor's architecture and model, its cores, torch's
    version.
    """

    processor: str
    cores: int
    torch: str


@cache
def this_machine() -> Machine:
    """Returns the fingerprint of this machine. It does not import torch."""
    import platform  # here, as below: slow to import, and few jobs have a calibration
    from importlib import metadata

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return Machine(
        processor=f"{platform.machine()} {_processor_model()}".strip(), cores=os.cpu_count() or 1, torch=torch
    )


def _processor_model() -> str:
    import platform

    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def machine_differences(calibration: Calibration | RunFit) -> Iterator[str]:
    """Yields, in words, what this machine has that the machine of a calibration has not."""
    here = this_machine()
    if calibration.machine != here.processor:
        yield f"a processor `{calibration.machine}`, and this one is `{here.processor}`"
    if calibration.cores != here.cores:
        yield f"{plural(calibration.cores, 'core')}, and here are {here.cores}"
    if calibration.torch != here.torch:
        yield f"torch {calibration.torch}, and here is {here.torch}"


def calibration_path(kind: str, processes: int | None = None) -> str:
    """Returns the path of the user's calibration of `processes` processes at once on a host with devices of a kind; of
    a fit, the file of any number.
    """
    home = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(home):  # as in the XDG base directory specification
        home = os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(home, "dslc", f"{kind}.toml" if processes is None else f"{kind}-{processes}.toml")


def _user_figures(path: str, kind: str) -> Findings[Hardware | None]:
    """Returns the figures of a kind of device in a file of the user's; None without the file, or if it is broken."""
    if not os.path.isabs(path) or not os.path.lexists(path):
        return None
    report = Report()
    catalogue = report.collect(read_catalogue(path, None))
    if report.errors:
        yield Diagnostic(
            "W0881",
            f"your calibration `{path_text(path)}` is not used: {report.errors[0].message}",
            None,
            help="`dslc calibrate` writes it anew; or remove it",
        )
        return None
    return catalogue.get(kind)


def user_calibration(kind: str, processes: int) -> Findings[Calibration | None]:
    """Returns the user's calibration for this machine, if there is one."""
    found = yield from _user_figures(calibration_path(kind, processes), kind)
    calibration = found.calibration if found is not None else None
    foreign = calibration is not None and any(machine_differences(calibration))
    return None if foreign else calibration


def user_fit(kind: str) -> Findings[RunFit | None]:
    """Returns the user's fit for this machine, if there is one."""
    found = yield from _user_figures(calibration_path(kind), kind)
    fit = found.fit if found is not None else None
    return None if fit is not None and any(machine_differences(fit)) else fit


def with_user_calibration(hardware: Hardware, processes: int) -> Findings[Hardware]:
    """Returns the figures of a kind of device with the times that the user measured on this machine."""
    calibration = yield from user_calibration(hardware.kind, processes)
    fit = yield from user_fit(hardware.kind)
    return replace(hardware, calibration=calibration or hardware.calibration, fit=fit or hardware.fit)
