"""Notes what tracing looks at: files, environment variables, and things that cannot be compared later.

Model: a child watches itself while it traces (`DependencyRecorder`). Python's audit events name the files that are
opened. The environment notes the variables that the user's code reads (variables of libraries are in each key).
Standard output and error note whether anything is written. Files of the standard library and of installed distributions
are known by the distributions' versions; all others count by their content, and so do the sources of modules from
elsewhere. Of the folders that modules came or could have come from, the names count that Python imports.

Contract: `dependencies` is None if anything was done that may come out otherwise another time, or that has an effect
beside its result: starting a process, opening a connection, writing a file, printing text, listing a folder, drawing
Python's or numpy's own random numbers, or going through the whole environment. Work that reads data (`reads_data`) may
list folders, whose names are then compared, and draw, as its generators are seeded; but it may load no compiled library
that could open files by itself.

Limits: these are not seen: the clock; questions whether a file exists; sizes of files that are not opened; files opened
relative to a descriptor (`dir_fd`); entropy without a seed (`default_rng()`, `os.urandom`, `uuid4`); standard input;
what `/proc` and `/sys` tell; and, in work that reads no data, compiled libraries that open files.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import source_from_cache
from typing import TextIO, TypeAlias

from dslc.dsl.files import open_file
from dslc.runtime.process.frame_ownership import is_pythons, is_users

_BEYOND = ("subprocess.", "socket.connect", "socket.bind", "os.system", "os.exec", "os.posix_spawn", "os.fork")
_GLOBS = ("glob.glob", "pathlib.Path.glob")
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
        "regex",
        "yaml",
        "_yaml",
        "markupsafe",
        "psutil",
        "gmpy2",
    ]
)
_FILE_READERS = frozenset(["PIL._imagingft", "PIL._imagingcms", "_dbm", "_gdbm"])  # modules that open files unseen
_OTHER_NAMES = {"PIL": "pillow", "functorch": "torch", "sklearn": "scikit_learn", "torchgen": "torch", "yaml": "pyyaml"}
_PROGRAM = ("__main__", "__mp_main__")  # the program's own file, and the name that multiprocessing gives it
_LISTS = ("os.listdir", "os.scandir")
_OF_LIBRARIES = (
    "TORCH",
    "PYTORCH",
    "ATEN",
    "MKL",
    "OMP_",
    "KMP_",
    "DNNL",
    "ONEDNN",
    "CUDA",
    "HF_",
    "TRANSFORMERS",
    "USE_",
)
_OF_MACHINE = ("/dev/", "/proc/", "/sys/")  # devices, and what the kernel tells
_kept_variables: list[tuple[str, str]] | None = None


# By kind ("files", "folders", "packages", "environment"), the digests of the contents of files, of the names in
# folders, of the names there that can be imported, and of the values of variables; None: not set.
Dependencies: TypeAlias = dict[str, dict[str, str | None]]


def is_unchanged(dependencies: Dependencies) -> bool:
    """True if files, folders and variables are what they were. Raises AttributeError or TypeError for other JSON."""
    environment = dependencies["environment"]
    return (
        all(digest_of(path) == digest for path, digest in dependencies["files"].items())
        and all(digest_of_names(path) == digest for path, digest in dependencies.get("folders", {}).items())
        and all(digest_of_modules(path) == digest for path, digest in dependencies.get("packages", {}).items())
        and all(digest_of_variable(os.environ.get(name)) == value for name, value in environment.items())
    )


def combine(some: Dependencies, more: Dependencies) -> Dependencies | None:
    """Returns both together; None if a file, a folder or a variable changed between them."""
    combined: Dependencies = {}
    for kind in ("files", "folders", "packages", "environment"):
        earlier, later = some.get(kind, {}), more.get(kind, {})
        if any(earlier[name] != later[name] for name in earlier.keys() & later.keys()):
            return None
        combined[kind] = earlier | later
    return combined


class DependencyRecorder:
    """Watches this process from now on; it cannot be undone, so this is for a child."""

    def __init__(self, work_folder: str = "", *, reads_data: bool = False) -> None:
        """The files of `work_folder` are of the work itself. `reads_data`: the module's contract says what for."""
        self._watching = True
        self._work_folder = os.path.join(os.path.realpath(work_folder), "") if work_folder else ""
        self._reads_data = reads_data
        self._opened: set[str] = set()
        self._listed: set[str] = set()
        self._import_path = frozenset(sys.path)  # which is in each key
        self._beyond: list[str] = []
        self._environment: dict[str, str | None] = {}
        self._drawn = _random_states()
        self._watch_torch()
        sys.dont_write_bytecode = True  # or importing a module for the first time would write a file
        self._outputs = note_writes()
        self._writes = [output.writes for output in self._outputs]
        variables = _Variables(os.environ._data, self._environment, self._beyond)  # type: ignore[attr-defined]
        os.environ._data = variables  # type: ignore[attr-defined]
        if os.supports_bytes_environ:
            os.environb._data = variables  # type: ignore[attr-defined]
        sys.addaudithook(self._audit)

    def dependencies(self) -> Dependencies | None:
        """Returns what the work looked at; None if it did more than can be compared."""
        self._watching = False
        if [output.writes for output in self._outputs] != self._writes:
            return None
        if self._beyond or (_loads_native_code() if self._reads_data else _random_states() != self._drawn):
            return None
        modules = [module for name, module in list(sys.modules.items()) if name not in _PROGRAM]
        sources = [getattr(module, "__file__", None) for module in modules]
        files = self._opened | {path for path in sources if path and os.path.isabs(path)}
        hashed_files = [path for path in sorted(files) if not _is_of_fixed_version(path)]
        sizes = [_size(path) for path in hashed_files]
        if (sum(sizes) if self._reads_data else max(sizes, default=0)) > LARGE:
            return None
        folders: dict[str, str | None] = {path: digest_of_names(path) for path in sorted(self._listed)}
        places = [path for module in modules for path in getattr(module, "__dict__", {}).get("__path__", ())]
        places += [path for path in sys.path if path not in self._import_path]
        absolute = [os.path.join(os.path.abspath(path), "") for path in places]
        packages: dict[str, str | None] = {
            path: digest_of_modules(path) for path in sorted(set(absolute)) if not _is_of_fixed_version(path)
        }
        if not all(folders.values()):
            return None
        return {
            "files": {path: digest_of(path) for path in hashed_files},
            "folders": folders,
            "packages": packages,
            "environment": {name: digest_of_variable(value) for name, value in self._environment.items()},
        }

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        if not self._watching:
            return
        if event == "open":
            self._open(*args)
        elif event in _GLOBS:
            if not _lists_all(_text(args[0] if event == "glob.glob" else args[1])):
                self._beyond.append(event)  # else each folder that it lists has an event of its own
        elif event.startswith(_BEYOND) or (event in _NATIVE and self._reads_data):
            self._beyond.append(event)
        elif event in _LISTS:
            asker = sys._getframe(1).f_code.co_filename
            folder = os.path.abspath(_text(args[0]) or ".")
            if asker.startswith(_IMPORTS) or _is_of_fixed_version(folder) or f"{folder}/" in _OF_MACHINE:
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
        if name.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # one that has no source counts itself
                name = source_from_cache(name)
        kind = _kind_of(name)
        if stat.S_ISFIFO(kind):
            self._beyond.append(name)
            return
        if name.startswith(_OF_MACHINE):
            name = os.path.realpath(name)  # of `/dev/fd/3` or `/proc/self/cwd`
            if stat.S_ISCHR(kind) or stat.S_ISBLK(kind) or name.startswith(_OF_MACHINE[1:]):
                return
        if self._work_folder and os.path.realpath(name).startswith(self._work_folder):
            return
        if writes:
            if not name.startswith(os.path.join(os.path.realpath(tempfile.gettempdir()), "")):
                self._beyond.append(name)
        else:
            self._opened.add(name)

    def _watch_torch(self) -> None:
        """Watches the functions of torch that open a file by themselves. A file that Python has opened before, as in
        `torch.load` with `mmap`, counts by its content.
        """
        with contextlib.suppress(ImportError, OSError):  # the work meets it again
            import torch

            self._watch_reader(torch, "from_file")
            self._watch_reader(torch.UntypedStorage, "from_file")
            self._watch_reader(torch.jit, "load")

    def _watch_reader(self, owner: object, name: str) -> None:
        read: Callable[..., object] = getattr(owner, name)

        @functools.wraps(read)
        def read_watched(*args: object, **arguments: object) -> object:
            if not args or os.path.abspath(_text(args[0])) not in self._opened:
                self._beyond.append(name)
            return read(*args, **arguments)

        setattr(owner, name, staticmethod(read_watched) if isinstance(owner, type) else read_watched)


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
    return _digest_of_text("\0".join(names)) if len(names) <= NAMES else ""


