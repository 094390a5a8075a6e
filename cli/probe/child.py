"""Runs a user's own code in a forked child, so that nothing it does stays, and returns its result or its exception.

Model: this process imports torch for the children of all trials. Where a child has imported large libraries for the
user's code, the trials go on in a process of their own (`in_trial_process`), which imports them, and from which the
later children are forked. So a library that takes seconds is imported twice, whatever the number of trials, and not
into the process of the command: on GPUs that could keep ranks from CUDA.

Limits: in later children such a library is there before the first line of the user's code. Where that code sets an
environment variable nothing is imported for it, as the library may read that.

Code that stays at a line longer than `PATIENCE` says so on standard error, as no rank runs yet that could.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import io
import json
import os
import pickle
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, BinaryIO, NoReturn, Protocol, TextIO, TypeAlias, TypedDict, TypeVar

from dslc.dsl.diagnostics import Diagnostic, Findings, recorded

T = TypeVar("T")
Json: TypeAlias = Any  # what JSON holds

PATIENCE = 10.0  # seconds after which a line of the user's is named; then after twice as many, and so on
_LOOKS = 10  # in these seconds


class ChildAnswer(TypedDict, total=False):
    """The answer of a child: the result of its work; or the exception, and where the user's code raised it."""

    made: Json
    error: str
    where: str
    module: str  # of a network, whose forward pass raised it
    absent: bool  # true if a module cannot be imported
    argument: str
    remedy: str
    barred: bool  # true if torch refuses to work in this child
    threads: list[str]  # that the work left running
    processes: list[int]
    repeats: list[int]
    left: str  # these in words
    libraries: list[str]  # modules of libraries that the work has imported
    status: int  # with which a child without an answer ended


class TrialObserver(Protocol):
    """Observes the children of `in_child`, and is given their answers."""

    def wrap(self, work: Callable[[], object]) -> Callable[[], object]:
        """Returns the work that a child does in place of `work`."""

    def unwrap(self, answer: ChildAnswer) -> ChildAnswer:
        """Returns the answer to `work`, from the answer to the wrapped work."""


_watches: list[TrialObserver] = []
_to_import: list[str] = []
_LONG = 0.1  # seconds: children that end sooner are not worth an import
_MANY = 100  # modules: about 0.1 s, and the fork of a process with torch
_OF_TRIALS = ("dslc", "torch", "sympy", "mpmath")  # what trials import themselves


@contextlib.contextmanager
def watched_by(watch: TrialObserver) -> Iterator[None]:
    """Makes `watch` observe the children while the context lasts."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


def import_torch_for_children() -> None:
    """Imports torch and the modules of most trials here, once, instead of in each child. That runs nothing, so that
    children which are forked later can compute.
    """
    with contextlib.suppress(ImportError, OSError):  # each child meets it again, and tells it with what needs torch
        import dslc.compiler.trace.sources.trace_source
        import dslc.runtime.data.sources.open_sources
        import dslc.runtime.loop.stateful_metrics
        import dslc.runtime.model.losses  # noqa: F401


def import_while_children_work(*modules: str) -> None:
    """Has this process import modules, in this order, while it would only wait for a child. It imports them later
    anyway.
    """
    _to_import.extend(name for name in modules if name not in sys.modules and name not in _to_import)


@dataclass
class _JobTrials:
    """The trials of a job, here or (`is_apart`) in the process that is forked for them. `answers` are those of the
    children so far, which that process is told. `libraries` are modules that children have imported.
    """

    is_apart: bool = False
    answers: list[ChildAnswer] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)

    def answer(self, work: Callable[[], object]) -> ChildAnswer:
        """Returns the answer of a child. Raises `_ProcessNeededError` if others have imported much."""
        if self.is_apart and self.answers:
            return self.answers.pop(0)
        if self.is_apart:
            self._import_libraries()
        elif len(self.libraries) >= _MANY:
            raise _ProcessNeededError
        answer = _forked(work)
        if not self.is_apart:
            self.answers.append(answer)
        if not answer.get("left"):
            self.libraries += answer.get("libraries", ())
        return answer

    def _import_libraries(self) -> None:
        if not self.libraries:
            return
        from dslc.runtime.process.vision_library import let_torchvision_load

        let_torchvision_load()
        for name in self.libraries:
            if name not in sys.modules:
                with contextlib.suppress(Exception, SystemExit):  # any kind: each child meets it again
                    importlib.import_module(name)
        self.libraries.clear()


_trials: _JobTrials | None = None


class _ProcessNeededError(BaseException):
    """Trials are to go on in a process of their own, with what they import."""


def in_trial_process(find: Callable[[], Findings[T]]) -> Findings[T]:
    """Returns what `find` returns, and yields what it yields: values that can be pickled. Once children import large
    libraries it runs in a process forked for it, which imports them once.

    In a program that has used torch on a machine with GPUs, whose children may not, all runs in this process.
    """
    global _trials
    outer, _trials = _trials, _JobTrials()
    try:
        value, found = _all_of(find())
    except _ProcessNeededError:
        value, found = _in_process_of_its_own(find)
    finally:
        _trials = outer
    yield from found
    return value


def _file_in_memory() -> BinaryIO:
    """Returns a file for what a child tells; a pipe would stay open with processes that it leaves."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("dslc"), "w+b")
    import tempfile  # here, as most checks need no child

    return tempfile.TemporaryFile()


def _all_of(findings: Findings[T]) -> tuple[T, list[Diagnostic]]:
    """Returns what a check returns and yields."""
    found = recorded(findings)
    while True:
        try:
            next(found)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _in_process_of_its_own(find: Callable[[], Findings[T]]) -> tuple[T, list[Diagnostic]]:
    """Returns what `find` returns and yields. Where it raises an exception, or the process ends, it runs here."""
    global _trials
    sys.stdout.flush()
    sys.stderr.flush()
    with _file_in_memory() as file:
        parent, process = os.getpid(), os.fork()
        if process == 0:
            _find_all(find, file, parent)
        _wait_for(process)
        file.seek(0)
        if content := file.read():
            outcome: tuple[T, list[Diagnostic]] = pickle.loads(content)
            return outcome
    _trials = None
    return _all_of(find())


def _find_all(find: Callable[[], Findings[T]], file: BinaryIO, parent: int) -> NoReturn:
    """Writes what `find` returns and yields, and ends this process; writes nothing where it raises an exception."""
    from dslc.probe.dependency_recorder import keep_library_variables, note_writes
    from dslc.runtime.process.lifetime import end_with

    try:
        end_with(parent)
        assert _trials is not None
        _trials.is_apart = True
        _to_import.clear()  # the process of the command does that
        keep_library_variables()
        note_writes()
        _hush_libraries()
        file.write(pickle.dumps(_all_of(find())))
        file.flush()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _wait_for(child: int) -> None:
    """Waits until a child has ended. While a long one works, this process imports what it needs later."""
    if _to_import and hasattr(os, "pidfd_open"):
        end = os.pidfd_open(child)
        try:
            wait = _LONG
            while _to_import and not select.select([end], [], [], wait)[0]:
                with contextlib.suppress(ImportError, OSError):  # which the launch meets again
                    importlib.import_module(_to_import.pop(0))
                wait = 0.0
        finally:
            os.close(end)
    os.waitpid(child, 0)


def in_child(work: Callable[[], object]) -> ChildAnswer:
    """Returns what `work` returns in a forked child, or its exception. The threads and processes that it left running
    are ended.

    In a program that has used torch on a machine with GPUs, whose children may not, the work is done here.
    """
    watches = list(_watches)
    for watch in watches:
        work = watch.wrap(work)
    answer = _forked(work) if _trials is None else _trials.answer(work)
    answer = _attempt_here(work) | {"left": ""} if "barred" in answer else answer
    for watch in reversed(watches):
        answer = watch.unwrap(answer)
    return answer


def _forked(work: Callable[[], object]) -> ChildAnswer:
    """Returns the answer of a child that does the work, with what it has left running, in words."""
    from dslc.probe.leaked_resources import in_words, supervise

    sys.stdout.flush()
    sys.stderr.flush()
    with io.TextIOWrapper(_file_in_memory(), encoding="utf-8") as file:

        def tell(status: int, processes: Sequence[int]) -> None:
            _write({"status": status, "processes": processes}, file)

        parent, child = os.getpid(), os.fork()
        if child == 0:
            supervise(parent, lambda: _answer(work, file), tell)
        _wait_for(child)
        file.seek(0)
        answers = [json.loads(line) for line in file]
    answer: ChildAnswer = answers[0]
    final = answers[-1]
    if answer is final:  # the child gave no answer
        message = f"the process ended with status {final['status']}"
        answer = {"error": message, "where": "", "module": "", "absent": False, "argument": "", "remedy": ""}
        answer |= {"threads": [], "processes": [], "repeats": []}
    new_processes = [process for process in final["processes"] if process not in answer["repeats"]]
    answer["left"] = in_words(answer["threads"], [*answer["processes"], *new_processes])
    return answer


def _answer(work: Callable[[], object], file: TextIO) -> NoReturn:
    """Writes the answer of a child, and ends it, even if `work` has left threads running."""
    from dslc.probe.dependency_recorder import note_variables
    from dslc.probe.leaked_resources import end_own, of_repeats

    pid = os.getpid()
    gc.set_threshold(2_000_000, 20, 1_000)  # libraries make millions of objects that stay: they are looked through less
    _hush_libraries()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # a parent that ran parallel operations leaves no threads to its child
    try:
        modules, variables = len(sys.modules), note_variables() if _trials is not None else []
        answer = {"barred": True} if _torch_is_barred() else _attempt(work, BaseException)
        if os.getpid() == pid:  # else `work` forked, and this is that process
            repeats = of_repeats()
            threads, processes = end_own()
            answer |= {"threads": threads, "processes": processes, "repeats": repeats}
            if _trials is not None and not variables:
                answer["libraries"] = _imported_libraries(modules)
            _write(answer, file)
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(0)


