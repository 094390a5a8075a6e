"""The position of each rank in its step, and the file by which others read it: `positions/rank-N.json`.

Model: a rank writes the number of its position to the shared memory of its node (stop.py) whenever it goes on, which
takes no system call. Its launcher reads the numbers when it wakes for the progress. It writes those that have changed
to a file of the run directory, at most once in `INTERVAL` seconds. The file has the name of the node's first rank. A
stalled rank is asked for the details of its position (measure/position_details.py): the module, the collective that it
waits in, and its last line of Python.

Contract: readers see a whole file, old or new. A disk that is full, or a folder that is gone, ends no training. A
machine that dies leaves what its launcher wrote last, at most `INTERVAL` seconds before.

Limits: positions do not tell two modules of one pass apart; details do. A rank that was killed has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Literal

from dslc.compiler.facts.untrusted_files import read_json, replacing
from dslc.compiler.ir.codec import DecodeError, from_json
from dslc.runtime.process.lifetime import is_suspended
from dslc.runtime.process.run_status import file_age
from dslc.runtime.process.stop import RunControl

FOLDER = "positions"
INTERVAL = 1.0  # seconds between two writings
_FILE = re.compile(r"rank-([0-9]{1,7})\.json")
_LIMIT = 1 << 24  # bytes of a file that is read
_MICROBATCH = 32  # a position is the number of its phase, and this times the micro-batches whose loss is computed

State = Literal["alive", "suspended", "failed", "gone", "done"]
Waits = Literal["", "collective", "backward", "workers"]


class Phase(IntEnum):
    """The parts of a rank's work, in their order."""

    START = 0
    GROUP = 1
    SOURCE = 2
    MODEL = 3
    REFERENCE = 4
    RESUME = 5
    SAMPLES = 6
    BEGIN = 7
    FORWARD = 8
    BACKWARD = 9
    PASSES = 10  # of a stage, which are not one after the other
    UPDATE = 11
    RECORD = 12
    EVALUATION = 13
    GENERATION = 14
    CHECKPOINT = 15
    END = 16


PHASES = {
    Phase.START: "starting",
    Phase.GROUP: "opening its connections",
    Phase.SOURCE: "opening its data",
    Phase.MODEL: "building the model",
    Phase.REFERENCE: "computing the reference",
    Phase.RESUME: "loading its state",
    Phase.SAMPLES: "loading the samples",
    Phase.BEGIN: "in the hooks at the begin",
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "in the backward pass",
    Phase.PASSES: "in the passes",
    Phase.UPDATE: "in the update",
    Phase.RECORD: "recording the loss",
    Phase.EVALUATION: "in the evaluation",
    Phase.GENERATION: "generating texts",
    Phase.CHECKPOINT: "writing a checkpoint",
    Phase.END: "writing the weights",
}


@dataclass(frozen=True, kw_only=True)
class PositionDetails:
    """The place of a rank by its stack: `module` and its `line` of the job, the `operation` that it `waits` in, and its
    last line of Python that is the user's. `order` counts the modules of the model up to this one.
    """

    since: int
    module: str = ""
    order: int = 0
    line: str = ""
    operation: str = ""
    waits: Waits = ""
    python: str = ""


@dataclass(frozen=True, kw_only=True)
class RankPosition:
    """Where a rank is: `phase` of `step`, for `seconds` when the file was written. `microbatches` have their loss.
    `idle`: its process used no processor since it stalled. `failed`: an exception ended it, in an exchange that it
    `waits` in if another rank is the cause. `status`: the exit status of a process that is gone, -N for signal N.
    """

    rank: int
    step: int
    phase: int
    microbatches: int
    seconds: float
    state: State = "alive"
    status: int | None = None
    idle: bool = False
    details: PositionDetails | None = None

    @property
    def current_step(self) -> int:
        """The step that the rank works for: samples belong to the next one."""
        return self.step + (self.phase == Phase.SAMPLES)

    @property
    def progress(self) -> tuple[int, ...]:
        """The order of positions, as far as it is known."""
        phase = self.phase if self.phase not in (Phase.FORWARD, Phase.BACKWARD) else Phase.FORWARD
        # The last stage alone computes losses.
        within = 0 if self.phase == Phase.PASSES else 2 * self.microbatches - (self.phase == Phase.BACKWARD)
        return self.current_step, phase, within

    def text(self) -> str:
        words = PHASES[Phase(self.phase)]
        if self.phase < Phase.SAMPLES:
            return words
        if self.phase > Phase.RECORD:
            return f"{words} after step {self.step}"
        return f"{words} of step {self.current_step}"


