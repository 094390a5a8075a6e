"""Waiting for what other processes do."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from helpers.launcher import Command

BETWEEN = 0.02  # seconds from one look to the next, which leave the cores to those that are waited for


def until(holds: Callable[[], bool], among: Iterable[Command] = (), between: float = BETWEEN) -> None:
    """Waits until something holds. Fails if one of the commands ends before; else the test's own time limit ends it."""
    among = [*among]
    with ExitStack() as around:
        endings = [os.pidfd_open(each.process.pid) for each in among]
        for ending in endings:
            around.callback(os.close, ending)
        while not holds():
            select.select(endings, [], [], between)
            ended = [each.end() for each in among if each.process.poll() is not None]
            assert not ended or holds(), ended
