"""`dslc verify`: trains some steps under the plan and in one process, and shows which invariant breaks where."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dslc.compiler.facts.checkpoint_names import name_of
from dslc.compiler.ir.program import CheckpointStep, ObserveMode, PrecisionStep
from dslc.compiler.placement.layout import lay_out
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.auto_fields import auto_fields
from dslc.dsl.meaning.load import LoadResult
from dslc.dsl.plain import plain_lines
from dslc.dsl.words import plural, shorten_list
from dslc.jobs.check_job import inspect, show
from dslc.jobs.choose_plan import with_choice
from dslc.jobs.prepare_run import Ready, prepare
from dslc.probe.gpus import gpus_here
from dslc.runs.load_one import load_first
from dslc.runs.run_folder import LOCK, FolderInUseError, claim_folder
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, TRAINING_FAILED, CommandFailedError
from dslc.terminal.tables import console
from dslc.verification.comparison import (
    NOISE_FACTOR,
    PLAIN,
    TITLES,
    Finding,
    Rounding,
    RoundingShares,
    Verdict,
    compare,
    compare_plain,
    compare_resumed,
    noisy,
    order_share,
    rounding_of,
    rounding_share_text,
    share_sentence,
    shares_of_rounding,
)
from dslc.verification.observed_runs import (
    expected_differences,
    layout_text,
    observed_program,
    train_observed,
    with_observation,
)
from dslc.verification.variants import CannotShrink, observed, one_process, shrink_job

if TYPE_CHECKING:
    from dslc.runtime.measure.observe import Observation

_ORDERS = 3  # other orders of a batch's samples, in which one process is trained to measure float32's rounding


def main(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise CommandFailedError("--steps takes a number of at least 1")
    output: str | None = arguments.out
    if output and os.path.exists(os.path.join(output, LOCK)):
        with claim_folder(output, None):  # or the message names who writes there
            pass
    _refuse_filled(output)
    try:
        job, changes = _job(load_first(arguments.job, arguments.settings), arguments.shrink)
    except CannotShrink as reason:
        raise CommandFailedError(str(reason), JOB_AT_FAULT) from None
    pair = _both(job)
    for change in changes:
        print(f"narrow copy: {change}")
    folder = os.path.abspath(output) if output else tempfile.mkdtemp(prefix="dslc-verify-")
    status = GOOD
    try:
        with claim_folder(folder, None):
            _refuse_filled(output)  # now that no other can begin
            status = _verify(*pair, arguments.steps, folder, noise=arguments.noise)
    finally:
        if not output and status != TRAINING_FAILED:  # its logs are to be read
            shutil.rmtree(folder)
    return status


def _refuse_filled(output: str | None) -> None:
    """Raises FolderInUseError if a folder holds more than a run's lock."""
    if output and os.path.exists(output) and not (os.path.isdir(output) and set(os.listdir(output)) <= {LOCK}):
        raise FolderInUseError(f"{output} is not an empty folder: name another with --out, or remove it")


def _job(load_result: LoadResult, shrink: bool) -> tuple[LoadResult, tuple[str, ...]]:
    """Returns the job to verify, and the list of what a narrow copy has smaller."""
    job = load_result.job
    if not shrink or job is None or load_result.report.errors:
        return (replace(load_result, job=observed(job)) if job else load_result), ()

    if auto_fields(job):
        analysis = inspect(load_result, Report())
        job = (with_choice(load_result, analysis).job if analysis else None) or job
    layout = Report().collect(lay_out(job))
    if layout is None:
        return load_result, ()  # its mistakes are shown when it is compiled
    gpus = len(gpus_here()) if job.devices.gpus is not None else 0
    narrow, changes = shrink_job(job, layout, gpus)
    return replace(load_result, job=observed(narrow)), changes


def _both(load_result: LoadResult) -> tuple[Ready, Ready, list[str]]:
    """Returns the job under its plan and in one process, and why they may differ. Raises CommandFailedError."""
    if load_result.job is not None and not load_result.report.errors:
        import dslc.runtime.launch  # noqa: F401 - or each child that looks at a user's function would load torch
    report = Report()
    plan = prepare(load_result, report)
    show(report)
    if plan is None or load_result.job is None:
        raise CommandFailedError(status=JOB_AT_FAULT)
    single_report = Report()
    single = prepare(replace(load_result, report=Report(), job=one_process(load_result.job)), single_report)
    if single is None:
        show(single_report.errors)
        raise CommandFailedError(
            "the job is valid, but cannot run in the one process that it would be compared with: try --shrink, or "
            "smaller sizes with --set",
            JOB_AT_FAULT,
        )
    return plan, single, expected_differences(report)


