"""`launch.with = ssh(…)`: starts the launchers of a training on several hosts, once, by the system's `ssh`.

Model: on each host `ssh` runs ssh_agent.py by the absolute path of this interpreter, in the current folder. When all
hosts have said that they are ready, each starts `dslc run … --rendezvous` with the first host, as a user would on each;
an elastic job's with all hosts. The secret by which they know each other goes to each by the input of its `ssh`. Their
output comes back here, marked by host (ssh_hosts.py).

Contract: ports, users, keys and known hosts come from ssh's own configuration; nothing is asked for on the terminal. A
host that cannot be reached, refuses the key or has no dslc is one message, and nothing has started anywhere; an elastic
job begins without it, and tries it again. Ctrl-C stops all ranks after the same step; a second one ends them at once.
When this command ends, in any way, or the connection to a host ends, no process remains on any host. A launcher that a
signal ends is started again on its host, up to `launch.restarts` times, and joins the others, which wait for it if the
job is not elastic. A host that is lost, or its connection, ends the training; an elastic one goes on.

Limits: each host must have the same folder, interpreter and job, at the same paths.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dslc.dsl.language.calls import SSH
from dslc.dsl.plain import plain
from dslc.launching.ssh_agent import NO_FOLDER
from dslc.launching.ssh_hosts import CONNECT, NOT_REACHED, START, ElasticHosts, FixedHosts, Host, NotStarted, end
from dslc.runtime.process.stop import RunControl, listening
from dslc.terminal.exit_codes import INTERRUPTED, WRONG_USAGE

if TYPE_CHECKING:
    from dslc.jobs.prepare_run import Ready

_PORTS = range(20_000, 30_000)  # below those that systems give out by themselves
# After those of the job: the first of equal options counts.
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)


def run_by_ssh(call: SSH, words: Sequence[str], job: Ready) -> int:
    """Runs `dslc run` with `words` on each host, and returns the exit status of the training."""
    board = RunControl(1)
    hosts: list[Host] = []
    try:
        secret = secrets.token_hex(32)
        arguments = [str(_restarts(job, call)), os.getcwd(), "run", *words, *_meeting(job, call)]
        with listening(board, _SecondStopRequest):
            hosts += [_started(call, name, arguments, secret) for name in call.hosts]
            return _host_group(hosts, board, job, lambda name: _started(call, name, arguments, secret)).run()
    except NotStarted as reason:
        print(plain(f"dslc: {reason}"), file=sys.stderr)
        return WRONG_USAGE
    except _SecondStopRequest:
        return INTERRUPTED
    finally:
        end(hosts)


class _SecondStopRequest(BaseException):
    """A second request to stop."""


def _restarts(job: Ready, call: SSH) -> int:
    """Returns how often a launcher that a signal has ended is started again: a lone one has no others that go on."""
    return job.program.restarts if len(call.hosts) > 1 else 0


def _meeting(job: Ready, call: SSH) -> list[str]:
    """Returns the words of the command that say where the launchers meet: at the first host; launchers of an elastic
    job at the first host that is up. Raises NotStarted.
    """
    if len(call.hosts) == 1 and not job.counts:
        return ["--set", "launch.with=local()"]
    port = random.choice(_PORTS)
    addresses = [_address(call, name) for name in (call.hosts if job.counts else call.hosts[:1])]
    places = [f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in addresses]
    return ["--rendezvous", ",".join(places)]


def _host_group(
    hosts: list[Host], board: RunControl, job: Ready, start: Callable[[str], Host]
) -> FixedHosts | ElasticHosts:
    if not job.counts:
        return FixedHosts(hosts, board, _fault)
    return ElasticHosts(hosts, board, _fault, least=min(job.counts), timeout=job.program.timeout, start=start)


# ------------------------------------------------------------------------------------------------------- their start


def _address(call: SSH, name: str) -> str:
    """Returns the address of a host by which others know it, from ssh's configuration. Raises NotStarted."""
    try:
        told = subprocess.run(["ssh", *call.options, "-G", name], capture_output=True, text=True, timeout=CONNECT)
    except FileNotFoundError:
        raise NotStarted("there is no `ssh` on this machine: install it (Debian: openssh-client)") from None
    except subprocess.TimeoutExpired:
        raise NotStarted(f"`ssh -G {name}` does not answer: see ~/.ssh/config") from None
    found = re.search(r"^hostname (\S+)$", told.stdout, re.MULTILINE)
    if told.returncode or found is None:
        raise NotStarted(f"`ssh -G {name}` fails: {told.stderr.strip().rpartition(chr(10))[2] or 'it says nothing'}")
    return found[1]


def _started(call: SSH, name: str, arguments: Sequence[str], secret: str) -> Host:
    there = [sys.executable, "-P", "-m", "dslc.launching.ssh_agent", *arguments]
    # `exec`: the shell between sshd and Python would not end with the connection.
    words = ["ssh", *call.options, *_OPTIONS, name, f"exec {shlex.join(there)}"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)  # Ctrl-C is passed on here
    return Host(name=name, process=process, secret=secret)


def _fault(host: Host) -> str:
    """Returns why nothing could be started on a host, and the remedy."""
    name, status, said, last = host.name, host.process.poll(), "\n".join(host.errors), host.last_error
    if status is None:
        return f"{name} has not answered within {START:.0f} s: `ssh {name}` by hand shows where it waits"
    if status == NOT_REACHED:
        if "Permission denied" in said or "Too many authentication failures" in said:
            return (
                f"{name} refuses the key ({last}): `ssh-copy-id {name}`, or name the key in ~/.ssh/config; nothing is "
                "asked for on the terminal"
            )
        if "Host key verification failed" in said:
            return f"the key of {name} is not known here, or has changed: `ssh {name}` once, by hand, shows it"
        return f"{name} cannot be reached by ssh ({last}): `ssh {name}` has to work; see ~/.ssh/config"
    if status == NO_FOLDER:
        return f"{name} has no folder {last}: the job has to be at the same path on each host"
    if "dslc" in said and "No module named" in said:
        return f"{name} has no dslc for {sys.executable}: install it there, at the same path"
    if status in (126, 127):
        return f"{name} has no {sys.executable}, with which dslc runs here: install dslc there, at the same path"
    return f"{name} could not start dslc (exit status {status}): {last}"
