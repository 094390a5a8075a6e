"""Names the module and the line of a network's code that runs, or that draws random numbers of the host.

Model: a network's code is every file that is neither torch's, numpy's, Python's own nor dslc's. `HostDraws` compares
the states of generators before and after a forward pass; only if one has moved, a second pass under `sys.settrace`
compares them after each line.

Limits: a generator is known if it is Python's or numpy's global one, or the operating system's. It is also known if an
attribute of a module holds it, or an object or a container in an attribute. A variable of a Python module of the
network's code may hold it too.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from dslc.compiler.ir.network_facts import CodePlace

if TYPE_CHECKING:
    from torch import nn

    from dslc.compiler.trace.structures import UserValue

TraceFunction: TypeAlias = "Callable[[FrameType, str, object], TraceFunction | None]"


def names_of(model: nn.Module) -> dict[int, str]:
    """Returns the name of each module by its identity."""
    return {id(module): name for name, module in model.named_modules()}


def place_of(frame: FrameType | None, names: Mapping[int, str], model: nn.Module) -> CodePlace:
    """Returns the innermost module and the innermost line of a network's code among the callers of a frame."""
    line, module = line_at(frame), module_of(frame, names)
    return CodePlace(module=names.get(id(module), ""), kind=type(module or model).__name__, line=line)


def module_of(frame: FrameType | None, names: Mapping[int, str]) -> nn.Module | None:
    """Returns the innermost module among the callers of a frame."""
    import torch

    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            holder = frame.f_locals.get("self")
            if isinstance(holder, torch.nn.Module) and id(holder) in names:
                return holder
        frame = frame.f_back
    return None


