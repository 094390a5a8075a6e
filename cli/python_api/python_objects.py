"""Takes what a program gives for a job: settings as values, and objects in place of `python(…)`.

Model: an object becomes an attribute of the module `dslc_given` of this process, and the job's field
`python("dslc_given:network")`. Children that try the user's code are forked from this process; to the processes of the
ranks it goes by cloudpickle: a function or class of a module by its name, any other by value.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from dslc.runtime.process.user_code import GIVEN

# The objects that a program may give, with the field that each stands for; of some several may be given.
FIELDS = {
    "network": "model.network",
    "loss": "model.loss",
    "source": "data.source",
    "optimizer": "train.optimizer",
    "lr_schedule": "train.lr_schedule",
    "hooks": "train.hooks",
    "loggers": "log.loggers",
    "metrics": "evaluate.metrics",
}
_SEVERAL = ("hooks", "loggers", "metrics")


class ObjectFactory:
    """A function that always returns one object. A job calls functions to make a data set or a module."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __call__(self) -> object:
        return self._value


class CopyFactory(ObjectFactory):
    """A function that gives a copy of a module, which is changed by each use."""

    def __call__(self) -> object:
        import copy

        return copy.deepcopy(self._value)


@contextlib.contextmanager
def object_settings(objects: Mapping[str, object]) -> Iterator[list[str]]:
    """Yields the settings that put `objects`, by the names of `FIELDS`, into a job, while they can be found. Raises
    TypeError for an object that cannot be passed to another process.
    """
    before, module = sys.modules.get(GIVEN), ModuleType(GIVEN)
    settings = []
    for name, value in objects.items():
        if name not in FIELDS:
            raise TypeError(f"there is no `{name}` to give; there are {', '.join(FIELDS)}")
        if value is None:
            continue
        if name in _SEVERAL:
            items = value if isinstance(value, list | tuple) else [value]
            calls = [_call(module, f"{name}_{n}", name, item) for n, item in enumerate(items)]
            settings.append(f"{FIELDS[name]}=[{', '.join(calls)}]")
        else:
            settings.append(f"{FIELDS[name]}={_call(module, name, name, value)}")
    sys.modules[GIVEN] = module
    try:
        yield settings
    finally:
        if before is None:
            del sys.modules[GIVEN]
        else:
            sys.modules[GIVEN] = before


def _call(module: ModuleType, attribute: str, name: str, value: object) -> str:
    if isinstance(value, str):  # as the language has it: `accuracy`, `mlp(widths = [64])`
        return value
    _try_to_pass(name, value)
    setattr(module, attribute, _wrapped(name, value))
    rate = f", lr = {text_of(_rate(value))}" if name == "optimizer" and _rate(value) is not None else ""
    return f'python("{GIVEN}:{attribute}"{rate})'


def _wrapped(name: str, value: object) -> object:
    if name == "source" and (isinstance(value, tuple | list) or hasattr(type(value), "__getitem__")):
        return ObjectFactory(value)
    if name == "network" and hasattr(value, "named_parameters") and not isinstance(value, type):
        return CopyFactory(value)
    if name == "metrics" and not inspect.isroutine(value) and not isinstance(value, type):
        return CopyFactory(value)
    return value


def _rate(optimizer: object) -> float | None:
    """Returns the learning rate that an optimizer has by default; None if it has none."""
    if not callable(optimizer):
        return None
    try:
        default = inspect.signature(optimizer).parameters["lr"].default
    except (TypeError, ValueError, KeyError):
        return None
    return float(default) if isinstance(default, int | float) else None


def _try_to_pass(name: str, value: object) -> None:
    import cloudpickle  # type: ignore[import-untyped]

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(f"`{name}` cannot be passed to the processes of the ranks: {error}") from error


def settings_of(values: Mapping[str, object]) -> list[str]:
    """Returns settings as `--set` takes them. Text stands as in a job: a word, a call, or text in quotes."""
    return [f"{path}={text_of(value)}" for path, value in values.items()]


def text_of(value: object) -> str:
    """Returns a value as the language has it. Raises TypeError for what it cannot have."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return json.dumps(os.fspath(value), ensure_ascii=False)
    if isinstance(value, int | float):
        return repr(value)
    if hasattr(value, "item"):  # a number of numpy's or torch's
        return text_of(value.item())
    if isinstance(value, Sequence):
        return f"[{', '.join(map(text_of, value))}]"
    raise TypeError(f"a {type(value).__name__} is not a value of the language")
