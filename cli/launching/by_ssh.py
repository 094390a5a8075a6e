"""`launch.with = ssh(…)`: starts the launchers of a training on several hosts, once, by the system's `ssh`.

Model: on each host `ssh` runs on_host.py by the absolute path of this interpreter, in the current folder. When all
hosts have said that they are ready, each starts `dslc run … --rendezvous` with the first of them, as a user would on
each. What they say comes back here: that of the first host as it comes, marked by host; of the others, at the end, the
lines that the first has not said.

Contract: ports, users, keys and known hosts are those of ssh's own configuration; nothing is asked for on the terminal.
A host that cannot be reached, refuses the key or has no dslc is one message, and nothing has started anywhere. Ctrl-C
stops all ranks after the same step; a second one ends them at once. When this command ends, in any way, or the
connection to a host, no process is left on any.

A launcher that a signal ends is started again on its host, up to `launch.restarts` times, and joins the others, which
wait for it. A host that is lost, or its connection, ends the training.

Limits: the same folder, interpreter and job have to be on each host, at the same paths.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dslc.dsl.language.calls import SSH
from dslc.dsl.plain import plain
from dslc.launching.on_host import BEAT, NO_FOLDER, READY
from dslc.status import GOOD, INTERRUPTED, TRAINING_FAILED, WRONG_USAGE

if TYPE_CHECKING:
    from dslc.runtime.process.stop import Board

_PORTS = range(20_000, 30_000)  # below those that systems give out by themselves
_CONNECT = 10  # seconds that a connection may take
_START = 60.0  # seconds that a host may take to say that it is ready
_END = 30.0  # seconds that the others have after one has failed: they notice it within 10
# After those of the job: the first of equal options counts.
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_NOT_REACHED = 255  # exit status of ssh for its own errors


class NotStarted(Exception):
    """A host on which nothing can be started; the text names it, and the remedy."""


@dataclass
class _Host:
    """One host: the process of its `ssh`, and what came from it."""

    name: str
    process: subprocess.Popen[bytes]
    ready: bool = False
    rest: dict[int, bytes] = field(default_factory=dict)  # of a line that has not ended, by descriptor
    errors: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    status: int | None = None

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: its exit status says so
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()


def run_by_ssh(call: SSH, words: Sequence[str], restarts: int) -> int:
    """Runs `dslc run` with `words` on each host, and returns the exit status of the first."""
    from dslc.runtime.process.stop import Board, listening

    board = Board(1)
    try:
        address = _address(call, call.hosts[0])
    except NotStarted as reason:
        print(plain(f"dslc: {reason}"), file=sys.stderr)
        return WRONG_USAGE
    port = random.choice(_PORTS)
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    command = (
        ["run", *words, "--rendezvous", place]
        if len(call.hosts) > 1
        else ["run", *words, "--set", "launch.with=local()"]
    )
    restarts = restarts if len(call.hosts) > 1 else 0  # a lone host has no others that go on
    hosts: list[_Host] = []
    try:
        with listening(board, _AtOnce):
            hosts += [_started(call, name, [str(restarts), os.getcwd(), *command]) for name in call.hosts]
            return _Together(hosts, board).run()
    except NotStarted as reason:
        print(plain(f"dslc: {reason}"), file=sys.stderr)
        return WRONG_USAGE
    except _AtOnce:
        return INTERRUPTED
    finally:
        _end(hosts)


class _AtOnce(BaseException):
    """A second request to stop."""


def _end(hosts: Sequence[_Host]) -> None:
    """Ends what is left on all hosts: each notices that nothing more comes."""
    for host in hosts:
        host.tell("end")
        with contextlib.suppress(OSError):
            assert host.process.stdin is not None
            host.process.stdin.close()
    for host in hosts:
        try:
            host.process.wait(_CONNECT)
        except subprocess.TimeoutExpired:
            host.process.kill()
            host.process.wait()
        for stream in (host.process.stdout, host.process.stderr):
            assert stream is not None
            stream.close()


# ------------------------------------------------------------------------------------------------------- their start


def _address(call: SSH, name: str) -> str:
    """Returns the name or address of a host by which the others know it: that of ssh's configuration. Raises
    NotStarted.
    """
    try:
        told = subprocess.run(["ssh", *call.options, "-G", name], capture_output=True, text=True, timeout=_CONNECT)
    except FileNotFoundError:
        raise NotStarted("there is no `ssh` on this machine: install it (Debian: openssh-client)") from None
    except subprocess.TimeoutExpired:
        raise NotStarted(f"`ssh -G {name}` does not answer: see ~/.ssh/config") from None
    found = re.search(r"^hostname (\S+)$", told.stdout, re.MULTILINE)
    if told.returncode or found is None:
        raise NotStarted(f"`ssh -G {name}` fails: {_last(told.stderr.splitlines())}")
    return found[1]


def _started(call: SSH, name: str, arguments: Sequence[str]) -> _Host:
    """Starts on_host.py on one host, which waits until all are ready."""
    there = [sys.executable, "-P", "-m", "dslc.launching.on_host", *arguments]
    # `exec`: the shell between sshd and Python would not end with the connection.
    words = ["ssh", *call.options, *_OPTIONS, name, f"exec {shlex.join(there)}"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)  # Ctrl-C is passed on here
    return _Host(name=name, process=process)


def _fault(host: _Host) -> str:
    """Returns why nothing could be started on a host, and the remedy."""
    name, status, said = host.name, host.process.poll(), "\n".join(host.errors)
    last = _last(host.errors)
    if status is None:
        return f"{name} has not answered within {_START:.0f} s: `ssh {name}` by hand shows where it waits"
    if status == _NOT_REACHED:
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


def _last(lines: Sequence[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else "it says nothing"


# ------------------------------------------------------------------------------------------------ while they are there


class _Together:
    """The hosts of one training, from their start to their end."""

    def __init__(self, hosts: Sequence[_Host], board: Board) -> None:
        self._hosts, self._board, self._stopping = hosts, board, False
        self._said: set[str] = set()
        self._beat = self._failed = 0.0
        self._selector = selectors.DefaultSelector()
        for host in hosts:
            for stream in (host.process.stdout, host.process.stderr):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ, host)

    def run(self) -> int:
        """Has all hosts start, and returns the exit status of the first when all have ended. Raises NotStarted."""
        until = time.monotonic() + _START
        while not all(host.ready for host in self._hosts):
            self._look()
            broken = [host for host in self._hosts if host.status is not None]
            late = [host for host in self._hosts if not host.ready] if time.monotonic() > until else []
            if broken or late:
                raise NotStarted(_fault((broken or late)[0]))
            if self._board.stop_requested:
                return INTERRUPTED
        for host in self._hosts:
            host.tell("go")
        while not self._over:
            self._look()
        for host in self._hosts[1:]:
            for line in host.held:
                if line not in self._said:
                    self._print(host, line)
        return self._status()

    @property
    def _over(self) -> bool:
        left = [host for host in self._hosts if host.status is None]
        ended = time.monotonic() - self._failed > _END if self._failed else False
        return not left or ended or any(host.status == _NOT_REACHED for host in self._hosts)

    def _status(self) -> int:
        lost = [host for host in self._hosts if host.status == _NOT_REACHED]
        for host in lost[:1]:
            said = f"the connection to {host.name} was lost ({_last(host.errors)}); the training is ended on all hosts"
            print(plain(f"dslc: {said}"), file=sys.stderr, flush=True)
        if lost:
            return TRAINING_FAILED
        statuses = [TRAINING_FAILED if host.status is None else host.status for host in self._hosts]
        first, worst = statuses[0], max(statuses)
        if first == GOOD and worst == GOOD:
            return GOOD
        return first if first in (WRONG_USAGE, TRAINING_FAILED, INTERRUPTED) else min(worst, TRAINING_FAILED)

    def _look(self) -> None:
        """Passes on what has come, and what is asked for; waits a moment."""
        now = time.monotonic()
        if now - self._beat > BEAT:
            self._beat = now
            self._tell("alive")
        if self._board.stop_requested and not self._stopping:
            self._stopping = True
            self._tell("stop")
        for key, _ in self._selector.select(0.2):
            self._read(key.data, key.fd)
        for host in self._hosts:
            if host.status is None and host.process.poll() is not None:
                for stream in (host.process.stdout, host.process.stderr):
                    assert stream is not None
                    self._read(host, stream.fileno())  # what came before its end
                host.status = host.process.returncode
                if host.status:
                    self._failed = self._failed or time.monotonic()

    def _tell(self, line: str) -> None:
        for host in self._hosts:
            if host.status is None:
                host.tell(line)

    def _read(self, host: _Host, descriptor: int) -> None:
        while True:
            try:
                content = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            if not content:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(descriptor)
                return
            *lines, host.rest[descriptor] = (host.rest.get(descriptor, b"") + content).split(b"\n")
            for line in lines:
                self._take(host, descriptor, line.decode(errors="replace").rstrip("\r"))

    def _take(self, host: _Host, descriptor: int, line: str) -> None:
        assert host.process.stderr is not None
        if descriptor == host.process.stderr.fileno():
            host.errors.append(line)
        elif not host.ready:
            host.ready = line == READY  # else it is the greeting of a shell
        elif host is self._hosts[0]:
            self._said.add(line)
            self._print(host, line)
        else:
            host.held.append(line)

    def _print(self, host: _Host, line: str) -> None:
        print(plain(f"{host.name}: {line}"), flush=True)
