"""Makes a user's data set a second time, as every rank does, and compares some samples with samples of the first.

Model: two children make it, each with its own entropy, clock and process, and the generators seeded as in a rank. If
the source lists folders, a third child is given the names in another order. If its module makes sets whose order may
count, another interpreter is started, whose texts have other hashes. Each sample is read twice: what differs then is
drawn anew at each access, and is not compared.

Limits: data sets that take longer to make than `SLOW` seconds, and streams, are not compared. Ranks compare samples
again before their first step (runtime/measure/replica_check.py).
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypedDict, cast

from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.program import PythonFunction
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language.calls import PythonSource
from dslc.probe.child import in_child
from dslc.probe.trial import Trial
from dslc.runtime.process.frame_ownership import is_users
from dslc.runtime.process.user_code import HANDED_OVER, load_function

if TYPE_CHECKING:
    from dslc.compiler.trace.structures import UserValue

SLOW = 1.0
SAMPLES = 64  # of each part that are compared, at most
SECONDS = 0.1  # in which they are read, but for the first, the middle and the last
_ENTROPY = re.compile(r"(default_rng|RandomState|Random|SystemRandom)\(\s*\)|urandom|uuid[14]\(|getpid\(|time\.time")
_ORDERED = ("sorted", "len", "min", "max", "sum", "any", "all")  # calls to which the order of a set is nothing


class DataReads(TypedDict):
    """Digests of some samples, the seconds that making the data set took, and the line that listed a folder."""

    samples: dict[str, list[str]]
    seconds: float
    listed: str


def fingerprint(data_set: UserValue, begin: Callable[[int], None]) -> dict[str, list[str]]:
    """Returns, by a name for each part of some samples, the digests of two reads of it, and the lengths."""
    digests: dict[str, list[str]] = {}
    for part, samples in _parts(data_set):
        count = len(samples)
        digests[f"{part} length"] = [str(count)] * 2
        end = time.monotonic() + SECONDS
        for number, index in enumerate(_sample_indices(count)):
            reads = []
            try:
                for _ in range(2):
                    begin(index)
                    reads.append(_leaves(samples[index]))
            except Exception:  # any kind: a rank that reads the sample reports it
                if number < 3:
                    raise
                break
            if number >= 3 and time.monotonic() > end:
                break
            for place, pair in enumerate(zip(*reads, strict=False)):
                digests[f"{part} {index} {place}"] = list(pair)
    return digests


def _sample_indices(count: int) -> list[int]:
    """Returns the numbers of the first, the middle and the last sample, and then of some that are spread evenly."""
    spread = range(0, count, max(1, count // SAMPLES))
    return list(dict.fromkeys([*(n for n in (0, count // 2, count - 1) if 0 <= n < count), *spread]))[:SAMPLES]


def _parts(data_set: UserValue) -> Iterator[tuple[str, UserValue]]:
    from dslc.compiler.trace.sources.trace_source import splits_of
    from dslc.runtime.data.sources.open_sources import is_pair_of_arrays

    if is_pair_of_arrays(data_set):
        yield "train", list(zip(*data_set, strict=False))
        return
    for part, split in enumerate(splits_of(data_set)):
        name = ("train", "validation", "test")[min(part, 2)]
        for subset, samples in split.items() if isinstance(split, dict) else [("", split)]:
            if hasattr(samples, "__len__") and hasattr(samples, "__getitem__"):
                yield f"{name}{subset}", samples


def _leaves(sample: object) -> list[str]:
    from hashlib import blake2b

    from dslc.compiler.trace.private_torch import tree_leaves

    contents = []
    for leaf in tree_leaves(sample):
        leaf = leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf
        content = leaf.tobytes() if hasattr(leaf, "tobytes") else b""
        content = repr(leaf).encode() if isinstance(leaf, int | float | str | bytes) else content
        contents.append(blake2b(content, digest_size=8).hexdigest())
    return contents


def compare_twice(trial: Trial, call: PythonSource, ranks: int, hashes: bool) -> Iterator[Diagnostic]:
    """Finds a data set that is another in each process. `ranks` is their number; `hashes`: each of them has hashes of
    its own, as where something else than this command starts them.
    """
    cause, sample, line = _difference(trial.function(call), trial.job.train.seed)
    if not cause:
        return
    label = f"by {line}" if line else ""
    if cause == "entropy" or hashes:
        code = "E0655" if ranks > 1 else "W0656"
        consequence = (
            f"each of {ranks} ranks would train on its own, and what one holds out another trains on"
            if ranks > 1
            else "a training that resumes goes on with other data, and what was held out may be trained on"
        )
        message = "the data set is another each time it is made" if cause == "entropy" else _ORDER[cause]
        yield Diagnostic(
            code,
            f"{message}: {sample} differs, and {consequence}",
            call.value_span("function"),
            label=label,
            help=_HELP[cause],
        )
        return
    yield Diagnostic(
        "W0657",
        f"{_ORDER[cause]}: {sample} differs, and a training that resumes, or runs on another host, has other data",
        call.value_span("function"),
        label=label,
        help=_HELP[cause],
    )


_ORDER = {
    "listing": "the data set depends on the order in which a folder lists its files",
    "hash": "the data set depends on the order of a set, which each process has for itself",
}
_HELP = {
    "entropy": "a generator with a seed: `numpy.random.default_rng(0)`; those of `random`, `numpy.random` and `torch` "
    "are seeded before the data set is made",
    "listing": "`sorted(…)` around the names",
    "hash": "`sorted(…)` around the set",
}


def _difference(function: PythonFunction, seed: int) -> tuple[str, str, str]:
    """Returns why two data sets differ (entropy, listing or hash), the sample in words, and the line of the user's
    code, if it is known; "" three times for no difference.
    """
    first_reads = in_child(lambda: make_and_read(function, seed)).get("made")
    if first_reads is None or first_reads["seconds"] > SLOW:
        return "", "", ""
    second_reads = in_child(lambda: make_and_read(function, seed)).get("made")
    if second_reads and (sample := _differing(first_reads["samples"], second_reads["samples"])):
        return "entropy", sample, _line_of_entropy(function)
    if first_reads["listed"]:
        reversed_reads = in_child(lambda: make_and_read(function, seed, backward=True)).get("made")
        if reversed_reads and (sample := _differing(first_reads["samples"], reversed_reads["samples"])):
            return "listing", sample, first_reads["listed"]
    by_value = function.function.partition(":")[0] in HANDED_OVER
    line = "" if by_value else _line_of_set(function)
    if line:
        hashed_reads = _in_interpreter(function, seed)
        if hashed_reads and (sample := _differing(first_reads["samples"], hashed_reads["samples"])):
            return "hash", sample, line
    return "", "", ""


def _differing(first_samples: dict[str, list[str]], second_samples: dict[str, list[str]]) -> str:
    for name, (a, a_repeated) in first_samples.items():
        if name not in second_samples:
            continue  # one of them took longer, and has read less
        b, b_repeated = second_samples[name]
        if a == a_repeated and b == b_repeated and a != b:
            part, _, place = name.partition(" ")
            word = "training" if part == "train" else part
            return "the length" if place == "length" else f"sample {place.split()[0]} of the {word} data"
    return ""


def make_and_read(function: PythonFunction, seed: int, *, backward: bool = False) -> DataReads:
    """Makes the data set, as a rank does, and reads some samples. `backward`: folders are listed in another order. What
    it prints is dropped.
    """
    import torch

    from dslc.runtime.process.random_numbers import begin, begin_sample

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        construct, listings = load_function(function), _Listings(backward)
        begin(seed, 0)
        start = time.monotonic()
        with listings:
            samples = construct()
        seconds = time.monotonic() - start
        digests = fingerprint(samples, lambda index: begin_sample(seed, "train", 0, index)) if seconds <= SLOW else {}
    return {"samples": digests, "seconds": seconds, "listed": listings.line}


class _Listings:
    """Notes the user's line that lists a folder, while it is entered, and gives the names backward if it is to."""

    def __init__(self, backward: bool) -> None:
        self.line, self._backward = "", backward

    def __enter__(self) -> None:
        self._own = os.listdir, os.scandir
        os.listdir = self._listed(os.listdir)
        os.scandir = self._listed(os.scandir)

    def __exit__(self, *_: object) -> None:
        os.listdir, os.scandir = self._own

    def _listed(self, original: Callable[..., UserValue]) -> UserValue:
        def listed(*arguments: UserValue) -> UserValue:
            frame = sys._getframe(1)
            while frame is not None and not is_users(frame.f_code.co_filename):
                frame = frame.f_back  # type: ignore[assignment]
            if frame is not None and not self.line:
                self.line = f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
            entries = original(*arguments)
            if not self._backward:
                return entries
            return entries[::-1] if isinstance(entries, list) else _ReversedEntries(list(entries)[::-1])

        return listed