def _verify(plan: Ready, single: Ready, by_nature: list[str], steps: int, folder: str, *, noise: bool) -> int:
    mode = ObserveMode(noise=noise)
    plan, single = (replace(run, program=replace(run.program, mode=mode)) for run in (plan, single))
    steps = min(steps, plan.program.steps)
    saved_step = steps // 2
    checkpoint = CheckpointStep()
    if saved_step and not by_nature:
        checkpoint = CheckpointStep(every=saved_step, keep=steps, asynchronous=plan.program.checkpoint.asynchronous)
    full_program = observed_program(plan.program, steps, checkpoint)
    print(plain_lines(f"{plan.program.file}: {layout_text(plan)}, against one process, {plural(steps, 'step')}"))
    under_plan = train_observed(plan, full_program, os.path.join(folder, "plan"), "under the plan")
    single_result = under_plan and train_observed(
        single, observed_program(single.program, steps), os.path.join(folder, "one"), "in one process"
    )
    if not under_plan or not single_result:
        return TRAINING_FAILED
    resumed_result: Observation | None = None
    wide: Verdict | None = None
    rounding: Rounding | None = None
    reruns: list[Observation] = []
    if noise and noisy(single_result) and plan.program.precision.dtype == "float32":
        reruns = _train_with_other_rounding(single, steps, folder)
        rounding = rounding_of(single_result, reruns, NOISE_FACTOR)
    low_parameters = single_result.low_parameters
    low = False  # judged as a training in 16 bits
    while True:
        verdict = compare(plan.program, under_plan, single_result, by_nature, rounding or Rounding(), low=low)
        if verdict.findings[3].status == "holds" and saved_step:
            checkpoint_path = os.path.join(folder, "plan", "checkpoints", name_of(saved_step))
            resumed_program = observed_program(single.program, steps, CheckpointStep(resume=checkpoint_path))
            description = f"in one process from step {saved_step} on"
            resumed_result = resumed_result or train_observed(
                single, resumed_program, os.path.join(folder, "resumed"), description
            )
            if not resumed_result:
                return TRAINING_FAILED
            compare_resumed(
                plan.program, resumed_result, single_result, saved_step, verdict, rounding or Rounding(), low=low
            )
        if rounding or low or not verdict.only_numbers or plan.program.precision.dtype != "float32":
            break
        wide = None if noise else _in_float64(plan, single, by_nature, steps, folder)
        if wide is not None and not (wide.broken_invariants and low_parameters):
            verdict = wide
            break
        if low_parameters:
            low = True
            continue
        reruns = _train_with_other_rounding(single, steps, folder)
        rounding = rounding_of(single_result, reruns)
    verdict.notes += _notes(plan, reruns, low_parameters if low else (), noise=noise, rounded=rounding is not None)
    plain, wide_result = _held_plain(single, single_result, steps, folder)
    if plain is None:
        return TRAINING_FAILED
    verdict.plain = plain
    if verdict.findings[2].status != "not compared" and not noise:
        measured = _measured_rounding(single, single_result, wide_result, reruns, steps, folder)
        shares = None if measured is None else shares_of_rounding(under_plan, single_result, measured)
        _add_shares(verdict, shares, of_rows=verdict is not wide)
    _show(verdict)
    return JOB_AT_FAULT if verdict.broken_invariants or plain.has_violation else GOOD