def line_at(frame: FrameType | None) -> str:
    """Returns the innermost line of a network's code among the callers of a frame, as in `net.py:31`; "" for none."""
    while frame is not None and not is_network_code(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """Returns the innermost line of a network's code in the traceback of an exception; "" for none."""
    lines = [
        f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        for frame, line in walk_tb(error.__traceback__)
        if is_network_code(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else ""


@lru_cache(maxsize=4096)
def is_network_code(file: str) -> bool:
    """True for a file of the user, or of a library of networks such as `transformers`."""
    pythons = file.startswith(sysconfig.get_path("stdlib")) and f"{os.sep}site-packages{os.sep}" not in file
    return not pythons and not file.startswith(("<", *_other_folders()))


@lru_cache(maxsize=1)
def _other_folders() -> tuple[str, ...]:
    import numpy
    import torch

    libraries = [os.path.dirname(str(library.__file__)) for library in (torch, numpy)]
    packages = [
        sys.modules[name] for name in ("dslc", "dslc.compiler", "dslc.runtime", "dslc.dsl") if name in sys.modules
    ]
    ours = [path for package in packages for path in package.__path__]
    return tuple(os.path.join(folder, "") for folder in (*libraries, *ours))


_GLOBAL = {
    "random": "Python's random numbers",
    "numpy.random": "numpy's random numbers",
    "os": "the operating system's random numbers",
}


class HostDraws:
    """The random numbers that a forward pass draws without torch: after `watch`, `source` names the
    generator in words, "" for none, and `holder` the attribute or variable that holds it, "" for a global one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._names = model, names_of(model)
        self.source = self.holder = ""
        self.is_global = False  # true: it draws from Python's or numpy's global generator alone
        self.is_seeded = True  # false: another pass draws others, whatever was seeded before
        self._system: list[CodePlace] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        states_before = self._states()
        with self._system_watched():
            yield
        name = self._moved(states_before)
        self.holder = "" if name in _GLOBAL else name
        self.source = _GLOBAL.get(name, f"its generator `{name}`") if name else ""
        is_attribute = not self.holder or has_attribute(self._model, name)
        self.is_seeded = name != "os" and is_attribute
        self.is_global = name in ("random", "numpy.random")

    @contextmanager
    def line_of(self) -> Iterator[list[CodePlace]]:
        """Yields a list that holds, after a pass, the place of the first draw."""
        places: list[CodePlace] = []
        states_before, call_places = self._states(), [place_of(None, self._names, self._model)]

        def look(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
            if not places and self._moved(states_before):
                places.append(call_places[0])
            if event == "return":
                back = frame.f_back
                frame = back if back is not None and is_network_code(back.f_code.co_filename) else frame
            call_places[0] = place_of(frame, self._names, self._model)
            return look

        def enter(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
            return look if is_network_code(frame.f_code.co_filename) else None

        with self._system_watched():
            traced = sys.gettrace()
            sys.settrace(enter)
            try:
                yield places
            finally:
                sys.settrace(traced)
        if self._system:
            places[:] = self._system[:1]
        elif not places and self._moved(states_before):
            places.append(call_places[0])

    def _states(self) -> dict[str, object]:
        return {name: generator_state(generator) for name, generator in self._generators().items()}

    def _moved(self, states_before: Mapping[str, object]) -> str:
        if self._system:
            return "os"
        for name, generator in self._generators().items():
            if name in states_before and generator_state(generator) != states_before[name]:
                return name
        return ""

    def _generators(self) -> dict[str, UserValue]:
        import numpy.random

        generators: dict[str, UserValue] = {"random": random, "numpy.random": numpy.random}
        for name, value in held_values(self._model):
            if is_generator(value):
                generators[name] = value
        return generators

    @contextmanager
    def _system_watched(self) -> Iterator[None]:
        """Notes each call of `os.urandom`, which `secrets` and generators without a seed use."""
        urandom = os.urandom
        self._system = []

        def noting(size: int) -> bytes:
            self._system.append(place_of(sys._getframe(1), self._names, self._model))
            return urandom(size)

        system_random: UserValue = random
        inner = system_random._urandom
        os.urandom = system_random._urandom = noting
        try:
            yield
        finally:
            os.urandom, system_random._urandom = urandom, inner


def held_values(model: nn.Module) -> Iterator[tuple[str, UserValue]]:
    """Yields the plain attributes of a network's modules, and the numbers, generators and tensors inside of these
    attributes. Then it yields the variables of the Python files that define the modules.
    """
    paths: set[str] = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                yield f"{path}.{name}".lstrip("."), value
                yield from _inner_values(f"{path}.{name}".lstrip("."), value, depth=3)
        file = sys.modules.get(type(module).__module__)
        if file is None or file.__name__ in paths or not is_network_code(getattr(file, "__file__", None) or "<"):
            continue
        paths.add(file.__name__)
        yield from ((name, value) for name, value in vars(file).items() if not name.startswith("__"))


def _inner_values(name: str, value: UserValue, depth: int) -> Iterator[tuple[str, UserValue]]:
    """Yields the numbers and generators in containers, and those and the tensors in objects of a user's own classes."""
    import torch

    inner: list[tuple[object, object]]
    if isinstance(value, dict):
        inner = list(dict.items(value))  # of a derived class, too, whose own `items` may make its values
    elif isinstance(value, list | tuple | deque):
        inner = list(enumerate(value))
    elif not isinstance(value, type | torch.Tensor | torch.nn.Module) and hasattr(value, "__dict__"):
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        inner = list(vars(value).items()) if is_network_code(file or "<") else []
    else:
        return
    contained = isinstance(value, dict | list | tuple)  # whose tensors are seen with it
    for key, inner_value in inner[:INNER_VALUES]:
        if (
            isinstance(inner_value, bool | int | float)
            or is_generator(inner_value)
            or (torch.is_tensor(inner_value) and not contained)
        ):
            yield f"{name}.{key}", inner_value
        elif depth:
            yield from _inner_values(f"{name}.{key}", inner_value, depth - 1)


def is_generator(value: object) -> bool:
    """True for a generator of Python's or numpy's that has a state; the operating system's generator has none."""
    import numpy.random

    kinds = (random.Random, numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def has_attribute(model: nn.Module, name: str) -> bool:
    """True for the name of an attribute of a module, or of a value inside; false for the name of a variable of a Python
    file.
    """
    modules, parts = dict(model.named_modules()), name.split(".")
    return any(
        parts[n] in vars(modules[".".join(parts[:n])]) for n in range(len(parts)) if ".".join(parts[:n]) in modules
    )


INNER_VALUES = 1000  # of one container or object that are looked at, at most
_OF_TORCH = frozenset(
    (
        *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"),
        *("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks"),
        *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
        *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
)


def set_inner_value(model: nn.Module, name: str, value: UserValue) -> None:
    """Sets a value that `held_values` names and that an object or a container in an attribute holds, or gets in a
    forward pass.
    """
    key: UserValue
    holder, key = next(_holders(model, name), ((), ""))
    if isinstance(holder, list | deque) and key == len(holder):
        holder.append(value)
    elif isinstance(holder, dict | list | deque):
        holder[key] = value
    elif not isinstance(holder, tuple):
        setattr(holder, key, value)


def _holders(holder: UserValue, name: str) -> Iterator[tuple[UserValue, UserValue]]:
    """Yields the object or container inside `holder` that holds the value called `name`, with its key, which may have
    dots; then those that could hold it under a new key.
    """
    import torch

    entries: dict[UserValue, UserValue]
    if isinstance(holder, dict):
        entries = dict(dict.items(holder))
    elif isinstance(holder, list | tuple | deque):
        entries = dict(enumerate(holder))
    else:
        children = holder.named_children() if isinstance(holder, torch.nn.Module) else ()
        entries = getattr(holder, "__dict__", {}) | dict(children)
    yield from ((holder, key) for key in entries if str(key) == name)
    for key, inner in entries.items():
        if name.startswith(f"{key}."):
            yield from _holders(inner, name.removeprefix(f"{key}."))
    if isinstance(holder, dict):
        yield holder, name
    elif name == str(len(entries)) and isinstance(holder, list | deque):
        yield holder, len(entries)


@contextmanager
def restored_generators(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yields a function that sets the generators which a network holds to their states of now; so does its end."""
    import numpy

    restores: list[Callable[[], object]] = []
    for _, value in held_values(model):
        if not is_generator(value):
            continue
        if isinstance(value, numpy.random.Generator):
            restores.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, random.Random):
            restores.append(partial(value.setstate, value.getstate()))
        else:
            restores.append(partial(value.set_state, value.get_state()))

    def restore() -> None:
        for undo in restores:
            undo()

    try:
        yield restore
    finally:
        restore()


def generator_state(generator: UserValue) -> object:
    """Returns the state of a generator of Python's or numpy's, which can be compared."""
    import numpy

    if isinstance(generator, numpy.random.Generator):
        return repr(generator.bit_generator.state)
    if hasattr(generator, "getstate"):
        return generator.getstate()
    _, words, *rest = generator.get_state()
    return words.tobytes(), rest