class _ReversedEntries:
    """The entries of a folder as `os.scandir` gives them, in another order."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _ReversedEntries:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def __enter__(self) -> _ReversedEntries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Does nothing. `os.scandir`'s own `close` frees a handle, and this object has none."""


def _in_interpreter(function: PythonFunction, seed: int) -> DataReads | None:
    """Makes the data set in an interpreter whose texts have other hashes."""

    # -P: a module of the current folder is found where it is in this process, and hides none of Python and torch.
    code = f"import sys; sys.path[:] = {sys.path}; from dslc.probe.second_source import answer; answer()"
    command = [sys.executable, "-P", "-c", code]
    environ = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    request = json.dumps({"named": to_json(function), "seed": seed})
    process = subprocess.run(command, input=request, env=environ, capture_output=True, text=True)
    lines = process.stdout.splitlines()
    if process.returncode or not lines:
        return None  # the first process has reported the failure
    return cast("DataReads", json.loads(lines[-1]))


def answer() -> None:
    """Makes a data set that standard input names, and prints what `make_and_read` returns."""

    request = json.load(sys.stdin)
    print(json.dumps(make_and_read(from_json(PythonFunction, request["named"]), request["seed"])))


def _source_text(function: PythonFunction) -> tuple[str, str]:
    """Returns the file of a source's module, and its text; "" for what cannot be read."""
    module = sys.modules.get(function.function.partition(":")[0])
    if module is not None:
        try:
            return os.path.basename(module.__file__ or ""), inspect.getsource(module)
        except (OSError, TypeError):
            return "", ""
    module_name = function.function.partition(":")[0]
    path = os.path.join(function.folder or ".", module_name.replace(".", os.sep) + ".py")
    try:
        with open(path, encoding="utf-8") as file:
            return os.path.basename(path), file.read(1 << 20)
    except (OSError, ValueError):
        return "", ""