def digest_of_modules(folder: str) -> str:
    """Returns the digest of the names in a folder that can be imported; "" for none that can be listed."""
    names = importable_names(folder)
    return "" if names is None else _digest_of_text("\0".join(names))


def importable_names(folder: str) -> list[str] | None:
    """Returns the names of the modules and packages in a folder; None for none that can be listed."""
    try:
        return sorted(
            entry.name
            for entry in os.scandir(folder)
            if entry.name.endswith((".py", ".so", ".pyd"))
            or (entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py")))
        )
    except OSError:
        return None


def digest_of_variable(value: str | None) -> str | None:
    """Returns a digest, as a variable may be a secret; None if it is not set."""
    return None if value is None else _digest_of_text(value)


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _kind_of(path: str) -> int:
    """Returns the mode of a file; 0 if there is none."""
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _loads_native_code() -> bool:
    """True if a module of compiled code is loaded that may open files by itself."""
    if not _FILE_READERS.isdisjoint(sys.modules):
        return True
    paths = [
        getattr(module, "__file__", None) or ""
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _OPEN_BY_PYTHON
    ]
    compiled = [path for path in paths if path.endswith(tuple(EXTENSION_SUFFIXES))]
    return any(path.startswith(_installed()) or not path.startswith(_python()) for path in compiled)


def _text(path: object) -> str:
    return os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""


def _lists_all(pattern: str) -> bool:
    """True if whatever a pattern finds follows from the names in the folders that are listed for it. Whether a name
    without a wildcard is there in a folder is asked without listing the folder.
    """
    wildcards = [glob.has_magic(part) for part in pattern.split(os.sep)]
    return True in wildcards and all(wildcards[wildcards.index(True) :])


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
    """A stream that counts how often something is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += bool(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.writes += 1
        self._stream.writelines(lines)

    def __getattr__(self, name: str) -> object:
        if name in ("buffer", "fileno", "detach"):
            self.writes += 1  # which may go around it
        return getattr(self._stream, name)


def note_writes() -> tuple[_Noting, _Noting]:
    """Makes standard output and error count what is written, also by what takes them now and writes in a child."""
    if not isinstance(sys.stdout, _Noting):
        sys.stdout = _Noting(sys.stdout)
    if not isinstance(sys.stderr, _Noting):
        sys.stderr = _Noting(sys.stderr)
    return sys.stdout, sys.stderr


def library_variables() -> list[tuple[str, str]]:
    """Returns the environment variables that libraries read."""
    if _kept_variables is not None:
        return _kept_variables
    return sorted((name, value) for name, value in os.environ.items() if name.startswith(_OF_LIBRARIES))


def keep_library_variables() -> None:
    """Makes `library_variables` return the variables of now, whatever libraries set later."""
    global _kept_variables
    _kept_variables = library_variables()


def note_variables() -> list[str]:
    """Returns a list to which the environment variables are added that the user's code sets or deletes from now on."""
    variables: list[str] = []

    def audit(event: str, args: tuple[object, ...]) -> None:
        if event in ("os.putenv", "os.unsetenv") and _is_asked_by_user():
            variables.append(_text(args[0]))

    sys.addaudithook(audit)
    return variables


def _is_asked_by_user() -> bool:
    """True if the code that reads or sets a variable is the user's own, maybe through Python's library, as in
    `expandvars`; other libraries read hundreds.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and _passes_on(frame.f_code.co_filename):
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


def _passes_on(file: str) -> bool:
    return file == __file__ or file.startswith("<") or is_pythons(file)


class _Variables(dict[bytes, bytes]):
    """The environment, which notes in `variables_read` the variables that the user's code reads and that this code did
    not set before, and in `beyond` that it reads all.
    """

    def __init__(self, values: dict[bytes, bytes], variables_read: dict[str, str | None], beyond: list[str]) -> None:
        super().__init__(values)
        self._read, self._beyond, self._set_here = variables_read, beyond, set[bytes]()
        self._outer = values if isinstance(values, _Variables) else None  # of a recorder that began before

    def __getitem__(self, key: bytes) -> bytes:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, bytes):
            self._note(key)
        return super().__contains__(key)

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._set_here.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: bytes) -> None:
        self._set_here.add(key)
        super().__delitem__(key)

    def __iter__(self) -> Iterator[bytes]:
        self._note_all()
        return super().__iter__()

    def _note_all(self) -> None:
        if self._outer is not None:
            self._outer._note_all()
        if _is_asked_by_user():
            self._beyond.append("os.environ")

    def _note(self, key: bytes) -> None:
        if self._outer is not None:
            self._outer._note(key)
        if key not in self._set_here and _is_asked_by_user():
            value = super().get(key)
            self._read.setdefault(os.fsdecode(key), None if value is None else os.fsdecode(value))
