"""`dslc data`: what a job's data is like, read as the training would read it. The job's own code runs here."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from dslc.compiler.graph.constants import data_step
from dslc.compiler.ir.number_text import byte_text, percent_text, time_text
from dslc.compiler.ir.program import DataStep
from dslc.compiler.model.job_steps import locate_paths
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.show.text_table import table
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.load import LoadResult
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.words import plural
from dslc.jobs.check_job import inspect, show
from dslc.jobs.worst_batch import (
    PricedBatch,
    batch_place,
    find_fullest_batch,
    has_uneven_batches,
    peak_bytes,
    price_batch,
)
from dslc.runs.load_one import load_first
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, CommandFailedError
from dslc.terminal.progress_bar import progress_bar

if TYPE_CHECKING:
    from rich.progress import Progress

    from dslc.runtime.data.padding import DocumentPacking, Padding
    from dslc.runtime.data.sample_records import Copy, SampleRecords
    from dslc.runtime.data.samples import Splits

_UNLIMITED = 2**62
_EXAMPLES = 3  # copies that a line names
_CLASSES = 20  # rows of the table of classes
_RANKS = 8  # columns of the table of classes

Row = tuple[str, ...]


@dataclass(frozen=True)
class DataReport:
    """The findings of `dslc data`; `classes` are counts by class and data rank, in the first epoch."""

    analysis: Analysis
    step: DataStep
    data_ranks: int
    records: tuple[SampleRecords, ...]  # of each split, training first
    classes: dict[int, tuple[int, ...]]
    worst: PricedBatch | None  # where the shapes of batches differ by sample
    padding: dict[str, Padding]  # by the name of an order, the job's own first
    packing: tuple[int, int, float] | None  # sequences, their length, and the share that is empty
    documents: DocumentPacking | None


def main(arguments: argparse.Namespace) -> int:
    analysis = _analyse(load_first(arguments.job, arguments.settings))
    report = _report_on(analysis, arguments.samples)
    if arguments.json:
        json.dump(_as_json(report), sys.stdout)
        print()
    else:
        print(plain_lines("\n".join(_as_text(report, arguments.job))))
    return GOOD


def _analyse(load_result: LoadResult) -> Analysis:
    """Returns the analysis of a job, whatever memory it takes and promises. Raises CommandFailedError."""
    report = Report()
    if load_result.job is not None:
        load_result = replace(load_result, job=_data_alone(load_result.job))
    analysis = inspect(load_result, report, trace=True)
    unknown = analysis is None or analysis.workload.visited is None or analysis.workload.train is None
    findings = [diagnostic.for_run() if unknown else diagnostic for diagnostic in report]
    errors = [diagnostic for diagnostic in findings if diagnostic.severity == "error"]
    show(errors)
    if unknown or errors or analysis is None:
        raise CommandFailedError("" if errors else "the number of samples is not known", JOB_AT_FAULT)
    return analysis


def _data_alone(job: JobSpec) -> JobSpec:
    """Returns the job without a limit of memory, promises and a checkpoint to resume from."""
    memory, checkpoint = replace(job.memory, limit=_UNLIMITED), replace(job.checkpoint, resume=None)
    return replace(job, memory=memory, expect=(), checkpoint=checkpoint)


# ----------------------------------------------------------------------------------------------------------- reading


def _report_on(analysis: Analysis, limit: int) -> DataReport:
    """Reads the samples of all splits. Raises CommandFailedError with the message of what fails, also in user code."""
    from dslc.probe.child import first_line, where_in_the_users_code
    from dslc.runtime.data.samples import SourceError
    from dslc.runtime.process.job_line import during

    try:
        return _read_splits(analysis, limit)
    except SourceError as error:
        sample = during(error)
        raise CommandFailedError(plain(f"{error}{f' ({sample})' if sample else ''}"), JOB_AT_FAULT) from error
    except Exception as error:  # any kind: the user's code runs
        places = ", ".join(place for place in (during(error), where_in_the_users_code(error)) if place)
        message = f"the data cannot be read: {first_line(error)}{f' ({places})' if places else ''}"
        raise CommandFailedError(plain(message), JOB_AT_FAULT) from error


def _read_splits(analysis: Analysis, limit: int) -> DataReport:
    import torch

    from dslc.runtime.data.padding import measure_documents
    from dslc.runtime.data.rank_orders import classes_by_rank
    from dslc.runtime.data.sample_keys import prepare
    from dslc.runtime.data.sample_records import read_records, samples_in
    from dslc.runtime.data.sources.open_sources import open_source

    step = locate_paths(data_step(analysis), analysis.job.folder)
    splits = open_source(step)
    counts = {split: samples_in(step, split) for split in ("training", "validation", "test")}
    read = []
    with progress_bar() as bar:
        for split, count in counts.items():
            if count:
                task = bar.add_task(f"{split} samples", total=min(count, limit))
                read.append(read_records(step, splits, split, limit, _advance(bar, task)))
    prepare(step, splits.train, torch.device("cpu"))
    training = read[0]
    known = {n: name for n, name in zip(training.numbers, training.classes, strict=True) if name is not None}
    ranks = analysis.layout.sizes["data"]
    steps = analysis.workload.steps or step.visited
    classes = classes_by_rank(step, ranks, steps, known) if known else {}
    worst = price_batch(analysis, find_fullest_batch(analysis)) if has_uneven_batches(analysis) else None
    return DataReport(
        analysis=analysis,
        step=step,
        data_ranks=ranks,
        records=tuple(read),
        classes=classes,
        worst=worst,
        padding=_measure_orders(analysis, step, splits, training),
        packing=_pack(training),
        documents=measure_documents(step, splits.train),
    )


def _measure_orders(analysis: Analysis, step: DataStep, splits: Splits, training: SampleRecords) -> dict[str, Padding]:
    """Returns the padding of the job's own order and of another one; nothing if no samples are padded."""
    from dslc.runtime.data.padding import by_length, measure_padding

    uneven = training.shape is None and training.all_read and step.structured
    if (not uneven and step.pad is None) or step.stream is not None:
        return {}
    shapes = training.shapes if uneven else None
    layout, steps = analysis.layout, analysis.workload.steps or step.visited

    def measure(order: DataStep) -> Padding | None:
        return measure_padding(order, splits.train, shapes, layout.sizes["data"], layout.microbatches, steps)

    own = step.sampler.kind if step.sampler is not None else "shuffled" if step.shuffle else "as given"
    orders = {f"{own} (the job's)": step}
    if own == "by_length":
        orders["shuffled"] = replace(step, sampler=None, shuffle=True)
    elif shapes is not None and step.sampler is None and not step.parts:
        orders["by_length()"] = by_length(step, shapes)
    measured = {name: measure(order) for name, order in orders.items()}
    return {name: padding for name, padding in measured.items() if padding is not None}


