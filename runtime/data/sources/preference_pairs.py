"""Reads pairs of answers: rows with `chosen`, `rejected` and mostly `prompt`, each a list of messages or a text.

Model: as TRL has them (https://huggingface.co/docs/trl/dataset_formats#preference). A row without a prompt has it in
both answers: it is what these have in common at their beginning, of texts without a last space. A prompt of text
beside lists of messages is the user's message, unless the lists begin with it.

Contract: a row that is no pair raises ConversationError with its file and line. A pair whose answer is empty is a pair
without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dslc.runtime.data.sources.chat_rendering import ConversationError, Message, common_length
from dslc.runtime.data.sources.conversations import named_kind, read_json_lines, read_message, read_tools

_SHAPE = '`{"prompt": …, "chosen": …, "rejected": …}` on each line, each a text, or a list of messages'
Answer: TypeAlias = str | tuple[Message, ...]


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to a prompt, all three texts or messages, with the tools that the template is given."""

    place: str
    prompt: Answer
    chosen: Answer
    rejected: Answer
    tools: Sequence[object] | None = None


def read_files(files: Iterable[str]) -> Iterator[PreferencePair]:
    """Yields the pairs of JSON Lines files, in their order. Raises ConversationError and OSError."""
    for place, row in read_json_lines(files, _SHAPE, "preferences"):
        yield read_pair(row, place)


def read_rows(rows: Iterable[Mapping[str, object]], name: str) -> Iterator[PreferencePair]:
    """Yields the pairs of a data set's rows. Raises ConversationError."""
    for number, row in enumerate(rows):
        yield read_pair(row, f"{name}, row {number}")


def read_pair(row: object, place: str) -> PreferencePair:
    """Returns the pair of one row. Raises ConversationError."""
    if not isinstance(row, Mapping):
        raise ConversationError(f"{place}: {named_kind(row)}, and no pair of answers", _SHAPE)
    missing = [name for name in ("chosen", "rejected") if row.get(name) is None]
    if missing:
        has = ", ".join(f"`{key}`" for key in list(row)[:12]) or "nothing"
        raise ConversationError(f"{place}: it has no `{missing[0]}`, but {has}", _SHAPE)
    if isinstance(row["chosen"], Mapping) and "prompt" not in row:  # as Axolotl has them, after `messages`
        row = {**row, "prompt": row.get("messages")}
    chosen, rejected = (_answer(row[name], f"{place}, `{name}`") for name in ("chosen", "rejected"))
    prompt = _answer(row["prompt"], f"{place}, `prompt`") if row.get("prompt") is not None else None
    tools = read_tools(row.get("tools"), place)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ConversationError(f"{place}: one of the answers is a text, and the other a list of messages", _SHAPE)
    if isinstance(prompt, str) and not isinstance(chosen, str) and not isinstance(rejected, str):
        length = int(bool(chosen) and chosen[0]["role"] == "system" and chosen[:1] == rejected[:1])
        if not _begins_with_user(chosen[length:]) and not _begins_with_user(rejected[length:]):
            user = {"role": "user", "content": prompt}
            return PreferencePair(place, (*chosen[:length], user), chosen[length:], rejected[length:], tools)
        prompt = None  # data sets repeat the prompt's text beside whole conversations
    if prompt is None:
        length = _common_length(chosen, rejected)
        return PreferencePair(place, chosen[:length], chosen[length:], rejected[length:], tools)
    if isinstance(prompt, str) != isinstance(chosen, str):
        raise ConversationError(f"{place}: the prompt is a list of messages, and the answers are texts", _SHAPE)
    return PreferencePair(place, prompt, chosen, rejected, tools)


def _begins_with_user(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[0]["role"] == "user"


def _common_length(chosen: Answer, rejected: Answer) -> int:
    length = common_length(chosen, rejected)
    is_space = isinstance(chosen, str) and 0 < length < len(chosen) and chosen[length - 1] == " "
    return length - 1 if is_space else length


def _answer(value: object, place: str) -> Answer:
    if isinstance(value, str):
        return value
    value = [value] if isinstance(value, Mapping) else value
    if isinstance(value, list | tuple):
        return tuple(read_message(message, f"{place}, message {n}") for n, message in enumerate(value, 1))
    raise ConversationError(f"{place} is {named_kind(value)}, and neither a text nor a list of messages", _SHAPE)
