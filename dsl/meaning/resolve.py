"""Resolves the merged layers: every block, promise and sweep of a job.

`resolve` never stops at a mistake: each block is built on its own. A wrong optional value counts as not given, and its
path as `broken`, so that later checks can ignore what depends on it. A job is made if every block could be. With a
sweep, the job has the first alternatives; every other alternative is tried in turn, and mistakes that it alone has are
reported at it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dslc.dsl.bounds import LOOKS, WORDS_LOOKED_AT
from dslc.dsl.diagnostics import Diagnostic, Report, TooManyErrors
from dslc.dsl.language import blocks
from dslc.dsl.language.job import JobSpec, Promise
from dslc.dsl.language.no_effect_warnings import EFFECTS
from dslc.dsl.language.registry import BLOCKS, PATH_BLOCKS, Dimension, Kind, fields, measure
from dslc.dsl.language.registry import Float as FloatKind
from dslc.dsl.language.suggest import (
    RESERVED,
    EntryPlace,
    did_you_mean,
    for_block,
    for_field,
    for_setting,
    words_of,
)
from dslc.dsl.meaning.calling import build, call, end_of, origin
from dslc.dsl.meaning.evaluate import BadValue, Evaluator
from dslc.dsl.meaning.layering import Merged, Setting, put
from dslc.dsl.paths import ResolvedPath
from dslc.dsl.record import Record, record
from dslc.dsl.remedy import remedy, remove_at, remove_field, replace_text
from dslc.dsl.source import Span
from dslc.dsl.syntax import tree
from dslc.dsl.words import listed, quoted

# The quantities that `expect` can name, and their dimensions; None is a plain number.
PROMISES: dict[str, Dimension | None] = {
    "devices": None,
    "parameters": None,
    "peak_memory": "bytes",
    "bubble": "ratio",
    "step_time": "time",
    "traffic": "bytes",
    "mfu": "ratio",
}
PROMISE_DOCS = {
    "devices": "the number of devices of the job",
    "parameters": "the number of parameters of the model",
    "peak_memory": "peak memory of any device",
    "bubble": "the share of a step in which a pipeline's ranks wait",
    "step_time": "the time of a step",
    "traffic": "the bytes that a rank sends in a step",
    "mfu": "the share of the devices' FLOP/s that the model's own arithmetic uses",
}

Combination = tuple[tuple[str, str], ...]


@record
class Resolved(Record):
    """`combinations` are the combinations of a sweep, as settings; empty without one."""

    job: JobSpec | None
    origins: dict[str, str]
    broken: frozenset[str]
    combinations: tuple[Combination, ...] = ()


@dataclass(kw_only=True)
class _Attempt:
    """One resolution of a job without its sweep."""

    blocks: dict[str, Any]
    promises: tuple[Promise, ...]
    evaluator: Evaluator
    report: Report = field(default_factory=Report)


def resolve(merged: Merged, report: Report, name: str, folder: str) -> Resolved:
    """Returns the job that the layers describe. `name` and `folder` are the job's."""
    _unused(merged, report)
    lists = _alternatives(merged, report)
    first = merged.copy()
    for path, items in lists.items():
        put(first, path, Setting(name=merged.sweeps[path].name, value=items[0]), report)
    attempts = [_attempt(first)]
    if lists and _too_many(lists, merged, attempts[0].evaluator.values, report):
        lists = {}
    for path, items in lists.items():
        for item in items[1:]:
            other = first.copy()
            put(other, path, Setting(name=merged.sweeps[path].name, value=item), report)
            attempts.append(_attempt(other))
    base = attempts[0]
    # A mistake of one alternative is a mistake; a field without effect in one may have an effect in another.
    for attempt in attempts:
        report.extend(d for d in attempt.report.found if d.severity == "error" or d.code != "W0103")
    common = set.intersection(*({d.text_key() for d in attempt.report.found} for attempt in attempts))
    report.extend(d for d in base.report.found if d.text_key() in common)
    paths = {span: path for attempt in attempts for span, path in attempt.evaluator.paths.items()}
    texts = {".".join(path): tuple(_text(item, paths) for item in items) for path, items in lists.items()}
    report.extend(_repeated_alternatives(lists, texts))
    job = None
    if all(not isinstance(block, BadValue) for block in base.blocks.values()):
        job = JobSpec(name=name, folder=folder, source=merged.main.source, **base.blocks, expect=base.promises,
                      sweep=texts)  # fmt: skip
        if shared := dict(_shared_folders(lists, attempts)):
            swept, common_folder = ", ".join(f"`{path}`" for path in shared), next(iter(shared.values()))
            report.add(
                "E0145",
                f"the runs of the sweep over {swept} would all write their checkpoints into {common_folder}",
                job.checkpoint.value_span("dir"),
                help=remedy(
                    remove_field("checkpoint.dir", "leave `checkpoint.dir` out"), ": each run has a folder of its own"
                ),
            )
    origins = _origins(merged, base)
    return Resolved(
        job=job, origins=origins, broken=frozenset(base.evaluator.broken), combinations=tuple(_combinations(texts))
    )