def _pack(training: SampleRecords) -> tuple[int, int, float] | None:
    """Returns the sequences into which samples of unequal length would be packed."""
    from dslc.runtime.data.padding import packed_share

    if training.shape is not None or any(len(shape) != 1 for shape in training.shapes):
        return None
    lengths = [shape[0] for shape in training.shapes]
    return (packed := packed_share(lengths))[0], max(lengths), packed[1]


def _advance(bar: Progress, task: object) -> Callable[[int], None]:
    return lambda samples: bar.advance(task, samples)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- as text


def _as_text(report: DataReport, job: str) -> list[str]:
    step = report.step
    lines = [f"data of {job}: batches of {step.batch}, {plural(report.data_ranks, 'data rank')}", ""]
    lines += _split_table(report)
    notes = [
        *_partly_read(report),
        *_length_lines(report),
        *_unstackable_lines(report),
        *_copy_lines(report),
        *_overlap_lines(report),
        *_worst_lines(report),
        *_conversation_lines(report),
    ]
    lines += ["", *(f"- {line}" for line in notes)]
    lines += _padding_lines(report)
    if report.classes:
        lines += ["", *_class_lines(report)]
    return lines


def _table(rows: Sequence[Row], head: Row, limit: int | None = None) -> list[str]:
    return [f"  {line}" for line in table(rows, range(1, len(head)), head, limit)]


