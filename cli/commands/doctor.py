"""`dslc doctor`: what this machine has, what is missing for which feature, and the command that installs it. Reads
only, and needs no network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Literal, NamedTuple

from dslc.compiler.facts.user_calibrations import calibration_path, this_machine
from dslc.compiler.ir.number_text import byte_text
from dslc.dsl.plain import plain
from dslc.dsl.record import Record, record
from dslc.dsl.words import plural, shorten_list
from dslc.terminal.exit_codes import GOOD, WRONG_USAGE
from dslc.terminal.version import __version__

Section = Literal["machine", "libraries", "programs"]

# What each extra of `pip install 'dslc[…]'` is for.
EXTRAS = {
    "parquet": "`parquet(…)` sources",
    "datasets": "`datasets(…)` sources",
    "transformers": "`transformers(…)` networks, `chat(…)` sources",
    "tokens": "`dslc tokens --tokenizer`",
    "torchmetrics": "metrics such as `f1`",
    "torchvision": "`augment` of images",
    "offload": "`memory.offload = [optimizer]` on a GPU",
    "peft": "`model.adapter`",
    "torchao": "weights in 4 or 8 bits: `pretrained(…, quantize = nf4)`; products: `precision = fp8`",
    "testing": "`dslc.testing`: properties of jobs",
    "lm-eval": "`dslc evaluate --lm-eval`",
    "wandb": "`wandb(…)` loggers",
    "mlflow": "`mlflow(…)` loggers",
    "trackio": "`trackio(…)` loggers",
    "lsp": "`dslc lsp`: the language server for editors",
}
FOR_DEVELOPERS = ("dev", "docs")


class Program(NamedTuple):
    """A program that some features start: its names, each of them enough, and the package of Debian that has it."""

    names: tuple[str, ...]
    purpose: str
    package: str
    otherwise: str = ""


PROGRAMS = (
    Program(("nvidia-smi",), "`devices.gpus = free(…)`", "", "it comes with the driver of NVIDIA's GPUs"),
    Program(("cc", "gcc", "clang"), "`train.compile` on CPUs", "gcc g++"),
    Program(("git",), "`dslc diff` and `dslc bisect` of `REVISION:JOB`", "git"),
    Program(("ssh",), "`launch.with = ssh(…)`", "openssh-client"),
    Program(("mpirun",), "`launch.with = mpi()`", "openmpi-bin"),
    Program(("sbatch",), "`launch.with = slurm(…)` and `dslc submit`", "", "it comes with SLURM, on a cluster's hosts"),
    Program(
        ("kubectl",), "`launch.with = kubernetes(…)` and `dslc submit`", "", "the manual of Kubernetes installs it"
    ),
)


@record
class SystemItem(Record):
    """One thing that the machine has or lacks. `remedy` is a command, or says where it comes from."""

    section: Section
    name: str
    purpose: str
    found: str
    missing: bool = False
    remedy: str = ""


def main(arguments: argparse.Namespace) -> int:
    findings = list(examine())
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(map(plain, _lines(findings))))
    torch = next(finding for finding in findings if finding.name == "torch")
    return WRONG_USAGE if torch.missing else GOOD


def examine() -> Iterator[SystemItem]:
    """Yields all that is looked at, in the order in which it is shown."""
    yield from _machine()
    yield from _libraries()
    for program in PROGRAMS:
        path = next(filter(None, map(shutil.which, program.names)), "")
        yield SystemItem(
            section="programs",
            name=program.names[0],
            purpose=program.purpose,
            found=path,
            missing=not path,
            remedy="" if path else _install(program),
        )


def _lines(findings: list[SystemItem]) -> Iterator[str]:
    width = max(len(finding.name) for finding in findings)
    section, shown = "", set()
    for finding in findings:
        version = finding.found or "missing"
        if (finding.name, version) in shown and not finding.missing:  # a library of several extras
            continue
        shown.add((finding.name, version))
        if finding.section != section:
            yield from [""] * bool(section)
            section = finding.section
            yield section
        purpose = f", for {finding.purpose}" if finding.purpose else ""
        yield f"  {finding.name:{width}}  {version}{purpose if finding.missing else ''}"
        if finding.remedy:
            yield f"  {'':{width}}  -> {finding.remedy}"


# --------------------------------------------------------------------------------------------------------- machine


def _machine() -> Iterator[SystemItem]:
    def finding(name: str, found: str, *, missing: bool = False, remedy: str = "", purpose: str = "") -> SystemItem:
        return SystemItem(section="machine", name=name, purpose=purpose, found=found, missing=missing, remedy=remedy)

    yield finding("dslc", f"{__version__}, in {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}")
    yield finding("Python", f"{platform.python_version()}, {sys.executable}")
    torch = this_machine().torch
    is_missing = torch == "none"
    yield finding("torch", "" if is_missing else torch, missing=is_missing, purpose="every training",
                  remedy="pip install torch" if is_missing else "")  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield finding("CPU", f"{this_machine().processor}, {plural(cores, 'core')}, {byte_text(memory)} of memory")
    if not is_missing:
        yield finding("GPUs", *_gpus())
    if os.path.isdir("/dev/shm"):
        space = os.statvfs("/dev/shm")
        yield finding("/dev/shm", f"{byte_text(space.f_bavail * space.f_frsize)} free, which ranks share")
    folder = os.path.dirname(calibration_path("cpu"))
    files = sorted(name for name in _names_in(folder) if name.endswith(".toml"))
    yield finding(
        "calibration",
        f"{shorten_list(files)} in {folder}" if files else "",
        missing=not files,
        purpose="predicted times of this machine",
        remedy="" if files else "dslc calibrate",
    )


def _gpus() -> tuple[str]:
    from dslc.probe.gpus import gpus_here

    try:
        sizes = gpus_here()
    except RuntimeError as error:
        return (str(error),)
    return (f"{plural(len(sizes), 'GPU')} with {shorten_list(list(map(byte_text, sizes)), 8)}" if sizes else "none",)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


# ------------------------------------------------------------------------------------------------------- libraries

_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;\s*extra == ['\"]([\w-]+)['\"])?")


def _libraries() -> Iterator[SystemItem]:
    """Yields each library of an extra, with the version that is installed."""
    for requirement in metadata.requires("dslc") or ():
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None or match[3] is None or match[3] in FOR_DEVELOPERS:
            continue
        name, bounds, extra = match.groups()
        version = _version(name)
        fits = bool(version) and all(_is_within(version, bound) for bound in bounds.split(","))
        version_text = version if fits else f"{version}, and {bounds} is needed" if version else ""
        yield SystemItem(
            section="libraries",
            name=name,
            purpose=EXTRAS.get(extra, f"dslc[{extra}]"),
            found=version_text,
            missing=not fits,
            remedy="" if fits else f"pip install 'dslc[{extra}]'",
        )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _is_within(version: str, bound: str) -> bool:
    """True if a version keeps a bound such as `>=17` or `<3`. What has another form bounds nothing."""
    match = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", bound)
    if match is None:
        return True
    present, bound_release = _release(version), _release(match[2])
    length = max(len(present), len(bound_release))
    releases = [(*numbers, *[0] * (length - len(numbers))) for numbers in (present, bound_release)]
    return releases[0] >= releases[1] if match[1] == ">=" else releases[0] < releases[1]


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


# -------------------------------------------------------------------------------------------------------- programs


def _install(program: Program) -> str:
    """Returns the command of this system's package manager, or says where the program comes from."""
    if not program.package:
        return program.otherwise
    if shutil.which("apt-get"):
        return f"apt-get install {program.package}"
    return f"install {program.package}, by the names that Debian has for it"