def _line_of_entropy(function: PythonFunction) -> str:
    """Returns the first line that looks like a generator without a seed: of the function, else of its module."""
    file, text = _source_text(function)
    numbers = [n for n, line in enumerate(text.splitlines(), 1) if _ENTROPY.search(line)]
    start, end = _lines_of_function(text, function.function.partition(":")[2])
    numbers_inside = [n for n in numbers if start <= n <= end]
    return f"{file}, line {(numbers_inside or numbers)[0]}" if numbers else ""


def _lines_of_function(text: str, name: str) -> tuple[int, int]:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # the trial has imported it, or told why not
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name.partition(".")[0]:
                return node.lineno, node.end_lineno or node.lineno
    return 1, 0


def _line_of_set(function: PythonFunction) -> str:
    """Returns the first line of a source's module that makes a set whose order may count, or a hash; "" for none."""
    file, text = _source_text(function)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    harmless: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ORDERED:
            harmless.update(node.args)
        elif isinstance(node, ast.Compare):
            harmless.update(node.comparators)
    for node in ast.walk(tree):
        callee = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if node not in harmless and (isinstance(node, ast.Set | ast.SetComp) or callee in ("set", "frozenset", "hash")):
            return f"{file}, line {node.lineno}"  # type: ignore[attr-defined]
    return ""
