"""The facts of a job: of its data, of the user's own functions, of this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from dslc.compiler.facts.sources import context_of, mixture_facts, source_facts, source_key
from dslc.compiler.ir.facts import Facts, MachineFacts, SourceFacts
from dslc.dsl.diagnostics import Diagnostic, Findings
from dslc.dsl.language.calls import Chat, Datasets, Free, Mixture, Parquet, PictureSource
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import Preferences
from dslc.dsl.language.registry import Call
from dslc.probe.child import in_child
from dslc.probe.gpus import choose_free, gpus_here

_IN_BROWSER = sys.platform == "emscripten"  # which installs nothing, starts no processes, and trains nothing


def collect_facts(job: JobSpec, *, trace: bool, run: bool) -> Findings[Facts]:
    """Returns the facts that the job does not state: of its data, of the user's own functions (only with `trace`), of
    this machine.
    """
    context, call = context_of(job), job.data.source
    source = source_facts(call, context)
    if isinstance(call, Mixture):
        pairs = zip(call.sources, source.parts, strict=True)
        source = mixture_facts([_with_library_facts(part, facts, context, fetch=run) for part, facts in pairs])
    else:
        source = _with_library_facts(call, source, context, fetch=run)
    for part in call.sources if isinstance(call, Mixture) else (call,):
        yield from _look_for_torchvision(part)
    facts = Facts(source=source)
    if trace:
        from dslc.probe.trace_facts import trace_facts  # here, as most checks call no functions

        facts = yield from trace_facts(job, source, run=run)
    return replace(facts, machine=_machine(job.devices.gpus)) if run else facts


def _look_for_torchvision(source: Call) -> Iterator[Diagnostic]:
    """Says that torchvision is not installed: a warning, as another machine may have it."""
    needs_library = isinstance(source, PictureSource) and source.augment and not _IN_BROWSER
    if needs_library and importlib.util.find_spec("torchvision") is None:
        yield Diagnostic(
            code="W0803",
            message="`augment` needs the library `torchvision`, which is not installed",
            span=source.value_span("augment"),
            help="`pip install 'dslc[torchvision]'`; torch for CPUs alone is best beside torchvision for CPUs alone, "
            "from the same index",
        )


def _with_library_facts(call: Call, source: SourceFacts, context: int | None, *, fetch: bool) -> SourceFacts:
    """Returns the facts of a source, with the facts that only a library can tell."""
    if _IN_BROWSER and isinstance(call, Chat | Preferences | Parquet | Datasets) and not source.missing:
        help = "`dslc check` opens it, where dslc is installed"
        return replace(source, missing=f"a browser has no library that opens `{call.word}(…)`", help=help)
    if isinstance(call, Chat | Preferences) and not source.missing and source.input is not None:
        return _read_conversations(call, source, context)
    if isinstance(call, Parquet | Datasets) and not source.missing:
        return _open_table(call, fetch=fetch)
    return source


def _open_table(call: Parquet | Datasets, *, fetch: bool) -> SourceFacts:
    """Opens a table in a child, so that the library is not loaded here. Only `run` may download it."""
    from dslc.compiler.ir.codec import from_json

    _, arguments = source_key(call)

    def work() -> object:
        from dslc.runtime.data.sources import tables

        try:
            if isinstance(call, Parquet):
                return tables.parquet_facts(call.files, call.input, call.target, call.size)
            return tables.datasets_facts(arguments, fetch=fetch)
        except tables.TableFault as fault:
            return fault.facts()

    answer = in_child(work)
    if "made" in answer:
        return from_json(SourceFacts, answer["made"])
    return SourceFacts(
        missing=f"the data cannot be opened: {answer['error']}",
        help="the library that opens it failed; call it alone to see the whole traceback",
        code="E0311",
    )


def _read_conversations(call: Chat | Preferences, source: SourceFacts, context: int | None) -> SourceFacts:
    """Returns the facts of conversations, from the cache if they are there. Else a child makes them tokens, so that
    `transformers` is not loaded here.
    """
    from dslc.compiler.ir.codec import from_json
    from dslc.runtime.data.sources import chat_cache

    if isinstance(call.conversations, Call) and not isinstance(call.conversations, Datasets):
        return source  # a rule reports it
    _, arguments = source_key(call)
    arguments |= {"context": context, **source.found}
    stored_facts = chat_cache.load_facts(chat_cache.entry_of(arguments)) if "files" in arguments else None
    if stored_facts is not None:
        stored_facts.pop("splits")
        stored_facts["found"] |= source.found
        return from_json(SourceFacts, stored_facts)

    def work() -> object:
        from dslc.runtime.data.sources import chat_data
        from dslc.runtime.data.sources.chat_rendering import ConversationError

        try:
            return chat_data.prepare(arguments).facts(arguments["context"])
        except ConversationError as error:
            return error.facts()

    answer = in_child(work)
    if "made" not in answer:
        return replace(
            source,
            missing=f"the conversations cannot be read: {answer['error']}",
            help="the files, the tokenizer or the library `transformers` may be the cause: load the tokenizer alone by "
            "`AutoTokenizer.from_pretrained` to see whether it fails",
            code="E0311",
        )
    facts = cast("dict[str, Any]", answer["made"])
    if isinstance(call, Preferences) and facts.get("argument") == "conversations":
        facts["argument"] = "pairs"
    if "missing" in facts:
        return replace(source, **facts)
    facts["found"] |= source.found
    return from_json(SourceFacts, facts)


def _machine(devices: object) -> MachineFacts:
    gpus: tuple[int, ...] = ()
    in_use, fault = 0, ""
    try:
        if isinstance(devices, Free):
            gpus, in_use = choose_free(devices.count)
        elif devices is not None:
            gpus = gpus_here()
    except RuntimeError as error:
        fault = str(error)
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        gpus_in_use=in_use,
        fault=fault,
    )
