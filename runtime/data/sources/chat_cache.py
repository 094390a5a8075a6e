"""Keeps the tokens of prepared conversations in the user's cache, so that ranks and later commands need not make them.

Model: an entry is a folder `chat-DIGEST`, whose name follows from what the tokens depend on: path, size, inode and time
of the files, of the tokenizer's and of the template's; the arguments; the version of `transformers`. It holds the
facts as JSON, and arrays that are mapped into memory.

Contract: an entry appears whole or not at all, so that several processes may prepare the same one at once. Nothing
fails because of the cache: without one, each process prepares for itself. Loading the facts imports no library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from dslc.compiler.facts.untrusted_files import read_json
from dslc.dsl import cache

ENTRIES = 16  # that are kept, by their last use
FACTS = "facts.json"
_FORMAT = 3
_NAME = "chat-"
_FACTS_LIMIT = 1 << 20  # bytes
_TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_OPTIONS = ("train_on", "pack", "context", "input", "path", "data_files", "data_dir", "arguments")


def entry_of(arguments: Mapping[str, Any], identity: Sequence[str] = ()) -> str | None:
    """Returns the folder of the entry for a source's arguments; None if there is no cache. `identity` names the content
    of data that lies in no files of the job.
    """
    place = cache.folder()
    if place is None:
        return None
    tokenizer = arguments["tokenizer"]
    files = [*arguments.get("files", ()), *filter(None, [arguments["template"]])]
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(tokenizer) if name.endswith(_TOKENIZER_FILES))
        files += [os.path.join(tokenizer, name) for name in names]
    options = {name: arguments[name] for name in _OPTIONS if name in arguments}
    key = [_FORMAT, _version(), options, list(identity), tokenizer, [_stamp(file) for file in files]]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=repr).encode()).hexdigest()
    return os.path.join(place, _NAME + digest[:40])


def load_facts(entry: str | None) -> dict[str, Any] | None:
    """Returns the facts of an entry; None if there is none."""
    if entry is None:
        return None
    try:
        facts: dict[str, Any] = read_json(os.path.join(entry, FACTS), _FACTS_LIMIT)
        os.utime(entry)
    except (OSError, ValueError):
        return None
    return facts


def store(entry: str, write: Callable[[str], None], facts: Mapping[str, object]) -> None:
    """Makes an entry: `write` writes the arrays into a folder."""
    place = os.path.dirname(entry)
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=f".{_NAME}", dir=place) as folder:
        write(folder)
        with open(os.path.join(folder, FACTS), "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.rename(folder, entry)
        os.mkdir(folder)  # for the end of `with`, which removes it
        _shrink(place)


def _shrink(place: str) -> None:
    entries = [entry for entry in os.scandir(place) if entry.name.startswith(_NAME)]
    for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime, reverse=True)[ENTRIES:]:
        shutil.rmtree(entry.path, ignore_errors=True)


def _stamp(file: str) -> list[object]:
    try:
        status = os.stat(file)
    except OSError:
        return [file]
    return [os.path.realpath(file), status.st_size, status.st_ino, status.st_mtime_ns]


def _version() -> str:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""
