"""Weights for bad jobs."""

from __future__ import annotations


def of_too_few() -> list[float]:
    return [1.0, 2.0]
