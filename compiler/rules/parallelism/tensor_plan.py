"""Rules for the tensor axis of a network that a function makes: its plan must name modules that can be cut.

Pure functions; E0415 to E0417 and E0426 to E0429. Entries of `tensor_plan` are checked as they stand; the rest needs
the modules, which tracing gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.placement.tensor_patterns import TensorPlanFault, TensorPlanStyles, parse_entry, resolve_styles
from dslc.compiler.rules.model.name_patterns import entry_at, likely_patterns
from dslc.dsl.diagnostics import Diagnostic, Note, division
from dslc.dsl.language.calls import CrossEntropy
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.language.preferences import PreferenceLoss
from dslc.dsl.language.registry import Call
from dslc.dsl.language.suggest import nearest_choice
from dslc.dsl.remedy import join_remedies, remedy, replace_text
from dslc.dsl.source import Span

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts, ShareFacts

_HEADS = ("num_attention_heads", "num_key_value_heads")


def check_styles(job: JobSpec, ranks: int, source: SourceFacts, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Checks that the plan of `job`, or of the library, cuts the network into equal parts that compute the same."""
    plan = job.parallelism.tensor_plan
    span = job.parallelism.value_span("tensor")
    library = isinstance(job.model.network, TransformersNetwork)
    facts = model.traced if model else None
    if plan is None and (not library or (facts is not None and not facts.published)):
        what = "this model of `transformers`, which publishes no plan," if library else "a network of your own"
        yield Diagnostic(
            "E0415", f"nothing says how {what} is split over the tensor axis", span, help=example_plan(facts)
        )
        return
    if facts is None:
        for parts in map(parse_entry, plan or ()):
            if isinstance(parts, TensorPlanFault):
                yield from _report_fault(job, parts, None)
        return
    styles = resolve_styles(plan, facts, ranks)
    for fault in (*styles.faults, *styles.ignored):
        yield from _report_fault(job, fault, facts)
    if styles.faults:
        return
    if not styles.styles:
        yield Diagnostic("E0416", "`parallelism.tensor_plan` cuts nothing", _place(job), help=example_plan(facts))
    yield from _check_counts(job, ranks, source, styles, facts)
    if facts.shares is not None and facts.shares.ranks == ranks and facts.shares.fault:
        yield from _report_shares(job, ranks, facts, facts.shares)


def _report_fault(job: JobSpec, fault: TensorPlanFault, facts: ModelFacts | None) -> Iterator[Diagnostic]:
    where = (
        entry_at(job.parallelism.value_span("tensor_plan"), fault.entry)
        if fault.entry
        else job.parallelism.value_span("tensor")
    )
    advice = fault.help
    if fault.code == "E0427":
        advice = f"a plan of your own: {example_plan(facts)}"
    elif fault.unknown and facts is not None:
        names = [module.name for module in facts.modules if module.plain]
        meant = nearest_choice(fault.unknown, likely_patterns(names))
        advice = f"did you mean `{meant}`?" if meant else "what `named_modules` of the network calls them"
    yield Diagnostic(
        fault.code, fault.message, where, notes=(Note("the network", job.model.value_span("network")),), help=advice
    )


def _check_counts(
    job: JobSpec, ranks: int, source: SourceFacts, found: TensorPlanStyles, facts: ModelFacts
) -> Iterator[Diagnostic]:
    """Reports features and rows that the ranks cannot share; each count once."""
    seen: set[int] = set()
    names = {count: name for name, count in reversed(facts.counts)}
    for module, what, count in found.uneven:
        if count not in seen:  # the rows of one module are the columns of the next
            seen.add(count)
            name = names.get(count)
            said, where = f"{name or what} of `{module}`", _number_span(job, name)
            if facts.layers and module == facts.layers[-1].name:
                yield from report_scores(said, count, ranks, where, job, source)
            else:
                at_least = source.vocab if what == "vocab" else None
                yield from report_uneven(said, count, ranks, where, job, at_least=at_least)