def _notes(
    plan: Ready, reruns: Sequence[Observation], low_parameters: Sequence[str], *, noise: bool, rounded: bool
) -> Iterator[str]:
    """Yields what a comparison allows and why. It is `rounded` if it is judged by trainings with other rounding;
    `low_parameters` are those in 16 bits, if it is judged as a training in 16 bits.
    """
    if rounded and noise:
        yield (
            f"noise is kept on: differences of up to {NOISE_FACTOR:g} times those between two noises in one "
            "process are allowed"
        )
    elif rounded:
        exact = "in float64 and " if len(reruns) > _ORDERS else ""
        yield (
            f"one process was trained again, {exact}with the samples of each batch in {_ORDERS} other orders, to "
            "measure the rounding of float32"
        )
    model = plan.compiled.analysis.model
    draws = model.traced.network.torch_draws if model is not None and model.traced and model.traced.network else None
    silenced = not noise and plan.program.draws is None
    if model is not None and model.noise and silenced and (draws is None or "Dropout" in draws.kind):
        yield "dropout is switched off in both trainings, as no two ranks draw the same: `--noise` keeps it"
    if low_parameters:
        yield (
            f"{shorten_list([f'`{name}`' for name in low_parameters])} have 16 bits, and the network rounds to them: "
            "differences are allowed as in a training with `precision = bf16`"
        )


def _in_float64(plan: Ready, single: Ready, by_nature: list[str], steps: int, folder: str) -> Verdict | None:
    """Compares the two trainings in float64, where rounding cannot lead them apart; None if one of them fails there."""
    if plan.program.pipeline is not None:
        return None  # its stages send float32
    saved_step = steps // 2
    checkpoint = CheckpointStep(every=saved_step, keep=steps) if saved_step and not by_nature else CheckpointStep()
    single_program = with_observation(observed_program(single.program, steps), exact=True)
    plan_result = train_observed(
        plan,
        with_observation(observed_program(plan.program, steps, checkpoint), exact=True),
        os.path.join(folder, "plan in float64"),
        "under the plan, in float64",
        quiet=True,
    )
    single_result = plan_result and train_observed(
        single, single_program, os.path.join(folder, "one in float64"), "in one process", quiet=True
    )
    if not plan_result or not single_result:
        return None
    verdict = compare(plan.program, plan_result, single_result, by_nature, exact=True)
    if verdict.findings[3].status == "holds" and saved_step:
        resume_step = CheckpointStep(resume=os.path.join(folder, "plan in float64", "checkpoints", name_of(saved_step)))
        program = with_observation(observed_program(single.program, steps, resume_step), exact=True)
        resumed_result = train_observed(
            single, program, os.path.join(folder, "resumed in float64"), "resumed", quiet=True
        )
        if not resumed_result:
            return None
        compare_resumed(plan.program, resumed_result, single_result, saved_step, verdict, exact=True)
    verdict.notes.append(
        "both were trained in float64, as in float32 they are further apart than is allowed: that is rounding, which "
        "the network amplifies"
        if not verdict.broken_invariants
        else "both were trained in float64, where no rounding leads them apart"
    )
    return verdict


def _held_plain(
    single: Ready, single_result: Observation, steps: int, folder: str
) -> tuple[Finding | None, Observation | None]:
    """Compares the one process with the plain loop, in float64 if the model can be; None if that training fails.
    Returns the training of one process in float64 as well, if there is one.
    """
    wide: Observation | None = None
    program = observed_program(single.program, steps)
    if program.own_step is not None:
        return Finding(status="not compared", texts=["the step is the job's own, and a plain loop has another"]), None
    if program.precision.level == "O2":
        texts = ["at level O2 parameters are kept twice, which a plain loop does not"]
        return Finding(status="not compared", texts=texts), None

    def train(description: str, quiet: bool = False, **changes: object) -> Observation | None:
        return train_observed(
            single, with_observation(program, **changes), os.path.join(folder, description), description, quiet=quiet
        )

    if program.precision.dtype == "float32":
        wide = train("one process in float64", quiet=True, exact=True)
        plain = wide and train("plain loop in float64", quiet=True, exact=True, plain=True)
        if wide and plain:
            finding = compare_plain(program, wide, plain, exact=True)
            if not (finding.has_violation and single_result.low_parameters):
                return finding, wide
    plain = train("plain loop", plain=True)
    if plain is None:
        return None, wide
    return compare_plain(program, single_result, plain, exact=False, low=bool(single_result.low_parameters)), wide


def _add_shares(verdict: Verdict, shares: RoundingShares | None, *, of_rows: bool) -> None:
    """Adds shares of rounding, if they are known, to a verdict, whose rows they are, or which was made in float64."""
    if shares is None:
        return
    parameter = f"{share_sentence('a parameter', shares.parameter)} (`{shares.name}`)"
    if of_rows:
        verdict.shares = shares
        verdict.notes.append(parameter)
    else:
        loss = share_sentence("a loss", max(shares.losses, key=order_share))
        verdict.notes.append(f"in float32 {loss}, and {parameter}")


