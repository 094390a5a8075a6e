"""A step of each program of tests/programs, as a job in one process, beside one of its plain loop; and their lines.

`python -m benchmarks programs` measures them all and writes the table of README.md anew.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.measure import Ratio, compare
from benchmarks.page_blocks import write_block

HERE = Path(__file__).parent
FOLDER = HERE.parent / "tests" / "programs"
FEW, MANY = 20, 220  # steps; the first are slower, and are left out

# The seconds from one step of a program's plain loop to a later one.
LOOP = """
import sys, time
sys.path.insert(0, sys.argv[1])
from dslc.runtime.process.vision_library import let_torchvision_load
let_torchvision_load()
plain = __import__(sys.argv[2]).plain
plain(1)  # imports what it needs
times = [time.perf_counter()]
for steps in map(int, sys.argv[3:]):
    plain(steps)
    times.append(time.perf_counter())
first, second = (b - a for a, b in zip(times, times[1:]))
print(second - first)
"""
PREPARE = """
import sys
sys.path.insert(0, sys.argv[1])
from dslc.runtime.process.vision_library import let_torchvision_load
let_torchvision_load()
getattr(__import__(sys.argv[2]), "prepare", lambda: None)()
"""


@dataclass(frozen=True, kw_only=True)
class ProgramComparison:
    """`job` and `loop` are lines of text, without the empty ones."""

    ratio: Ratio
    name: str
    job: int
    loop: int

    def __str__(self) -> str:
        return f"{self.ratio}; {self.job} lines of the job, {self.loop} of the loop"

    @property
    def row(self) -> str:
        r = self.ratio
        times = f"{r.ours:.3g} ms | {r.theirs:.3g} ms | {r.median:.3f} [{r.low:.3f}, {r.high:.3f}]"
        return f"| `{self.name}` | {times} | {self.job} | {self.loop} |"


def names() -> list[str]:
    return sorted(folder.name for folder in FOLDER.iterdir() if (folder / f"{folder.name}.plt").exists())


def measure(
    name: str, pairs: int, step_of_dslc: Callable[..., float], finish: Callable[[list[str]], str]
) -> ProgramComparison:
    """Measures one program. `step_of_dslc` gives the milliseconds of a job's step, `finish` runs a command."""
    folder = FOLDER / name
    job = folder / f"{name}.plt"
    finish([sys.executable, "-c", PREPARE, str(folder), name])

    def ours() -> float:
        return step_of_dslc(str(job), f"train.steps={MANY}", "log.every=10 steps")

    def by_hand() -> float:
        command = [sys.executable, "-c", LOOP, str(folder), name, str(FEW), str(MANY)]
        return 1000 * float(finish(command)) / (MANY - FEW)

    ratio = compare(f"step, {name}", ours, by_hand, pairs=pairs, unit="ms")
    loop = (folder / f"{name}.py").read_text().partition("def plain(")[2].partition("\n\n\n")[0]
    return ProgramComparison(
        ratio=ratio, name=name, job=_lines(job.read_text()), loop=1 + _lines(loop.partition("\n")[2])
    )


def _lines(text: str) -> int:
    return len([line for line in text.splitlines() if line.strip()])


def write(found: Sequence[ProgramComparison], path: Path = HERE / "README.md") -> None:
    """Writes the table between its marks in the page."""
    cores, today = os.cpu_count(), datetime.date.today()
    told = (
        "Each program of [tests/programs](../tests/programs) in one process, as a job and as a loop: the time of\n"
        f"a step, the median of {found[0].ratio.pairs} pairs, and the lines of the job and of the function with the\n"
        f"loop; data set and network are shared. {cores} cores, torch {version('torch')}, Python "
        f"{platform.python_version()}, {today}.\n"
    )
    head = "| program | job | loop | ratio [95%] | lines of the job | of the loop |\n" + "| --- " * 6 + "|\n"
    table = head + "".join(f"{each.row}\n" for each in found)
    write_block(path, "programs", f"{told}\n{table}")
