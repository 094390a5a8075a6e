"""Keeps what tracing a network found, in the user's cache, for the next time that everything is the same.

Model: an entry's name is a digest of what is known beforehand. That is the call with its arguments, the settings that
tracing depends on, and a sample's shape; the versions of Python and of every installed distribution; dslc's own code;
the processor; the modules that could be imported from the job's folder; and the variables that libraries read. In it
are also the files and variables that tracing looked at (dependency_recorder.py); it is taken only if these have the
same content now. Nothing else is imported or run to find out: a hit loads neither torch nor a line of the user's.

Contract: cached facts equal the facts that tracing would find. What prints, fails, looks at numbers, leaves processes
behind or does anything else whose result may be another next time is not kept. Of the samples that a network is tried
with, the description of their source is compared, not their numbers. An entry is JSON, read by the codec, and begins
with its checksum; what is damaged, of another user, or could have been written by one, is not read. An entry is written
whole or not at all, so that several processes may read and write at once. Nothing fails because of the cache.

`DSLC_TRACE_CACHE=off` in the environment switches it off.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import platform
import stat
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dslc.compiler.ir.codec import DecodeError, from_json
from dslc.compiler.ir.module_facts import ModelFacts
from dslc.dsl import cache
from dslc.probe.child import Json
from dslc.probe.dependency_recorder import (
    Dependencies,
    DependencyRecorder,
    importable_names,
    is_unchanged,
    library_variables,
)

F = TypeVar("F")

SWITCH = "DSLC_TRACE_CACHE"
MOST_BYTES = 64 << 20  # of all entries
_FORMAT = 1
_NAME = "trace-"
_CHECKSUM = 64  # characters at the beginning of an entry


class CacheEntry(Generic[F]):
    """The place of facts of one `kind`."""

    def __init__(self, kind: type[F], key: dict[str, object] | None, folder: str = "") -> None:
        """`key` is all that the facts depend on in the job, None for facts that are not kept; `folder` is where the
        user's modules are.
        """
        self._kind = kind
        place = cache.folder() if key is not None and os.environ.get(SWITCH, "").lower() not in ("off", "0") else None
        self._path = ""
        if place:
            key_text = json.dumps([_FORMAT, key, _environment(folder)], sort_keys=True, default=repr)
            self._path = os.path.join(place, f"{_NAME}{hashlib.sha256(key_text.encode()).hexdigest()[:40]}.json")

    @property
    def has_place(self) -> bool:
        """True if facts are looked for and kept."""
        return bool(self._path)

    def load(self) -> tuple[F, Dependencies] | None:
        """Returns the facts and what they rest on, if they were kept and all of that is the same."""
        if not self._path or (text := _read_entry(self._path)) is None:
            return None
        try:
            entry = json.loads(text)
            if not is_unchanged(entry):
                return None
            facts = from_json(self._kind, entry.pop("facts"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, DecodeError):
            return None  # of another version, or not an entry
        _touch(self._path)
        return facts, entry

    def store(self, facts: Json, dependencies: Dependencies) -> None:
        """Keeps facts, as JSON, with what they rest on."""
        if not self._path:
            return
        text = json.dumps({**dependencies, "facts": facts})
        content = hashlib.sha256(text.encode()).hexdigest() + text
        if len(content) <= MOST_BYTES // 4:
            cache.replace(self._path, content.encode())
            _shrink(os.path.dirname(self._path))


class TraceCache:
    """The entry of one network's facts. `report_dependencies` gets what loaded facts rest on."""

    def __init__(
        self,
        key: dict[str, object] | None,
        folder: str = "",
        report_dependencies: Callable[[Dependencies], object] | None = None,
    ) -> None:
        """`key` and `folder` are the entry's arguments."""
        self._entry, self._report_dependencies = CacheEntry(ModelFacts, key, folder), report_dependencies

    def load(self) -> ModelFacts | None:
        """Returns the facts, if they were kept and everything that they rest on is the same."""
        loaded = self._entry.load()
        if loaded is None:
            return None
        if self._report_dependencies is not None:
            self._report_dependencies(loaded[1])
        return loaded[0]

    def watched(self, work: Callable[[], object], prepare: Callable[[], None]) -> Callable[[], object]:
        """Returns work for a child that does `work`, and reports the files and variables it looked at. `prepare` comes
        first, unwatched: it reads data, and the key has only the description of the data's source.
        """
        if not self._entry.has_place:

            def unwatched() -> object:
                prepare()
                return {"facts": work(), "dependencies": None}

            return unwatched

        pid = os.getpid()

        def watched() -> object:
            prepare()
            if os.getpid() == pid:  # a process that goes on cannot be watched
                return {"facts": work(), "dependencies": None}
            recorder = DependencyRecorder()
            facts = work()
            return {"facts": facts, "dependencies": recorder.dependencies()}

        return watched

    def store(self, answer: dict[str, Json], facts: ModelFacts | None) -> None:
        """Keeps the facts that a child found, with what they rest on, if that is known."""
        dependencies: Dependencies | None = answer["dependencies"]
        if dependencies is not None and facts is not None and not facts.looks and not facts.structured:
            self._entry.store(answer["facts"], dependencies)


