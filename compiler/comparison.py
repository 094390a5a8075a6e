"""Compares two plans: which settings of the training differ, and what follows for memory, time, traffic and placement.

`dslc diff` prints a comparison. The training is compared by the programs that ranks receive, where both plans have one.
Where a network was not traced, the sections `Data` and `Training` of the plans are compared. All other figures are
compared as `dslc plan` shows them. Bytes are of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from dslc.compiler.emit import emit
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.plan_view import plan_view
from dslc.compiler.graph.stored import hash_without_lines
from dslc.compiler.ir import program as p
from dslc.compiler.ir.actions import handed_in
from dslc.compiler.ir.data_steps import DataStep
from dslc.compiler.ir.memory import KINDS
from dslc.compiler.ir.number_text import byte_text, count_text, percent_text, time_text
from dslc.compiler.ir.plan import PlanView, RankNode
from dslc.compiler.ir.records import DataNode, TrainingNode
from dslc.compiler.ir.steps import ModuleStep, PythonFunction
from dslc.dsl.record import Record, record
from dslc.dsl.words import plural

Section = Literal["training", "placement", "memory", "traffic", "time"]
SECTIONS: tuple[Section, ...] = ("training", "placement", "memory", "traffic", "time")
Value: TypeAlias = int | float | str | None
Unit = Literal["", "bytes", "seconds", "share", "rate"]
_MOST = 60  # characters of a value


@record
class PlanDifference(Record):
    """One figure or setting that differs; `ranks` are those it is of, "" for all. None stands for an unknown value."""

    section: Section
    what: str
    before: Value
    after: Value
    unit: Unit = ""
    ranks: str = ""

    def text(self, value: Value) -> str:
        if value is None or isinstance(value, str):
            return "unknown" if value is None else value
        return _FORMATS[self.unit](value)


def _plain_number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


_FORMATS: dict[Unit, Callable[[float], str]] = {
    "": _plain_number,
    "bytes": byte_text,
    "seconds": time_text,
    "share": percent_text,
    "rate": lambda value: f"{count_text(value)}/s",
}


def compare_plans(before: PlanGraph, after: PlanGraph) -> tuple[PlanDifference, ...]:
    """Returns every difference in the order of SECTIONS; () if the plans differ in the texts of their jobs alone."""
    one, other = plan_view(before), plan_view(after)
    changes = [
        *_training(before, after, one, other),
        *_placement(one, other),
        *_memory(one, other),
        *_traffic(one, other),
        *_time(one, other),
    ]
    if not changes and hash_without_lines(before) != hash_without_lines(after):
        changes = [PlanDifference(section="placement", what="plan graph", before=one.hash, after=other.hash)]
    return tuple(changes)


# ------------------------------------------------------------------------------------------------------ the training

_BLOCKS: Mapping[str, str] = {  # where a job states what a step of its program says
    "model": "model",
    "loss": "model.loss",
    "data": "data",
    "optimizer": "train.optimizer",
    "learning_rate": "train.lr_schedule",
    "precision": "train.precision",
    "gradients": "parallelism.gradients",
    "checkpoint": "checkpoint",
    "recompute": "memory.recompute",
    "average": "train.ema",
    "timeout": "launch.timeout",
    "restarts": "launch.restarts",
    "offload": "memory.offload",
    "evaluate_every": "evaluate.every",
    "evaluate_start": "evaluate.start",
    "evaluate_training": "evaluate.training",
    "metrics": "evaluate.metrics",
    "generate": "generate",
    "log_every": "log.every",
    "tensorboard": "log.tensorboard",
    "loggers": "log.loggers",
}
# Settings with which each step of a training computes the same. All others mean another training.
SAME_TRAINING: Mapping[type, set[str]] = {
    p.JobProgram: {
        *("timeout", "restarts", "offload", "compiled", "deterministic", "recompute", "checkpoint"),
        *("check_replicas", "evaluate_every", "evaluate_start", "evaluate_training", "metrics", "generate"),
        *("log_every", "tensorboard", "hooks", "loggers"),
    },
    p.GradientStep: {"kind", "reshard"},
    p.ModelStep: {"channels_last"},
    p.LossStep: {"compiled", "chunks"},
    DataStep: {"workers"},
}
# Fields that follow from other settings or from the machine. Placement is compared as the plan shows it.
DERIVED: Mapping[type, set[str]] = {
    p.JobProgram: {
        *("job", "file", "plan_hash", "world_size", "axes", "processes", "device", "gpus", "backend", "threads"),
        *("memory", "memory_limit", "microbatches", "pipeline", "tensor", "context", "mode", "moves_buffers"),
    },
    p.GradientStep: {
        *("replicas", "averages", "static_graph", "unused", "search", "units", "accumulate"),
    },
    p.ModelStep: {"inits", "seed", "reset"},
    p.LossStep: {"head"},
    p.OptimizerStep: {"state", "counts", "fused", "group_state", "base_lr", "closure"},
    p.LearningRateStep: {"steps"},
    p.ExchangeStep: {"agrees", "pieces"},
    DataStep: {"seed", "whole", "structured", "ignore"},
    DataNode: {"shares", "last_shares", "microbatch", "microbatches"},
    TrainingNode: {"check_replicas", "chunked", "compiled", "recomputed", "restarts"},
}
_WHERE = {"line", "folder"}  # the place in a file at which something is written


def _training(before: PlanGraph, after: PlanGraph, one: PlanView, other: PlanView) -> Iterator[PlanDifference]:
    if before.find(p.Training) is not None and after.find(p.Training) is not None:
        found = [*_settings(emit(before, one.hash), emit(after, other.hash), "train")]
    else:
        found = [*_settings(one.data, other.data, "data"), *_settings(one.training, other.training, "train")]
    yield from sorted(found, key=lambda change: SECTIONS.index(change.section))


def _settings(one: Record, other: Record, path: str, section: Section = "training") -> Iterator[PlanDifference]:
    """Yields the fields in which two records of a class differ."""
    left_out = DERIVED.get(type(one), set()) | _WHERE
    for name in one.record_compared:
        if name in left_out:
            continue
        a, b = getattr(one, name), getattr(other, name)
        inside: Section = "placement" if name in SAME_TRAINING.get(type(one), ()) else section
        where = _BLOCKS.get(name, f"{path}.{name}") if isinstance(one, p.JobProgram) else f"{path}.{name}"
        if isinstance(a, ModuleStep) and isinstance(b, ModuleStep):
            yield from _modules(a, b, path)
        elif isinstance(a, Record) and type(a) is type(b) and not isinstance(a, PythonFunction):
            yield from _settings(a, b, where, inside)
        elif isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in sorted(a.keys() | b.keys()):
                if a.get(key) != b.get(key):
                    yield _setting(inside, f"{path}.{key}", a.get(key), b.get(key))
        elif a != b:
            yield _setting(inside, where, a, b)


def _setting(section: Section, path: str, old: object, new: object) -> PlanDifference:
    return PlanDifference(section=section, what=path, before=_short(old), after=_short(new))


def _modules(one: ModuleStep, other: ModuleStep, path: str) -> Iterator[PlanDifference]:
    """Yields where modules of the same name differ, and the number of all if one network has others."""
    ours, theirs = dict(_named(one)), dict(_named(other))
    for name, module in ours.items():
        counterpart, where = theirs.get(name, module), f"{path}.network: {name}"
        if module.kind != counterpart.kind:
            yield _setting("training", where, module.kind.lstrip("."), counterpart.kind.lstrip("."))
            continue
        for key in sorted(module.arguments.keys() | counterpart.arguments.keys()):
            a, b = module.arguments.get(key), counterpart.arguments.get(key)
            if a != b:
                yield _setting("training", f"{where}.{key}", a, b)
    if ours.keys() != theirs.keys():
        yield _setting("training", f"{path}.network", plural(len(ours), "module"), plural(len(theirs), "module"))


def _named(module: ModuleStep, prefix: str = "") -> Iterator[tuple[str, ModuleStep]]:
    name = f"{prefix}.{module.name}".strip(".")
    yield name, module
    for child in module.children:
        yield from _named(child, name)


def _short(value: object) -> Value:
    """Returns a value as a cell of a table has it."""
    text: Value
    match value:
        case bool():
            text = str(value).lower()
        case None:
            text = "none"
        case int() | float() | str():
            return value
        case PythonFunction():
            text = _call(value.function, value.arguments)
        case Mapping():
            text = _call("", value)
        case tuple() | list():
            text = ", ".join(str(_short(each)) for each in value) or "none"
        case Record():
            shown = {
                name: getattr(value, name)
                for name in value.record_compared
                if name not in _WHERE | {"kind"}
                and getattr(value, name) not in (value.record_defaults.get(name), {}, ())
            }
            text = _call(str(getattr(value, "kind", "")), shown)
        case _:
            text = str(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def _call(name: str, arguments: Mapping[str, object]) -> str:
    inside = ", ".join(f"{key} = {_short(value)}" for key, value in arguments.items())
    return f"{name}({inside})" if name else inside


# ----------------------------------------------------------------------------------------------------- the other parts


def _figures(
    section: Section, unit: Unit, ranks: str, pairs: Mapping[str, tuple[Value, Value]]
) -> Iterator[PlanDifference]:
    for what, (a, b) in pairs.items():
        if a != b:
            yield PlanDifference(section=section, what=what, before=a, after=b, unit=unit, ranks=ranks)


def _placement(one: PlanView, other: PlanView) -> Iterator[PlanDifference]:
    before, after = _places(one), _places(other)
    names = {name: (before.get(name, "none"), after.get(name, "none")) for name in {**before, **after}}
    yield from _figures("placement", "", "", names)
    sizes = {
        name: (getattr(one.topology, field), getattr(other.topology, field))
        for name, field in (("memory of a device", "memory"), ("limit of a rank", "limit"))
    }
    yield from _figures("placement", "bytes", "", sizes)


def _places(plan: PlanView) -> dict[str, Value]:
    topology = plan.topology
    found: dict[str, Value] = {
        "ranks": plan.world_size,
        "nodes": topology.nodes,
        "devices of a node": topology.processes,
        "device": topology.kind,
        "backend": topology.backend,
        "threads of a process": topology.threads,
        **{f"axis {axis.name}": axis.size for axis in plan.axes},
        "pieces of the sequence": "yes" if plan.sequence else "no",
        "ranks that share parameters": plan.shards,
        "micro-batches": plan.data.microbatches,
        "samples of a micro-batch": plan.data.microbatch,
        "parameters": plan.parameters,
        "parameters that train": plan.parameters if plan.trained is None else plan.trained,
    }
    if plan.schedule is not None:
        found["schedule"] = plan.schedule.name
        found |= {f"layers of stage {each.index}": f"{each.first}–{each.last}" for each in plan.stages}
    return found


def _memory(one: PlanView, other: PlanView) -> Iterator[PlanDifference]:
    for ranks, a, b in _paired(one, other):
        figures: dict[str, tuple[Value, Value]] = {
            kind: (getattr(a.memory, kind), getattr(b.memory, kind)) for kind in KINDS
        }
        figures |= {"at rest": (a.memory.rest, b.memory.rest), "peak": (a.memory.peak, b.memory.peak)}
        yield from _figures("memory", "bytes", ranks, figures)


def _traffic(one: PlanView, other: PlanView) -> Iterator[PlanDifference]:
    for ranks, a, b in _paired(one, other):
        before, after = _sent_bytes(a), _sent_bytes(b)
        names = {name: (before.get(name, 0), after.get(name, 0)) for name in {**before, **after}}
        yield from _figures("traffic", "bytes", ranks, names)


def _sent_bytes(node: RankNode) -> dict[str, Value]:
    """Returns the bytes that a rank hands in in a step, by axis, operation and payload."""
    names = dict.fromkeys((each.axis, each.operation, each.what) for each in node.traffic)
    return {
        f"{axis}: {operation} of {what}": handed_in(
            each for each in node.traffic if (each.axis, each.operation, each.what) == (axis, operation, what)
        )
        for axis, operation, what in names
        if operation != "receive"
    }


def _paired(one: PlanView, other: PlanView) -> list[tuple[str, RankNode, RankNode]]:
    """Returns the ranks of both plans that are compared: those at each pipeline coordinate, or, where these are not the
    same, those with the highest peak.
    """
    if not one.ranks or not other.ranks:
        return []
    if [each.pipeline for each in one.ranks] == [each.pipeline for each in other.ranks]:
        pairs = list(zip(one.ranks, other.ranks, strict=True))
        if len({(a.memory, a.traffic, b.memory, b.traffic) for a, b in pairs}) == 1:
            return [("", one.ranks[0], other.ranks[0])]
        return [(f"ranks {a.first}–{a.last}" if a.first < a.last else f"rank {a.first}", a, b) for a, b in pairs]
    fullest = [max(plan.ranks, key=lambda node: node.memory.peak) for plan in (one, other)]
    return [("the fullest rank", fullest[0], fullest[1])]


def _time(one: PlanView, other: PlanView) -> Iterator[PlanDifference]:
    bound = any(plan.step_time and plan.step and plan.step.source == "bound" for plan in (one, other))
    step = "step, at best" if bound else "step"
    yield from _figures("time", "seconds", "", {step: (one.step_time, other.step_time)})
    rates = tuple(plan.data.batch / plan.step_time if plan.step_time else None for plan in (one, other))
    yield from _figures("time", "rate", "", {"samples": (rates[0], rates[1])})
    bubbles = (one.bubble or 0, other.bubble or 0)
    yield from _figures("time", "share", "", {"MFU": (one.mfu, other.mfu), "bubble": bubbles})


def summary(changes: Sequence[PlanDifference]) -> str:
    """Returns whether the training is the same, in words."""
    if not changes:
        return "the same plan"
    count = sum(change.section == "training" for change in changes)
    return f"another training, in {plural(count, 'setting')}" if count else "the same training"


def rows(changes: Sequence[PlanDifference], section: Section) -> list[tuple[str, str, str, str]]:
    """Returns the changes of a section as (what, before, after, change in percent)."""
    return [
        (
            change.what + (f", {change.ranks}" if change.ranks else ""),
            change.text(change.before),
            change.text(change.after),
            _relative(change),
        )
        for change in changes
        if change.section == section
    ]


def _relative(change: PlanDifference) -> str:
    a, b = change.before, change.after
    if not change.unit or not isinstance(a, int | float) or not isinstance(b, int | float) or not a or not b:
        return ""
    return f"{100 * (b / a - 1):+.3g}%"
