"""Opens weights that `torch.save` wrote, in a child, for the names and shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslc.compiler.facts.weights_file import Unreadable, files_of
from dslc.compiler.ir.facts import TensorEntry
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.probe.child import in_child


def opened_weights(job: JobSpec, report: Report) -> Mapping[str, TensorEntry] | None:
    """Returns the tensors of the job's weights if only torch can read them, else None; reports files that it cannot
    read.
    """
    start = job.model.start
    if start is None:
        return None
    try:
        files = files_of(start.path)
    except Unreadable:  # a rule reports it
        return None
    if not files.torchs:
        return None

    def work() -> Any:
        from dslc.runtime.checkpoint.weights import entry
        from dslc.runtime.model.initial_weights import tensors_of

        opened = [(name, entry(tensor)) for file in files.files for name, tensor in tensors_of(file).items()]
        return [(name, one.dtype, one.shape) for name, one in opened]

    answer = in_child(work)
    if "made" in answer:
        return {name: TensorEntry(dtype=dtype, shape=tuple(shape)) for name, dtype, shape in answer["made"]}
    report.add(
        "W0712",
        f"{files.path} cannot be read as weights: {answer['error']}",
        start.at("path"),
        help="a file in which `torch.save` has put a state dict: names and tensors, and nothing that runs",
    )
    return None
