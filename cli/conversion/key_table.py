"""The keys of a tool that a job does not state: what follows without a setting, and what a job cannot state."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["carried", "implied", "named"]


@dataclass(frozen=True)
class KeyVerdict:
    """The outcome for one key of a file. `text` is the setting that carries it, or the reason."""

    key: str
    outcome: Outcome
    text: str


@dataclass(frozen=True)
class KeyTable:
    """The table of one tool, read from its TOML file.

    `implied` and `named` map a key, or the section above several, to the reason. `ignored` maps a key to why the tool
    itself ignores it, and `removed` a section to why the newest versions of the tool refuse it. `sections` has all keys
    that this version of the tool takes in a section, and `plugins` those that a plugin of the tool adds.
    """

    implied: Mapping[str, str]
    named: Mapping[str, str]
    ignored: Mapping[str, str]
    removed: Mapping[str, str]
    sections: Mapping[str, frozenset[str]]
    plugins: Mapping[str, frozenset[str]]
    version: str
    unknown: str  # what the tool does to a key that a section lacks: it refuses or ignores it

    def unknown_part(self, key: str) -> str:
        """Returns the first part of a key that its section does not have, "" for a key that the tool takes."""
        parts = key.split(".")
        if any(parts[0] in keys for keys in self.plugins.values()):
            return ""
        for length in range(len(parts)):
            names = self.sections.get(".".join(parts[:length]))
            if names is not None and parts[length] not in names:
                return ".".join(parts[: length + 1])
        return ""

    def verdict(self, key: str, value: object) -> KeyVerdict | None:
        """Returns the outcome of a key, by itself or the nearest section above it; None for an unknown key."""
        path = key
        while path:
            if path in self.implied:
                return KeyVerdict(key, "implied", self.implied[path])
            if path in self.named:
                if is_off(value):
                    return KeyVerdict(key, "implied", "it is off, and a job has nothing to switch on")
                return KeyVerdict(key, "named", self.named[path])
            path = path.rpartition(".")[0]
        return None


def is_off(value: object) -> bool:
    """True for a value that switches a feature off, or states nothing."""
    return value is None or value is False or value in ("", "none", "no", "NO", "null") or value == [] or value == {}


@functools.cache
def key_table(tool: str) -> KeyTable:
    with open(os.path.join(os.path.dirname(__file__), "tools", f"{tool}.toml"), "rb") as file:
        content: dict[str, Any] = tomllib.load(file)
    tables = {
        kind: {key: reason for reason, keys in content.get(kind, []) for key in keys.split()}
        for kind in ("implied", "named", "ignored", "removed")
    }
    lists = {
        kind: {name: frozenset(keys.split()) for name, keys in content.get(kind, [])} for kind in ("keys", "plugins")
    }
    version, unknown = content.get("version", ""), content.get("unknown", "refuses")
    return KeyTable(**tables, sections=lists["keys"], plugins=lists["plugins"], version=version, unknown=unknown)
