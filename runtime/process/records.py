"""The record of a training as it runs: metrics.jsonl, and the same for TensorBoard.

Model: rank 0 appends one JSON object a line to `metrics.jsonl`. The launcher reads that file as it grows, and makes the
display and TensorBoard's events from it. Notes in words go to `logs/notes.txt` in the same way.

Contract: a resumed training keeps the lines up to the step of its checkpoint, without the test's, drops later lines,
and writes them again. A line that cannot be read (a disk that failed, an editor) is left out and reported with its
number. A line that cannot be written (a full disk) is written with one of the next, or lost; this is reported once.
Readers see whole lines. The keys of a line are `step` (from 1), `split` (`train`, `validation` or `test`), `loss` and
other metrics, `lr` (training), `samples` (seen so far), and `seconds` (since the first step began). With `on_nonfinite
= skip` a line also has `skipped`: the number of steps skipped since the training began or was resumed. A number that is
not finite is `null`.

A line of the training also has `seconds.data`, `.passes`, `.exposed`, `.update` and `.host`: where the time of a step
went on rank 0, in the mean since the line before (measure/phases.py). Evaluations and checkpoints count for none.
Without `.exposed` the engine does not tell the exchange from the work. Where ranks differ, `slowest.rank` is the rank
that the others wait for, with the same phases of its own, `slowest.data` and so on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dslc.compiler.facts.untrusted_files import LINE_LIMIT, open_file, open_to_append, parse_json, read_lines, replacing

NAME = "metrics.jsonl"
TEXTS = "samples.jsonl"
NOTES = os.path.join("logs", "notes.txt")
REPORT, REPORT_VERSION = "report.json", 1  # of what a run measured (measure/report.py)
SHARES = "shares.json"  # of a batch, by the measured speed of the ranks (step/rank_speeds.py)
EXPERT_LOAD = "load."  # begins the name of the load of one expert
SKIPPED = "skipped_batches.json"  # of spikes of the loss (loop/loss_spikes.py)
TRACE_MARK = "dslc: "  # begins the names of the ranges of a rank's recording (measure/step_trace.py)
SHARED_MEMORY_MARK = "shared_memory::"  # and this before the kind of a collective over shared memory and its numbers
LOGGED_VALUES = "values to log"  # the range of the all-reduce of logged steps, which is no action of the plan
PHASES = ("data", "passes", "exposed", "update", "host")
_FACTS = frozenset(
    (
        *("step", "split", "samples", "seconds", "slowest.rank"),
        *(f"{whose}.{phase}" for whose in ("seconds", "slowest") for phase in PHASES),
    )
)

Record = dict[str, Any]


class Records:
    """Writes metrics.jsonl of a run directory, after the records of the first `step` steps; on rank 0 alone. The new
    lines begin at the position `begin`. `also` is called with each new record; `tell` with the reason, in words, if the
    file cannot be written.
    """

    def __init__(
        self,
        run_dir: str,
        step: int = 0,
        also: Callable[[Record], None] | None = None,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._also, self._tell, self._told = also, tell, False
        self._late = b""  # what could not be written yet
        path = os.path.join(run_dir, NAME)
        found, damaged = _read_records(run_dir)
        for fault in damaged:
            note(run_dir, f"{NAME}, {fault}: the line is left out")
        kept = [record for record in found if step and record["step"] <= step and record["split"] != "test"]
        with replacing(path) as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
        self._path = path
        self._file = open(open_to_append(path), "ab", buffering=0)  # noqa: SIM115
        self.begin = os.path.getsize(path)

    def write(self, record: Record) -> None:
        self._late += (json.dumps(finite(record)) + "\n").encode()
        self._write()
        if self._also is not None:
            self._also(finite(record))

    def _write(self) -> None:
        try:
            while self._late:
                self._late = self._late[self._file.write(self._late) :]
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(f"{self._path} cannot be written ({error.strerror}); the training goes on")

    def close(self) -> None:
        self._write()
        if self._late:
            lines = self._late.count(b"\n")
            self._tell(f"{self._path} lacks {lines} line{'s' * (lines != 1)}, which could not be written")
        with contextlib.suppress(OSError):
            self._file.close()


class TextRecords:
    """Writes the texts that a network generates to samples.jsonl of a run directory, a line for each; on rank 0 alone.
    A resumed training keeps the lines up to its `step`.
    """

    def __init__(self, run_dir: str, step: int, tell: Callable[[str], object]) -> None:
        self._path, self._tell, self._told = os.path.join(run_dir, TEXTS), tell, False
        earlier = [text for text in read_texts(self._path) if step and text["step"] <= step]
        with replacing(self._path) as file:
            file.writelines(json.dumps(text, ensure_ascii=False) + "\n" for text in earlier)

    def write(self, texts: Iterable[Record]) -> None:
        lines = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
        try:
            with open(open_to_append(self._path), "ab") as file:
                file.write(lines.encode(errors="replace"))
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(f"{self._path} cannot be written ({error.strerror}); the training goes on")


def read_texts(path: str) -> Iterator[Record]:
    """Yields the readable lines of a file of generated texts; none if there is no file."""
    for line in Follower(path).new():
        with contextlib.suppress(ValueError):  # of another program, or cut off when the disk was full
            yield parse_text(line)


def parse_text(line: str) -> Record:
    """Returns the record of a generated text. Raises ValueError if a line has none."""
    found = parse_json(line)
    if not isinstance(found, dict) or type(found.get("step")) is not int or type(found.get("number")) is not int:
        raise ValueError("it is not a text of a step")
    if not all(isinstance(found.get(name), str) for name in ("prompt", "text")):
        raise ValueError("it has no prompt, or no text")
    return found


def finite(value: Any) -> Any:
    """Returns a value for JSON, which has no word for a number that is not finite: those are None."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def name_fault(name: str) -> str:
    """Returns why a number of the user's cannot have this name in a record; "" if it can."""
    if not name.isprintable():
        return "a name in a record has no control characters"
    return f"`{name}` is something else in each record" if name in _FACTS | {"loss", "lr", "skipped"} else ""


