"""Flips one bit in a training and checks who names it: `python -m instruments.bit_flips N SEED`, with PYTHONPATH=tests.

Model: a flip has a drawn kind (a parameter after an update, a gradient, a moment of Adam before an update), step,
element, bit, and place: one rank of three, or all ranks of one of two runs. The job trains with the flip, and is
compared with the same training without it. The change of the number says what must happen:

- a parameter that changed on one rank: `train.check_replicas` stops the run after the step, and names both
- a change of more than what rounding explains: `dslc bisect` names the step and the tensor
- a number that is not finite any more: the same, or the run stops in that step or the next one
- a smaller change: nothing is named, or a later tensor to which the change has grown; never an earlier one
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from helpers.flipped_bits import Effect, Flip
from helpers.job_texts import job_text
from helpers.paths import HELPERS

from dslc.commands.bisect import BisectedSide, MeasuredRounding, Trainings, open_side, single_process
from dslc.terminal.exit_codes import CommandFailedError
from dslc.verification.bisection import find_difference
from dslc.verification.recordings import GRADIENT, STATE, TensorKey, TensorRecording
from dslc.verification.replay_window import ReplayWindow
from dslc.verification.rounding_bounds import SHARE_LIMIT

RANKS, STEPS = 3, 4
SIZES = {
    "first.weight": 72,
    "first.bias": 12,
    "norm.weight": 12,
    "norm.bias": 12,
    "last.weight": 36,
    "last.bias": 3,
}
JOB = job_text(
    model={"network": 'python("flipped_bits:net")'},
    data={"source": 'python("flipped_bits:data")', "batch": 24},
    devices={"cpus": RANKS},
    train={"steps": 10, "optimizer": "adamw(lr = 1e-2)", "check_replicas": "1 step"},
    log=None,
)
_COPIES = re.compile(r"after step (\d+), `(\S+)` on rank (\d)")
_STOPPED = re.compile(r"training failed on rank \d at step (\d+)")
_EXPLAINED = 3.0  # a change of this many times the bound, or less than its inverse, is on either side of the limit


@dataclass(frozen=True, kw_only=True)
class FlipResult:
    flip: Flip
    outcome: str  # "copies", "named", "stopped", "nothing", or "wrong: …"
    share: float  # of what rounding explains


class FlipTrial:
    """Trains with one flip after another, and compares each training with the undisturbed one."""

    def __init__(self, folder: Path) -> None:
        shutil.copy(HELPERS / "flipped_bits.py", folder)
        (folder / "job.plt").write_text(JOB)
        self._folder = folder
        self._trainings = Trainings(ReplayWindow(last=STEPS), str(folder))
        self._side: BisectedSide = open_side(str(folder / "job.plt"), [], str(folder))
        self._rounding: MeasuredRounding = self._trainings.measure_rounding(single_process(self._side))
        self._undisturbed: TensorRecording = self._trainings.record(self._side, self._rounding.plain)

    def try_flip(self, flip: Flip) -> FlipResult:
        for path in self._folder.glob("effect-*.json"):
            path.unlink()
        os.environ["DSLC_FLIP"] = json.dumps(asdict(flip))
        screen = io.StringIO()
        recording: TensorRecording | None = None
        try:
            with contextlib.redirect_stderr(screen), contextlib.suppress(CommandFailedError):
                recording = self._trainings.record(self._side, self._rounding.plain)
        finally:
            del os.environ["DSLC_FLIP"]
        effects = [Effect(**json.loads(path.read_text())) for path in self._folder.glob("effect-*.json")]
        share = self._share(flip, effects)
        return FlipResult(flip=flip, outcome=self._outcome(flip, share, recording, screen.getvalue()), share=share)

    def _share(self, flip: Flip, effects: list[Effect]) -> float:
        """Returns the change of the tensor as a share of what rounding explains."""
        assert len(effects) == (1 if flip.rank >= 0 else RANKS), effects
        changes = sum(effect.change for effect in effects) / (RANKS if flip.kind == "gradient" else len(effects))
        return abs(changes) / self._rounding.bounds[_key(flip)] if math.isfinite(changes) else math.inf

    def _outcome(self, flip: Flip, share: float, recording: TensorRecording | None, shown: str) -> str:
        if recording is None:
            return self._judge_failure(flip, share, shown)
        if flip.rank >= 0 and flip.kind != "gradient" and share > 0:
            return "wrong: a copy that differs is not found"
        result = find_difference(self._undisturbed, recording, self._rounding.bounds, self._rounding.reference)
        if not result.text:
            return "nothing" if share < SHARE_LIMIT * _EXPLAINED else "wrong: nothing is named"
        assert result.first is not None or share, result.text
        key = result.first.key if result.first is not None else None
        if key == _key(flip):
            return "named" if share > SHARE_LIMIT / _EXPLAINED else f"wrong: {result.text} by {share:.2g}"
        is_later = (result.step or 0) > flip.step or (
            key is not None and key.step == flip.step and flip.kind == "gradient" and key.kind != "output"
        )
        if is_later and share < SHARE_LIMIT * _EXPLAINED:
            return "nothing"  # the change has grown
        return f"wrong: {result.text} of step {result.step}"

    def _judge_failure(self, flip: Flip, share: float, shown: str) -> str:
        copies, stopped = _COPIES.search(shown), _STOPPED.search(shown)
        if copies is not None:
            step, name, rank = int(copies[1]), copies[2], int(copies[3])
            due = step == flip.step if share > 0 else step > flip.step
            is_right = due and name == flip.parameter and rank == flip.rank and flip.kind != "gradient"
            return "copies" if is_right else f"wrong: {copies[0]}"
        if stopped is not None and int(stopped[1]) in (flip.step, flip.step + 1) and share > SHARE_LIMIT:
            return "stopped"
        return f"wrong: {shown}"


def _key(flip: Flip) -> TensorKey:
    return TensorKey(step=flip.step, kind=GRADIENT if flip.kind == "gradient" else STATE, name=flip.parameter)


def drawn_flip(draw: random.Random, number: int, folder: Path) -> Flip:
    """Returns a flip; a third of them each are of a parameter, a gradient and a moment, half of them of one rank."""
    kind = ("parameter", "gradient", draw.choice(("exp_avg", "exp_avg_sq")))[number % 3]
    name = draw.choice(list(SIZES))
    return Flip(
        kind=kind,  # type: ignore[arg-type]
        step=draw.randint(2 if kind.startswith("exp") else 1, STEPS - 1),
        parameter=name,
        element=draw.randrange(SIZES[name]),
        bit=draw.randrange(32),
        rank=draw.randrange(RANKS) if draw.random() < 0.5 else -1,
        folder=str(folder),
    )


def count_flips(number: int, seed: int) -> Counter[str]:
    """Returns how many of the drawn flips have each outcome, and prints each."""
    draw, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        trial = FlipTrial(Path(name))
        for n in range(number):
            result = trial.try_flip(drawn_flip(draw, n, Path(name)))
            flip = result.flip
            where = "all ranks" if flip.rank < 0 else f"rank {flip.rank}"
            what = f"bit {flip.bit} of {flip.kind} {flip.parameter}[{flip.element}] in step {flip.step} on {where}"
            print(f"{n + 1} {what}: {result.share:.3g} of rounding, {result.outcome}", flush=True)
            outcomes[result.outcome.partition(":")[0]] += 1
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return outcomes


if __name__ == "__main__":
    count_flips(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
