"""Rules for conversations: what `chat` reads and goes with, and what it leaves out. E0352, N0353."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.facts.sources import each_source
from dslc.compiler.ir.facts import SourceFacts
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import Preferences
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import remedy, remove_argument
from dslc.dsl.words import plural


def check_conversations(job: JobSpec, source: SourceFacts) -> Iterator[Diagnostic]:
    for source_job, facts in each_source(job, source):
        chat = source_job.data.source
        if isinstance(chat, c.Chat | Preferences):
            yield from _check_source(job, chat)
            yield from _note_counts(chat, facts)


def _check_source(job: JobSpec, chat: c.Chat | Preferences) -> Iterator[Diagnostic]:
    data, pairs = chat.conversations, isinstance(chat, Preferences)
    if isinstance(data, Call) and not isinstance(data, c.Datasets):
        yield Diagnostic(
            "E0352",
            f"`{data.word}` gives no {'pairs of answers' if pairs else 'conversations'}",
            data.span,
            help='a file of JSON Lines, or `datasets("folder")`',
        )
    elif isinstance(data, c.Datasets) and data.target is not None:
        yield Diagnostic(
            "E0352",
            f"the targets of {'pairs' if pairs else 'conversations'} are their tokens, and no column",
            data.value_span("target"),
            help=remedy(
                remove_argument(data.span, "target"),
                ": the columns are `chosen`, `rejected` and `prompt`"
                if pairs
                else ": `input` names the column of the messages",
            ),
        )
    if isinstance(job.data.source, c.Mixture) and pairs:
        yield Diagnostic(
            "E0352",
            "a mixture gives samples of one row, and a pair has two",
            chat.span,
            help='one `preferences(…)` over all files: a pattern such as `"pairs/*.jsonl"`',
        )
    elif isinstance(chat, c.Chat) and chat.pack is not None and isinstance(job.data.source, c.Mixture):
        yield Diagnostic(
            "E0352",
            "a mixture cannot hold packed conversations: each of its sources has another token between documents",
            chat.value_span("pack"),
            help=remedy(remove_argument(chat.span, "pack"), ", or one `chat(…)` over all files"),
        )


def _note_counts(chat: c.Chat | Preferences, facts: SourceFacts) -> Iterator[Diagnostic]:
    counts = facts.found.get("counts")
    if counts is None:
        return
    length = facts.input.shape[0] if facts.input is not None else 0
    pairs = isinstance(chat, Preferences)
    texts = {
        "cut_off": f"cut off after {plural(length, 'token')}",
        "empty": f"without {'an answer' if pairs else 'messages'} left out",
        "without_target": "without a target left out",
    }
    parts = [f"{counts[name]:,} {text}" for name, text in texts.items() if counts[name]]
    if parts:
        read = plural(counts["conversations"], "pair" if pairs else "conversation")
        span = chat.value_span(
            "max_length" if counts["cut_off"] and chat.max_length else "pairs" if pairs else "conversations"
        )
        yield Diagnostic("N0353", f"of {read}, {', '.join(parts)}", span)