def numbers(record: Record) -> Iterator[tuple[str, float | None]]:
    """Yields name and value of each number of a record that describes the training, without lists of numbers."""
    for name, value in record.items():
        if name not in _FACTS and not isinstance(value, list):
            yield name, value


def overview_numbers(record: Record) -> Iterator[tuple[str, float | None]]:
    """Yields the same without the load of each expert: a training may have hundreds of experts."""
    return ((name, value) for name, value in numbers(record) if not name.startswith(EXPERT_LOAD))


def phases_of(record: Record) -> dict[str, float]:
    """Returns the seconds of a step by phase that a record has."""
    found = {phase: record.get(f"seconds.{phase}") for phase in PHASES}
    return {phase: seconds for phase, seconds in found.items() if seconds is not None}


def read_metrics(run_dir: str) -> list[Record]:
    """Returns the records of metrics.jsonl; [] if there is no file. Raises ValueError, with the number of the line, if
    one cannot be read.
    """
    found, damaged = _read_records(run_dir)
    if damaged:
        raise ValueError(f"{os.path.join(run_dir, NAME)}, {damaged[0]}")
    return found


def readable_records(run_dir: str) -> list[Record]:
    return _read_records(run_dir)[0]


def _read_records(run_dir: str) -> tuple[list[Record], list[str]]:
    """Returns the records of metrics.jsonl, and for each unreadable line its number and the reason."""
    found: list[Record] = []
    damaged: list[str] = []
    number = 0
    try:
        with open_file(os.path.join(run_dir, NAME)) as file:
            for number, line in enumerate(read_lines(file), 1):
                try:
                    found.append(parse_record(line))
                except ValueError as error:  # also if it is not UTF-8, or not JSON
                    damaged.append(f"line {number} cannot be read ({error})")
    except FileNotFoundError:
        return [], []
    except ValueError as error:
        damaged.append(f"what follows line {number} cannot be read ({error})")
    return found, damaged


def parse_record(line: bytes) -> Record:
    """Returns the record in a line. Raises ValueError if there is none: another program may have written it."""
    told = parse_json(line.decode())
    if not isinstance(told, dict) or type(told.get("step")) is not int or not isinstance(told.get("split"), str):
        raise ValueError("it is not a record of a step")
    if type(told.get("seconds", 0)) not in (int, float):
        raise ValueError("its seconds are no number")
    if not all(name.isprintable() for name in (*told, told["split"])):
        raise ValueError("a name in it has control characters")
    odd = next((name for name in told if name != "split" and not _is_number(told[name], name)), None)
    if odd is not None:
        raise ValueError(f"its `{odd}` is no number")
    return told


