"""The steps of a program (program.py) that the compiler plans with: the modules of a model, and their initial values.

They are a module of their own because `dslc check` needs no others, and each class takes time to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from dslc.dsl.record import Record, record

Arguments = Mapping[str, Any]  # None, bool, int, float, str, tuples of these


@record
class ModuleStep(Record):
    """Builds one module, then its children, which become its attributes.

    `kind` is a class of `torch.nn` (`Conv2d`), or one of `dslc.runtime.model.modules` (`.Attention`).
    """

    name: str  # the attribute's name in its parent; "" for the root
    kind: str
    arguments: Arguments = field(default_factory=dict)
    children: tuple[ModuleStep, ...] = ()
    line: str = ""  # "digits.plt:6:5": the place that an error names


@record
class InitStep(Record):
    """The initial value of one parameter: `uniform` in [a, b), `normal` with mean a and deviation b, `constant` a.

    Drawn alone, in float32, from a generator seeded with (seed, name), so that it depends on nothing else.
    """

    parameter: str  # its full name in the unwrapped model
    shape: tuple[int, ...]
    kind: Literal["uniform", "normal", "constant"]
    a: float
    b: float = 0.0