def _split_table(report: DataReport) -> list[str]:
    head: Row = ("split", "samples", "read", "shape")
    rows: list[Row] = [
        (records.split, f"{records.samples:,}", f"{len(records.numbers):,}", _shape_text(records))
        for records in report.records
    ]
    summaries = [length_summary(records) for records in report.records]
    if any(summaries):
        head += ("shortest", "median", "mean", "95%", "longest")
        rows = [row + _length_cells(summary) for row, summary in zip(rows, summaries, strict=True)]
    return _table(rows, head)


def _shape_text(records: SampleRecords) -> str:
    return "varies" if records.shape is None else " x ".join(map(str, records.shape)) or "one number"


def _length_cells(summary: dict[str, float] | None) -> Row:
    if summary is None:
        return ()
    return tuple(_length_text(summary[name]) for name in ("shortest", "median", "mean", "p95", "longest"))


def _length_text(length: float) -> str:
    return f"{length:,.0f}" if length == int(length) else f"{length:,.1f}"


def length_summary(records: SampleRecords) -> dict[str, float] | None:
    """Returns figures of the lengths; None if all samples have one shape."""
    import numpy as np

    if records.shape is not None:
        return None
    lengths = np.array(records.lengths)
    median, p95 = np.percentile(lengths, [50, 95], method="higher")
    at = int(lengths.argmax())
    return {
        "shortest": float(lengths.min()),
        "median": float(median),
        "mean": float(lengths.mean()),
        "p95": float(p95),
        "longest": float(lengths[at]),
        "longest_sample": records.numbers[at],
    }


def _partly_read(report: DataReport) -> list[str]:
    parts = [f"{len(each.numbers):,} of {each.samples:,} {each.split}" for each in report.records if not each.all_read]
    if not parts:
        return []
    order = "the first ones of the stream" if report.step.stream is not None else "spread evenly"
    return [f"{' and '.join(parts)} samples were read, {order}: all figures are of these (`--samples`)"]


def _length_lines(report: DataReport) -> list[str]:
    lines = []
    for records in report.records:
        if (lengths := length_summary(records)) is not None:
            name = _name(report, records.split, int(lengths["longest_sample"]))
            lines.append(f"longest: {name}, {_length_text(lengths['longest'])} long")
    return lines


def _unstackable_lines(report: DataReport) -> list[str]:
    """Returns a line on samples of unequal shapes that nothing makes a batch."""
    step = report.step
    if step.collate is not None or step.source != "python":
        return []
    lines = []
    for records in report.records:
        usual = Counter(records.shapes).most_common(1)[0][0]
        unlike = [n for n, shape in zip(records.numbers, records.shapes, strict=True) if shape != usual]
        if unlike:
            name = _name(report, records.split, unlike[0])
            lines.append(
                f"unequal shapes: {plural(len(unlike), f'{records.split} sample')} of {len(records.numbers):,}, {name} "
                "first, cannot be stacked with the others: `data.collate` makes batches of them"
            )
    return lines


def _name(report: DataReport, split: str, number: int) -> str:
    from dslc.runtime.data.splits import sample_name

    return sample_name(report.step, split, number)


def _copies(records: SampleRecords) -> tuple[list[Copy], list[Copy]]:
    """Returns the copies in a split, and the samples that have the input of an earlier one and another target."""
    from dslc.runtime.data.sample_records import find_conflicts, find_copies

    return find_copies(records.numbers, records.contents), find_conflicts(records)


def _copy_lines(report: DataReport) -> list[str]:
    lines = []
    for records in report.records:
        copies, conflicts = _copies(records)
        equal = "equals" if len(copies) == 1 else "equal"
        count = f"{plural(len(copies), f'{records.split} sample')} of {len(records.numbers):,}"
        lines.append(f"duplicates: {count} {equal} an earlier one{_pairs(copies)}")
        if conflicts:
            has = "has" if len(conflicts) == 1 else "have"
            lines.append(
                f"contradictions: {plural(len(conflicts), f'{records.split} sample')} {has} the input of an earlier "
                f"one and another target{_pairs(conflicts)}"
            )
    return lines


