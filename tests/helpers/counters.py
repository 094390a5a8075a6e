"""A hook that notes what the network interface of its host has sent after each step.

Of the bytes that the interface counts, 66 of each packet are the headers of Ethernet, IP and TCP.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from torch import distributed

_COUNTERS, _HEADERS = "/sys/class/net/eth0/statistics", 66


class Counters:
    """Leaves a line for each step, `{"step", "seconds", "sent"}`, in `sent-RANK.jsonl` of the run."""

    def after_step(self, context: Any) -> None:
        told = {"step": context.step, "seconds": time.perf_counter(), "sent": _read_counters()}
        with open(os.path.join(context.folder, f"sent-{context.rank}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


class SettledCounters(Counters):
    """Reads the counters when every rank has received what the step sent to it: nothing waits in a socket's buffer."""

    def after_step(self, context: Any) -> None:
        distributed.barrier()
        super().after_step(context)


def _read_counters() -> int:
    found = []
    for name in ("tx_bytes", "tx_packets"):
        with open(os.path.join(_COUNTERS, name), encoding="ascii") as file:
            found.append(int(file.read()))
    return found[0] - _HEADERS * found[1]
