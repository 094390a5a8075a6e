"""`python -m benchmarks [NAME …] [--pairs N]`: prints each ratio with its interval."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.measure import Ratio, compare, interval

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
BIN = os.path.dirname(sys.executable)
# Compiled modules are kept, as for a user; each side chooses how much of the machine a rank may use.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")}


def dslc(*arguments: str) -> list[str]:
    return [os.path.join(BIN, "dslc"), *arguments]


def torchrun(*arguments: str) -> list[str]:
    return [
        os.path.join(BIN, "torchrun"), "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", os.path.join(HERE, "handwritten.py"), *arguments,
    ]  # fmt: skip


def handwritten_command(*arguments: str) -> list[str]:
    return [sys.executable, os.path.join(HERE, "handwritten.py"), *arguments]


def finish(command: list[str], **environment: str) -> str:
    run = subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    return run.stdout


def train_dslc(job: str, *settings: str, **environment: str) -> list[dict[str, Any]]:
    """Trains a job, one of benchmarks/jobs or a path, and returns the lines of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run")
        flags = [word for setting in settings for word in ("--set", setting)]
        path = job if os.path.isabs(job) else os.path.join(HERE, "jobs", f"{job}.plt")
        finish(dslc("run", path, "--out", out, *flags), **environment)
        with open(os.path.join(out, "metrics.jsonl")) as file:
            return [line for line in map(json.loads, file) if line["split"] == "train"]


def step_of_dslc(job: str, *settings: str) -> float:
    """Returns the milliseconds of a step of a job, without the first."""
    first, *_, last = train_dslc(job, *settings)
    return float(1000 * (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))


def step_by_hand(what: str, *flags: str, command: Callable[..., list[str]] = torchrun) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "result.json")
        finish(command(what, "--out", out, *flags))
        with open(out) as file:
            found = json.load(file)
        return float(1000 * (found["last"] - found["first"]) / (found["steps"] - 1))


def until_first_step(command: list[str], sign: str, **environment: str) -> float:
    """Returns the seconds from the command to the line that reports the first step."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, env=ENVIRONMENT | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        found = 0.0
        seen = []
        for line in run.stdout:
            seen.append(line)
            if sign in line and not found:
                found = time.perf_counter() - start
    if run.returncode or not found:
        sys.exit(f"{' '.join(command)} failed:\n{''.join(seen)}")
    return found


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    finish(command)
    return time.perf_counter() - start


def show_seconds(name: str, command: list[str], runs: int, target: float | None = None) -> None:
    finish(command)  # a first run fills the caches
    times = sorted(seconds(command) for _ in range(runs))
    low, high = interval(times)
    met = "" if target is None else f"; target {target} {'met' if low <= target else 'MISSED'}"
    print(f"{name}: {statistics.median(times):.3f} s [{low:.3f}, {high:.3f}] ({runs} runs{met})", flush=True)


def show(ratio: Ratio) -> None:
    print(ratio, flush=True)


def bench_gpt(pairs: int) -> None:
    ours, by_hand = partial(step_of_dslc, "gpt"), partial(step_by_hand, "gpt")
    show(compare("step, gpt", ours, by_hand, pairs=pairs, unit="ms", target=1))


def bench_moe(pairs: int) -> None:
    """Compares a Llama with experts, and a loop over torch's `grouped_mm`."""
    ours, by_hand = partial(step_of_dslc, "moe"), partial(step_by_hand, "moe")
    show(compare("step, moe", ours, by_hand, pairs=pairs, unit="ms", target=1.02))