def _pairs(copies: Sequence[Copy], original: str = "") -> str:
    """Returns the first pairs: ` (17 = 5, 40 = 5, …)`."""
    if not copies:
        return ""
    pairs = [f"{copy.number} = {original}{copy.original}" for copy in copies[:_EXAMPLES]]
    return f" ({', '.join([*pairs, *(['…'] if len(copies) > _EXAMPLES else [])])})"


def _overlaps(report: DataReport) -> dict[str, list[Copy]]:
    from dslc.runtime.data.sample_records import find_overlap

    training, *others = report.records
    return {records.split: find_overlap(training, records) for records in others}


def _overlap_lines(report: DataReport) -> list[str]:
    counts = {records.split: len(records.numbers) for records in report.records}
    return [
        f"overlap: the input of {plural(len(shared), f'{split} sample')} of {counts[split]:,} is that of a training "
        f"sample{_pairs(shared, 'training ')}"
        for split, shared in _overlaps(report).items()
    ]


def _padding_lines(report: DataReport) -> list[str]:
    """Returns the table of padding by order, and what packing leaves."""
    lines = []
    if report.padding:
        batches = next(iter(report.padding.values())).batches
        lines += ["", f"padding, in {plural(batches, 'global batch')} of epoch 1:"]
        head: Row = ("order", "padding", "numbers of a sample", "fullest rank over the mean")
        rows: list[Row] = [
            (name, percent_text(each.share), f"{each.numbers:,.1f}", f"{each.fullest:.2f}")
            for name, each in report.padding.items()
        ]
        if (seconds := padding_seconds(report)) is not None:
            head += ("padding a step",)
            rows = [(*row, time_text(seconds[row[0]])) for row in rows]
        lines += _table(rows, head)
    notes = []
    if report.packing is not None:
        sequences, length, share = report.packing
        packed = f"packed into {plural(sequences, 'sequence')} of {length:,}"
        notes.append(f"packing: samples {packed}, {percent_text(share)} would be empty")
    if (packing := report.documents) is not None:
        notes.append(
            f"documents: {packing.documents:.3g} in a sequence of {packing.length:,}; {percent_text(packing.cut)} of "
            f"them go on in the next sequence; {percent_text(packing.masked)} of attention is between documents, and "
            f"masked; {percent_text(packing.uncounted)} of targets do not count"
        )
    return [*lines, *([""] if notes else []), *(f"- {note}" for note in notes)]


def padding_seconds(report: DataReport) -> dict[str, float] | None:
    """Returns the predicted seconds of a step's arithmetic on padding, by order; None without a calibration.

    Arithmetic is in proportion to numbers. A calibration measures usual batches; fitted constants are of the sample
    that the plan was made with.
    """
    estimate = report.analysis.estimate
    if step_seconds(report.analysis) is None or estimate is None:
        return None
    own = next(iter(report.padding.values())).numbers
    known = own
    structures = report.analysis.source.structures
    if estimate.source == "fitted" and structures is not None:
        known = structures[0].leaves[0].numbers
    return {
        name: estimate.arithmetic * each.numbers / max(1, known) * each.share for name, each in report.padding.items()
    }


def _worst_lines(report: DataReport) -> list[str]:
    """Returns the place of the fullest micro-batch, and its predicted memory and time."""
    worst = report.worst
    if worst is None:
        return []
    fullest, plan_peak = worst.fullest, byte_text(peak_bytes(report.analysis))
    lines = [f"fullest micro-batch: {batch_place(report.analysis, fullest)}"]
    if worst.fault is not None:
        lines.append(worst.fault.message)
    elif worst.analysis is not None and worst.analysis.costs:
        peak = byte_text(peak_bytes(worst.analysis))
        lines.append(f"its predicted memory: {peak} on a rank, and {plan_peak} in the plan{_time_text(report, worst)}")
    else:
        lines.append(f"the predicted memory of the plan covers it: {plan_peak} on a rank")
    if fullest.read < (report.analysis.workload.train or 0):
        lines.append(f"the fullest micro-batch is of {fullest.read:,} samples, read within the time for it")
    if fullest.steps < (report.analysis.workload.steps or 0):
        lines.append(f"the fullest micro-batch is of the first {fullest.steps:,} steps, followed in the time for it")
    return lines


