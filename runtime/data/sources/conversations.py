"""Reads conversations: lists of messages in files of JSON Lines, or in rows of a data set of `datasets`.

Model: a row has `messages` or `conversations`, a list of messages with `role` and `content`, or with `from` and `value`
as ShareGPT writes them (https://huggingface.co/docs/trl/dataset_formats). `tools`, if a row has them, are given to the
template: a list, or its JSON in a text. Other columns are not read.

Contract: a row that is no conversation raises ConversationError with its file and line. An empty list of messages is a
conversation without messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dslc.compiler.facts.untrusted_files import open_file
from dslc.runtime.data.sources.chat_rendering import ConversationError, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLES_OF_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_COLUMNS = ("messages", "conversations")
_SHAPE = '`{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}` on each line'


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation, its tools, and its place in messages to the user."""

    place: str
    messages: tuple[Message, ...]
    tools: Sequence[object] | None = None


def read_files(files: Iterable[str]) -> Iterator[Conversation]:
    """Yields the conversations of JSON Lines files, in their order. Raises ConversationError and OSError."""
    for place, row in read_json_lines(files, _SHAPE, "chat"):
        yield conversation(row, place)


def read_json_lines(files: Iterable[str], shape: str, source: str) -> Iterator[tuple[str, object]]:
    """Yields the place and the value of each line. Raises ConversationError and OSError; `shape` says what a line of
    the `source` is.
    """
    for file in files:
        with open_file(file) as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                place = f"{file}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    help = shape
                    if number == 1 and line.lstrip().startswith(b"["):
                        help = f'`{source}(datasets("json", data_files = "{file}"), …)` reads a list in one file'
                    raise ConversationError(f"{place}: not a line of JSON: {error}", help) from error
                yield place, row


def read_rows(rows: Iterable[Mapping[str, object]], name: str, column: str | None) -> Iterator[Conversation]:
    """Yields the conversations of a data set's rows; `column` has the messages. Raises ConversationError."""
    for number, row in enumerate(rows):
        yield conversation(row, f"{name}, row {number}", column)


def conversation(row: object, place: str, column: str | None = None) -> Conversation:
    """Returns the conversation of one row. Raises ConversationError."""
    if not isinstance(row, Mapping):
        raise ConversationError(f"{place}: {named_kind(row)}, and no conversation", _SHAPE)
    names = (column,) if column is not None else _COLUMNS
    name = next((name for name in names if name in row), None)
    if name is None or not isinstance(row[name], list):
        has = ", ".join(f"`{key}`" for key in list(row)[:12]) or "nothing"
        wanted = " or ".join(f"`{key}`" for key in names)
        what = f"it has no {wanted}, but {has}" if name is None else f"`{name}` is {named_kind(row[name])}, and no list"
        raise ConversationError(f"{place}: {what}", _SHAPE)
    messages = tuple(read_message(message, f"{place}, message {n}") for n, message in enumerate(row[name], 1))
    return Conversation(place, messages, read_tools(row.get("tools"), place))


def read_tools(tools: object, place: str) -> list[object] | None:
    """Returns the tools of a row. Raises ConversationError."""
    help = '`{"tools": [{"type": "function", "function": {"name": "…"}}]}`, or that list as JSON in a text'
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except (ValueError, RecursionError) as error:
            raise ConversationError(f"{place}: `tools` is a text, and no JSON: {error}", help) from error
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ConversationError(f"{place}: `tools` is {named_kind(tools)}, and no list", help)
    for n, tool in enumerate(tools, 1):
        if not isinstance(tool, Mapping):
            raise ConversationError(f"{place}: tool {n} is {named_kind(tool)}, and no object", help)
    return tools


def read_message(message: object, place: str) -> Message:
    """Returns a message with its role and its content. Raises ConversationError."""
    if not isinstance(message, Mapping):
        raise ConversationError(f"{place}: {named_kind(message)}, and no message", '`{"role": "user", "content": "…"}`')
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    role = _ROLES_OF_SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        known = ", ".join((*ROLES, *_ROLES_OF_SHAREGPT))
        what = "has no role" if role is None else f"has the role {role!r}"
        raise ConversationError(f"{place} {what}, which is none of {known}", "one of these as its `role`")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        what = f"the content is {named_kind(content)}" if content is not None else "it has no content"
        raise ConversationError(f"{place}: {what}", "a text as its `content`: images and parts are not read")
    if isinstance(content, str) and (half := _LONE_SURROGATE.search(content)):
        what = f"the content has {half[0]!r}, one half of a surrogate pair, which is no text"
        raise ConversationError(f"{place}: {what}", "the text in UTF-8, or both halves of the pair")
    extra_fields = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
    return {"role": role, "content": content, **extra_fields}


def named_kind(value: object) -> str:
    """Returns what a value of JSON is, in words."""
    words = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "nothing"}
    return words.get(type(value), "a number")
