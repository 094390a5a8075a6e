"""Tests the first promise of the design on jobs drawn at random (jobs_drawn.py): accepted jobs run.

Model: each job goes through the front end that `dslc run` uses. One that is accepted is trained by the real launcher
and so is the same training in one process; both have `LIMIT` seconds. One that is rejected must have a code. `Tally`
counts the results, and `forced` trains a rejected one nevertheless, without the rules that refused it.

Tolerances are those of `dslc verify` (cli/verification/comparison.py), in one number or relative to it, whichever is
more; in 16 bits parameters are not compared, and where that fails a loss may differ by as much as 16 bits change the
losses of the one process: with batch norms over 4 samples that is 0.05 to 0.14. Where it fails in fp32, `dslc verify`
has the last word, which trains one process again in float64 and in other orders, to see what float32 itself rounds.
Such jobs agree `rounded`.

Limits: of what a warning says that it depends on the plan (`BY_NATURE`) it is held only that it runs to its end with
numbers. With Adam and its like the parameters of a network with batch norm are not compared: the bias of a layer
before one has no gradient but rounding.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from helpers.commands import dslc
from helpers.launcher import PRELOADED, Launcher
from helpers.trained import load_what_traces, without_times
from safetensors.numpy import load_file

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import Ready, prepare
from dslc.verification.comparison import Tolerance, tolerance_of
from instruments.drawn_files import lay_out
from instruments.jobs_drawn import CHECKPOINT, Drawn

LIMIT = 100.0  # longer than ranks wait for one another before they say where each of them is
BY_NATURE = (
    "W0437",
    "W0606",
    "W0607",
    "W0608",
    "W0609",
    "W0624",
    "W0625",
    "W0626",
    "W0630",
    "W0641",
    "W0642",
    "W0643",
    "W0646",
    "W0649",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one job. `codes`: those that it was rejected with, or warned of."""

    seed: int
    said: str  # agrees, differs, crashed, hung, rejected, broke the compiler
    codes: tuple[str, ...] = ()
    why: str = ""
    rounded: bool = False  # it agrees as closely as trainings in one process with other rounding


@dataclass
class Tally:
    results: list[Result] = field(default_factory=list)
    resumed: int = 0  # trainings that went on under another plan as well

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.said not in ("agrees", "rejected")]

    def text(self) -> str:
        """The summary: one line of counts, one of codes, and each failure."""
        said = Counter(result.said for result in self.results)
        accepted = len(self.results) - said["rejected"] - said["broke the compiler"]
        loose = sum(result.said == "agrees" and bool({*result.codes} & {*BY_NATURE}) for result in self.results)
        rounded = sum(result.rounded for result in self.results)
        codes = Counter(code for result in self.results if result.said == "rejected" for code in set(result.codes))
        lines = [
            f"drawn {len(self.results)}, accepted {accepted}: "
            + ", ".join(f"{said[word]} {word}" for word in ("agrees", "differs", "crashed", "hung"))
            + f" ({loose} of them by nature only held to end well, {rounded} within what rounding does; "
            f"{self.resumed} resumed under another plan as well); "
            f"{said['broke the compiler']} broke the compiler",
            f"rejected {said['rejected']}: " + ", ".join(f"{code} {number}" for code, number in codes.most_common()),
        ]
        lines += [f"seed {result.seed} {result.said}: {result.why}" for result in self.failed]
        return "\n".join(lines)


# Rules without which a job can still run; one whose shapes, axes or names do not fit cannot.
FORCEABLE = re.compile(r"E0216|E030[12347]|E031[234]|E041[246789]|E0424|E043[012]|E0602|E0720")
_EACH = 5  # rejected jobs of a code that are forced


