"""Arithmetic of numbers and quantities, with dimensions.

A quantity can be multiplied by a number; quantities of one dimension can be added; their quotient is a number. `/` of
integers stays an integer where it is exact. An impossible computation raises `Impossible` with the reason; nothing else
is ever raised, whatever the numbers.
"""

from __future__ import annotations

import math

from dslc.dsl.language.registry import Quantity
from dslc.dsl.language.units import LARGEST, NAMES, write

Amount = int | float | Quantity


class Impossible(Exception):
    """Why an operation has no result, and the remedy. `unlike` marks dimensions that do not match."""

    def __init__(self, reason: str, help: str = "", *, unlike: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.help, self.unlike = reason, help, unlike


def finite(value: Amount) -> Amount:
    """Returns the value itself, unless it is too large to be meant."""
    number = value.value if isinstance(value, Quantity) else value
    if isinstance(number, float) and not math.isfinite(number):
        raise Impossible("this number is too large")
    if isinstance(number, int) and abs(number) > LARGEST:
        raise Impossible("this number is too large")
    return value


def unary(operator: str, operand: Amount) -> Amount:
    if operator == "+":
        return operand
    return Quantity(-operand.value, operand.dimension) if isinstance(operand, Quantity) else -operand


def binary(operator: str, left: Amount, right: Amount) -> Amount:
    try:
        return finite(_binary(operator, left, right))
    except OverflowError:
        raise Impossible("the result is too large") from None


def _binary(operator: str, left: Amount, right: Amount) -> Amount:
    one = left.dimension if isinstance(left, Quantity) else None
    two = right.dimension if isinstance(right, Quantity) else None
    a = left.value if isinstance(left, Quantity) else left
    b = right.value if isinstance(right, Quantity) else right
    result = _numbers(operator, a, b)
    if one is None and two is None:
        return result
    if operator in ("+", "-"):
        if one == two and one is not None:
            return Quantity(result, one)
        raise Impossible(
            f"{_named(left)} and {_named(right)} cannot be {'added' if operator == '+' else 'subtracted'}",
            "only quantities of one kind can; give both the same unit", unlike=True,
        )  # fmt: skip
    if operator == "*" and (one is None or two is None):
        return Quantity(result, one or two)  # type: ignore[arg-type]
    if operator in ("/", "//") and two is None and one is not None:
        return Quantity(result, one)
    if operator in ("/", "//") and one == two:
        return result
    verb = {"*": "multiplied by", "/": "divided by", "//": "divided by", "**": "raised to the power of"}[operator]
    raise Impossible(f"{_named(left)} cannot be {verb} {_named(right)}", unlike=True)


def _numbers(operator: str, a: int | float, b: int | float) -> int | float:
    match operator:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "/" | "//":
            if b == 0:
                raise Impossible("this divides by zero")
            if operator == "//":
                return a // b
            if isinstance(a, int) and isinstance(b, int) and a % b == 0:
                return a // b
            return a / b
        case _:
            return _power(a, b)


def _power(a: int | float, b: int | float) -> int | float:
    if a == 0 and b < 0:
        raise Impossible("this divides by zero")
    if a < 0 and b != int(b):
        raise Impossible("a negative number has no root here")
    if isinstance(a, int) and isinstance(b, int) and b >= 0:
        # Checked before it is computed: 9 ** 9 ** 9 has 370 million digits.
        if abs(a) > 1 and b * math.log2(abs(a)) > 128:
            raise Impossible("the result is too large")
        return int(a**b)
    return float(float(a) ** float(b))


def _named(amount: Amount) -> str:
    if isinstance(amount, Quantity):
        return f"{NAMES[amount.dimension]} ({write(amount.value, amount.dimension)})"
    return f"the number {amount}"
