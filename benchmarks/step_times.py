"""The predicted time of a step beside the measured one, for the table of docs/step-time.md.

A calibration of a job is followed by the trainings of its plans, each predicted before it runs. Rows of two hosts need
root, as they are network namespaces with a link of a set rate. `python -m benchmarks.step_times own vit` measures the
rows of these jobs anew, and keeps the others.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.page_blocks import read_block, write_block

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.commands import dslc  # noqa: E402
from helpers.hosts import TOOL, namespaces, started  # noqa: E402
from helpers.launcher import DSLC  # noqa: E402

PAGE = ROOT / "docs" / "step-time.md"
TRAINED = ("train.steps=46", "train.epochs=none", "log.every=9 steps")
ENVIRONMENT = {**os.environ, "XDG_CONFIG_HOME": "/nonexistent"}  # without the calibrations of who runs this
TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
TRANSFORMERS = """model {
  network = transformers("llama")
  loss    = cross_entropy()
}
data {
  source = synthetic(samples = 1024, vocab = 256, context = 64)
  batch  = 16
}
devices {
  cpus = 2
}
train {
  steps     = 60
  optimizer = adamw(lr = 6e-4)
}
"""


@dataclass(frozen=True)
class Group:
    """Plans of a job that one calibration of it serves: of the job with `settings`, to which each plan adds its own.

    With a `link`, which is a rate as `tc` spells it, the job runs on two hosts.
    """

    job: str
    settings: tuple[str, ...] = ()
    plans: tuple[tuple[str, ...], ...] = ((),)
    link: str = ""


# A line of the log every ninth step is a part of its own of a step of 2 ms, and so is the drawing of the plan, which
# takes a processor for the first second of a run.
_SHORT_STEPS = ("evaluate.every=100 epochs", "train.steps=3002", "log.every=300 steps")
_TWO_HOSTS = ("devices.nodes=2", "devices.cpus=1")
GROUPS = (
    Group(
        "benchmarks/jobs/gpt.plt",
        plans=(
            (),
            ("parallelism.zero=1",),
            ("parallelism.microbatches=4",),
            ("memory.recompute=full",),
            ("data.batch=32",),
        ),
    ),
    Group("benchmarks/jobs/gpt.plt", ("parallelism.zero=3",), ((), ("parallelism.zero=2",), ("data.batch=32",))),
    Group(
        "benchmarks/jobs/gpt.plt",
        ("parallelism.pipeline=2", "parallelism.microbatches=8"),
        ((), ("parallelism.microbatches=4", "parallelism.schedule=gpipe")),
    ),
    Group("benchmarks/jobs/gpt.plt", ("devices.cpus=1",), ((), ("parallelism.microbatches=2",))),
    Group(
        "benchmarks/jobs/gpt.plt",
        ("devices.cpus=4",),
        ((), ("parallelism.zero=1",)),
    ),
    Group(
        "benchmarks/jobs/gpt.plt",
        ("devices.cpus=4", "parallelism.pipeline=4", "parallelism.microbatches=8"),
    ),
    Group("benchmarks/jobs/gpt.plt", ("devices.cpus=4", "parallelism.pipeline=2", "parallelism.microbatches=4")),
    Group("benchmarks/jobs/gpt.plt", ("train.precision=bf16",)),
    Group("benchmarks/jobs/gpt.plt", ("parallelism.context=2",), ((), ("data.batch=32",))),
    Group("benchmarks/jobs/gpt.plt", ("memory.recompute=selective",)),
    Group(
        "benchmarks/jobs/gpt.plt",
        ("parallelism.tensor=2", "parallelism.sequence=true"),
        ((), ("parallelism.microbatches=2",)),
    ),
    Group("benchmarks/jobs/gpt.plt", ("parallelism.gradients=fp16()",)),
    Group("benchmarks/jobs/convnet.plt", plans=((), ("parallelism.microbatches=2",), ("data.batch=256",))),
    Group("benchmarks/jobs/convnet.plt", ("parallelism.zero=3",)),
    Group("examples/blocks.plt"),
    Group("examples/resnet.plt"),
    Group("examples/vit.plt", plans=((), ("parallelism.zero=1",))),
    Group("examples/lstm.plt", plans=((), ("data.batch=64",))),
    Group("examples/llama_cpu.plt", plans=((), ("data.batch=32",))),
    Group("examples/llama_cpu.plt", ("parallelism.tensor=1",), ((), ("parallelism.zero=3",))),
    Group("examples/own/own.plt", _SHORT_STEPS, ((), ("data.batch=64",))),
    Group("llama.plt"),
    Group("benchmarks/jobs/gpt.plt", _TWO_HOSTS, ((), ("parallelism.zero=1",)), link="1gbit"),
    Group("benchmarks/jobs/gpt.plt", (*_TWO_HOSTS, "parallelism.zero=3"), link="1gbit"),
    Group("benchmarks/jobs/convnet.plt", _TWO_HOSTS, ((), ("data.batch=256",)), link="1gbit"),
    Group(
        "benchmarks/jobs/gpt.plt", (*_TWO_HOSTS, "parallelism.pipeline=2", "parallelism.microbatches=8"), link="1gbit"
    ),
)


@dataclass(frozen=True)
class Row:
    job: str
    settings: tuple[str, ...]
    predicted: float
    measured: tuple[float, ...]  # of each run

    @property
    def error(self) -> float:
        return self.predicted / statistics.median(self.measured) - 1

    def text(self) -> str:
        low, high = (f"{1000 * each:.1f}" for each in (min(self.measured), max(self.measured)))
        name = self.job.removesuffix(".plt").rpartition("/")[2]
        plan = f"`{', '.join(self.settings)}`" if self.settings else "as it is"
        middle = 1000 * statistics.median(self.measured)
        times = f"{1000 * self.predicted:.1f} ms | {middle:.1f} ms, {low} to {high}"
        return f"| {name} | {plan} | {times} | {100 * self.error:+.0f}% |"


@contextmanager
def jobs_folder() -> Iterator[Path]:
    """Gives a folder with the jobs that stand in no other."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "llama").mkdir()
        (Path(folder) / "llama" / "config.json").write_text(json.dumps(TINY_LLAMA))
        (Path(folder) / "llama.plt").write_text(TRANSFORMERS)
        yield Path(folder)