def _measured_rounding(
    single: Ready,
    single_result: Observation,
    wide: Observation | None,
    reruns: Sequence[Observation],
    steps: int,
    folder: str,
) -> Rounding | None:
    """Returns the rounding of the one process: its largest distances from a training without, which is in float64, or
    in float32 for a job in 16 bits, and those of trainings with other orders of samples. Returns None if there is none.
    """
    program = observed_program(single.program, steps)
    if wide is None and program.precision.dtype != "float32":
        program_wide = replace(program, precision=PrecisionStep())
        wide = train_observed(single, program_wide, os.path.join(folder, "one in float32"), "in float32", quiet=True)
    if wide is None and program.data.structured:
        return None  # the samples of a structure have no other order
    if not reruns:
        program = with_observation(program, reorder=1)
        reordered = train_observed(single, program, os.path.join(folder, "reordered"), "in another order", quiet=True)
        reruns = [reordered] if reordered else []
    reference = wide or single_result
    others = [each for each in (single_result, *reruns) if each is not reference]
    return rounding_of(reference, others, 1.0) if others else None


def _train_with_other_rounding(single: Ready, steps: int, folder: str) -> list[Observation]:
    """Trains in one process with other roundings: in float64, if the model can be, and in other orders."""
    program = observed_program(single.program, steps)
    ways = {"in float64": with_observation(program, exact=True)}
    ways |= {f"in order {n}": with_observation(program, reorder=n) for n in range(1, _ORDERS + 1)}
    results = (
        train_observed(single, way, os.path.join(folder, description), f"in one process, {description}", quiet=True)
        for description, way in ways.items()
    )
    return [result for result in results if result]


# ------------------------------------------------------------------------------------------------------- on the screen


def _show(verdict: Verdict) -> None:
    from rich.table import Table

    steps = Table(box=None, pad_edge=False)
    shares = verdict.shares
    of_rounding = ("of rounding",) if shares is not None else ()
    for column in ("step", "samples", *("loss", "one process", "apart"), *of_rounding, "norm", "one process", "apart",
                   *of_rounding):  # fmt: skip
        steps.add_column(column, justify="right", no_wrap=True)
    for place, row in enumerate(verdict.rows):
        numbers = [f"{row.losses[0]:.6f}", f"{row.losses[1]:.6f}", _difference_text(row.losses)]
        norms = [f"{row.norms[0]:.6g}", f"{row.norms[1]:.6g}", _difference_text(row.norms)]
        if shares is not None:
            numbers.append(rounding_share_text(shares.losses[place]))
            norms.append(rounding_share_text(shares.norms[place]))
        steps.add_row(str(row.step), str(row.samples), *numbers, *norms)
    output = console()
    output.print(steps)
    output.print()
    colour: Callable[[str], str] = {"holds": "green", "broken": "red", "not compared": "yellow"}.__getitem__
    titled_findings = zip((*TITLES, PLAIN), (*verdict.findings, verdict.plain), strict=True)
    for number, (title, finding) in enumerate(titled_findings, 1):
        head = f"{number} {title:<13} {finding.status:<14}"
        for text in finding.texts:
            output.print(head, style=colour(finding.status), end="", markup=False)
            output.print(text, markup=False)
            head = " " * len(head)
    for note in verdict.notes:
        output.print(f"note: {note}", markup=False)
    if verdict.broken_invariants:
        output.print(f"the plan does not train as one process does: {', '.join(verdict.broken_invariants)} broken")
    else:
        pairs = zip(TITLES, verdict.findings, strict=True)
        uncompared = [title.removeprefix("same ") for title, finding in pairs if finding.status != "holds"]
        if uncompared:
            output.print(f"what was compared agrees with one process; not compared: {' and '.join(uncompared)}")
        else:
            output.print("the plan trains as one process does")
    if verdict.plain.has_violation:
        output.print("one process does not train as a plain loop of torch does: a fault of dslc, not of the job")


def _difference_text(pair: tuple[float, float]) -> str:
    return f"{abs(pair[0] - pair[1]):.1e}" if pair[0] != pair[1] else "0"
