"""The messages between launchers: the fields of each kind, and the bounds within which a text is parsed.

Contract: `parse_message` returns a message that has exactly the fields of its kind, each of its type, or raises
MessageError. It neither recurses nor converts a value, whatever the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias, get_args

Message: TypeAlias = dict[str, Any]

DEEPEST = 16  # brackets within brackets
_LARGEST = 1 << 53  # of a whole number
_HOST = 255  # characters of a host's name
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # also one that does not end: or it takes n² steps
_BRACKET = re.compile(rb"[\[\]{}]")
_PLACE = (str, int)

# A tuple is an array of these values, a list an array of one type, a dict an object. `?` may be left out.
KINDS: Mapping[str, Mapping[str, object]] = {
    "join_request": {
        "host": str,
        "facts": {str: str},
        "place?": int,
        "fault?": str,
        "node?": int,
        "start?": int,
        "folder?": str,
        "changes?": int,
    },
    "heard": {},
    "refused": {"why": str, "fact?": str},
    "stopped": {},
    "join_reply": {"node": int, "hosts": [str], "store": _PLACE, "start": int, "changes?": int, "addresses?": [str]},
    "wait": {"why": str},
    "over": {"steps": int, "host": str, "stopped": bool},
    "elsewhere": {"place": _PLACE},
    "leaves": {"why": str},
    "again": {},
    "folder": {"folder": str, "file": str, "start": int},
    "sees": {"content": str},
    "blind": {"nodes": [int]},
    "value": {"value": str},
    "alike": {"why": str},
    "ready": {"stops": bool},
    "store": {"port": int, "start": int, "stops": bool},
    "done": {"end": str},
    "failed": {"seen": dict | None},
    "settle": {"of": str},
    "stop": {"timed?": bool},
    "hold": {"step": int},
    "held": {"step": int, "at": int},
    "leave": {"step": int, "timed": bool},
    "release": {},
    "part": {"end": str, "again": bool},
    "end": {"cause": dict, "again": bool, "change": bool},
    "reported": {},
}


class MessageError(Exception):
    """A text that is no message of a launcher; it says why, without the text."""


def parse_message(content: bytes) -> Message:
    if _depth(content) > DEEPEST:
        raise MessageError(f"its message is nested more than {DEEPEST} deep")
    try:
        message = json.loads(content.decode())
    except ValueError:
        raise MessageError("its message is no JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise MessageError("its message has no kind")
    check_message(message)
    return message


def check_message(message: Message) -> None:
    """Raises MessageError if a message is of no known kind, or has other fields than its kind."""
    kind = message["kind"]
    if kind not in KINDS:
        raise MessageError("its message is of an unknown kind")
    fields = KINDS[kind]
    for name, value in message.items():
        shape = fields.get(name, fields.get(f"{name}?"))
        if name != "kind" and (shape is None or not _has_shape(value, shape)):
            raise MessageError(f"a field of its message `{kind}` is unknown, or of another type")
    missing_fields = [name for name in fields if not name.endswith("?") and name not in message]
    if missing_fields:
        raise MessageError(f"its message `{kind}` has no `{missing_fields[0]}`")
    hosts = message.get("hosts", [message.get("host", "")])
    if any(len(host) > _HOST or not host.isprintable() for host in hosts):
        raise MessageError(f"its message `{kind}` has a name of a host that is none")


def _has_shape(value: object, shape: object) -> bool:
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(_has_shape, value, shape))
    if isinstance(shape, list):
        return isinstance(value, list) and all(_has_shape(item, shape[0]) for item in value)
    if isinstance(shape, dict):
        ((_, of_values),) = shape.items()
        return isinstance(value, dict) and all(_has_shape(item, of_values) for item in value.values())
    if type(value) is int:
        return shape is int and 0 <= value < _LARGEST
    return type(value) in (get_args(shape) or (shape,))


def _depth(content: bytes) -> int:
    """Returns how deeply brackets are nested, without recursion; a few brackets in all are not counted further."""
    if content.count(b"[") + content.count(b"{") <= DEEPEST:
        return 0
    deepest = depth = 0
    for bracket in _BRACKET.findall(_TEXT.sub(b"", content)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest
