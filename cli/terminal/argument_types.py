"""Values of options that are more than a text: each function raises ArgumentTypeError for text that is none.

Imports are made within the functions, because each start of the command loads this module.
"""

from __future__ import annotations


def count(text: str, limit: int = 10_000) -> int:
    from argparse import ArgumentTypeError

    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:19]) <= limit:
        raise ArgumentTypeError(f"{text} is not a number from 1 to {limit:,}")
    return int(text)


def byte_count(text: str) -> int:
    """Returns the bytes of a size such as 5GB."""
    import re
    from argparse import ArgumentTypeError

    from dslc.dsl.language.units import in_base_units

    parts = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]+)", text)
    unit = parts[2] if parts is not None else ""
    found = in_base_units(int(parts[1]), "kB" if unit == "KB" else unit) if parts is not None else None
    if found is None or found.dimension != "bytes" or found.value < 1:
        raise ArgumentTypeError(f"{text} is not a size such as 5GB")
    return int(found.value)


def node_and_gpu_counts(text: str) -> tuple[int, int]:
    """Returns the nodes, and the GPUs of each, of a text such as 2x8."""
    import re
    from argparse import ArgumentTypeError

    parts = re.fullmatch(r"(?:(\d{1,5})\s*x\s*)?(\d{1,5})", text, re.ASCII)
    nodes, gpus = (int(parts[1] or 1), int(parts[2])) if parts else (0, 0)
    if nodes < 1 or gpus < 1:
        raise ArgumentTypeError(f"{text} is not a number of GPUs such as 8, or of nodes and GPUs such as 2x8")
    return nodes, gpus
