"""Rules for what a job says to a launcher: the hosts of `launch.with = ssh(…)`, and texts that reach others. E0823,
E0835.
"""

from __future__ import annotations

from dslc.compiler.placement.layout import Layout
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.calls import SSH
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import fields
from dslc.dsl.plain import plain
from dslc.dsl.words import plural


def check_launch_texts(job: JobSpec, report: Report) -> None:
    """Reports control characters in a text of `launch.with`.

    A second line of a partition would be a command in SLURM's script, and other launchers pass texts on likewise.
    """
    call = job.launch.with_
    for field in fields(type(call)):
        value = getattr(call, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and plain(text) != text:
                report.add(
                    "E0835",
                    f"`{call.word}` would pass on `{plain(text)}`, which has control characters in it",
                    call.at(field.name),
                    help="one line of plain text; several options are several texts of the list",
                )
                break


def check_hosts(job: JobSpec, layout: Layout, report: Report) -> None:
    """Reports hosts that are not one for each node, or that `ssh` would not take for a host."""
    call = job.launch.with_
    if not isinstance(call, SSH):
        return
    odd = [host for host in call.hosts if not host or host.startswith("-") or any(c.isspace() for c in host)]
    if odd:
        what, remedy = f"`{odd[0]}` is no host", 'a name or an address, as `"host1"` or `"user@host1"`'
    elif len(set(call.hosts)) < len(call.hosts):
        twice = next(host for n, host in enumerate(call.hosts) if host in call.hosts[:n])
        what, remedy = f"`{twice}` is named twice, and a host is one node", "each host once"
    elif layout.nodes != len(call.hosts):
        what = f"`ssh` reaches {plural(len(call.hosts), 'host')}, and the job takes {plural(layout.nodes, 'node')}"
        remedy = f"`devices {{ nodes = {len(call.hosts)} }}`" if call.hosts else "a host for each node"
    else:
        return
    report.add("E0823", what, call.at("hosts"), help=remedy)