def _repeated_alternatives(
    lists: Mapping[tuple[str, ...], Sequence[tree.Expr]], texts: Mapping[str, Sequence[str]]
) -> Iterator[Diagnostic]:
    """Reports alternatives of a sweep that are given again: their runs would have one folder."""
    for items, (path, alternatives) in zip(lists.values(), texts.items(), strict=True):
        for number, item in enumerate(items):
            if alternatives[number] in alternatives[:number]:
                message = f"the sweep of `{path}` has the alternative `{alternatives[number]}` twice"
                yield Diagnostic("E0142", message, item.span, help=remedy(remove_at(item.span)))


def _shared_folders(
    lists: Mapping[tuple[str, ...], Sequence[tree.Expr]], attempts: Sequence[_Attempt]
) -> Iterator[tuple[str, str]]:
    """Yields each swept path with two alternatives that write their checkpoints into one folder, and the folder.
    `attempts` are the job itself and, path by path, the job with each further alternative.
    """
    base, others = attempts[0], iter(attempts[1:])
    for path, items in lists.items():
        runs = [base, *islice(others, len(items) - 1)]
        checkpoints = [run.blocks["checkpoint"] for run in runs]
        folders = [c.dir for c in checkpoints if isinstance(c, blocks.CheckpointSpec) and c.is_enabled and c.dir]
        if shared := next((folder for folder in folders if folders.count(folder) > 1), None):
            yield ".".join(path), shared


def _too_many(
    lists: Mapping[tuple[str, ...], Sequence[tree.Expr]], merged: Merged, values: int, report: Report
) -> bool:
    """True if a sweep has more combinations than are analysed; each is the whole job again, of `values` values."""
    longest = max(len(items) for items in lists.values())
    count = math.prod(len(items) for items in lists.values()) if max(longest, len(lists)) <= LOOKS.most else 0
    each = merged.words + values
    if 0 < count <= LOOKS.most and count * each <= WORDS_LOOKED_AT.most:
        return False
    if 0 < count <= LOOKS.most:
        size, most = f"{count:,} combinations of a job of {each:,} words and values", WORDS_LOOKED_AT.most // each
    else:
        huge = not 0 < count < 10**12
        size = f"{len(lists):,} paths, of up to {longest:,} alternatives" if huge else f"{count:,} combinations"
        most = LOOKS.most
    span = merged.sweeps[next(iter(lists))].name
    message = f"the sweep has {size}, and {most:,} combinations are the most"
    report.add(LOOKS.code, message, span, help="sweep fewer paths at once")
    return True


def _attempt(merged: Merged) -> _Attempt:
    """Resolves as much of the job as possible; after too many mistakes, returns the part made so far."""
    report = Report()
    evaluator = Evaluator(merged, report, call)
    block_of: dict[str, Any] = {}
    promises: tuple[Promise, ...] = ()
    try:
        _blocks(evaluator, report, block_of)
        promises = _promises(evaluator)
        if not any(isinstance(block, BadValue) for block in block_of.values()):
            for effect in EFFECTS:
                report.extend(effect(block_of, evaluator.broken))
    except TooManyErrors:
        block_of = dict.fromkeys(BLOCKS, BadValue())
    return _Attempt(blocks=block_of, promises=promises, evaluator=evaluator, report=report)


