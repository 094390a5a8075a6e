"""`chat` and `preferences`: conversations, or pairs of answers, as sequences of tokens of one length, and which
tokens are targets.

Model: conversations are rendered once, by chat_rendering.py, and kept in the user's cache. A sequence has `context`
tokens. Without packing it holds the beginning of one conversation. With packing it holds several whole ones, each put
into the fullest sequence that has room for it, the longest first. One token, `filler`, which no conversation has,
stands between two conversations, and fills up a sequence. The target of a position is the token that follows it, or
`ignore` where that token does not count. A pair is two sequences, one after the other: the prompt with the chosen
answer, and with the rejected one.

Contract: sequences are in the order of their first conversations. Conversations without messages, or without a token
that counts among their first `context`, are left out, and counted. The ranks compare a digest of all tokens with that
of the plan. Arrays are mapped into memory: the ranks of a machine share them.

Limits: filled-up positions are computed and not counted. What follows a conversation cannot change it only where
attention is causal.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dslc.compiler.ir.steps import Arguments
from dslc.runtime.data.sources import chat_cache, preference_pairs
from dslc.runtime.data.sources.chat_rendering import (
    ConversationError,
    ConversationRenderer,
    RenderedConversation,
    TextRenderer,
    load_tokenizer,
)
from dslc.runtime.data.sources.conversations import Conversation, read_files, read_rows
from dslc.runtime.data.sources.preference_pairs import PreferencePair
from dslc.runtime.data.sources.tables import TableFault, open_datasets

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_ARRAYS = ("tokens", "counted", "starts")
ANSWERS = "answers"  # as `train_on`: the source has pairs
Render: TypeAlias = Callable[
    [Any], list[RenderedConversation]
]  # the rows of a conversation or a pair; [] if it is empty


@dataclass
class ConversationCounts:
    """Conversations (or pairs) that were read, and those that are empty, have no target, or lose their end; tokens and
    targets of those that are trained on.
    """

    conversations: int = 0
    empty: int = 0
    without_target: int = 0
    cut_off: int = 0
    tokens: int = 0
    targets: int = 0


@dataclass(frozen=True)
class PreparedSplit:
    """The sequences of a split: `tokens` and `counted` of all, one after another; sequence n begins at `starts[n]`."""

    tokens: NDArray[np.uint32]
    counted: NDArray[np.bool_]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True)
class PreparedConversations:
    """The splits, training first. `filler` fills up sequences; `vocab` is one more than the largest token, which says
    nothing about how many tokens the tokenizer knows.
    """

    splits: tuple[PreparedSplit, ...]
    filler: int
    vocab: int
    digest: str
    counts: ConversationCounts
    rows: int = 1  # of a sample: a pair has two

    def facts(self, context: int) -> dict[str, object]:
        """Returns the fields of SourceFacts."""
        tokens = {"shape": (context,), "dtype": "int64"}
        return {
            "samples": len(self.splits[0]) // self.rows,
            "validation_samples": len(self.splits[1]) // self.rows if len(self.splits) > 1 else None,
            "input": tokens,
            "target": tokens,
            "vocab": self.vocab,
            "found": {"filler": self.filler, "digest": self.digest, "counts": asdict(self.counts)},
        }


def prepare(arguments: Arguments) -> PreparedConversations:
    """Returns the sequences of a source, from the cache if they are there. Raises ConversationError and OSError."""
    sets, identity = _open_sets(arguments)
    entry = chat_cache.entry_of(arguments, identity)
    if entry is not None and (facts := chat_cache.load_facts(entry)) is not None:
        try:
            return _load(entry, facts, _rows(arguments))
        except (OSError, ValueError, KeyError):
            pass  # another process removes it
    prepared = _prepare(arguments, sets)
    if entry is not None:
        facts = prepared.facts(arguments["context"]) | {"splits": len(prepared.splits)}
        chat_cache.store(entry, lambda folder: _save(prepared, folder), facts)
    return prepared


def _rows(arguments: Arguments) -> int:
    return 2 if arguments["train_on"] == ANSWERS else 1


def _open_sets(arguments: Arguments) -> tuple[list[Iterator[Any]], list[str]]:
    """Returns the conversations or pairs of each split, and what identifies them if they are in no file of the job."""
    has_pairs = _rows(arguments) > 1
    if "files" in arguments:
        return [(preference_pairs.read_files if has_pairs else read_files)(arguments["files"])], []
    try:
        parts: list[datasets.Dataset] = [part for part in open_datasets(arguments) if part is not None]
    except TableFault as fault:
        raise ConversationError(str(fault), fault.help, fault.code) from fault
    if any(not hasattr(part, "__len__") for part in parts):
        raise ConversationError("conversations are counted, and a stream has no end", "a data set without `streaming`")
    column = next(iter(arguments["input"] or ()), None)
    sets: list[Iterator[Any]] = [
        preference_pairs.read_rows(part, arguments["path"]) if has_pairs else read_rows(part, arguments["path"], column)
        for part in parts
    ]
    return sets, [str(part._fingerprint) for part in parts]


# ---------------------------------------------------------------------------------------------------------- preparing


@dataclass(frozen=True)
class _CountedTokens:
    tokens: NDArray[np.uint32]
    counted: NDArray[np.bool_]


def _prepare(arguments: Arguments, sets: Sequence[Iterable[Any]]) -> PreparedConversations:
    counts, rows = ConversationCounts(), _rows(arguments)
    render = _pair_renderer(arguments) if rows > 1 else _conversation_renderer(arguments)
    splits = [_render(arguments, render, items, counts) for items in sets]
    vocabulary = np.unique(np.concatenate([rendered.tokens for split in splits for rendered in split]))
    filler = _unused_token(vocabulary, load_tokenizer(arguments["tokenizer"]))
    packed = arguments["pack"] is not None
    prepared = tuple(_lay_out(split, arguments["context"], filler if packed else None) for split in splits)
    digest = hashlib.sha256()
    for split in prepared:
        for name in _ARRAYS:
            digest.update(np.ascontiguousarray(getattr(split, name)).tobytes())
    vocab = max(int(vocabulary[-1]), filler) + 1
    return PreparedConversations(prepared, filler, vocab, digest.hexdigest()[:32], counts, rows)


def _conversation_renderer(arguments: Arguments) -> Render:
    renderer = ConversationRenderer(arguments["tokenizer"], arguments["template"], arguments["train_on"])

    def render(conversation: Conversation) -> list[RenderedConversation]:
        return [renderer.render(conversation.messages, conversation.tools)] if conversation.messages else []

    return render


def _pair_renderer(arguments: Arguments) -> Render:
    """Returns the function that renders the two rows of a pair, of text or of messages."""
    of_text = cache(lambda: TextRenderer(arguments["tokenizer"]))
    of_messages = cache(lambda: ConversationRenderer(arguments["tokenizer"], arguments["template"], "all"))

    def render(pair: PreferencePair) -> list[RenderedConversation]:
        if not pair.chosen or not pair.rejected:
            return []
        if isinstance(pair.prompt, str):
            texts = [answer for answer in (pair.chosen, pair.rejected) if isinstance(answer, str)]
            return of_text().render_answers(pair.prompt, texts)
        messages = [answer for answer in (pair.chosen, pair.rejected) if not isinstance(answer, str)]
        return of_messages().render_answers(pair.prompt, messages, pair.tools)

    return render


def _render(
    arguments: Arguments, render: Render, items: Iterable[Any], counts: ConversationCounts
) -> list[_CountedTokens]:
    """Returns the rows of a split's conversations or pairs, cut to the length of a row. A pair has two; a conversation
    or pair counts if each of its rows has a target.
    """
    length, shortest = arguments["context"], 0
    rows: list[_CountedTokens] = []
    earlier = counts.conversations
    for item in items:
        counts.conversations += 1
        try:
            rendered = render(item)
        except ConversationError as error:
            raise ConversationError(f"{item.place}: {error}", error.help, error.code, error.argument) from error
        if not rendered:
            counts.empty += 1
            continue
        masks = [_targets_of(row) for row in rendered]
        if not all(mask[:length].any() for mask in masks):
            counts.without_target += 1
            if all(mask.any() for mask in masks):
                needed = max(int(mask.argmax()) + 1 for mask in masks)
                shortest = min(shortest or needed, needed)
            continue
        counts.cut_off += any(len(mask) > length for mask in masks)
        for row, mask in zip(rendered, masks, strict=True):
            rows.append(_CountedTokens(np.array(row.tokens[:length], np.uint32), mask[:length]))
            counts.tokens += len(rows[-1].tokens)
            counts.targets += int(rows[-1].counted.sum())
    if not rows:
        raise _no_target_error(arguments, counts.conversations - earlier, shortest)
    return rows


def _targets_of(row: RenderedConversation) -> NDArray[np.bool_]:
    counted = np.array(row.counted, np.bool_)
    counted[:1] = False  # nothing predicts the first token
    return counted


def _no_target_error(arguments: Arguments, conversations: int, shortest: int) -> ConversationError:
    length, source = arguments["context"], arguments.get("conversations", arguments.get("path"))
    has_pairs = _rows(arguments) > 1
    what, one = ("pairs of answers", "row") if has_pairs else ("conversations", "conversation")
    if not conversations:
        return ConversationError(f"{source} holds no {what}", f"a file with {what}")
    if shortest:
        return ConversationError(
            f"the first {length:,} tokens of each {one} hold nothing that the loss counts",
            f"`max_length = {shortest}` or more: the shortest prompt has {shortest - 1:,} tokens",
            "E0351",
            "max_length",
        )
    if has_pairs:
        what = f"none of the pairs ({conversations:,}) has two answers"
        return ConversationError(what, "pairs with `chosen` and `rejected`", "E0351")
    what = f"none of the conversations ({conversations:,}) has a turn of the assistant"
    return ConversationError(what, "conversations with answers, or `train_on = all`", "E0351", "train_on")


def _unused_token(vocabulary: NDArray[np.uint32], tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the token that fills up sequences: no conversation has it, and it is not in `vocabulary`. One below their
    largest token is taken if possible, as a model may know fewer tokens than its tokenizer.
    """
    used_tokens = set(vocabulary.tolist())
    largest = int(vocabulary[-1])
    own = [token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None]
    candidates = (*(token for token in own if token <= largest), *range(largest))
    within = next((token for token in candidates if token not in used_tokens), None)
    if within is None and largest + 1 >= len(tokenizer):
        raise ConversationError(
            f"the conversations use all {len(tokenizer):,} tokens of the tokenizer, and none is left to fill up "
            "sequences",
            "a tokenizer with a padding token",
            "E0350",
            "tokenizer",
        )
    return largest + 1 if within is None else within


