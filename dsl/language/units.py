"""Units of quantities: the value of each in base units, and the best way to write a number in base units.

Base units are bytes, seconds, steps, epochs, a fraction, bytes per second and FLOP/s. A unit is a ratio of two whole
numbers, so that `100ms` is 0.1 and `20%` is 0.2 to the last bit. Units are case-sensitive: `kB` is 1000 bytes, `KiB`
1024, and `Gbps` counts bits. `write` is the inverse of `in_base_units`: what it writes reads back as the same number.
"""

from __future__ import annotations

from dslc.dsl.language.registry import Dimension, Quantity

UNITS: dict[str, tuple[Dimension, int, int]] = {
    "B": ("bytes", 1, 1),
    "kB": ("bytes", 10**3, 1),
    "MB": ("bytes", 10**6, 1),
    "GB": ("bytes", 10**9, 1),
    "TB": ("bytes", 10**12, 1),
    "KiB": ("bytes", 2**10, 1),
    "MiB": ("bytes", 2**20, 1),
    "GiB": ("bytes", 2**30, 1),
    "TiB": ("bytes", 2**40, 1),
    "us": ("time", 1, 10**6),
    "ms": ("time", 1, 10**3),
    "s": ("time", 1, 1),
    "min": ("time", 60, 1),
    "h": ("time", 3600, 1),
    "d": ("time", 86400, 1),
    "step": ("steps", 1, 1),
    "steps": ("steps", 1, 1),
    "batch": ("steps", 1, 1),  # a step has one global batch
    "batches": ("steps", 1, 1),
    "epoch": ("epochs", 1, 1),
    "epochs": ("epochs", 1, 1),
    "%": ("ratio", 1, 100),
    "Gbps": ("bandwidth", 125 * 10**6, 1),
    "GBps": ("bandwidth", 10**9, 1),
    "TFLOPS": ("flops", 10**12, 1),
}

NAMES: dict[Dimension, str] = {
    "bytes": "bytes",
    "time": "time",
    "steps": "steps",
    "epochs": "epochs",
    "ratio": "a ratio",
    "bandwidth": "bandwidth",
    "flops": "FLOP/s",
}
EXAMPLES: dict[Dimension, str] = {
    "bytes": "76GiB",
    "time": "10min",
    "steps": "500 steps",
    "epochs": "1 epoch",
    "ratio": "20%",
    "bandwidth": "400Gbps",
    "flops": "100TFLOPS",
}
LARGEST = 2**127  # of the whole numbers of a job, a limit that no count reaches; floats have their own
# The dimensions in which a field takes a bare number.
BARE: frozenset[Dimension] = frozenset({"steps", "epochs", "ratio"})
# Other spellings in use.
SPELT = {
    "percent": "%", "sec": "s", "secs": "s", "second": "s", "seconds": "s", "m": "min", "mins": "min",
    "minute": "min", "minutes": "min", "hr": "h", "hrs": "h", "hour": "h", "hours": "h", "day": "d", "days": "d",
    "msec": "ms", "usec": "us", "byte": "B", "bytes": "B", "K": "KiB", "M": "MiB", "G": "GiB", "T": "TiB",
    "iter": "steps", "iters": "steps", "iterations": "steps", "it": "steps", "ep": "epochs", "GB/s": "GBps",
}  # fmt: skip


def in_base_units(value: int | float, unit: str) -> Quantity | None:
    """Returns the quantity in base units, or None if the unit is unknown. Bytes are rounded to whole ones."""
    found = UNITS.get(unit)
    if found is None:
        return None
    dimension, over, under = found
    product = value * over
    exact = isinstance(product, int) and product % under == 0
    base = product // under if exact else product / under
    if dimension == "bytes" and abs(base) < 2**62:
        base = round(base)
    return Quantity(base, dimension)


def write(value: int | float, dimension: Dimension) -> str:
    """Writes the quantity as a person would: `76GiB`, `100ms`, `20%`, `1 epoch`. Reads back as exactly this number."""
    if dimension in ("steps", "epochs"):
        return f"{number(value)} {dimension if value != 1 else dimension.removesuffix('s')}"
    whole: list[tuple[int, str]] = []
    broken: list[tuple[int, str]] = []
    for unit, (of, over, under) in UNITS.items():
        if of == dimension:
            count = value * under / over  # of floats, infinite if no float is as large
            if abs(count) <= LARGEST and Quantity(value, dimension) == in_base_units(round(count), unit):
                whole.append((abs(round(count)), f"{number(round(count))}{unit}"))
            elif Quantity(value, dimension) == in_base_units(count, unit):
                broken.append((0, f"{number(count)}{unit}"))
    # The smallest whole count of a unit, else the shortest text: 90min, 0.1s.
    if whole:
        return min(whole, key=lambda item: item[0])[1]
    if broken:
        return min(broken, key=lambda item: len(item[1]))[1]
    unit = {"bytes": "B", "time": "s", "ratio": "%", "bandwidth": "GBps", "flops": "TFLOPS"}[dimension]
    _, over, under = UNITS[unit]
    # No decimal fraction of a unit is exactly this number, but a product is: 100% times it.
    return f"{number(value)} * {under}{unit}" if over == 1 else f"{number(value / over)}{unit}"


def number(value: int | float) -> str:
    """Writes a number in the language, without loss."""
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= 10_000 else str(value)
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text
