"""A job in the making: settings with the keys that they come from, the outcome of every key, and findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dslc.conversion.batch_size import BatchSize
from dslc.conversion.config_file import ConfigFile
from dslc.conversion.key_table import KeyVerdict
from dslc.dsl.diagnostics import Report
from dslc.dsl.json_value import Json
from dslc.dsl.language.units import number
from dslc.dsl.words import quoted


@dataclass(frozen=True)
class ConvertedSetting:
    """The text of a value in the language, and the key or reason beside it as a comment."""

    text: str
    origin: str = ""


@dataclass(frozen=True)
class CallDraft:
    """A call such as `adamw(lr = 1e-4)`, whose arguments come from several keys."""

    word: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    def having(self, **arguments: str) -> CallDraft:
        """Returns the call with these arguments set."""
        return replace(self, arguments={**self.arguments, **arguments})

    def text(self) -> str:
        arguments = ", ".join(f"{name} = {value}" for name, value in self.arguments.items())
        return f"{self.word}({arguments})" if arguments or self.word not in ("constant", "bf16", "fp16") else self.word


@dataclass
class Draft:
    """The settings so far. `model_ranks` is the product of the axes other than the data axis."""

    report: Report = field(default_factory=Report)
    tools: list[str] = field(default_factory=list)
    files: dict[str, ConfigFile] = field(default_factory=dict)  # of each tool
    verdicts: dict[str, list[KeyVerdict]] = field(default_factory=dict)
    settings: dict[str, ConvertedSetting] = field(default_factory=dict)
    optimizer: CallDraft | None = None
    schedule: CallDraft | None = None
    batch: BatchSize = field(default_factory=BatchSize)
    devices: tuple[int, int] | None = None  # nodes, and processes of each
    axes: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, Json] = field(default_factory=dict)  # of the Trainer, which resolve `auto`
    autos: dict[str, tuple[Json, str]] = field(default_factory=dict)  # what Accelerate puts in its place, and the key
    wants_cpu: bool = False

    @property
    def model_ranks(self) -> int:
        product = 1
        for size in self.axes.values():
            product *= size
        return product

    def set(self, path: str, text: str, origin: str = "") -> None:
        self.settings[path] = ConvertedSetting(text, origin)

    def drop(self, path: str) -> None:
        self.settings.pop(path, None)

    def verdicts_of(self, outcome: str) -> Iterable[tuple[str, KeyVerdict]]:
        for name, verdicts in self.verdicts.items():
            yield from ((name, verdict) for verdict in verdicts if verdict.outcome == outcome)


def value_text(value: Json) -> str:
    """Writes a plain value in the language."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return "none"


def quantity(count: float, unit: str) -> str:
    """Writes a whole number of steps or epochs in the language; more than any training has are cut."""
    whole = int(min(count, 10**9))
    return f"{whole} {unit}" + ("s" if whole != 1 else "")
