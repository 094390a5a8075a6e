"""Hooks and loggers: the user's objects that follow a training.

Model: each rank makes the hooks that are for it, and calls their methods at the events of the training with one
`Context`. `start` comes after a checkpoint is loaded, `after_backward` between the passes of a step and its update,
`evaluated` after an evaluation. `end` comes after everything is written, `failed` when an exception ends the training.
What `state_dict` returns is kept in checkpoints as bytes that `torch.load(weights_only=True)` reads.

Contract: a job without hooks pays nothing, and one with hooks for their calls alone: no number is read back from the
device for them. An exception of a hook ends the training like any other, with its name, method and line of the job.
Where a training resumes, each rank gives a hook the state that it had there, or, if that rank was not there, rank 0's.

Limits: a hook must not change parameters, draw random numbers or call collectives, unless it does on all ranks alike.
Between the passes and the update gradients are this rank's own: not clipped yet, still scaled in fp16, and of its own
rows where they are sharded.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dslc.compiler.ir.program import HookStep, JobProgram, PythonFunction, RankPlace
from dslc.runtime.checkpoint.custom_optimizer_state import pack, unpack
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.measure.copy_digests import bit_sums
from dslc.runtime.measure.replica_check import FIRST
from dslc.runtime.process.error_text import causes
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.records import Record
from dslc.runtime.process.user_code import UserObject, load_function
from dslc.runtime.step.assemble import TrainingComponents

EVENTS = ("start", "epoch", "before_step", "after_backward", "after_step", "evaluated", "end", "failed")
_STATE = ("state_dict", "load_state_dict")

Between = Callable[[StepBatch, Tensor, int | Tensor], None]


class HookError(RuntimeError):
    """An object that cannot be used as a hook or a logger; the text says why."""


class Context:
    """The training as a hook sees it; read-only.

    `step` counts from 1, and is 0 before the first; `steps` is the last; `epoch` counts from 0. `model` is the module
    under its own names: of a pipeline this rank's stages. `loss` is the mean over the global batch of the last step
    that was logged (`log.every`). `metrics` are the metrics of the last evaluation, and `lr` is the rate of this step.
    `folder` is the run directory, `error` the exception of `failed`.
    """

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, object]) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> UserObject:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"a training has no `{name}`; it has {', '.join(sorted(self._values))}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"`{name}` cannot be set: a hook looks at a training")

    def __dir__(self) -> list[str]:
        return sorted(self._values)

    def __reduce__(self) -> tuple[type[Context], tuple[dict[str, object]]]:
        return Context, (dict(self._values),)  # a copy keeps the values of its moment


class _AloneCheck:
    """Finds that a hook of one rank alone changes the model: by digests around calls, in steps 1, 2, 4, …"""

    def __init__(self, place: RankPlace, parts: TrainingComponents, job: JobProgram, hook: HookStep) -> None:
        self._rank, self._parts = place.rank, parts
        self._on = job.world_size > 1 and not hook.everywhere

    @contextlib.contextmanager
    def compared(self, step_number: int, event: str) -> Iterator[None]:
        """Compares what the calls in it change, in the `step_number`th step of this process. Raises HookError."""
        in_step = event in ("before_step", "after_backward", "after_step")
        if not self._on or event == "failed" or (in_step and step_number > FIRST and step_number & (step_number - 1)):
            yield
            return
        tensors = self._tensors(event)
        sums_before = bit_sums(list(tensors.values()))
        yield
        changed = [
            name
            for (name, tensor), old, new in zip(
                tensors.items(), sums_before, bit_sums(list(tensors.values())), strict=True
            )
            if old != new
        ]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            error = HookError(f"it changes {changed[0]}{more} on rank {self._rank} alone, so that the ranks differ")
            error.add_note("`ranks = all` calls a hook on every rank; a hook that looks at a training changes nothing")
            raise error

    def _tensors(self, event: str) -> dict[str, Tensor]:
        plain = self._parts.plain
        named_tensors = {f"`{name}`": tensor for name, tensor in (*plain.named_parameters(), *plain.named_buffers())}
        if event == "after_backward":
            gradients = ((name, parameter.grad) for name, parameter in plain.named_parameters())
            named_tensors |= {
                f"the gradient of `{name}`": gradient for name, gradient in gradients if gradient is not None
            }
        return named_tensors


class _FreezeCheck:
    """Finds that a hook freezes parameters, or lets frozen ones train, which the plan does not know of."""

    def __init__(self, job: JobProgram, parts: TrainingComponents) -> None:
        self._trained = [
            (name, parameter, parameter.requires_grad) for name, parameter in parts.plain.named_parameters()
        ]
        # Elsewhere the ranks would wait for the gradients of frozen parameters, or sum others without them.
        self._may_freeze = job.gradients.kind in ("none", "fsdp") or job.gradients.search

    def look(self) -> None:
        """Raises HookError."""
        for name, parameter, trains in self._trained:
            if parameter.requires_grad and not trains:
                raise HookError(f"it lets `{name}` train, which the optimizer was made without: `model.freeze` has it")
            if trains and not parameter.requires_grad and not self._may_freeze:
                error = HookError(f"it freezes `{name}`, and the ranks wait for its gradient in each step")
                error.add_note(
                    "`model.freeze` freezes it from the beginning; with `zero = 3` a hook may freeze parameters"
                )
                raise error


class Hooks:
    def __init__(self, job: JobProgram, place: RankPlace, parts: TrainingComponents, run_dir: str) -> None:
        inner: Any = getattr(parts.optimizer, "optim", parts.optimizer)
        self._rank, self._steps_seen = place.rank, 0
        self._values: dict[str, object] = {
            "step": 0,
            "steps": job.steps,
            "epoch": None,
            "rank": place.rank,
            "world_size": job.world_size,
            "model": parts.plain,
            "optimizer": getattr(inner, "own", inner),
            "lr": 0.0,
            "loss": None,
            "metrics": {},
            "folder": run_dir,
            "error": None,
        }
        self._context = Context(self._values)
        named = _named(job.hooks)
        self._freezing = _FreezeCheck(job, parts)
        self._hooks = [
            (name, hook.python.line, make_hook_object(hook.python), _AloneCheck(place, parts, job, hook))
            for name, hook in zip(named, job.hooks, strict=True)
            if hook.everywhere or place.rank == 0
        ]

    def _call(self, event: str) -> None:
        for name, line, hook, alone_check in self._hooks:
            method = getattr(hook, event, None)
            if method is not None:
                with (
                    mark_errors(line, f"the hook `{name}`, its `{event}`"),
                    alone_check.compared(self._steps_seen, event),
                ):
                    method(self._context)
                    self._freezing.look()

    def start(self, step: int) -> None:
        self._values["step"] = step
        self._call("start")

    def before_step(self, step: int, rate: float, epoch: int) -> None:
        """Calls `epoch` before the first step of each epoch, and of a training that resumes within one."""
        self._values |= {"step": step, "lr": rate}
        if epoch != self._values["epoch"]:
            self._values["epoch"] = epoch
            self._call("epoch")
        self._steps_seen += 1
        self._call("before_step")

    def add_after_backward(self, inner: Between) -> Between:
        """Returns `inner`, which is called between the passes and the update, with the hooks' `after_backward`."""
        if not any(hasattr(hook, "after_backward") for _, _, hook, _ in self._hooks):
            return inner

        def both(batch: StepBatch, total: Tensor, number: int | Tensor) -> None:
            inner(batch, total, number)
            self._call("after_backward")

        return both

    def after_step(self, loss: float | None) -> None:
        if loss is not None:
            self._values["loss"] = loss
        self._call("after_step")

    def evaluated(self, metrics: Mapping[str, object]) -> None:
        self._values["metrics"] = dict(metrics)
        self._call("evaluated")

    def end(self) -> None:
        self._call("end")

    def failed(self, error: BaseException) -> None:
        """Calls `failed`. The training has an exception already: one of a hook is shown in the rank's log alone."""
        self._values["error"] = error
        try:
            self._call("failed")
        except Exception:
            traceback.print_exc(file=sys.stderr)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def tensors_to_save(self) -> dict[str, Tensor]:
        named_tensors = {}
        for name, line, hook, _ in self._hooks:
            if hasattr(hook, "state_dict"):
                with mark_errors(line, f"the hook `{name}`, its `state_dict`"):
                    state = hook.state_dict()
                    try:
                        named_tensors[f"hook.{self._rank}.{name}"] = pack(state)
                    except Exception as error:
                        kinds = "tensors, numbers, text, lists and dicts"
                        raise HookError(f"its state can have {kinds}, and has something else") from error
        return named_tensors

    def tensors_to_load(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        named_tensors = {}
        for name, _, hook, _ in self._hooks:
            keys = [key for key in (f"hook.{self._rank}.{name}", f"hook.0.{name}") if key in saved]
            if keys and hasattr(hook, "load_state_dict"):
                named_tensors[keys[0]] = torch.empty(tuple(saved[keys[0]].size), dtype=torch.uint8)
        return named_tensors

    def after_load(self, tensors: Mapping[str, Tensor]) -> None:
        states = {key.split(".", 2)[2]: tensor for key, tensor in tensors.items()}
        for name, line, hook, _ in self._hooks:
            if name in states:
                with mark_errors(line, f"the hook `{name}`, its `load_state_dict`"):
                    hook.load_state_dict(unpack(states[name], torch.device("cpu")))


def _named(hooks: Sequence[HookStep]) -> list[str]:
    """Returns a name for each hook: its function, and a number for a second one of the same."""
    labels: list[str] = []
    for hook in hooks:
        earlier_count = sum(label.partition(" ")[0] == hook.python.function for label in labels)
        labels.append(f"{hook.python.function} {earlier_count + 1}" if earlier_count else hook.python.function)
    return labels


def make_hook_object(function: PythonFunction) -> UserObject:
    """Returns the object that a job names, made by its class or function if it is one. Raises HookError."""
    with mark_errors(function.line, f"`{function.function}`"):
        user_object: UserObject = load_function(function)
        has_events = any(callable(getattr(user_object, name, None)) for name in (*EVENTS, "log"))
        if isinstance(user_object, type) or not has_events:
            if not callable(user_object):
                raise HookError(f"a {type(user_object).__name__} is neither a hook nor a function that makes one")
            user_object = user_object()
        return user_object


class _Logger:
    """One logger, and the records that it has missed."""

    def __init__(self, function: PythonFunction) -> None:
        self.function, self.name = function, function.function
        self.object: UserObject = None
        self.missed, self.in_a_row, self.reason = 0, 0, ""

    def make(self) -> None:
        self.object = make_hook_object(self.function)

    def call(self, what: str, act: Callable[[], None]) -> bool:
        """Does something with its object. Returns False, and keeps the reason, if a service cannot be reached."""
        try:
            with mark_errors(self.function.line, f"the logger `{self.name}`{what}"):
                act()
        except Exception as error:  # of a library, which may have classes of its own for it
            if not is_of_service(error):
                raise
            self.reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            return False
        return True


class Loggers:
    """The user's loggers, on rank 0. One whose service fails misses records, and is called no more after `TRIES`."""

    TRIES = 3

    def __init__(self, functions: Sequence[PythonFunction], tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._loggers = [_Logger(function) for function in functions]
        for logger in self._loggers:
            if not logger.call("", logger.make):
                logger.in_a_row = self.TRIES
                tell(f"the logger `{logger.name}` gets no records, as it cannot be made ({logger.reason})")

    def log(self, record: Record) -> None:
        for logger in self._loggers:
            if logger.in_a_row == self.TRIES:
                logger.missed += 1
            elif logger.call("", lambda logger=logger: logger.object.log(dict(record))):  # type: ignore[misc]
                logger.in_a_row = 0
            else:
                self._note_missed(logger, record)

    def _note_missed(self, logger: _Logger, record: Record) -> None:
        logger.missed, logger.in_a_row = logger.missed + 1, logger.in_a_row + 1
        if logger.in_a_row in (1, self.TRIES):
            more = "and is called no more" if logger.in_a_row == self.TRIES else "and the training goes on"
            self._tell(
                f"the logger `{logger.name}` missed the record of step {record['step']} ({logger.reason}), {more}"
            )

    def failed(self) -> None:
        """Closes them. The training has an exception already: one of a logger is shown in the rank's log alone."""
        try:
            self.close()
        except Exception:
            traceback.print_exc(file=sys.stderr)

    def close(self) -> None:
        for logger in self._loggers:
            if hasattr(logger.object, "close") and not logger.call(", its `close`", logger.object.close):
                self._tell(f"the logger `{logger.name}` could not be closed ({logger.reason})")
            if logger.missed:
                records = "1 record" if logger.missed == 1 else f"{logger.missed} records"
                self._tell(
                    f"the logger `{logger.name}` missed {records} ({logger.reason}); metrics.jsonl has all of them"
                )


# Names of exceptions of libraries that derive from no OSError, as those of grpc, wandb, redis and sqlalchemy.
_OF_SERVICE = re.compile(
    r"\w*(Connect|Connection|Disconnected|Comm|Rpc|Timeout|TimedOut|Transport|Network|Unavailable|Unreachable|"
    r"Operational|RateLimit)(Error|Exception)?"
)
_BUSY = (408, 425, 429)  # status codes of HTTP that ask to come back


def is_of_service(error: BaseException) -> bool:
    """True if an exception says, or follows from one that says, that a service or a file cannot be used."""
    for cause in causes(error, contexts=True):
        status = _http_status(cause)
        named = any(_OF_SERVICE.fullmatch(error_type.__name__) for error_type in type(cause).__mro__)
        if isinstance(cause, OSError) or named or status >= 500 or status in _BUSY:
            return True
    return False


def _http_status(error: BaseException) -> int:
    """Returns the status code of HTTP that an exception of a library has; 0 without one."""
    holders = (error, getattr(error, "response", None))
    codes = (getattr(holder, name, None) for holder in holders for name in ("status_code", "status", "code"))
    return next((code for code in codes if isinstance(code, int)), 0)


# ------------------------------------------------------------------------------------------- before any rank starts


def try_hook(function: PythonFunction) -> None:
    """Checks the methods of a hook without making it, which may have effects. Raises HookError."""
    owner = _hook_type(function)
    if owner is None:
        return
    events = [event for event in EVENTS if callable(getattr(owner, event, None))]
    if not events:
        raise HookError(f"{_word(owner)} has none of the methods {', '.join(EVENTS)}")
    for event in events:
        _takes_one(owner, event)
    state = [name for name in _STATE if callable(getattr(owner, name, None))]
    if len(state) == 1:
        raise HookError(f"it has `{state[0]}` alone: a state is kept by `state_dict` and `load_state_dict`")


def try_logger(function: PythonFunction) -> None:
    """Looks for the `log` of a logger, without making it. Raises as its module does, and HookError."""
    owner = _hook_type(function)
    if owner is None:
        return
    if not callable(getattr(owner, "log", None)):
        raise HookError(f"{_word(owner)} has no `log`")
    _takes_one(owner, "log")


def _hook_type(function: PythonFunction) -> object:
    """Returns the class or object that a job names; None for a function, whose type only a call shows."""
    hook_type: object = load_function(replace(function, arguments={}))
    if callable(hook_type):
        try:
            inspect.signature(hook_type).bind(**function.arguments)
        except (TypeError, ValueError) as error:
            if isinstance(hook_type, type) or function.arguments:
                raise HookError(f"it is called with other arguments: {error}") from error
    return None if inspect.isroutine(hook_type) else hook_type


def _word(owner: object) -> str:
    return f"the class {owner.__name__}" if isinstance(owner, type) else f"a {type(owner).__name__}"


def _takes_one(owner: object, name: str) -> None:
    example = (None, None) if isinstance(owner, type) else (None,)
    try:
        inspect.signature(getattr(owner, name)).bind(*example)
    except TypeError as error:
        raise HookError(f"its `{name}` is called with one argument: {error}") from error
