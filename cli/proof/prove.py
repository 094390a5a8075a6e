"""Proves a conversion: trains with the other tool and with the job, from the same weights and on the same samples."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dslc.compiler.ir.program import CheckpointStep, ObserveMode
from dslc.conversion.batch_size import BatchSize
from dslc.conversion.convert import convert_files
from dslc.conversion.draft import Draft
from dslc.conversion.job_text import job_text
from dslc.conversion.key_reader import is_auto
from dslc.conversion.tools.deepspeed import resolve_autos
from dslc.dsl.diagnostics import Report
from dslc.dsl.files import write_file
from dslc.dsl.json_value import Json
from dslc.dsl.language.blocks import LaunchSpec, MemorySpec, ParallelismSpec
from dslc.dsl.language.calls import Fp32
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.optimizers import Adam
from dslc.dsl.language.units import number
from dslc.dsl.meaning.load import LoadResult, load_text
from dslc.dsl.plain import plain
from dslc.dsl.words import quoted
from dslc.jobs.check_job import show
from dslc.jobs.prepare_run import Ready, launch_quietly, prepare, show_failure
from dslc.proof.compare_curves import compare_curves, largest_difference, rates_differ
from dslc.proof.run_tool import RUNNERS, check_tool, run_tool
from dslc.proof.runners.proof_files import Curve, ProofSetup, write_setup
from dslc.runtime.process.program_file import write_program
from dslc.terminal.exit_codes import JOB_AT_FAULT, TRAINING_FAILED, CommandFailedError
from dslc.terminal.tables import console
from dslc.verification.variants import observed, one_process


def _norm_text(norm: float | None) -> str:
    return "-" if norm is None else f"{norm:.5g}"


RANKS = 2
MOST = 8  # samples of a micro-batch, and micro-batches of a step
VOCAB, CONTEXT = 128, 32
# Settings that the proof leaves out, each with what happens in their place.
_LEFT_OUT = {
    "train.precision": "",  # the tool's runner says it, and the next
    "train.compile": "",
    "memory.offload": "nothing is offloaded: all memory is the host's here",
    "model.adapter": "all parameters train",
    "parallelism.schedule": "",
    "parallelism.replicas": "one copy of the shards",
    "data.validation": "",
    "data.workers": "",
    "data.last_batch": "",
}


@dataclass(frozen=True)
class ProofSizes:
    """The sizes of the training on this machine, and what differs from the configuration, in words."""

    micro: int
    accumulation: int
    ranks: int
    changes: tuple[str, ...]

    @property
    def batch(self) -> int:
        return self.micro * self.accumulation * self.ranks


def default_base(batch: int, samples: int, schedule: str) -> str:
    """Returns a job with a small network and synthetic data, for a configuration that names neither. `schedule` is one
    of the user's program, where the tool leaves it to that.
    """
    return f"""model {{
  network = gpt(layers = 2, width = 64, heads = 4, context = {CONTEXT}, vocab = {VOCAB})
  loss    = cross_entropy()
}}

data {{
  source = synthetic(samples = {samples}, vocab = {VOCAB})
  batch  = {batch}
}}