def _read_entry(path: str) -> bytes | None:
    """Returns the text of an entry that only the user can have written, and that is whole."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            mine = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
            if not mine or not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
                return None
            data = file.read()
    except OSError:
        return None
    checksum, body = data[:_CHECKSUM], data[_CHECKSUM:]
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        return None
    return body


def _touch(path: str) -> None:
    with contextlib.suppress(OSError):  # only the order in which entries are removed suffers
        os.utime(path)


def _shrink(folder: str) -> None:
    """Removes the entries that were used longest ago until the others take no more than `MOST_BYTES`."""
    try:
        entries = []
        for entry in os.scandir(folder):
            if entry.name.startswith(_NAME):
                about = entry.stat(follow_symlinks=False)
                entries.append((about.st_mtime, about.st_size, entry.path))
        total, now = 0, time.time()
        for modified_at, size, path in sorted(entries, reverse=True):
            total += size
            is_unfinished = not path.endswith(".json") and now - modified_at > 3600
            if total > MOST_BYTES or is_unfinished:
                os.unlink(path)
    except OSError:  # another process has removed it
        pass


# ----------------------------------------------------------------------------------------------- known beforehand


def _environment(folder: str) -> list[object]:
    """Returns everything but the job that tracing depends on and that is known beforehand."""
    places = [folder, *sys.path] if folder else sys.path
    return [
        sys.version,
        platform.machine(),
        _processor(),
        _own_code(),
        [_names(os.path.abspath(place)) for place in places if os.path.isdir(place or ".")],
        library_variables(),
    ]


def _names(folder: str) -> object:
    """Returns, of a folder that Python imports from, the distributions that it has; of another than Python's own, the
    modules.
    """
    is_installed = os.path.basename(folder) in ("site-packages", "dist-packages")
    if not is_installed:
        is_pythons = (folder + os.sep).startswith(os.path.join(sysconfig.get_path("stdlib"), ""))
        return folder if is_pythons else (folder, importable_names(folder))
    ends = (".dist-info", ".egg-info", ".egg-link", ".pth")
    try:
        # A version that is installed again may have other files.
        entries = [(each.name, each.stat().st_mtime_ns) for each in os.scandir(folder) if each.name.endswith(ends)]
    except OSError:
        return folder
    return folder, sorted(entries)


def _processor() -> str:
    """Returns the processor's features, by which torch chooses its kernels."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


@functools.cache
def _own_code() -> str:
    """Returns the digest of dslc's own code."""
    digest = hashlib.sha256()
    for path in sorted(set(_sources())):
        with open(path, "rb") as file:
            digest.update(path.encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()


def _sources() -> Iterator[str]:
    for name in ("dslc", "dslc.compiler", "dslc.dsl", "dslc.runtime"):
        spec = importlib.util.find_spec(name)
        for top in (spec and spec.submodule_search_locations) or ():
            for folder, _, names in os.walk(top):
                yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))
