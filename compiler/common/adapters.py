"""The names of modules and tensors in a network with adapters: the compiler and the runtime follow this alike.

Model: the library `peft` puts a layer with an adapter into the place of a dense layer `x`. The layer itself becomes
`x.base_layer`, the two matrices are `x.lora_A.default.weight` and `x.lora_B.default.weight`. Files know the weight by
its name without the adapter, `x.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from typing import TypeVar

T = TypeVar("T")

BASE = "base_layer"
FIRST, SECOND = "lora_A.default", "lora_B.default"
_OWN = re.compile(r"(.*\.)?lora_[AB]\.default\.weight")


def targeted(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that is True for the names of modules that one of the patterns is of, whole or at its end, as
    peft's `target_modules` are: `q_proj` is of `layers.0.q_proj`. `*` is any text.
    """
    if not patterns:
        return lambda name: False
    found = re.compile("|".join(translate(form) for each in patterns for form in (each, f"*.{each}"))).match
    return lambda name: found(name) is not None


def is_of_adapter(name: str) -> bool:
    """True if a parameter is one of an adapter's own."""
    return _OWN.fullmatch(name) is not None


def base_name(name: str) -> str:
    """Returns the name of a tensor in the network without adapters; of one that is no adapter's own."""
    return name.replace(f".{BASE}.", ".").removeprefix(f"{BASE}.")


def without_adapters(tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns what is known of tensors by their names without adapters, but for the adapters' own."""
    return {base_name(name): value for name, value in tensors.items() if not is_of_adapter(name)}


def file_name(name: str) -> str:
    """Returns the name of an adapter's tensor in the file of an adapter alone, without peft's prefix."""
    return name.replace(".default.", ".")
