"""Notes what tracing looks at: files, environment variables, and things that cannot be compared later.

Model: a child watches itself while it traces (`DependencyRecorder`). Python's audit events name the files that are
opened. The environment notes the variables that the user's code reads (variables of libraries are in each key).
Standard output and error note whether anything is written. Files of the standard library and of installed distributions
are known by the distributions' versions; all others count by their content, and so do the sources of modules from
elsewhere.

Contract: `dependencies` is None if anything was done that may come out otherwise another time, or that has an effect
beside its result: starting a process, opening a connection, writing a file, printing text, listing a folder, drawing
Python's or numpy's own random numbers. Work that reads data (`reads_data`) may list folders, whose names are then
compared, and draw, as its generators are seeded; but it may load no compiled library that could open files by itself.

Limits: the clock, and questions whether a file exists, are not seen, nor are compiled libraries that open files in work
that reads no data.
"""

from __future__ import annotations

import _collections_abc
import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TextIO, TypeAlias

from dslc.dsl.files import open_file
from dslc.runtime.process.frame_ownership import is_users

_BEYOND = ("subprocess.", "socket.connect", "socket.bind", "os.system", "os.exec", "os.posix_spawn", "os.fork", "glob.")
_IMPORTS = ("<frozen importlib", os.path.join(sysconfig.get_path("stdlib"), "importlib", ""))  # which list folders
LARGE = 64 << 20  # bytes of a file that is compared, at most; of all together, where data is read
NAMES = 100_000  # of a folder that is compared, at most
_NATIVE = ("sqlite3.connect", "ctypes.dlopen")  # what opens files without an event
# Packages with compiled code that opens no files but by Python's own `open`.
_OPEN_BY_PYTHON = frozenset(
    [
        "torch",
        "functorch",
        "numpy",
        "PIL",
        "scipy",
        "sklearn",
        "regex",
        "yaml",
        "_yaml",
        "markupsafe",
        "psutil",
        "gmpy2",
    ]
)
_OTHER_NAMES = {"PIL": "pillow", "functorch": "torch", "sklearn": "scikit_learn", "torchgen": "torch", "yaml": "pyyaml"}
_PASSING_ON = (__file__, os.__file__, "<frozen os>", _collections_abc.__file__, "<frozen _collections_abc>")
_PROGRAM = ("__main__", "__mp_main__")  # the program's own file, and the name that multiprocessing gives it
_LISTS = ("os.listdir", "os.scandir")
_OF_MACHINE = ("/dev", "/proc", "/sys")  # what is there follows from the machine


# By kind ("files", "folders", "environment"), the digests of the contents of files, of the names in folders, and of the
# values of variables; None: not set.
Dependencies: TypeAlias = dict[str, dict[str, str | None]]


def is_unchanged(dependencies: Dependencies) -> bool:
    """True if files, folders and variables are what they were. Raises AttributeError or TypeError for other JSON."""
    environment = dependencies["environment"]
    return (
        all(digest_of(path) == digest for path, digest in dependencies["files"].items())
        and all(digest_of_names(path) == digest for path, digest in dependencies.get("folders", {}).items())
        and all(digest_of_variable(os.environ.get(name)) == value for name, value in environment.items())
    )


def combine(some: Dependencies, more: Dependencies) -> Dependencies | None:
    """Returns both together; None if a file, a folder or a variable changed between them."""
    combined: Dependencies = {}
    for kind in ("files", "folders", "environment"):
        earlier, later = some.get(kind, {}), more.get(kind, {})
        if any(earlier[name] != later[name] for name in earlier.keys() & later.keys()):
            return None
        combined[kind] = earlier | later
    return combined


class DependencyRecorder:
    """Watches this process from now on; it cannot be undone, so this is for a child."""

    def __init__(self, own: str = "", *, reads_data: bool = False) -> None:
        """`own` is a folder whose files are of the work itself. `reads_data`: the module's contract says what for."""
        self._watching = True
        self._own, self._reads_data = os.path.join(os.path.realpath(own), "") if own else "", reads_data
        self._opened: set[str] = set()
        self._listed: set[str] = set()
        self._beyond: list[str] = []
        self._environment: dict[str, str | None] = {}
        self._drawn = _random_states()
        self._outputs = [_Noting(sys.stdout), _Noting(sys.stderr)]
        sys.stdout, sys.stderr = self._outputs
        os.environ._data = _Variables(os.environ._data, self._environment)  # type: ignore[attr-defined]
        sys.addaudithook(self._audit)

    def dependencies(self) -> Dependencies | None:
        """Returns what the work looked at; None if it did more than can be compared."""
        self._watching = False
        for output in self._outputs:
            if output.written:
                return None
        if self._beyond or (_loads_native_code() if self._reads_data else _random_states() != self._drawn):
            return None
        sources = [
            getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if name not in _PROGRAM
        ]
        files = self._opened | {path for path in sources if path and os.path.isabs(path)}
        hashed_files = [path for path in sorted(files) if not _is_of_fixed_version(path)]
        sizes = [_size(path) for path in hashed_files]
        if (sum(sizes) if self._reads_data else max(sizes, default=0)) > LARGE:
            return None
        folders: dict[str, str | None] = {path: digest_of_names(path) for path in sorted(self._listed)}
        if not all(folders.values()):
            return None
        variables = {name: digest_of_variable(value) for name, value in self._environment.items()}
        return {"files": {path: digest_of(path) for path in hashed_files}, "folders": folders, "environment": variables}

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        if not self._watching:
            return
        if event == "open":
            self._open(*args)
        elif event.startswith("glob.") and self._reads_data:
            return  # what it lists has events of its own
        elif event.startswith(_BEYOND) or (event in _NATIVE and self._reads_data):
            self._beyond.append(event)
        elif event in _LISTS:
            asker = sys._getframe(1).f_code.co_filename
            folder = os.path.abspath(_text(args[0]) or ".")
            if asker.startswith(_IMPORTS) or _is_of_fixed_version(folder) or folder in _OF_MACHINE:
                return
            if self._reads_data and args[0] is not None and not isinstance(args[0], int):
                self._listed.add(folder)
            else:
                self._beyond.append(event)

    def _open(self, path: object, mode: object = None, flags: object = None) -> None:
        if isinstance(path, int):
            return
        name = os.path.abspath(_text(path))
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if name.endswith(".pyc") or name.startswith(tuple(f"{folder}/" for folder in _OF_MACHINE)):
            return  # of a module, whose source counts; of the machine
        if self._own and os.path.realpath(name).startswith(self._own):
            return
        if writes:
            if not name.startswith(os.path.join(os.path.realpath(tempfile.gettempdir()), "")):
                self._beyond.append(name)
        else:
            self._opened.add(name)