def _lay_out(conversations: list[_CountedTokens], length: int, separator: int | None) -> PreparedSplit:
    """Returns the sequences of a split, packed if there is a `separator`."""
    numbers = [[n] for n in range(len(conversations))]
    between = _CountedTokens(np.array([], np.uint32), np.array([], np.bool_))
    if separator is not None:
        numbers = pack([len(conversation.tokens) for conversation in conversations], length)
        between = _CountedTokens(np.array([separator], np.uint32), np.array([False]))
    starts = [0]
    parts: list[_CountedTokens] = []
    for row in numbers:
        pieces = [piece for n in row for piece in (between, conversations[n])][1:]
        starts.append(starts[-1] + sum(len(piece.tokens) for piece in pieces))
        parts += pieces
    return PreparedSplit(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.counted for part in parts]),
        np.array(starts, np.int64),
    )


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Returns the conversations of each sequence of `size` tokens, by their numbers. Each goes into the fullest
    sequence that has room for it and for a token between them, the longest first.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens that are left in a sequence, and its number, ascending
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        at = bisect_left(room, (lengths[n] + 1, 0))
        left, row = room.pop(at) if at < len(room) else (size + 1, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(n)
        insort(room, (left - lengths[n] - 1, row))
    return sorted(sorted(row) for row in rows)


# -------------------------------------------------------------------------------------------------------------- files


def _save(prepared: PreparedConversations, folder: str) -> None:
    for n, name in itertools.product(range(len(prepared.splits)), _ARRAYS):
        np.save(os.path.join(folder, f"{name}{n}.npy"), getattr(prepared.splits[n], name))


def _load(entry: str, facts: dict[str, Any], rows: int) -> PreparedConversations:
    def array(name: str, n: int) -> NDArray[Any]:
        return np.asarray(np.load(os.path.join(entry, f"{name}{n}.npy"), mmap_mode="r", allow_pickle=False))

    splits = tuple(PreparedSplit(*(array(name, n) for name in _ARRAYS)) for n in range(facts["splits"]))
    details = facts["found"]
    counts = ConversationCounts(**details["counts"])
    return PreparedConversations(splits, details["filler"], facts["vocab"], details["digest"], counts, rows)