def write_table(runs: int, jobs: Sequence[str] = ()) -> None:
    """Measures all rows, `runs` times each, and writes the table; with `jobs`, as "own", their rows alone."""
    old = read_block(PAGE, "times")
    rows = {_row_key(line): line for line in old.splitlines()[2:] if line.startswith("| ") and jobs}
    with jobs_folder() as folder:
        for group in GROUPS:
            if jobs and Path(group.job).stem not in jobs:
                continue
            for row in _rows(group, folder, runs):
                print(row.text(), flush=True)
                rows[_row_key(row.text())] = row.text()
    errors = [abs(int(text.split("|")[-2].strip(" %"))) for text in rows.values()]
    summary = f"Off by {statistics.median(errors):.0f}% at the median, {max(errors)}% at worst."
    print(summary)
    heading = "| job | plan | predicted | measured | off by |\n| --- | --- | ---: | ---: | ---: |\n"
    table = heading + "".join(f"{text}\n" for text in rows.values()) + f"\n{summary}\n"
    write_block(PAGE, "times", table)


def _row_key(text: str) -> tuple[str, ...]:
    """Returns the job and the plan of a row."""
    return tuple(text.split("|")[1:3])


def _rows(group: Group, folder: Path, runs: int) -> Iterator[Row]:
    source = ROOT / group.job if (ROOT / group.job).exists() else folder / group.job
    catalogue = folder / "here.toml"
    with namespaces(2, group.link) if group.link else nullcontext():
        command = finish_on_hosts if group.link else finish
        command("calibrate", source, "-o", catalogue, *flags(group.settings))
        for plan in group.plans:
            last = {each.partition("=")[0]: each for each in (*group.settings, *plan)}  # of settings of one field
            settings = tuple(last.values())
            fixed = (*TRAINED, f'devices.catalogue="{catalogue}"')
            steps = []
            for run in range(runs):
                out = folder / f"run-{run}"
                command("run", source, "--out", out, *flags((*fixed, *settings)))
                steps.append(json.loads((out / "report.json").read_text())["step_time"])
                shutil.rmtree(out)
            if steps[0]["predicted"] is None:
                raise SystemExit(f"{group.job} {settings} is not predicted")
            link = (f"hosts, {group.link}",) if group.link else ()
            measured = tuple(step["measured"] for step in steps)
            shown = tuple(each for each in settings if each not in _SHORT_STEPS)
            yield Row(group.job, (*link, *shown), steps[0]["predicted"], measured)


def flags(settings: tuple[str, ...]) -> list[str]:
    return [word for each in settings for word in ("--set", each)]


def finish(*arguments: object) -> str:
    """Runs the command on this host, and returns its output."""
    run = dslc(*arguments, cwd=ROOT, env=ENVIRONMENT)
    if run.returncode:
        raise SystemExit(run.stdout + run.stderr)
    return run.stdout


def finish_on_hosts(*arguments: object) -> None:
    """Runs the command on two hosts at once."""
    words = [str(DSLC), *map(str, arguments), "--rendezvous", "host1"]
    with (
        TemporaryDirectory() as folder,
        started(Path(folder), [[str(TOOL), "run", str(n), *words] for n in (1, 2)]) as both,
    ):
        for status, said in [command.end() for command in both]:
            if status:
                raise SystemExit(said)


if __name__ == "__main__":
    write_table(3, sys.argv[1:])