@dataclass
class Forced:
    """Counts rejected jobs that were trained all the same, and those that deserved the rejection."""

    results: list[Result] = field(default_factory=list)  # `codes` are those of the rejection

    def wants(self, result: Result) -> bool:
        """Of each code some, where nothing else was wrong with the job."""
        if result.said != "rejected" or len({*result.codes}) != 1 or not FORCEABLE.fullmatch(result.codes[0]):
            return False
        return sum(each.codes[0] == result.codes[0] for each in self.results) < _EACH

    def text(self) -> str:
        lines = [f"forced {len(self.results)} of the rejected:"]
        for result in sorted(self.results, key=lambda each: each.codes):
            why = [line for line in result.why.strip().splitlines() if line.strip()] or [""]
            lines.append(f"  {result.codes[0]} seed {result.seed} {result.said}: {why[0][:150]}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Trained:
    lines: list[dict[str, Any]]  # of metrics.jsonl
    weights: dict[str, np.ndarray[Any, Any]]


class Fault(Exception):
    """A training that failed: `said`, and why."""

    def __init__(self, said: str, why: str) -> None:
        super().__init__(why)
        self.said, self.why = said, why


class Trainer:
    """Runs jobs one after another. Must be closed."""

    def __init__(self, folder: Path) -> None:
        load_what_traces()
        self._folder, self._launcher = folder, Launcher(*PRELOADED)
        self.resumed = 0  # trainings that have gone on under another plan
        lay_out(folder)

    def close(self) -> None:
        self._launcher.close()

    def take(self, drawn: Drawn) -> Result:
        try:
            ready, report = self._prepare(drawn.text, drawn.seed)
        except Exception:
            return Result(seed=drawn.seed, said="broke the compiler", why=traceback.format_exc(limit=-4))
        codes = tuple(d.code for d in (report.errors or report.found))
        if ready is None:
            ok = bool(codes) and all(re.fullmatch(r"E\d{4}", code) for code in codes)
            why = "" if ok else f"rejected without a code: {report.found}"
            return Result(seed=drawn.seed, said="rejected" if ok else "broke the compiler", codes=codes, why=why)
        return self._compare(drawn, ready, codes, codes)

    def forced(self, drawn: Drawn, rejected: Result) -> Result:
        """Trains a rejected job without the rules that rejected it, and without the proof of its plan; returns the
        result with the codes of the rejection.
        """
        with _left_out({*rejected.codes}):
            try:
                ready, report = self._prepare(drawn.text, drawn.seed)
            except Exception as error:
                why = f"no program can be made of it: {type(error).__name__}: {error}"
                return Result(seed=drawn.seed, said="broke the compiler", codes=rejected.codes, why=why)
            if ready is None:
                why = ", ".join(f"{d.code} {d.message}" for d in report.errors) or "there is nothing to plan"
                return Result(seed=drawn.seed, said="rejected", codes=rejected.codes, why=why)
            return self._compare(drawn, ready, rejected.codes, [d.code for d in report.found])

    def _compare(self, drawn: Drawn, ready: Ready, codes: tuple[str, ...], warned: Iterable[str]) -> Result:
        rounded = False
        try:
            plain, report = self._prepare(drawn.plain, drawn.seed)
            if plain is None:
                refused = ", ".join(f"{d.code} {d.message}" for d in report.errors)
                raise Fault("differs", f"one process is refused: {refused}")
            with tempfile.TemporaryDirectory(dir=self._folder) as name:
                found = self._train(ready, Path(name))
                expected = self._train(plain)
                by_nature = bool({*warned} & {*BY_NATURE})
                try:
                    _check_equal(found, expected, ready, by_nature=by_nature)
                except Fault:
                    spread = self._spread_of_16_bits(drawn, ready, expected)
                    if spread == 0.0:
                        raise
                    _check_equal(found, expected, ready, by_nature=by_nature, spread=spread)
                    rounded = True
                if drawn.resumed:
                    self._resumed(drawn, Path(name) / "checkpoints", expected, by_nature)
        except Fault as fault:
            if fault.said == "differs" and self._rounded(drawn, ready.program.steps):
                return Result(seed=drawn.seed, said="agrees", codes=codes, why=fault.why, rounded=True)
            return Result(seed=drawn.seed, said=fault.said, codes=codes, why=fault.why)
        return Result(seed=drawn.seed, said="agrees", codes=codes, rounded=rounded)

    def _spread_of_16_bits(self, drawn: Drawn, ready: Ready, narrow: Trained) -> float:
        """Returns how much 16 bits change a loss of the one process, at most; 0 in float32."""
        if ready.program.precision.dtype == "float32":
            return 0.0
        plain, _ = self._prepare(re.sub(r"  precision = .*\n", "", drawn.plain), drawn.seed)
        assert plain is not None
        pairs = zip(narrow.lines, self._train(plain).lines, strict=False)
        away = [abs(one["loss"] - other["loss"]) for one, other in pairs if None not in (one["loss"], other["loss"])]
        return max((each for each in away if math.isfinite(each)), default=0.0)

    def _resumed(self, drawn: Drawn, checkpoints: Path, expected: Trained, by_nature: bool) -> None:
        """Goes on under another plan from a checkpoint of the first; raises `Fault` if that is another training."""
        saved = 2
        path = checkpoints / f"step-{saved:08d}"
        later = [line for line in expected.lines if line["step"] > saved]
        if not path.exists() or not later:
            return  # the training ended before
        ready, report = self._prepare(drawn.resumed.replace(CHECKPOINT, str(path)), drawn.seed)
        if ready is None:
            if all(re.fullmatch(r"E\d{4}", d.code) for d in report.errors) and report.errors:
                return
            raise Fault("differs", f"resuming is refused without a code: {report.found}")
        by_nature |= bool({d.code for d in report.found} & {*BY_NATURE})
        try:
            _check_equal(self._train(ready), Trained(lines=later, weights=expected.weights), ready, by_nature=by_nature)
        except Fault as fault:
            raise Fault(fault.said, f"resumed from step {saved}: {fault.why}") from None
        self.resumed += 1

    def verified(self, drawn: Drawn) -> str:
        """Returns what is wrong with `dslc verify` of a job; "" if it holds, or is refused for a reason."""
        path = self._folder / f"verify{drawn.seed}.plt"
        path.write_text(drawn.text)
        done = dslc("verify", path, "--steps=3")
        refused = done.returncode == 1 and re.search(r"^error\[E\d{4}\]", done.stdout + done.stderr, re.MULTILINE)
        return "" if done.returncode == 0 or refused else f"{done.returncode}\n{done.stdout}{done.stderr}"

    def _rounded(self, drawn: Drawn, steps: int) -> bool:
        path = self._folder / f"verify{drawn.seed}.plt"
        path.write_text(drawn.text)
        done = dslc("verify", path, f"--steps={steps}")
        return (
            done.returncode == 0
            and re.search("trained again|that is rounding", " ".join(done.stdout.split())) is not None
        )

    def _prepare(self, text: str, seed: int) -> tuple[Ready | None, Report]:
        path = self._folder / f"job{seed}.plt"
        path.write_text(text)
        report = Report()
        return prepare(load(str(path), []), report), report

    def _train(self, ready: Ready, folder: Path | None = None) -> Trained:
        """Trains in `folder`, or in one that is removed."""
        if folder is None:
            with tempfile.TemporaryDirectory(dir=self._folder) as name:
                return self._train(ready, Path(name))
        outcome, shown = self._launch(ready, folder)
        if outcome is None or outcome.failure is not None:
            waited = outcome is not None and outcome.failure.kind == "timeout"
            raise Fault("hung" if waited else "crashed", f"{outcome and outcome.failure}\n{shown}\n{_logs(folder)}")
        text = (folder / "metrics.jsonl").read_text()
        return Trained(
            lines=[without_times(json.loads(line)) for line in text.splitlines()],
            weights=load_file(folder / "weights.safetensors"),
        )

    def _launch(self, ready: Ready, folder: Path) -> Any:
        """The launcher is ended, and another made, where a training takes longer than it may."""
        over = threading.Event()

        def end() -> None:
            over.set()
            os.killpg(self._launcher.process_id, signal.SIGKILL)

        timer = threading.Timer(LIMIT, end)
        timer.start()
        try:
            return self._launcher.launch(ready.program, ready.places, folder)
        except EOFError:
            assert over.is_set(), "the launcher ended by itself"
            self._launcher = Launcher(*PRELOADED)
            raise Fault("hung", f"no end within {LIMIT:g} s\n{_logs(folder)}") from None
        finally:
            timer.cancel()


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-1500:] for path in sorted((folder / "logs").glob("rank-*.log")))


