"""Rules for the hosts that a job names: those of `launch.with = ssh(…)`. E0823."""

from __future__ import annotations

from dslc.compiler.placement.layout import Layout
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.calls import SSH
from dslc.dsl.language.job import JobSpec
from dslc.dsl.words import plural


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
