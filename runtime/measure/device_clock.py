"""Marks moments of a device: the host's clock on CPUs, events on GPUs, which the host reads later."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class DeviceClock:
    """Marks moments on a device; seconds between two are read after the device has come past both."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def mark(self) -> Mark:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def is_host(self) -> bool:
        """True if marks are moments of the host, which are past at once."""
        return self._device is None

    def is_past(self, mark: Mark) -> bool:
        """True if the device has come past a mark; asks without waiting."""
        return not isinstance(mark, torch.cuda.Event) or mark.query()

    def wait(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def seconds_between(self, one: Mark, later: Mark) -> float:
        if isinstance(one, torch.cuda.Event):
            assert isinstance(later, torch.cuda.Event)
            return float(one.elapsed_time(later)) / 1000
        assert isinstance(later, float)
        return later - one
