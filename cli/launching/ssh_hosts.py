"""The hosts that `ssh` has reached, while they train: the lines that they receive, and the lines that they print.

Model: `FixedHosts` has a fixed number of hosts, and the loss of one ends all. Of `ElasticHosts` reachable hosts train;
unreachable hosts are tried again, at growing intervals, and join them. How a host is started is ssh_launch.py's.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dslc.dsl.plain import plain
from dslc.launching.ssh_agent import BEAT, READY, SECRET
from dslc.runtime.process.stop import RunControl
from dslc.terminal.exit_codes import GOOD, INTERRUPTED, TRAINING_FAILED, WRONG_USAGE

CONNECT = 10  # seconds that a connection may take
START = 60.0  # seconds that a host may take to say that it is ready
_ENOUGH = 15.0  # seconds after which an elastic job begins with fewer hosts than there are
_END = 30.0  # seconds that the others have after one has failed: they notice it within 10
_AGAIN = 10.0, 300.0  # seconds until a host is tried again: the first time, and at most
_REMEMBERED = 1000  # lines, of which others are known to be the same
NOT_REACHED = 255  # exit status of ssh for its own errors
_OF_ALL = INTERRUPTED, GOOD, TRAINING_FAILED  # exit statuses that tell how a training ended, the one that counts first


class NotStarted(Exception):
    """A host on which nothing can be started; the text names it, and the remedy."""


@dataclass
class Host:
    """One host: the process of its `ssh`, and what came from it. `status` is its exit status, when it has ended."""

    name: str
    process: subprocess.Popen[bytes]
    secret: str = field(default="", repr=False)  # of the run
    ready: bool = False
    going: bool = False
    noted: bool = False  # its end
    rest: dict[int, bytes] = field(default_factory=dict)  # of a line that has not ended, by descriptor
    errors: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    status: int | None = None

    @property
    def streams(self) -> list[int]:
        assert self.process.stdout is not None and self.process.stderr is not None
        return [self.process.stdout.fileno(), self.process.stderr.fileno()]

    @property
    def last_error(self) -> str:
        said = [line.strip() for line in self.errors if line.strip()]
        return said[-1] if said else "it says nothing"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: its exit status says so
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def go(self) -> None:
        self.going = True
        if self.secret:
            self.tell(f"{SECRET} {self.secret}")
        self.tell("go")


def end(hosts: Sequence[Host]) -> None:
    """Ends the remaining processes on these hosts and waits for them. Each host notices that its input has ended."""
    for host in hosts:
        host.tell("end")
        with contextlib.suppress(OSError):
            assert host.process.stdin is not None
            host.process.stdin.close()
    for host in hosts:
        try:
            host.process.wait(CONNECT)
        except subprocess.TimeoutExpired:
            host.process.kill()
            host.process.wait()
        for stream in (host.process.stdout, host.process.stderr):
            assert stream is not None
            stream.close()


class _Hosts(ABC):
    """The hosts of one training, from their start to their end; `why` gives why nothing could be started on one."""

    def __init__(self, hosts: list[Host], board: RunControl, why: Callable[[Host], str]) -> None:
        self._hosts, self._board, self._why, self._stopping = hosts, board, why, False
        self._beat = 0.0
        self._selector = selectors.DefaultSelector()
        for host in hosts:
            self._listen_to(host)

    @abstractmethod
    def run(self) -> int:
        """Has the hosts train, and returns the exit status of the command. Raises NotStarted."""

    @abstractmethod
    def _receive_line(self, host: Host, line: str) -> None:
        """Passes on a line that a host has said of the training."""

    def _listen_to(self, host: Host) -> None:
        for descriptor in host.streams:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, host)

    def _poll(self) -> None:
        now = time.monotonic()
        if now - self._beat > BEAT:
            self._beat = now
            self._send_to_all("alive")
        if self._board.stop_requested and not self._stopping:
            self._stopping = True
            self._send_to_all("stop")
        for key, _ in self._selector.select(0.2):
            self._read_stream(key.data, key.fd)
        for host in self._hosts:
            if host.status is None and host.process.poll() is not None:
                for descriptor in host.streams:
                    self._read_stream(host, descriptor)  # what came before its end
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(descriptor)
                host.status = host.process.returncode

    def _send_to_all(self, line: str) -> None:
        for host in self._hosts:
            if host.status is None:
                host.tell(line)

    def _read_stream(self, host: Host, descriptor: int) -> None:
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
                self._handle_line(host, descriptor, line.decode(errors="replace").rstrip("\r"))

    def _handle_line(self, host: Host, descriptor: int, line: str) -> None:
        if descriptor == host.streams[1]:
            host.errors.append(line)
        elif not host.ready:
            host.ready = line == READY  # else it is the greeting of a shell
        else:
            self._receive_line(host, line)

    def _print(self, host: Host, line: str) -> None:
        print(plain(f"{host.name}: {line}"), flush=True)

    def _report(self, text: str) -> None:
        print(plain(f"dslc: {text}"), file=sys.stderr, flush=True)


class FixedHosts(_Hosts):
    """A fixed number of hosts. The first one's exit status counts; its lines are printed, others' at the end."""

    def __init__(self, hosts: list[Host], board: RunControl, why: Callable[[Host], str]) -> None:
        super().__init__(hosts, board, why)
        self._lines: set[str] = set()
        self._failed = 0.0  # when the first one ended with an error

    def run(self) -> int:
        until = time.monotonic() + START
        while not all(host.ready for host in self._hosts):
            self._poll()
            broken = [host for host in self._hosts if host.status is not None]
            late = [host for host in self._hosts if not host.ready] if time.monotonic() > until else []
            if broken or late:
                raise NotStarted(self._why((broken or late)[0]))
            if self._board.stop_requested:
                return INTERRUPTED
        for host in self._hosts:
            host.go()
        while not self._is_training_over:
            self._poll()
            if any(host.status for host in self._hosts):
                self._failed = self._failed or time.monotonic()
        for host in self._hosts[1:]:
            for line in host.held:
                if line not in self._lines:
                    self._print(host, line)
        return self._status()

    @property
    def _is_training_over(self) -> bool:
        left = [host for host in self._hosts if host.status is None]
        ended = time.monotonic() - self._failed > _END if self._failed else False
        return not left or ended or any(host.status == NOT_REACHED for host in self._hosts)

    def _status(self) -> int:
        lost = [host for host in self._hosts if host.status == NOT_REACHED]
        for host in lost[:1]:
            self._report(
                f"the connection to {host.name} was lost ({host.last_error}); the training is ended on all hosts"
            )
        if lost:
            return TRAINING_FAILED
        statuses = [TRAINING_FAILED if host.status is None else host.status for host in self._hosts]
        first, worst = statuses[0], max(statuses)
        if first == GOOD and worst == GOOD:
            return GOOD
        return first if first in (WRONG_USAGE, TRAINING_FAILED, INTERRUPTED) else min(worst, TRAINING_FAILED)

    def _receive_line(self, host: Host, line: str) -> None:
        if host is self._hosts[0]:
            self._lines.add(line)
            self._print(host, line)
        else:
            host.held.append(line)


@dataclass
class _LostHost:
    at: float = 0.0
    wait: float = _AGAIN[0] / 2
    told: str = ""


class ElasticHosts(_Hosts):
    """The hosts of an elastic job, which begins with `least` of them. `start` starts one of this name again; without a
    host for `timeout` seconds the training ends. A line that several hosts say is printed once. A host that ends by
    itself is not tried again: it was refused, or the training is over.
    """

    def __init__(
        self,
        hosts: list[Host],
        board: RunControl,
        why: Callable[[Host], str],
        *,
        least: int,
        timeout: float,
        start: Callable[[str], Host],
    ) -> None:
        super().__init__(hosts, board, why)
        self._least, self._timeout, self._start = least, timeout, start
        self._lines: dict[str, str] = {}  # each with the host that said it first
        self._lost: dict[str, _LostHost] = {}
        self._ends: dict[str, int] = {}
        self._seen = 0.0  # when a host was last there

    def run(self) -> int:
        if not self._wait_for_enough_hosts():
            return INTERRUPTED
        self._seen = time.monotonic()
        self._note_ends()
        while not self._is_training_over():
            if not self._ends_soon:
                self._let_in()
                self._try_again()
            self._poll()
            self._note_ends()
        return self._status()

    def _wait_for_enough_hosts(self) -> bool:
        """Waits for the hosts that begin the training; returns False if it was stopped. Raises NotStarted."""
        began = time.monotonic()
        while True:
            self._poll()
            if self._board.stop_requested:
                return False
            ready = [host for host in self._hosts if host.ready and host.status is None]
            open_ = [host for host in self._hosts if not host.ready and host.status is None]
            waited = time.monotonic() - began
            if len(ready) >= self._least and (not open_ or waited > _ENOUGH):
                return True
            if len(ready) + len(open_) < self._least or waited > START:
                broken = [host for host in self._hosts if host.status is not None]
                raise NotStarted(self._why((broken or open_)[0]))

    @property
    def _connected_hosts(self) -> list[Host]:
        return [host for host in self._hosts if host.going and host.status is None]

    @property
    def _ends_soon(self) -> bool:
        return self._stopping or any(status in _OF_ALL for status in self._ends.values())

    def _is_training_over(self) -> bool:
        now = time.monotonic()
        if self._connected_hosts:
            self._seen = now
            return False
        if self._ends_soon or not (self._lost or self._is_connecting):
            return True
        if now - self._seen > self._timeout:
            self._report(f"no host was there for {self._timeout:g} s (`launch.timeout`): the training ends")
            return True
        return False

    @property
    def _is_connecting(self) -> bool:
        return any(host.status is None and not host.going for host in self._hosts)

    def _let_in(self) -> None:
        for host in self._hosts:
            if host.ready and not host.going and host.status is None:
                host.go()
                self._lost.pop(host.name, None)

    def _note_ends(self) -> None:
        for host in self._hosts:
            if host.status is not None and not host.noted:
                self._note_end(host)

    def _note_end(self, host: Host) -> None:
        assert host.status is not None
        host.noted = True
        if host.going and host.status != NOT_REACHED:
            self._ends[host.name] = host.status
            if host.status not in _OF_ALL:
                self._report(f"{host.name} takes no part any more (exit status {host.status})")
            return
        lost = self._lost.setdefault(host.name, _LostHost())
        lost.wait = min(2 * lost.wait, _AGAIN[1])
        lost.at = time.monotonic() + lost.wait
        reason = f"the connection to {host.name} was lost ({host.last_error})" if host.going else self._why(host)
        if reason != lost.told and not self._ends_soon:
            lost.told = reason
            others = any(each.ready and each.status is None for each in self._hosts)
            self._report(f"{reason}; it is tried again{', and the others go on' if others else ''}")

    def _try_again(self) -> None:
        now = time.monotonic()
        for n, host in enumerate(self._hosts):
            lost = self._lost.get(host.name)
            if host.noted and lost is not None and now >= lost.at:
                end([host])
                self._hosts[n] = self._start(host.name)
                self._listen_to(self._hosts[n])

    def _status(self) -> int:
        """Returns how the training ended: hosts that were lost, or refused, do not count where another one knows."""
        ends = self._ends.values()
        other = min(max(ends, default=TRAINING_FAILED), TRAINING_FAILED)
        return next((status for status in _OF_ALL if status in ends), other)

    def _receive_line(self, host: Host, line: str) -> None:
        if self._lines.setdefault(line, host.name) == host.name:
            self._print(host, line)
        if len(self._lines) > _REMEMBERED:
            del self._lines[next(iter(self._lines))]