def _imported_libraries(begin: int) -> list[str]:
    """Returns the modules of installed libraries that were imported after the first `begin` modules, in that order."""
    from dslc.runtime.process.frame_ownership import is_installed

    names = []
    for name, module in list(sys.modules.items())[begin:]:
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(file, str) and is_installed(file) and name.partition(".")[0] not in _OF_TRIALS:
            names.append(name)
    return names


def _write(message: object, file: TextIO) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


def _hush_libraries() -> None:
    """Silences, in a child, the logging of torch and the libraries around it. In a training it goes to the logs of the
    ranks.
    """
    import logging
    import warnings

    torch = sys.modules.get("torch")
    if torch is None:
        os.environ.setdefault("TORCH_LOGS", "-all")  # read at import: only errors
    elif "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(all=logging.ERROR)
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # tells of an error that is raised, too
    for name in ("torch", "torchao"):
        warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _attempt(work: Callable[[], object], *caught: type[BaseException]) -> ChildAnswer:
    try:
        with _naming_slow_lines():
            return {"made": work()}
    except caught as raised:  # passed on, to be reported
        from dslc.runtime.process.vision_library import true_cause

        error = true_cause(raised)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        return {
            "error": first_line(error),
            "where": where_in_the_users_code(error),
            "module": _module(error),
            "absent": isinstance(error, ImportError),
            "argument": getattr(error, "argument", ""),
            "remedy": "make room there" if full else getattr(error, "remedy", ""),
        }


@contextlib.contextmanager
def _naming_slow_lines() -> Iterator[None]:
    """Names the line of the user's that this thread stays at, after `PATIENCE` seconds and on. Tracing that is slow
    moves from line to line.
    """
    import threading

    main, ended = threading.get_ident(), threading.Event()

    def watch() -> None:
        line, looks, limit = "", 0, _LOOKS
        while not ended.wait(PATIENCE / _LOOKS):
            before, (line, doing) = line, _user_code_at(sys._current_frames().get(main))
            looks, limit = (looks + 1, limit) if line and line == before else (0, _LOOKS)
            if looks >= limit:
                seconds = looks * PATIENCE / _LOOKS
                text = f"dslc: no rank has started: a trial of your code {doing}, for {seconds:g} s\n"
                os.write(2, text.encode())
                limit *= 2

    threading.Thread(target=watch, name="dslc-slow-lines", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _user_code_at(frame: FrameType | None) -> tuple[str, str]:
    """Returns the user's innermost line in a stack, and in words what it does, with the sample that it reads; "" and ""
    if none of the user's code runs.
    """
    from dslc.dsl.plain import plain
    from dslc.runtime.process.frame_ownership import is_users

    line = sample = ""
    while frame is not None and frame.f_code is not _attempt.__code__:  # what calls the trial is no code of a trial
        code = frame.f_code
        if is_users(code.co_filename):
            line = line or plain(f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, in {code.co_name}")
            number = frame.f_locals.get(code.co_varnames[1]) if code.co_argcount == 2 else None
            if code.co_name == "__getitem__" and isinstance(number, int):
                sample = f"reads sample {number} ({line})"
        frame = frame.f_back
    return line, sample or f"is at {line}"


def _torch_is_barred() -> bool:
    """True if torch refuses to work in this child: the parent has initialized CUDA, or the threads of its backward
    pass.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    try:
        torch.zeros((), requires_grad=True).backward()
    except RuntimeError:
        return True
    return bool(torch.cuda._is_in_bad_fork())


def _attempt_here(work: Callable[[], object]) -> ChildAnswer:
    """Does the work in this process, and restores its threads and random states."""
    import torch

    threads = torch.get_num_threads()
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    try:
        with torch.random.fork_rng(gpus):
            return _attempt(work, Exception, SystemExit)
    finally:
        torch.set_num_threads(threads)


def first_line(error: BaseException) -> str:
    from dslc.runtime.process.error_text import error_text, narrow

    text = narrow(error_text(error).strip().split("\n")[0])
    kind = type(error).__name__
    plain = kind in ("TraceError", "TransformersError", "ImportError", "LossError", "MetricError", "VisionLibraryError")
    return text if plain and text else f"{kind}: {text}" if text else kind


def _module(error: BaseException) -> str:
    """Names the module of a network whose forward pass raised this: "`out` (Linear)"; "" if none did."""
    import traceback

    torch = sys.modules.get("torch")
    calls = traceback.walk_tb((error.__cause__ or error).__traceback__)
    receivers = [frame.f_locals.get("self") for frame, _ in calls]
    modules = [receiver for receiver in receivers if torch is not None and isinstance(receiver, torch.nn.Module)]
    if not modules:
        return ""
    names = {id(module): name for name, module in modules[0].named_modules()}
    name = names.get(id(modules[-1]), "")
    return f"`{name}` ({type(modules[-1]).__name__})" if name else ""


def where_in_the_users_code(error: BaseException) -> str:
    """Returns the deepest line of the traceback that is the user's own."""
    import traceback

    from dslc.runtime.process.frame_ownership import is_users

    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}, line {error.lineno}"
    user_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{os.path.basename(user_frames[-1].filename)}, line {user_frames[-1].lineno}" if user_frames else ""