def _report_shares(job: JobSpec, ranks: int, facts: ModelFacts, shares: ShareFacts) -> Iterator[Diagnostic]:
    heads = next(((name, count) for name, count in facts.counts if name in _HEADS and count % ranks), None)
    if heads is not None:  # the other counts follow from it
        name, count = heads
        yield from report_uneven(
            name, count, ranks, _number_span(job, name), job, help=_heads(job, facts, name, count, ranks)
        )
        return
    yield Diagnostic(
        "E0428",
        f"cut over {ranks} tensor-parallel ranks the network would not compute the same: {shares.fault}",
        _place(job),
        notes=(Note("the network", job.model.value_span("network")),),
        help=shares.help or "leave its modules whole, or cut what it works with alike",
    )


def _heads(job: JobSpec, facts: ModelFacts, name: str, count: int, ranks: int) -> str:
    """Returns a remedy for heads: the count of key and value heads divides the count of query heads."""
    below, counts = count // ranks * ranks, dict(facts.counts)
    near, queries = [n for n in (below, below + ranks) if n], counts.get(_HEADS[0])
    if name == _HEADS[0]:
        return f"use {' or '.join(map(str, near))}, and a `hidden_size` that they share out"
    near = [n for n in near if queries is None or queries % n == 0]
    if not near:
        return f"as many as `{_HEADS[0]}`, a multiple of {ranks}"
    return _use(count, near, _number_span(job, name))


def report_uneven(
    what: str,
    value: int,
    ranks: int,
    where: Span | None,
    job: JobSpec,
    *,
    at_least: int | None = None,
    help: str = "",
) -> Iterator[Diagnostic]:
    """Reports E0417. Fewer than `at_least` are not advised; `help` replaces the nearest multiples."""
    below = value // ranks * ranks
    near = [n for n in (below, below + ranks) if n and n >= (at_least or 0)]
    yield Diagnostic(
        "E0417",
        f"{value} ({what}) cannot be shared out over {ranks} tensor-parallel ranks",
        where,
        label=division(value, ranks),
        notes=(Note("`parallelism.tensor` is set here", job.parallelism.value_span("tensor")),),
        help=help or _use(value, near, where),
    )


def _use(value: int, numbers: Sequence[int], place: Span | None) -> str:
    """Advises one of some numbers instead of the value in the text at a place."""
    written = place.text() if place is not None else ""
    once = len(re.findall(rf"\b{value}\b", written)) == 1
    edits = [
        replace_text(place if once else None, re.sub(rf"\b{value}\b", f"{number}", written), f"{number}")
        for number in numbers
    ]
    return remedy("use ", join_remedies(" or ", [remedy(edit) for edit in edits]))


def report_scores(
    what: str, value: int, ranks: int, where: Span | None, job: JobSpec, source: SourceFacts
) -> Iterator[Diagnostic]:
    """Reports E0417 for a network's output: no fewer than there are classes; as many numbers as the data has."""
    if isinstance(job.model.loss, CrossEntropy | PreferenceLoss):
        classes = source.classes if source.classes is not None else source.vocab
        yield from report_uneven(what, value, ranks, where, job, at_least=classes)
    else:
        remedy = f"the data asks for {value}: a tensor axis that divides it, or other layers after this one"
        yield from report_uneven(what, value, ranks, where, job, help=remedy)


def example_plan(facts: ModelFacts | None) -> str:
    """Returns an example plan with modules of the network: two adjacent dense layers, wide between them."""
    form = '`tensor_plan = ["<module>: column", "<other>: row"]`, with modules as `named_modules` calls them'
    if facts is None:
        return f"{form}; `--trace` proposes some"
    linears = [module for module in facts.modules if module.plain == "Linear"]
    for one, other in pairwise(linears):
        beside = one.name.rpartition(".")[0] == other.name.rpartition(".")[0]
        if beside and one.weight[0] > one.weight[1] and one.weight == other.weight[::-1]:
            first, second = (re.sub(r"\b\d+\b(?=\.)", "*", each.name) for each in (one, other))
            return f'for instance `tensor_plan = ["{first}: column", "{second}: row"]`'
    return form


def _place(job: JobSpec) -> Span | None:
    parallelism = job.parallelism
    return parallelism.value_span("tensor_plan" if parallelism.is_set("tensor_plan") else "tensor")


def _number_span(job: JobSpec, name: str | None) -> Span | None:
    """Returns the span of a number of the configuration; else the span of the network."""
    network = job.model.network
    if name and isinstance(network, Call) and network.is_set(name):
        return network.value_span(name)
    return job.model.value_span("network")
