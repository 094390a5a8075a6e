"""The memory of an exchange that is no exact sum of gradients: what it keeps from step to step, and what it works in.

Contract: `runtime/exchange/` keeps these tensors and no others, which tests/training/test_memory.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dslc.compiler.ir.nodes import ParameterNode
from dslc.compiler.placement.exchange import Exchange

Bytes = Callable[[Sequence[ParameterNode], Exchange], int]


def kept_bytes(exchange: Exchange, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes that a rank keeps for the exchange of these parameters."""
    return _KEPT[exchange.kind](parameters, exchange) if exchange.kind in _KEPT else 0


def passing_bytes(exchange: Exchange, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes that exist while the exchange goes on."""
    return _PASSING[exchange.kind](parameters, exchange) if exchange.kind in _PASSING else 0


def _numbers(parameters: Sequence[ParameterNode]) -> int:
    return sum(q.count for q in parameters)


_KEPT: dict[str, Bytes] = {}
_PASSING: dict[str, Bytes] = {}
