"""Checks, before a rank starts, variables that break torch, other modules named torch, and two limits of a process: on
open files, and on shared memory.

Contract: an error names the host and the variable or the limit. A lower limit of open files than a training needs is
raised where the system allows it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping

from dslc.compiler.placement.layout import Layout
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec

_DEBUG = ("OFF", "INFO", "DETAIL")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_SHARED = "/dev/shm"
_FILES, _FILES_OF_RANK = 64, 4  # which a process has open, and more for each rank that it is connected to
_SHARED_OF_RANK = 1 << 16  # bytes of shared memory for the locks of one rank


def check_needs(job: JobSpec, layout: Layout, environ: Mapping[str, str], report: Report) -> None:
    """Reports variables that have no meaning (E0825), and limits below what the ranks of this host need (E0826)."""
    backend = "nccl" if layout.device == "cuda" else "gloo"
    for why, help in _variables(backend, environ):
        report.add("E0825", f"{why}, on {socket.gethostname()}", job.launch.value_span("with_"), help=help)
    for why, help in _hidden(environ.get("PYTHONPATH", "")):
        report.add("E0825", f"{why}, on {socket.gethostname()}", job.launch.value_span("with_"), help=help)
    for why, help in _limits(layout):
        report.add("E0826", f"{why}, on {socket.gethostname()}", job.launch.value_span("with_"), help=help)


def _variables(backend: str, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each variable that has no meaning, in words, with the remedy."""
    for name in _THREADS:
        told = environ.get(name, "")
        if told and not re.fullmatch(r"\s*0*[1-9]\d*\s*(,\s*0*[1-9]\d*\s*)*", told):
            yield (
                f"{name} is `{told}`, which is no number of threads",
                f"`export {name}=4`, or `unset {name}`; `devices.threads` says it in the job",
            )
    told = environ.get("TORCH_DISTRIBUTED_DEBUG", "")
    if told and told.upper() not in _DEBUG:
        name = "TORCH_DISTRIBUTED_DEBUG"
        yield f"{name} is `{told}`, and torch takes {', '.join(_DEBUG)}", f"`unset {name}`"
    name = _INTERFACES[backend]
    known = [name for _, name in socket.if_nameindex()]
    for missing in _missing(environ.get(name, ""), known, prefixes=backend == "nccl"):
        there = ", ".join(known)
        yield f"{name} is `{missing}`, and there is no such network interface (but {there})", f"`unset {name}`"


def _hidden(search: str) -> Iterator[tuple[str, str]]:
    """Yields, in words and with the remedy, what is found in place of PyTorch and is not it; imports nothing."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    folder = os.path.dirname(found.origin)
    if os.path.isdir(os.path.join(folder, "distributed")):
        return
    entry = folder if found.submodule_search_locations is None else os.path.dirname(folder)
    named = os.path.abspath(entry) in map(os.path.abspath, filter(None, search.split(os.pathsep)))
    where = f"PYTHONPATH names {entry}, where" if named else "there"
    yield f"{where} is a `torch` that is not PyTorch ({found.origin})", "`unset PYTHONPATH`" if named else "rename it"


def _missing(told: str, known: list[str], *, prefixes: bool) -> list[str]:
    """Returns the interfaces of a variable that are not there. For NCCL `^` means all but those, `=` whole names."""
    if prefixes and told.startswith("^"):
        return []
    prefixes = prefixes and not told.startswith("=")
    names = [name.partition(":")[0].strip() for name in told.lstrip("=").split(",")]
    return [
        name
        for name in names
        if name and not any(each.startswith(name) if prefixes else each == name for each in known)
    ]


def _limits(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yields each limit of the system that is too low, in words, with the remedy."""
    needed = _FILES + _FILES_OF_RANK * layout.world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        yield (
            f"a process may have {hard} files open (`ulimit -n`), and a rank of this job needs {needed}",
            f"`ulimit -n {max(needed, 4096)}` as root, or `nofile` in /etc/security/limits.conf, or LimitNOFILE= of a "
            "service",
        )
    elif soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    if not os.path.isdir(_SHARED):
        return  # not Linux, or none is needed
    space = os.statvfs(_SHARED)
    free, each = space.f_bavail * space.f_frsize, layout.world_size // layout.nodes
    if space.f_flag & os.ST_RDONLY or not os.access(_SHARED, os.W_OK | os.X_OK):
        yield f"{_SHARED}, where processes share memory, cannot be written", f"`mount -o remount,rw {_SHARED}`"
    elif space.f_blocks and free < each * _SHARED_OF_RANK:
        yield (
            f"{_SHARED}, where processes share memory, has {free:,} bytes free, and the ranks need "
            f"{each * _SHARED_OF_RANK:,}",
            f"remove what others have left in {_SHARED}; `--shm-size=1g` gives a container more",
        )
