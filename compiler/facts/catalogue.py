"""A user's own catalogue of devices: a TOML file with a table for each kind.

    [lab_card]                # `devices.kind = lab_card`
    memory  = "80GiB"
    fp32    = "67TFLOPS"      # tf32, bf16, fp16, fp8 likewise
    link    = "450GBps"       # to a device of the same node, one direction
    network = "400Gbps"       # to another node, for each device
    bandwidth = "3350GBps"    # of its memory: transformers then have estimates instead of bounds
    efficiency = 0.5          # the share of its FLOP/s that products reach; 1, so that estimates are bounds

    [cpu]                     # for jobs with `devices.cpus`; under another name it needs `device = "cpu"`
    fp32    = "0.4TFLOPS"    # of one process, as measured with all of them running
    link    = "2GBps"         # between two processes

`dslc calibrate` writes such a file, with a table `[KIND.calibration]` of the times that it measured.

A kind of dslc's own keeps the figures that its table leaves out; `cpu` has none. Units are written as in the job
language. Errors name their place in the file: E0421 if it cannot be read or is not TOML, E0422 for a table or a figure
in it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dslc.compiler.facts.calibration import Calibration, RunFit, Times, read_times
from dslc.compiler.facts.hardware import CATALOGUE, Hardware
from dslc.compiler.ir.codec import DecodeError
from dslc.compiler.ir.number_text import path_text
from dslc.dsl.bounds import CATALOGUE as CATALOGUE_BYTES
from dslc.dsl.diagnostics import Diagnostic, Findings
from dslc.dsl.files import read_bytes
from dslc.dsl.language import units
from dslc.dsl.language.registry import Dimension
from dslc.dsl.language.suggest import nearest_choice
from dslc.dsl.source import Source, Span

KEYS: dict[str, tuple[str, Dimension]] = {
    "memory": ("memory", "bytes"),
    "fp32": ("flops_fp32", "flops"),
    "tf32": ("flops_tf32", "flops"),
    "bf16": ("flops_bf16", "flops"),
    "fp16": ("flops_fp16", "flops"),
    "fp8": ("flops_fp8", "flops"),
    "link": ("link", "bandwidth"),
    "network": ("network", "bandwidth"),
    "bandwidth": ("bandwidth", "bandwidth"),
}
_OTHER_KEYS = ("efficiency", "device", "calibration", "fit")


def read_catalogue(path: str | None, where: Span | None) -> Findings[dict[str, Hardware]]:
    """Returns dslc's own kinds with the kinds of the file `path`, which the job names at `where`."""
    if path is None:
        return CATALOGUE
    name = path_text(path)
    try:
        text = read_bytes(path, CATALOGUE_BYTES.most).decode()
        tables = _tables(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        yield Diagnostic("E0421", f"the catalogue `{name}` cannot be read: {reason}", where, help="a TOML file")
        return CATALOGUE
    except (ValueError, RecursionError) as error:  # no TOML, a number, or brackets, without end
        yield Diagnostic("E0421", f"the catalogue `{name}` is not TOML: {error}", where, help=_EXAMPLE)
        return CATALOGUE
    source = Source(name, text)
    found = dict(CATALOGUE)
    for kind, table in tables.items():
        made = yield from _kind(kind, table, source)
        if made is not None:
            found[kind] = made
    return found


@lru_cache(maxsize=4)
def _tables(text: str) -> dict[str, Any]:
    """Returns the tables of a catalogue, which each trial of a job reads again."""
    import tomllib  # here: few jobs have a catalogue of their own

    return tomllib.loads(text)


_EXAMPLE = '`[lab_card]` and under it `memory = "80GiB"`, `bf16 = "989TFLOPS"`, `link = "450GBps"`, …'


def _kind(kind: str, table: Any, source: Source) -> Findings[Hardware | None]:
    if not isinstance(table, dict):
        yield Diagnostic("E0422", f"`{kind}` stands outside of a table", _span(source, kind, None), help=_EXAMPLE)
        return None
    if kind == "gpu":
        yield Diagnostic(
            "E0422",
            "`gpu` stands for any GPU, of which nothing is known beforehand",
            _span(source, kind, None),
            help="another name, and `devices.kind = gpu_of_mine`",
        )
        return None
    base = CATALOGUE.get(kind, Hardware(kind=kind))
    figures: dict[str, Any] = {}
    for key, value in table.items():
        span = _span(source, kind, key)
        if key == "efficiency":
            figures[key] = yield from _share(value, span)
            continue
        if key == "calibration":
            figures[key] = yield from _times(Calibration, key, value, span)
            continue
        if key == "fit":
            figures[key] = yield from _times(RunFit, key, value, span)
            continue
        if key == "device":
            figures["cpu"] = yield from _is_cpu(value, base, span)
            continue
        if key not in KEYS:
            close = nearest_choice(key, (*KEYS, *_OTHER_KEYS))
            yield Diagnostic(
                "E0422",
                f"`{key}` is not a property of a device",
                span,
                help=f"did you mean `{close}`?" if close else f"one of {', '.join((*KEYS, *_OTHER_KEYS))}",
            )
            continue
        field, dimension = KEYS[key]
        number = _parse_quantity(value, dimension)
        if number is None:
            example = units.EXAMPLES[dimension]
            yield Diagnostic(
                "E0422",
                f"`{key}` of a device is {units.NAMES[dimension]}, and `{value}` is not",
                span,
                help=f'`{key} = "{example}"`',
            )
            continue
        figures[field] = number
    return replace(base, **figures)


def _times(kind: type[Times], key: str, value: object, span: Span) -> Findings[Times | None]:
    """Returns the times that a catalogue holds; None if they are damaged or of another version."""
    try:
        return read_times(kind, value)
    except DecodeError as error:
        reason = str(error).removeprefix(f"{kind.__name__}.")
        command = "dslc calibrate JOB" if kind is Calibration else "dslc calibrate"
        yield Diagnostic("E0422", f"`{key}` cannot be read: {reason}", span, help=f"`{command}` writes it anew")
        return None


def _is_cpu(value: object, base: Hardware, span: Span) -> Findings[bool]:
    """True if a table is about CPUs. For dslc's own kinds the base decides."""
    known = base.kind in CATALOGUE
    wanted = ("cpu" if base.cpu else "gpu",) if known else ("cpu", "gpu")
    if value not in wanted:
        choice = " or ".join(f'`device = "{each}"`' for each in wanted)
        what = f"`{base.kind}` is one" if known else "it is one of them"
        yield Diagnostic("E0422", f"`device` says whether a kind is a CPU or a GPU; {what}", span, help=choice)
        return base.cpu
    return value == "cpu"


def _share(value: object, span: Span) -> Findings[float]:
    if isinstance(value, int | float) and 0 < value <= 1:
        return float(value)
    yield Diagnostic(
        "E0422",
        f"`efficiency` is the share of a device's speed that products reach, and `{value}` is not",
        span,
        help="a number above 0, and 1 at most: `efficiency = 0.5`",
    )
    return 1.0


def _parse_quantity(value: object, dimension: Dimension) -> float | int | None:
    found = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?) ?([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    )
    if found is None:
        return None
    if len(found[1]) > 30:
        return None
    number = float(found[1]) if re.search(r"[.eE]", found[1]) else int(found[1])
    quantity = units.in_base_units(number, found[2])
    if quantity is None or quantity.dimension != dimension or quantity.value <= 0:
        return None
    return quantity.value if dimension == "bytes" else float(quantity.value)


def _span(source: Source, kind: str, key: str | None) -> Span:
    """Returns the span of a table, or a figure in it; the beginning of the file if it is written in another way."""
    at = 0
    inside = key is None
    for line in source.text.splitlines(keepends=True):
        said = line.strip()
        if said.startswith("["):
            heading = said.strip("[] \"'").split("#")[0].strip("[] \"'")
            inside = heading in (kind, f"{kind}.{key}")
            name = kind if key is None else key if heading == f"{kind}.{key}" else ""
        else:
            name = re.split(r"\s*=", said, maxsplit=1)[0].strip("\"'")
        if inside and name == (key or kind):
            start = at + line.index(name)
            return Span(source, start, start + len(name))
        at += len(line)
    return Span(source, 0, 0)