@contextmanager
def _left_out(codes: set[str]) -> Iterator[None]:
    """Makes reports ignore diagnostics with these codes, and skips the proof of plans."""
    extend = Report.extend

    def some(self: Report, diagnostics: Any) -> None:
        extend(self, [d for d in diagnostics if d.code not in codes])

    with mock.patch.object(Report, "extend", some), mock.patch("dslc.compiler.graph.build.verify"):
        yield


# ----------------------------------------------------------------------------------------------------- the comparison


def _check_equal(found: Trained, expected: Trained, ready: Ready, *, by_nature: bool, spread: float = 0.0) -> None:
    """Raises `Fault` if the two are not the same training, or differ by more than `spread` and the tolerance."""
    steps = [line["step"] for line in found.lines]
    if steps != [line["step"] for line in expected.lines]:
        raise Fault("differs", f"steps {steps}, in one process {[line['step'] for line in expected.lines]}")
    if found.weights.keys() != expected.weights.keys():
        raise Fault("differs", f"parameters: {sorted(found.weights.keys() ^ expected.weights.keys())} in one alone")
    rates = [line["lr"] for line in expected.lines if line["split"] == "train"]
    tolerance = tolerance_of(ready.program, rates)
    for one, other in zip(found.lines, expected.lines, strict=True):
        _line(one, other, max(tolerance.loss, spread), ready, by_nature, steady=tolerance.parameter == 1e-5)
    if not by_nature and tolerance.parameter is not None and not _unsteady(ready):
        _weights(found, expected, tolerance)