def _is_number(value: object, name: str) -> bool:
    return value is None or type(value) in (int, float) or (isinstance(value, list) and name not in _FACTS)


def note(run_dir: str, text: str, whole: str = "") -> None:
    """Writes one line for whoever watches the training, and into this rank's log, where `whole` may say more. Raises
    nothing.
    """
    print(whole or text, flush=True)
    path = os.path.join(run_dir, NOTES)
    with contextlib.suppress(OSError), open(open_to_append(path), "a", encoding="utf-8") as file:
        file.write(" ".join(text.split()) + "\n")


class Follower:
    """Reads a file of lines as it grows, from byte `begin` on. `position` is the byte after the last line."""

    def __init__(self, path: str, begin: int = 0) -> None:
        self._path, self.position = path, begin

    def new(self) -> Iterator[str]:
        return (line for line in self.parts() if line is not None)

    def parts(self) -> Iterator[str | None]:
        """Yields the new lines, and None for each part of a line that no training writes, as it is very long: a reader
        may stop at each.
        """
        try:
            with open_file(self._path) as file:
                file.seek(self.position)
                while line := file.readline(LINE_LIMIT):
                    if line.endswith(b"\n"):
                        self.position += len(line)
                        yield line.decode(errors="replace")
                    elif len(line) == LINE_LIMIT:
                        self.position += len(line)
                        yield None
                    else:
                        break
        except OSError:
            return  # it is not there, or not at the moment


class RecordFollower:
    """Reads the records of a training as it writes them, or its generated `texts`, each once over all resumes."""

    def __init__(self, run_dir: str, *, texts: bool = False) -> None:
        self._path, self._texts = os.path.join(run_dir, TEXTS if texts else NAME), texts
        self._seen = set(Follower(self._path).new())  # of the training that this one resumes
        self._follower, self._file = Follower(self._path), 0

    def new(self) -> Iterator[Record]:
        try:
            file = os.stat(self._path).st_ino
        except OSError:
            return
        if file != self._file:  # a training that resumes writes it anew
            self._follower, self._file = Follower(self._path), file
        for line in self._follower.new():
            if line not in self._seen:
                self._seen.add(line)
                with contextlib.suppress(ValueError):  # written by another, as by an editor
                    yield parse_text(line) if self._texts else parse_record(line.encode())


def metrics_of(record: Record) -> dict[str, float]:
    """Returns the finite numbers of a record under the names that loggers show: `train/loss`, `phases/data`."""
    named = {f"{record['split']}/{name}": value for name, value in numbers(record) if value is not None}
    return named | {f"phases/{phase}": seconds for phase, seconds in phases_of(record).items()}


class TensorBoard:
    """Writes each record's numbers into `folder`, and generated texts as `texts/0`. In a resumed training TensorBoard
    drops the earlier events of `step`, its first step, and of later ones.
    """

    def __init__(self, folder: str, step: int = 1) -> None:
        from torch.utils.tensorboard import SummaryWriter  # 0.1 s: not before the first step is done

        self.writer: Any = SummaryWriter(folder, purge_step=step if step > 1 else None)

    def write(self, record: Record) -> None:
        for name, value in metrics_of(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def write_text(self, text: Record) -> None:
        """Writes a generated text, as `texts/0` for the first prompt."""
        blocks = [_as_code(f"{text['prompt']}{text['text']}")]
        if text.get("chat"):
            blocks = [_as_code(text["prompt"]), "answer:", _as_code(text["text"])]
        self.writer.add_text(f"texts/{text['number']}", "\n\n".join(blocks), text["step"])
        if text["number"] == 0 and type(text.get("took")) in (int, float):
            self.writer.add_scalar("phases/texts", text["took"], text["step"])

    def close(self) -> None:
        self.writer.close()


def _as_code(text: str) -> str:
    """Returns a text as Markdown that shows each character of it."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