def bench_convnet(pairs: int) -> None:
    ours, by_hand = partial(step_of_dslc, "convnet"), partial(step_by_hand, "convnet")
    show(compare("step, convnet", ours, by_hand, pairs=pairs, unit="ms", target=1))
    # No target: hand-written code on CPUs has nothing that computes these statistics.
    name = "step, convnet with batch statistics over all ranks"
    show(compare(name, partial(ours, "sync=true"), by_hand, pairs=max(6, pairs // 5), unit="ms"))


def bench_dropout(pairs: int) -> None:
    """Compares dropout by sample with that of torch's generator, one for each rank."""
    by_sample = partial(step_of_dslc, "gpt", "model.network.dropout=0.1")
    by_torch = partial(by_sample, "train.dropout_generator=torch")
    name = "step, gpt, dropout by sample over torch's"
    show(compare(name, by_sample, by_torch, pairs=pairs, unit="ms", target=1.02))


def bench_phases(pairs: int) -> None:
    """Compares steps with and without the record of their phases, ten for each pair."""
    for what in ("gpt", "convnet"):
        flags = ("--nproc-per-node", "2", "-m", "benchmarks.phases", what, "--pairs", str(10 * pairs))
        print(finish([os.path.join(BIN, "torchrun"), *flags]).strip(), flush=True)


def bench_zero(pairs: int) -> None:
    """Runs a third of the other benchmarks' steps, so that thirty pairs of each end within the hour."""
    for zero, flags in ((1, ()), (1, ("--fully-shard",)), (2, ()), (3, ())):
        ours = partial(step_of_dslc, "gpt", f"parallelism.zero={zero}", "train.steps=21")
        by_hand = partial(step_by_hand, "gpt", "--zero", str(zero), "--steps", "21", *flags)
        name = f"step, gpt, zero {zero}" + (" against fully_shard" if flags else "")
        show(compare(name, ours, by_hand, pairs=pairs, unit="ms", target=1.02))


def bench_pipeline(pairs: int) -> None:
    """Compares two stages of two blocks each, 1F1B, eight micro-batches of two sequences."""
    ours = partial(step_of_dslc, "gpt", "parallelism.pipeline=2", "parallelism.microbatches=8", "train.steps=21")
    by_hand = partial(step_by_hand, "gpt", "--pipeline", "--microbatches", "8", "--steps", "21")
    show(compare("step, gpt, pipeline 2", ours, by_hand, pairs=pairs, unit="ms", target=1.02))


def bench_tensor(pairs: int) -> None:
    """Compares half of each matrix on either rank: as a job has it on CPUs, with whole sequences between them, with a
    loop that has pieces; and each way with a loop of that way.
    """
    pieces, whole = ("parallelism.sequence=true",), ("--whole-sequence",)
    sides = (("", (), (), 0.8), (", pieces", pieces, (), 1.02), (", whole sequences", (), whole, 1.02))
    for way, settings, flags, target in sides:
        ours = partial(step_of_dslc, "gpt", "parallelism.tensor=2", *settings, "train.steps=21")
        by_hand = partial(step_by_hand, "gpt", "--tensor", *flags, "--steps", "21")
        show(compare(f"step, gpt, tensor 2{way}", ours, by_hand, pairs=pairs, unit="ms", target=target))


def bench_shared_memory(pairs: int) -> None:
    """Compares collectives through shared memory with the loop by hand over gloo."""
    sides = {
        "gpt": ((), (), 0.85),
        "gpt, zero 3": (("parallelism.zero=3",), ("--zero", "3"), 0.8),
        "gpt, tensor 2": (("parallelism.tensor=2",), ("--tensor",), 0.8),
        "gpt, pipeline 2": (
            ("parallelism.pipeline=2", "parallelism.microbatches=8"), ("--pipeline", "--microbatches", "8"), 0.95,
        ),
    }  # fmt: skip
    for name, (settings, flags, target) in sides.items():
        ours = partial(step_of_dslc, "gpt", *settings, "train.steps=21", "devices.backend=shared_memory")
        by_hand = partial(step_by_hand, "gpt", *flags, "--steps", "21")
        title = f"step, {name}, shared memory over gloo by hand"
        show(compare(title, ours, by_hand, pairs=pairs, unit="ms", target=target))


def bench_stages(pairs: int) -> None:
    """Compares a balanced cut with equal numbers of layers, beside the plans' predictions."""
    equal = "[4, 4]"
    steps = [partial(step_of_dslc, "heavy_head", f"parallelism.stages={stages}") for stages in ("balanced", equal)]

    def length(stages: str) -> float:
        """Returns the length of a step by its plan, where the work of both ranks together is 1."""
        job = os.path.join(HERE, "jobs", "heavy_head.plt")
        plan = json.loads(finish(dslc("plan", job, "--summary", "--set", f"parallelism.stages={stages}")))
        return float(1 / (1 - plan["schedule"]["bubble"]))

    name = f"step, heavy head, balanced stages over {equal}"
    show(compare(name, *steps, pairs=pairs, unit="ms"))
    print(f"{name}, by their plans: {length('balanced') / length(equal):.3f}", flush=True)


def bench_checkpoint(pairs: int) -> None:
    """Measures the cost of a save in every fifth step, as a fraction of a step's time."""
    for way in ("true", "false"):
        settings = ("checkpoint.every=5 steps", f"checkpoint.asynchronous={way}", "parallelism.zero=3")
        stalls, steps = [], []
        for _ in range(max(6, pairs // 5)):
            plain = step_of_dslc("gpt", "parallelism.zero=3")
            saving = step_of_dslc("gpt", *settings)
            stalls.append(5 * (saving - plain))
            steps.append(plain)
        shares = sorted(stall / step for stall, step in zip(stalls, steps, strict=True))
        low, high = interval(shares)
        kind = "asynchronous" if way == "true" else "synchronous"
        print(
            f"checkpoint, {kind}: a save costs {statistics.median(stalls):.1f} ms, {statistics.median(shares):.2f} "
            f"[{low:.2f}, {high:.2f}] of a step ({statistics.median(steps):.1f} ms, {len(shares)} pairs)",
            flush=True,
        )


def bench_programs(pairs: int) -> None:
    """Compares each program with its plain loop, and writes the table of README.md."""
    from benchmarks import programs

    found = []
    for name in programs.names():
        found.append(programs.measure(name, max(3, pairs // 3), step_of_dslc, finish))
        print(found[-1], flush=True)
    programs.write(found)


def bench_trainers(pairs: int) -> None:
    """Compares Accelerate, Lightning and DeepSpeed too, and writes the table of README.md."""
    from benchmarks.trainers.table import write_table

    write_table(pairs, train_dslc, ENVIRONMENT)


def bench_faults(pairs: int) -> None:
    """Runs as many drawn cases on either side."""
    from benchmarks import faults

    faults.compare(pairs)


def bench_stalls(pairs: int) -> None:
    """Runs as many scripted stalls and ends, and measures what positions cost a step."""
    from benchmarks import stalls

    stalls.compare(pairs)


def bench_keystrokes(pairs: int) -> None:
    """Times the diagnostics of a language server after each keystroke."""
    from benchmarks import keystrokes  # here: it takes helpers of the tests

    keystrokes.main()


def bench_exchanges(pairs: int) -> None:
    """Times each exchange once on each link; writes the tables of docs/exchanges.md."""
    from benchmarks import exchanges

    exchanges.main()


def bench_start(pairs: int) -> None:
    folder = tempfile.mkdtemp()

    def ours() -> float:
        out = tempfile.mkdtemp(dir=folder)
        job = os.path.join(HERE, "jobs", "gpt.plt")
        command = dslc(
            "run", job, "--out", os.path.join(out, "run"), "--set", "train.steps=2", "--set", "log.every=1 step"
        )
        return until_first_step(command, "step 1")

    def theirs() -> float:
        return until_first_step(torchrun("gpt", "--steps", "2"), "first step done")

    show(compare("command to first step, gpt", ours, theirs, pairs=pairs, target=0.8))
    shutil.rmtree(folder)


def bench_compile(pairs: int) -> None:
    """Compares blocks compiled by a job and by hand: the first step with both kinds of cache, and a step."""
    from benchmarks import compiled

    for ratio in compiled.bench_compile(pairs, until_first_step, train_dslc, finish, dslc):
        show(ratio)


def bench_launch(pairs: int) -> None:
    """Compares trainings of two launchers: to the first step, and from a killed rank to the next one."""
    from benchmarks import launching

    name = "two hosts, command to first step, gpt"
    show(compare(name, launching.first_step, launching.first_step_by_hand, pairs=pairs, target=0.7))
    name, by_hand = "two hosts, kill -9 of a rank to the next step, gpt", launching.ByHand()
    show(compare(name, launching.next_step, by_hand.next_step, pairs=pairs, target=0.7))
    print(f"{name}: torchrun did not go on after {by_hand.failed} of {by_hand.asked} kills", flush=True)


def bench_agents(pairs: int) -> None:
    """Measures what it takes that launchers meet, agree on a folder and meet again, without ranks. One alone has nobody
    to meet.
    """
    from benchmarks import launching

    print("| launchers | meet | agree on a folder | meet again | processor time of the keeper |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for count in launching.LAUNCHERS:
        m = launching.meetings(count, max(3, pairs // 3))
        print(f"| {count} | {m.meet:.1f} ms | {m.folder:.1f} ms | {m.again:.1f} ms | {m.busy:.1f} ms |", flush=True)


def bench_gpt2(pairs: int) -> None:
    """Compares GPT-2 of 124 M parameters in bfloat16, compiled, on one GPU; and its fraction of the GPU's peak."""
    import torch

    from dslc.compiler.facts.hardware import CATALOGUE

    if not torch.cuda.is_available():
        sys.exit("gpt2: there is no GPU here")
    ours, by_hand = partial(step_of_dslc, "gpt2"), partial(step_by_hand, "gpt2", command=handwritten_command)
    ratio = compare("step, gpt2 on a GPU", ours, by_hand, pairs=pairs, unit="ms", target=1)
    show(ratio)
    plan = json.loads(finish(dslc("plan", os.path.join(HERE, "jobs", "gpt2.plt"), "--summary")))
    speed = plan["ranks"][0]["flops"] / (ratio.ours / 1000)
    name = torch.cuda.get_device_name()
    kind = next((k for k in CATALOGUE.values() if k.flops_bf16 and k.kind.partition("_")[0] in name.lower()), None)
    of_peak = f", {100 * speed / kind.flops('bf16'):.1f}% of the peak of {kind.kind}" if kind else ""
    print(f"step, gpt2 on a GPU: {speed / 1e12:.1f} TFLOP/s on {name}{of_peak}", flush=True)


def bench_memory(pairs: int) -> None:
    """Prints predicted peaks beside `torch.cuda.max_memory_allocated`, of the rank that holds most; once each, as they
    do not vary. Jobs that need more GPUs than there are are left out. Without `torch.compile` unless noted.
    """
    from benchmarks.peaks import PEAKS
    from dslc.probe.gpus import gpus_here

    errors, there = [], len(gpus_here())
    for job, gpus, changed in PEAKS:
        if gpus > there:
            continue
        settings = [f"devices.gpus={gpus}", "train.compile=false", "train.steps=5", *changed.split()]
        settings.append("train.on_nonfinite=continue")  # absent GPUs leave whatever was in their memory
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            flags = [word for setting in settings for word in ("--set", setting)]
            finish(dslc("run", os.path.join(HERE, "jobs", f"{job}.plt"), "--out", out, "--profile", *flags))
            with open(os.path.join(out, "report.json")) as file:
                ranks = json.load(file)["ranks"]
        rank = max(ranks, key=lambda rank: int(rank["process"]["allocated"]))
        predicted, measured = rank["memory"]["predicted"]["peak"], rank["process"]["allocated"]
        off = predicted / measured - 1
        errors.append(abs(off))
        sizes = f"{predicted / 2**20:.0f} MiB | {measured / 2**20:.0f} MiB | {100 * off:+.1f}%"
        print(f"| {job} | {gpus} | {changed.replace(' ', ', ') or 'as it is'} | {sizes} |", flush=True)
    if not errors:
        sys.exit("memory: there is no GPU here")
    median = statistics.median(errors)
    print(
        f"peak memory, predicted beside measured: off by {100 * median:.1f}% at the median, "
        f"{100 * max(errors):.1f}% at worst; target 5% at the median {'met' if median <= 0.05 else 'MISSED'}"
    )


def bench_times(pairs: int) -> None:
    """Predicts the step of plans from calibrations of their jobs, and measures it, three times each."""
    from benchmarks.step_times import write_table  # here: it takes helpers of the tests

    write_table(runs=3)


def bench_plans(pairs: int) -> None:
    """Measures all plans that ten jobs leave to the compiler; writes a table of docs/choosing.md."""
    from benchmarks.measured_plans import write_measured

    write_measured()


def bench_fits(pairs: int) -> None:
    """Trains what constants of `dslc calibrate` are to predict, and writes a table of docs/step-time.md."""
    from benchmarks import fitted_steps

    fitted_steps.main(seconds=3600)


def bench_choose(pairs: int) -> None:
    """Searches plans for Llama on 8 to 512 GPUs; writes the table of docs/choosing.md."""
    from benchmarks import choosing

    choosing.main()


def bench_check(pairs: int) -> None:
    show_seconds("dslc check cluster.plt", dslc("check", os.path.join(ROOT, "examples", "cluster.plt")), pairs, 0.22)
    show_seconds("a bare interpreter", [sys.executable, "-c", ""], pairs)


def bench_plan(pairs: int) -> None:
    """Measures each command, which loads, checks, plans and proves the job anew; the drawings are written besides."""
    job = os.path.join(HERE, "jobs", "large.plt")
    with tempfile.TemporaryDirectory() as folder:
        picture = os.path.join(folder, "plan.svg")
        for name, command in (
            ("dslc check", dslc("check", job)),
            ("dslc plan", dslc("plan", job)),
            *((f"dslc render --view {v}", dslc("render", job, "--view", v, "-o", picture)) for v in VIEWS),
        ):
            show_seconds(f"{name}, 16,384 devices", command, max(3, pairs // 3), 2.0)
            memory, busy = measure_command(command)
            print(f"{name}: {memory / 2**20:.0f} MiB at the peak, target 500; {busy:.2f} s of a core", flush=True)


def bench_loading(pairs: int) -> None:
    """Compares trainings that wait for their samples with a plain loop over a `DataLoader` with as many workers."""
    from benchmarks import loading

    for kind in loading.KINDS:
        ratio, share = loading.measure(kind, max(3, pairs // 3), dslc, finish)
        show(ratio)
        print(
            f"loading, {kind}: the record gives data {100 * share:.0f}% of a step, the most of all phases", flush=True
        )


def bench_plan131072(pairs: int) -> None:
    """Measures a fresh interpreter that plans and proves a job for 131,072 devices, and emits the program and the place
    of one rank.
    """
    command = [sys.executable, os.path.join(HERE, "emit_one.py"), os.path.join(HERE, "jobs", "largest.plt")]
    show_seconds("plan and program of one rank, 131,072 devices", command, max(3, pairs // 3), 2.0)
    memory, busy = measure_command(command)
    print(f"131,072 devices: {memory / 2**20:.0f} MiB at the peak, target 200; {busy:.2f} s of a core", flush=True)


def bench_plan70b(pairs: int) -> None:
    """Measures `dslc plan --trace` of a model of 70 B parameters: with nothing kept, and again."""
    command = dslc("plan", os.path.join(HERE, "jobs", "llama70.plt"), "--trace")
    first: list[tuple[float, float]] = []
    again: list[tuple[float, float]] = []
    for _ in range(max(3, pairs // 10)):
        with tempfile.TemporaryDirectory() as folder:
            for found in (first, again):
                begun = time.perf_counter()
                _, busy = measure_command(command, ENVIRONMENT | {"XDG_CACHE_HOME": folder})
                found.append((time.perf_counter() - begun, busy))
    for name, found, target in (("first", first, 10), ("again", again, 1)):
        seconds, busy = (statistics.median(each) for each in zip(*found, strict=True))
        told = "met" if busy <= target else "MISSED"
        print(f"dslc plan --trace, 70 B, {name}: {seconds:.2f} s, {busy:.2f} s of a core; target {target} s, {told}")


VIEWS = ("placement", "graph", "schedule")


def measure_command(command: list[str], environment: dict[str, str] = ENVIRONMENT) -> tuple[int, float]:
    """Returns the peak memory of a command in bytes, and the processor seconds that it takes, whatever else the machine
    does.
    """
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def bench_uneven_shares(pairs: int) -> None:
    """Measures what unequal shares save where one of two ranks has half a core."""
    from benchmarks.uneven_shares import bench_shares

    for ratio in bench_shares(pairs, lambda arguments, environment: finish(dslc(*arguments), **environment)):
        show(ratio)


BENCHMARKS: dict[str, Callable[[int], None]] = {
    "check": bench_check,
    "plan": bench_plan,
    "plan131072": bench_plan131072,
    "plan70b": bench_plan70b,
    "start": bench_start,
    "compile": bench_compile,
    "launch": bench_launch,
    "agents": bench_agents,
    "gpt": bench_gpt,
    "moe": bench_moe,
    "convnet": bench_convnet,
    "dropout": bench_dropout,
    "phases": bench_phases,
    "zero": bench_zero,
    "pipeline": bench_pipeline,
    "tensor": bench_tensor,
    "shared_memory": bench_shared_memory,
    "stages": bench_stages,
    "checkpoint": bench_checkpoint,
    "programs": bench_programs,
    "loading": bench_loading,
    "choose": bench_choose,
    "keystrokes": bench_keystrokes,
    "plans": bench_plans,
    "fits": bench_fits,
}
BESIDE_TOOLS: dict[str, Callable[[int], None]] = {"trainers": bench_trainers}
ON_A_GPU: dict[str, Callable[[int], None]] = {"gpt2": bench_gpt2, "memory": bench_memory}
AS_ROOT: dict[str, Callable[[int], None]] = {
    "faults": bench_faults,
    "stalls": bench_stalls,
    "exchanges": bench_exchanges,
    "times": bench_times,
    "shares": bench_uneven_shares,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = BENCHMARKS | BESIDE_TOOLS | ON_A_GPU | AS_ROOT
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(BENCHMARKS)}, which are all done by default, beside other tools "
        f"{', '.join(BESIDE_TOOLS)}, on a GPU {', '.join(ON_A_GPU)}, and as root "
        f"{', '.join(AS_ROOT)}",
    )
    parser.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(known)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    for name in arguments.names or BENCHMARKS:
        known[name](arguments.pairs)


if __name__ == "__main__":
    main()