def _blocks(evaluator: Evaluator, report: Report, block_of: dict[str, Any]) -> None:
    """Puts each block of the job into `block_of`; `BadValue` if it cannot be made."""
    merged = evaluator.merged
    _unknown(evaluator, report)
    for word, declaration in BLOCKS.items():
        settings = {name: setting for (block, name), setting in merged.fields.items() if block == word}
        known = {f.word for f in fields(declaration)}
        whole = declaration.whole
        if whole in settings:
            chosen = settings.pop(whole)
            values: dict[str, Any] = {whole: True}
            block_of[word] = declaration(**values, span=chosen.name)
            evaluator.origins[f"{word}.{whole}"] = origin(chosen.name)
            continue
        settings = {name: setting for name, setting in settings.items() if name in known}
        required = [f.word for f in fields(declaration) if f.required] + ["` or `".join(g) for g in declaration.one_of]
        if word not in merged.headers and required:
            if not all(f"{word}.{name}" in evaluator.broken for group in required for name in group.split("` or `")):
                _missing_block(evaluator, word, required)
            block_of[word] = BadValue()
            continue
        block_of[word] = build(evaluator, declaration, settings, word, merged.headers.get(word))


def _missing_block(evaluator: Evaluator, word: str, required: list[str]) -> None:
    if evaluator.merged.complete and word not in evaluator.merged.taken_for_fields:
        needs = " and ".join(f"`{name}`" for name in required)
        evaluator.fail(
            "E0109", f"the block `{word}` is missing", end_of(evaluator),
            help=f"a job needs `{word} {{ … }}` with {needs}",
        )  # fmt: skip


def _unknown(evaluator: Evaluator, report: Report) -> None:
    """Reports blocks and fields that do not exist, and `auto` written as a field."""
    merged = evaluator.merged
    for block in merged.headers:
        # An unknown one is reported already; `optimizer { … }` is `train.optimizer` all the same.
        if block not in BLOCKS and block not in PATH_BLOCKS:
            _taken_for(evaluator, for_block(block).path)
    for (block, name), setting in merged.fields.items():
        span = next(iter(setting.arguments.values())).name if setting.arguments else setting.name
        if block not in BLOCKS:
            continue
        declaration = BLOCKS[block]
        if name in words_of(declaration):
            continue
        if name == declaration.whole:
            if not isinstance(setting.value, tree.Name) or setting.value.name != name or setting.arguments:
                report.add("E0107", f"`{block}` has no field `{name}`", span, help=f"write `{block} = {name}`")
        elif name in RESERVED:
            report.add("E0108", f"`{name}` is reserved for a later version of the language", span)
        else:
            value = "" if setting.arguments else setting.value.span.text()
            paths = frozenset(f"{block}.{field}" for block, field in merged.fields)
            meant = for_field(block, name, EntryPlace(span, value, paths))
            report.add("E0107", f"`{block}` has no field `{name}`", span, help=meant.said)
            _taken_for(evaluator, meant.path)


def _taken_for(evaluator: Evaluator, path: str) -> None:
    """Counts a field that was written under another name as given, with an unknown value."""
    block, _, field = path.partition(".")
    if field and (block, field) not in evaluator.merged.fields:
        evaluator.broken.add(path)


def _unused(merged: Merged, report: Report) -> None:
    if not merged.complete or any(d.code.startswith("E00") for d in report.found):
        return  # it may be used in text that could not be read
    for name, param in merged.params.items():
        if name not in merged.spoken and param.setting is not None:
            help = remedy(remove_at(param.declared, "remove it"), ", or use it")
            report.add("W0101", f"param `{name}` is never used", param.declared, help=help)


# ------------------------------------------------------------------------------------------------------- promises


def _promises(evaluator: Evaluator) -> tuple[Promise, ...]:
    promises = []
    for name, comparisons in evaluator.merged.promises.items():
        for comparison in comparisons:
            if name not in PROMISES:
                meant = did_you_mean(name, PROMISES, comparison.name_span)
                evaluator.fail(
                    "E0140", f"`expect` knows no `{name}`", comparison.name_span,
                    help=meant or f"it knows {listed(PROMISES)}",
                )  # fmt: skip
                continue
            dimension = PROMISES[name]
            kind: Kind = FloatKind() if dimension is None else measure(dimension)
            value = _promised(evaluator, comparison.value, kind, f"expect.{name}")
            if not isinstance(value, BadValue):
                evaluator.origins[f"expect.{name}"] = origin(comparison.name_span)
                promises.append(Promise(name=name, operator=comparison.operator, value=value, span=comparison.span))
    return tuple(promises)