def users_modules() -> Iterator[str]:
    """Yields the modules that are loaded now and are the user's own."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name not in _PROGRAM and path and os.path.isabs(path) and is_users(path):
            yield name


def digest_of(path: str) -> str:
    """Returns the digest of a file's content; "" for none that can be read, a folder, a device or a pipe."""
    try:
        with open_file(path) as file:
            digest = hashlib.sha256()
            while piece := file.read(1 << 20):
                digest.update(piece)
            return digest.hexdigest()
    except OSError:
        return ""


def digest_of_names(folder: str) -> str:
    """Returns the digest of the names in a folder; "" for none that can be listed, or too many names."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ""
    text = "\0".join(names).encode(errors="surrogateescape")
    return hashlib.sha256(text).hexdigest() if len(names) <= NAMES else ""


def digest_of_variable(value: str | None) -> str | None:
    """Returns a digest, as a variable may be a secret; None if it is not set."""
    return None if value is None else hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _loads_native_code() -> bool:
    """True if a module of compiled code is loaded that may open files by itself."""
    paths = [
        getattr(module, "__file__", None) or ""
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _OPEN_BY_PYTHON
    ]
    compiled = [path for path in paths if path.endswith(tuple(EXTENSION_SUFFIXES))]
    return any(path.startswith(_installed()) or not path.startswith(_python()) for path in compiled)


def _text(path: object) -> str:
    return os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""


def _is_of_fixed_version(path: str) -> bool:
    """True for a file whose content follows from the versions of Python, dslc and the installed distributions."""
    if path.startswith(_ours()):
        return True
    for place in _installed():
        if path.startswith(place):
            top = path[len(place) :].partition(os.sep)[0]
            return top.endswith((".dist-info", ".egg-info")) or top.partition(".")[0] in _distributed()
    return path.startswith(_python())


@cache
def _ours() -> tuple[str, ...]:
    """Returns the folders of dslc, whose content is in each key (trace_cache.py)."""
    packages = [sys.modules.get(name) for name in ("dslc", "dslc.dsl", "dslc.compiler", "dslc.runtime", "dslc.grammar")]
    paths = [path for package in packages for path in getattr(package, "__path__", ())]
    return tuple(os.path.join(os.path.abspath(path), "") for path in paths)


@cache
def _installed() -> tuple[str, ...]:
    """Returns the folders that distributions are installed in."""
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    paths |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    return tuple(os.path.join(os.path.abspath(path), "") for path in paths)


@cache
def _python() -> tuple[str, ...]:
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return tuple(os.path.join(os.path.abspath(path), "") for path in paths)


@cache
def _distributed() -> frozenset[str]:
    """Returns the names of packages whose content follows from the version of an installed distribution. A package with
    another name than its distribution counts by its content: finding its distribution takes 0.3 s in each child.
    """
    folders = [name for place in _installed() if os.path.isdir(place) for name in os.listdir(place)]
    distributions = {name.partition("-")[0].lower() for name in folders if name.endswith((".dist-info", ".egg-info"))}
    return frozenset(distributions | {name for name, of in _OTHER_NAMES.items() if of in distributions})


def _random_states() -> tuple[object, ...]:
    import random

    import numpy

    return random.getstate(), repr(numpy.random.get_state())


class _Noting:
    """A stream that notes whether anything is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.written = False

    def write(self, text: str) -> int:
        self.written |= bool(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.written = True
        self._stream.writelines(lines)

    def __getattr__(self, name: str) -> object:
        if name in ("buffer", "fileno", "detach"):
            self.written = True  # which may go around it
        return getattr(self._stream, name)


def _asked_by_user() -> bool:
    """True if the code that reads a variable is the user's own; libraries read hundreds."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in _PASSING_ON:
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


class _Variables(dict[bytes, bytes]):
    """The environment, which notes in `variables_read` the variables that the user's code reads and that this code did
    not set before.
    """

    def __init__(self, values: dict[bytes, bytes], variables_read: dict[str, str | None]) -> None:
        super().__init__(values)
        self._read, self._own = variables_read, set[bytes]()
        self._outer = values if isinstance(values, _Variables) else None  # of a recorder that began before

    def __getitem__(self, key: bytes) -> bytes:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, bytes):
            self._note(key)
        return super().__contains__(key)

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._own.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: bytes) -> None:
        self._own.add(key)
        super().__delitem__(key)

    def __iter__(self) -> Iterator[bytes]:
        for key in list(self.keys()):
            self._note(key)
        return super().__iter__()

    def _note(self, key: bytes) -> None:
        if self._outer is not None:
            self._outer._note(key)
        if key not in self._own and _asked_by_user():
            value = super().get(key)
            self._read.setdefault(os.fsdecode(key), None if value is None else os.fsdecode(value))
