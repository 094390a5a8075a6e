"""One launcher's part in a rendezvous, and the reports of what it waits for."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dslc.runtime.hosts.rendezvous_address import Endpoint, RendezvousError
from dslc.runtime.hosts.run_secret import TOKEN, RunSecret

_FOR_HOSTS = "the job takes {} (`devices.nodes`), each started with the same command"
_SAY = 2.0, 60.0  # seconds after which it is first said who is awaited, and then every so many
_UNSEEN = 10.0  # seconds after which a host that does not see the file of the secret gives up


class StopRequestedError(Exception):
    """A host was asked to stop while hosts met."""


@dataclass(frozen=True)
class Rendezvous:
    """The part of one launcher: where they meet, how many they are, and what it knows of the job, by name. With an
    `endpoint` the launchers know their places, and what has started them (`by`: "mpirun"); each starts `processes`
    ranks. One that cannot train has the reason as its `fault`, and comes to say so: all leave, and the coordinator with
    that reason.
    """

    address: str
    nodes: int  # the most, of an elastic training
    facts: Mapping[str, str]
    timeout: float  # seconds that hosts are waited for
    say: Callable[[str], object] = field(default=lambda text: None)
    host: str = field(default_factory=socket.gethostname)
    processes: int = 1
    endpoint: Endpoint | None = None
    place: int = 0
    by: str = ""
    needs: str = _FOR_HOSTS
    fault: str = ""
    again: bool = False  # hosts that are lost may come back
    secret: RunSecret = field(default_factory=RunSecret)
    until: float = math.inf  # the time of the clock, if that is before `timeout` has passed
    stopped: Callable[[], bool] = field(default=lambda: False)
    counts: tuple[int, ...] = ()  # of an elastic training: the numbers of hosts on which it can go on
    claim: Callable[[str], bool] = field(default=lambda folder: True)  # takes a run directory over, if it is free
    holder: Callable[[], str] = field(default=lambda: "")  # who trains in the run directory, if somebody does
    remedy: Callable[[str], str] = field(default=lambda name: "")  # for a fact in which two hosts differ
    patient: bool = False  # before the first start hosts are waited for without end: a cluster brings them

    @property
    def takes(self) -> str:
        return f"{self.counts[0]} to {self.nodes}" if self.counts and self.counts[0] < self.nodes else str(self.nodes)

    def create_secret(self) -> bytes:
        """Returns the secret of the run, on the coordinator. Raises RendezvousError and OSError."""
        return self._of_endpoint or self.secret.create()

    def read_secret(self) -> bytes | None:
        """Returns the secret of the run; None if its file is not seen here. Raises RendezvousError."""
        return self._of_endpoint or self.secret.load()

    @property
    def _of_endpoint(self) -> bytes:
        return self.endpoint.secret if self.endpoint is not None and not self.secret.token else b""

    @property
    def ranks(self) -> bool:
        """True if each launcher launches one rank, with a place that it was given."""
        return self.endpoint is not None and self.processes == 1


class WaitReporter:
    """Says what is waited for, now and then; raises RendezvousError when that lasts too long, StopRequestedError when
    asked to.
    """

    def __init__(self, rendezvous: Rendezvous, purpose: str) -> None:
        self.what, self.why, self.help = purpose, "", ""
        self.patient = False  # it is known that this host waits for a place
        self._rendezvous, self._began = rendezvous, time.monotonic()
        self._unseen = 0.0  # since when somebody answers, but the file of the secret is not seen
        self._next = self._began + _SAY[0]

    def turn_to(self, purpose: str, help: str) -> None:
        """Waits for something else from now on, and reports it at once."""
        if purpose != self.what:
            self.what, self.why, self.help, self._next = purpose, "", help, time.monotonic()

    def unseen(self, path: str) -> None:
        """Waits for the file of the secret, for a while. Raises RendezvousError."""
        self._unseen = self._unseen or time.monotonic()
        self.why = f", whose secret {path} is not seen here"
        self.help = f"a folder that all hosts share, which --out names; or the same {TOKEN} on all of them"
        if time.monotonic() > self._unseen + _UNSEEN:
            wait_text = f"{self._rendezvous.host} waited {_UNSEEN:g} s {self.what}{self.why}"
            raise RendezvousError(f"{wait_text}\nhelp: {self.help}")

    def look(self, host_names: Sequence[str]) -> None:
        if self._rendezvous.stopped():
            raise StopRequestedError
        now = time.monotonic()
        hosts_text = f"; here: {', '.join([self._rendezvous.host, *host_names])}" if host_names else ""
        limit = math.inf if self._rendezvous.patient else self._began + self._rendezvous.timeout
        if not self.patient and now > min(limit, self._rendezvous.until):
            wait_text = (
                f"{self._rendezvous.host} waited {self._rendezvous.timeout:g} s (`launch.timeout`) "
                f"{self.what}{self.why}"
            )
            help = f"\nhelp: {self.help}" if self.help else ""
            raise RendezvousError(
                f"{wait_text}{hosts_text}; {self._rendezvous.needs.format(self._rendezvous.takes)}{help}"
            )
        if now >= self._next and not self.patient:
            self._next = now + _SAY[1]
            self._rendezvous.say(f"waiting {self.what}{self.why}{hosts_text}; the job takes {self._rendezvous.takes}")