def _promised(evaluator: Evaluator, expr: tree.Expr, kind: Kind, path: str) -> float | BadValue:
    value: float | BadValue = evaluator.value(expr, kind, path)
    if isinstance(kind, FloatKind) and isinstance(value, float) and value == int(value):
        return int(value)
    return value


# --------------------------------------------------------------------------------------------------------- sweeps


def _alternatives(merged: Merged, report: Report) -> dict[tuple[str, ...], tuple[tree.Expr, ...]]:
    """Returns the alternatives of each swept path that exists."""
    evaluator = Evaluator(merged, Report(), call)
    alternatives = {}
    for path, setting in merged.sweeps.items():
        shown = ".".join(path)
        problem = _no_path(merged, path, setting.name)
        if problem:
            report.add("E0142", f"`{shown}` names nothing that could be swept", setting.name, help=problem)
            continue
        value = evaluator.behind(setting.value)
        if isinstance(value, tree.UnreadValue) or evaluator.is_lost(setting.value):
            continue
        if not isinstance(value, tree.List):
            report.add(
                "E0142", f"a sweep of `{shown}` takes a list of its alternatives", setting.value.span,
                help=_as_list(shown, setting.value.span),
            )  # fmt: skip
        elif not value.items:
            report.add("E0142", f"the sweep of `{shown}` has no alternatives", setting.value.span)
        else:
            alternatives[path] = value.items
    return alternatives


def _as_list(path: str, place: Span) -> str:
    value = f"[{place.text()}]"
    return remedy("write ", replace_text(place, value, f"`{path} = {value}`")) if len(value) < 42 else ""


def _no_path(merged: Merged, path: tuple[str, ...], place: Span) -> str:
    """Returns the reason why a path cannot be swept; "" if it can. Trying it shows if a call has the argument."""
    if len(path) == 1:
        if path[0] in merged.params or (path[0] in BLOCKS and BLOCKS[path[0]].whole):
            return ""
        meant = did_you_mean(path[0], merged.params, place) or for_setting(path[0], place)
        return meant or "a path is a param, `block.field` or `block.field.argument`"
    if path[0] not in BLOCKS:
        return did_you_mean(path[0], BLOCKS) or f"the blocks are {listed(BLOCKS)}"
    if path[1] not in words_of(BLOCKS[path[0]]):
        return for_field(path[0], path[1]).said
    return "" if len(path) <= 3 else "a path is a param, `block.field` or `block.field.argument`"


_STRING_OR_GAP = r'("(?:[^"\\\n]|\\.)*")|(?:\s|#[^\n]*)+'


def _text(item: tree.Expr, paths: Mapping[Span, ResolvedPath]) -> str:
    """Returns an alternative on one line, as `--set` takes it: from the command line a relative path would start in the
    current folder.
    """
    if item.span in paths:
        return quoted(paths[item.span])

    def text_of(part: re.Match[str]) -> str:
        if part[1] is None:
            return " "
        start, end = part.span()
        path = paths.get(Span(item.span.source, item.span.start + start, item.span.start + end))
        return part[1] if path is None or path == os.path.abspath(os.path.expanduser(path.written)) else quoted(path)

    return re.sub(_STRING_OR_GAP, text_of, item.span.text())


def _combinations(texts: dict[str, tuple[str, ...]]) -> Iterable[Combination]:
    """Yields every combination, the last path varying fastest; nothing without a sweep."""
    if not texts:
        return []
    combinations: list[Combination] = [()]
    for path, alternatives in texts.items():
        combinations = [(*before, (path, text)) for before in combinations for text in alternatives]
    return combinations


# -------------------------------------------------------------------------------------------------------- origins


def _origins(merged: Merged, attempt: _Attempt) -> dict[str, str]:
    """Returns the origin of every param, every field, and every written argument."""
    origins = {name: origin(param.setting.name) for name, param in merged.params.items() if param.setting is not None}
    for word, declaration in BLOCKS.items():
        for f in fields(declaration):
            if f.name == declaration.whole and f"{word}.{f.word}" not in attempt.evaluator.origins:
                continue
            path = f"{word}.{f.word}"
            origins[path] = attempt.evaluator.origins.get(path, "default")
    return origins | attempt.evaluator.origins