train {{
  epochs    = 1
  optimizer = adamw(lr = 1e-3)
{schedule}}}
"""


def proof_draft(draft: Draft) -> tuple[Draft, ProofSizes]:
    """Returns the draft of the job for this machine, and its sizes."""
    small, changes = replace(draft, settings=dict(draft.settings)), []
    for path, reason in _LEFT_OUT.items():
        setting = small.settings.pop(path, None)
        if setting is not None and reason:
            changes.append(f"{path} = {setting.text}: {reason}")
    for axis, size in draft.axes.items():
        small.settings.pop(f"parallelism.{axis}", None)
        changes.append(f"parallelism.{axis} = {size}: the ranks share the samples out")
    batch = draft.batch
    ranks = min(batch.ranks or RANKS, RANKS)
    micro, accumulation = _shares(batch, ranks)
    for name, before, after in (
        ("data ranks", batch.ranks, ranks),
        ("micro-batch", batch.micro, micro),
        ("accumulation", batch.accumulation, accumulation),
    ):
        if before is not None and before != after:
            changes.append(f"{name} {before} -> {after}")
    small.batch = BatchSize(micro, accumulation, None, ranks).resolved()
    small.devices, small.axes, small.wants_cpu = (1, ranks), {}, True
    return small, ProofSizes(micro, accumulation, ranks, tuple(changes))


def _shares(batch: BatchSize, ranks: int) -> tuple[int, int]:
    """Returns a micro-batch and a number of micro-batches that this machine can train."""
    accumulation = batch.accumulation or 1
    micro = batch.micro or (max(1, batch.total // (accumulation * ranks)) if batch.total else 4)
    if batch.accumulation is None and batch.total and batch.micro:
        accumulation = max(1, batch.total // (micro * ranks))
    return min(micro, MOST), min(accumulation, MOST)


def steps_per_epoch(draft: Draft, steps: int) -> int:
    """Returns the steps of an epoch on synthetic data: `steps` are most of a training, whose warm-up fits it."""
    if "train.steps" in draft.settings:
        return steps
    epochs = _epochs(draft)
    warmup = re.fullmatch(r"(\d+) steps?", draft.schedule.arguments.get("warmup", "")) if draft.schedule else None
    return max(1, steps // epochs, -(-2 * int(warmup[1]) // epochs) if warmup else 0)


def _epochs(draft: Draft) -> int:
    stated = draft.settings.get("train.epochs")
    return int(stated.text) if stated is not None and stated.text.isdigit() else 1


def with_base(draft: Draft, base: str) -> str:
    """Returns the text of the job, with network and data of the job at the path `base`."""
    return job_text(draft, "the job of a proof", base=base)


_RATES = "tool_rates"  # the module with the tool's rates


@dataclass(frozen=True)
class Proof:
    """Both curves, the job's at the tool's rates if these differ, and what was changed and found, in words."""

    tool: Curve
    job: Curve
    at_tool_rates: Curve | None
    sizes: ProofSizes
    changes: Sequence[str]
    findings: Sequence[str]


def prove(draft: Draft, *, model: str, python: str, steps: int, folder: str) -> Proof:
    """Trains both in the folder. Raises CommandFailedError if the job cannot train, ToolError if the tool cannot."""
    name = draft.tools[0]
    check_tool(RUNNERS[name], python)
    resolutions: list[str] = []
    autos: Mapping[str, Json] = {}
    if _starts_deepspeed(name, draft):
        check_tool(RUNNERS["deepspeed"], python)
    if name == "deepspeed":
        draft, resolutions, autos = _resolved(draft, steps)
    elif name == "transformers" and "accelerate" in draft.files:
        resolutions.append("the Accelerate file is not used by the Trainer: its strategy is proved by that file alone")
    small, sizes = proof_draft(draft)
    base = os.path.abspath(model) if model else _write_base(small, sizes, steps, folder)
    text = with_base(small, base)
    home = os.path.dirname(base)  # where code of yours is found
    job = _prepare(text, home)
    one = _prepare(text, home, one_rank=True)
    steps = min(steps, job.program.steps)
    setup = ProofSetup(
        config=draft.files[name].root,
        micro=sizes.micro,
        accumulation=sizes.accumulation,
        ranks=sizes.ranks,
        steps=steps,
        length=job.program.steps,
        autos=autos,
        engine=draft.files["deepspeed"].root if name != "deepspeed" and "deepspeed" in draft.files else {},
        path=os.path.abspath(draft.files[name].path),
    )
    write_setup(folder, setup)
    write_program(folder, one.program, one.places)
    tool_curve = run_tool(name, python, folder, sizes.ranks)
    job_curve = _train_job(job, steps, os.path.join(folder, "job"))
    at_tool_rates = None
    if rates_differ(tool_curve, job_curve):
        at_tool_rates = _train_at_rates(small, base, tool_curve.rates, job, steps, folder)
    factors = {"rank": sizes.ranks, "micro-batch": sizes.accumulation}
    if sizes.accumulation > 1:
        factors["micro-batch of each rank"] = sizes.accumulation * sizes.ranks
    findings = compare_curves(tool_curve, job_curve, at_tool_rates, factors)
    changes = [*resolutions, *sizes.changes, *(change for change in tool_curve.changes if change not in sizes.changes)]
    return Proof(tool_curve, job_curve, at_tool_rates, sizes, changes, findings)


def _starts_deepspeed(name: str, draft: Draft) -> bool:
    """True if another tool starts DeepSpeed, which must be installed beside it."""
    kind = draft.files["accelerate"].value("distributed_type") if name == "accelerate" else None
    return str(kind).upper() == "DEEPSPEED" or (name == "transformers" and "deepspeed" in draft.files)


def _write_base(draft: Draft, sizes: ProofSizes, steps: int, folder: str) -> str:
    """Writes a job with the network and the data; where the configuration states no length, it has one."""
    schedule = "  lr_schedule = warmup_linear(warmup = 3 steps)\n" if draft.tools[0] == "accelerate" else ""
    text = default_base(sizes.batch, sizes.batch * steps_per_epoch(draft, steps), schedule)
    return _write(folder, "network.plt", text)


def _write(folder: str, name: str, text: str) -> str:
    path = os.path.join(folder, name)
    write_file(path, text)
    return path


def _prepare(text: str, home: str, *, one_rank: bool = False) -> Ready:
    """Returns the job, ready to run and observed; in one process if `one_rank`."""
    loaded: LoadResult = load_text(text, "job.plt", home)
    report = Report()
    ready = None
    if loaded.job is not None and not loaded.report.errors:
        job = _on_cpus(loaded.job)
        job = one_process(job) if one_rank else observed(job)
        ready = prepare(replace(loaded, job=job), report)
    if ready is None:
        show([*loaded.report.errors, *report.errors])
        raise CommandFailedError("the job of the proof is refused: --model names a job with your network and data",
                                 JOB_AT_FAULT)  # fmt: skip
    return replace(ready, program=replace(ready.program, mode=ObserveMode(), draws=None))


def _on_cpus(job: JobSpec) -> JobSpec:
    """Returns the job with only data ranks and in fp32, also where a job that `--model` names says something else, and
    with the moments of its optimizer in fp32.
    """
    parallelism = ParallelismSpec(
        zero=job.parallelism.zero, microbatches=job.parallelism.microbatches, gradients=job.parallelism.gradients
    )
    optimizer = job.train.optimizer
    if isinstance(optimizer, Adam):  # the other tool's has moments in fp32 on CPUs
        optimizer = replace(optimizer, state_="fp32")
    return replace(
        job,
        parallelism=parallelism,
        memory=MemorySpec(recompute=job.memory.recompute),
        train=replace(job.train, optimizer=optimizer, precision=Fp32(), compile=False),
        launch=LaunchSpec(timeout=job.launch.timeout),
    )


# Arguments by which a proof resolves `auto`, where no file has them.
_ARGUMENTS: dict[str, Json] = {"learning_rate": 1e-3, "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999,
              "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "warmup_steps": 3, "fp16": False,
              "bf16": False, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}  # fmt: skip


def _resolved(draft: Draft, steps: int) -> tuple[Draft, list[str], Mapping[str, Json]]:
    """Returns the draft of a DeepSpeed file with its `auto` resolved, with what was changed, and each value."""
    file = draft.files["deepspeed"]
    if not any(is_auto(value) for _, value in file.values()):
        return draft, [], {}
    arguments = {**_ARGUMENTS, "max_steps": steps}
    resolved = Draft(devices=draft.devices, arguments=arguments)
    convert_files([("deepspeed", file)], resolved)
    autos = {key: value for key, (value, _) in resolve_autos(arguments).items()}
    resolved.set("train.steps", str(steps))
    change = "`auto` is resolved by arguments of the Trainer: learning_rate 0.001, weight_decay 0.01, warmup_steps 3"
    return resolved, [change], autos


def _train_job(ready: Ready, steps: int, folder: str) -> Curve:
    from dslc.runtime.measure.observe import Observation

    program = replace(
        ready.program,
        steps=steps,
        log_every=steps,
        tensorboard=False,
        hooks=(),
        loggers=(),
        checkpoint=CheckpointStep(),
    )
    outcome = launch_quietly(program, ready.places, folder)
    if outcome.failure is not None:
        show_failure(outcome, before="the job: ")
        raise CommandFailedError(status=TRAINING_FAILED)
    curve = Curve(name="the job")
    for ranks in zip(*Observation(folder, program.world_size).ranks, strict=True):
        loss = sum(rank.total for rank in ranks) / max(1.0, ranks[0].number)
        curve.add(loss, ranks[0].norm, ranks[0].lr)
    return curve


def _train_at_rates(draft: Draft, base: str, rates: Sequence[float], job: Ready, steps: int, folder: str) -> Curve:
    peak = job.program.optimizer.lr
    factors = ", ".join(repr(rate / peak) for rate in rates)
    _write(
        folder,
        f"{_RATES}.py",
        f"FACTORS = [{factors}]\n\n\ndef factor(step: int, steps: int) -> float:\n"
        "    return FACTORS[min(step, len(FACTORS) - 1)]\n",
    )
    changed = replace(draft, settings=dict(draft.settings), schedule=None)
    if draft.optimizer is not None and "lr" not in draft.optimizer.arguments:
        changed.optimizer = draft.optimizer.having(lr=number(peak))
    module = os.path.join(folder, _RATES)
    changed.set("train.lr_schedule", f"python({quoted(f'{module}:factor')})")
    return _train_job(
        _prepare(with_base(changed, base), os.path.dirname(base)), steps, os.path.join(folder, "at-tool-rates")
    )


def show_proof(proof: Proof) -> None:
    from rich.table import Table

    sizes, tool = proof.sizes, proof.tool
    shown = console()
    batch = f"batch {sizes.batch} = {sizes.micro} x {sizes.accumulation} x {sizes.ranks}"
    shown.print(plain(f"{tool.name} against the job, {len(tool.losses)} steps on CPUs in fp32, {batch}"), markup=False)
    for change in proof.changes:
        shown.print(plain(f"  changed for this machine: {change}"), markup=False)
    steps = Table(box=None, pad_edge=False)
    columns = ["step", "loss", "the job", "apart", "rate", "the job", "norm", "the job"]
    columns += ["at its rates"] if proof.at_tool_rates else []
    for column in columns:
        steps.add_column(column, justify="right", no_wrap=True)
    for index, (loss, norm, rate) in enumerate(zip(tool.losses, tool.norms, tool.rates, strict=True)):
        job = proof.job
        row = [str(index + 1), f"{loss:.6f}", f"{job.losses[index]:.6f}", _difference_text(loss, job.losses[index])]
        row += [f"{rate:.4g}", f"{job.rates[index]:.4g}", _norm_text(norm), _norm_text(job.norms[index])]
        row += [f"{proof.at_tool_rates.losses[index]:.6f}"] if proof.at_tool_rates else []
        steps.add_row(*row)
    shown.print(steps)
    for finding in proof.findings:
        shown.print(plain(finding), markup=False)


def _difference_text(a: float, b: float) -> str:
    return f"{largest_difference([a], [b]):.0e}" if a != b else "0"