@dataclass(frozen=True, kw_only=True)
class HostPositions:
    """The ranks of one launcher, at its start number `attempt`; `world` ranks are in the training. `lines` are lines of
    the job: of its model and of its data. `age`: seconds since it was written, set by the reader.
    """

    host: str
    attempt: int
    world: int
    ranks: tuple[RankPosition, ...]
    lines: Mapping[str, str]
    gradients: str = ""  # the exchange that ends a backward pass
    age: float = 0.0


class PositionFile:
    """The launcher's part: it reads the board and keeps the file of its ranks up to date."""

    def __init__(
        self, run_dir: str, board: RunControl, world: int, lines: Mapping[str, str], gradients: str = ""
    ) -> None:
        self._path = os.path.join(run_dir, FOLDER, f"rank-{board.ranks.start}.json")
        self._board, self._lines = board, lines
        self._world, self._gradients = world, gradients
        self._written: object = None
        self._at = 0.0

    def positions(self, statuses: Mapping[int, int | None], idle: Collection[int] = ()) -> HostPositions:
        """Returns the positions of this node's ranks. `statuses` are their exit statuses: None for those alive. Ranks
        that are `idle` used no processor since they stalled.
        """
        now, board = time.monotonic_ns(), self._board
        ranks = []
        for rank in board.ranks:
            step, position, since = board.position(rank)
            microbatches, phase = divmod(position, _MICROBATCH)
            status = statuses.get(rank)
            state: State = "alive"
            if board.has_finished(rank):
                state = "done"
            elif board.failing(rank):
                state = "failed"
            elif status is not None:
                state = "gone"
            elif is_suspended(board.process(rank) or -1):
                state = "suspended"
            details = _details(board.details(rank), since)
            seconds = (now - since) / 1e9 if since else 0.0
            place = RankPosition(rank=rank, step=step, phase=phase, microbatches=microbatches, seconds=seconds)
            ranks.append(replace(place, state=state, status=status, idle=rank in idle, details=details))
        return HostPositions(
            host=socket.gethostname(),
            attempt=board.attempt,
            world=self._world,
            ranks=tuple(ranks),
            lines=self._lines,
            gradients=self._gradients,
        )

    def update(self) -> None:
        """Writes the file if a position has changed; costs some microseconds if not."""
        found = [(self._board.position(rank), self._board.process(rank)) for rank in self._board.ranks]
        if found != self._written and time.monotonic() - self._at >= INTERVAL:
            self._written = found
            self.write(self.positions({}))

    @property
    def age(self) -> float:
        """Seconds since the file was written."""
        return time.monotonic() - self._at

    def write(self, positions: HostPositions) -> None:
        self._at = time.monotonic()
        with contextlib.suppress(OSError):
            folder = os.path.dirname(self._path)
            if os.path.islink(folder):
                return  # nothing is written through a link
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)  # not its parents: a run directory that was removed stays so
            with replacing(self._path) as file:
                json.dump(asdict(positions), file)


def _details(text: str, since: int) -> PositionDetails | None:
    """Returns the details that a rank gave of its position; None if it has gone on since."""
    try:
        details = from_json(PositionDetails, json.loads(text))
    except ValueError:
        return None
    return details if details.since == since else None


def forget_positions(run_dir: str) -> None:
    """Removes the files of an earlier run in the folder, and what else has the name of their folder."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, FOLDER))  # a link or a pipe: a folder stays
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.join(run_dir, FOLDER)):
            if _FILE.fullmatch(name):
                os.remove(os.path.join(run_dir, FOLDER, name))


def read_positions(run_dir: str) -> tuple[list[HostPositions], list[str]]:
    """Returns the positions that the launchers of a run wrote at its last start, and what is wrong with files that
    cannot be read.
    """
    folder = os.path.join(run_dir, FOLDER)
    try:
        names = sorted(name for name in os.listdir(folder) if _FILE.fullmatch(name))
    except OSError:
        names = []
    hosts, faults = list[HostPositions](), list[str]()
    for name in names:
        path = os.path.join(folder, name)
        try:
            positions = from_json(HostPositions, read_json(path, _LIMIT))
            if not all(_is_sound(place) for place in positions.ranks):
                raise DecodeError("a position is out of range")
        except (OSError, ValueError) as error:
            faults.append(f"{path} cannot be read: {error}")
            continue
        hosts.append(replace(positions, age=file_age(path)))
    last = max((positions.attempt for positions in hosts), default=0)
    return [positions for positions in hosts if positions.attempt == last], faults


def _is_sound(place: RankPosition) -> bool:
    return place.phase in PHASES and min(place.rank, place.step, place.microbatches) >= 0 and place.seconds >= 0


def position_number(phase: Phase, microbatches: int = 0) -> int:
    return phase + _MICROBATCH * microbatches


def phase_of(number: int) -> Phase:
    return Phase(number % _MICROBATCH)
