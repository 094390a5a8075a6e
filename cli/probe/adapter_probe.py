"""A network with its adapters, for tracing, and the faults of an adapter that only the network shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dslc.compiler.rules.model.adapters import targets_any
from dslc.compiler.rules.model.name_patterns import report_unmatched
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.probe.trial import Trial

if TYPE_CHECKING:
    from torch import nn

_FAULT = "fault of the adapter"
_MOST = 2_000  # names that a child tells


def with_adapter(trial: Trial, make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that makes the module of `make` with the job's adapter."""
    step = trial.steps.adapter
    if step is None:
        return make

    def adapted() -> Any:
        from torch import nn

        from dslc.runtime.model.adapters import add

        made = make()
        if not isinstance(made, nn.Module):
            return made
        return add(made, replace(step, line=""), trial.job.train.seed)  # the job's line is in the message

    return adapted


def preload_adapters(job: JobSpec) -> None:
    """Imports the library before a run, for the children and the ranks."""
    if job.model.adapter is not None:
        from dslc.runtime.model.adapters import preload

        preload()


def transposed(module: nn.Module) -> tuple[str, ...]:
    """Returns the layers with an adapter whose weight has the input's dim first."""
    from dslc.runtime.model.adapters import targets_of

    return tuple(name for name, over in targets_of(module) if over)


def or_fault(work: Callable[[], Any]) -> Any:
    """Returns what `work` returns, or the fault of the adapter, for `tell_of_fault`."""
    from dslc.runtime.model.adapters import AdapterError

    try:
        return work()
    except AdapterError as error:
        return {_FAULT: str(error), "argument": error.argument, "dense": list(error.dense)[:_MOST]}


def tell_of_fault(job: JobSpec, made: Any, report: Report) -> bool:
    """Reports the fault that a child found; returns False if there is none."""
    adapter = job.model.adapter
    if not isinstance(made, dict) or _FAULT not in made or adapter is None:
        return False
    if made["dense"]:
        ends = dict.fromkeys(name.rpartition(".")[2] for name in made["dense"])
        report_unmatched(
            "0727",
            "`model.adapter.targets`: no dense layer is called @",
            adapter.at("targets"),
            adapter.targets,
            [*ends, *made["dense"]],
            report,
            what="its dense layers",
            is_of=targets_any,
        )
        return True
    report.add("E0727", made[_FAULT], adapter.at(made["argument"]), help=_REMEDIES[made["argument"]])
    return True


_REMEDIES = {
    "targets": "`targets` of dense layers alone; `save` for modules that are to train whole",
    "save": "name it in one of the two",
}