def _conversation_lines(report: DataReport) -> list[str]:
    """Returns what became of the conversations of `chat` sources, and of the pairs of `preferences`."""
    lines = []
    pairs = report.step.source == "preferences"
    what, without = ("pairs", "an answer") if pairs else ("conversations", "messages")
    for counts in _conversation_counts(report):
        trained = counts["conversations"] - counts["empty"] - counts["without_target"]
        lines.append(
            f"{what}: {trained:,} of {counts['conversations']:,} are trained on, with "
            f"{plural(counts['tokens'], 'token')} and {plural(counts['targets'], 'target')}"
        )
        lines.append(
            f"left out: {counts['empty']:,} without {without}, {counts['without_target']:,} without a target; cut off: "
            f"{counts['cut_off']:,}"
        )
    return lines


def _conversation_counts(report: DataReport) -> list[dict[str, int]]:
    steps = report.step.parts or (report.step,)
    return [step.arguments["counts"] for step in steps if step.source in ("chat", "preferences")]


def _time_text(report: DataReport, worst: PricedBatch) -> str:
    """Returns the predicted time of the step beside the plan's; "" without a calibration."""
    times = [step_seconds(analysis) for analysis in (worst.analysis, report.analysis)]
    if times[0] is None or times[1] is None:
        return ""
    return f"; its step: {time_text(times[0])}, and {time_text(times[1])} in the plan"


def step_seconds(analysis: Analysis | None) -> float | None:
    """Returns the predicted seconds of a step by a calibration; None without one."""
    estimate = analysis.estimate if analysis is not None else None
    return estimate.step_time if estimate is not None and estimate.source in ("measured", "fitted") else None


def _class_lines(report: DataReport) -> list[str]:
    """Returns the table of classes; of many ranks it shows the ranks with the fewest and the most samples."""
    counts = list(report.classes.items())
    ranks = range(report.data_ranks)
    if report.data_ranks <= _RANKS:
        head: Row = ("class", "samples", *(f"rank {rank}" for rank in ranks))
        rows: list[Row] = [(str(name), f"{sum(by):,}", *(f"{count:,}" for count in by)) for name, by in counts]
    else:
        head = ("class", "samples", "fewest", "most")
        rows = [(str(name), f"{sum(by):,}", _extreme(by, min(by)), _extreme(by, max(by))) for name, by in counts]
    return ["classes by data rank, in epoch 1:", *_table(rows, head, _CLASSES)]


def _extreme(by_rank: Sequence[int], count: int) -> str:
    return f"{count:,} (rank {by_rank.index(count)})"


# ----------------------------------------------------------------------------------------------------------- as JSON


def _as_json(report: DataReport) -> dict[str, object]:
    splits: dict[str, object] = {}
    for records in report.records:
        copies, conflicts = _copies(records)
        splits[records.split] = {
            "samples": records.samples,
            "read": len(records.numbers),
            "shape": records.shape,
            "length": length_summary(records),
            "duplicates": [asdict(copy) for copy in copies],
            "contradictions": [asdict(copy) for copy in conflicts],
        }
    return {
        "batch": report.step.batch,
        "data_ranks": report.data_ranks,
        "splits": splits,
        "overlap": {split: [asdict(copy) for copy in copies] for split, copies in _overlaps(report).items()},
        "padding": {name: asdict(padding) for name, padding in report.padding.items()},
        "padding_seconds": padding_seconds(report) if report.padding else None,
        "packing": dict(zip(("sequences", "length", "empty"), report.packing, strict=True)) if report.packing else None,
        "conversations": _conversation_counts(report),
        "documents": asdict(report.documents) if report.documents is not None else None,
        "fullest": _worst_as_json(report),
        "classes": {str(name): list(counts) for name, counts in report.classes.items()},
    }


def _worst_as_json(report: DataReport) -> dict[str, object] | None:
    worst = report.worst
    if worst is None:
        return None
    priced = worst.analysis if worst.analysis is not None else None if worst.fault is not None else report.analysis
    return {
        **asdict(worst.fullest),
        "memory": peak_bytes(priced) if priced is not None and priced.costs else None,
        "seconds": step_seconds(priced),
        "fault": worst.fault.message if worst.fault is not None else None,
    }