def _line(
    found: dict[str, Any],
    expected: dict[str, Any],
    tolerance: float,
    ready: Ready,
    by_nature: bool,
    *,
    steady: bool,
) -> None:
    """Compares two lines of metrics; `steady`: parameters differ by no more than losses."""
    where = f"step {found['step']} {found['split']}"
    if found.keys() != expected.keys():
        raise Fault("differs", f"{where}: {sorted(found)}, in one process {sorted(expected)}")
    if _unsteady(ready) and found["split"] != "train":
        tolerance = max(tolerance, 2e-2)  # running statistics do not yet follow the biases before them
    for name, one in expected.items():
        value = found[name]
        if isinstance(one, str):
            continue
        if value is None or one is None or not (math.isfinite(value) and math.isfinite(one)):
            same = value == one or (value is not None and one is not None and math.isnan(value) and math.isnan(one))
            if not same:
                raise Fault("differs", f"{where}: {name} is {value}, in one process {one}")
            continue
        if by_nature and name not in ("samples", "lr", "step"):
            continue
        if name.startswith("load") and not steady:
            continue  # rounding that an optimizer amplifies sends a token to another expert
        allowed = {"samples": 0, "step": 0, "lr": 1e-9}.get(name, tolerance)
        if name in ("accuracy", "top_k"):
            allowed = 1e-5 if tolerance == 1e-5 else 1.0
        if abs(value - one) > allowed * max(1.0, abs(one)):
            raise Fault("differs", f"{where}: {name} is {value!r}, in one process {one!r}")


def _unsteady(ready: Ready) -> bool:
    """True if rounding may move a parameter a whole learning rate: a bias before batch norm, with Adam and its like."""
    model = ready.compiled.analysis.model
    return ready.program.optimizer.kind.lower() != "sgd" and model is not None and bool(model.batch_norm)


def _weights(found: Trained, expected: Trained, tolerance: Tolerance) -> None:
    for name, value in expected.weights.items():
        other, bound = found.weights[name], tolerance.for_parameter(name)
        if other.shape != value.shape or other.dtype != value.dtype:
            raise Fault("differs", f"{name}: {other.dtype}{other.shape}, in one process {value.dtype}{value.shape}")
        away = np.abs(other.astype(np.float64) - value.astype(np.float64))
        off = away - bound * np.maximum(1.0, abs(value))
        if off.size and not off.max() <= 0 and not (np.isnan(value).all() and np.isnan(other).all()):
            raise Fault("differs", f"{name} differs by {np.abs(other - value).max():.3g}, more than {bound:.3g}")
