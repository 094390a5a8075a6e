"""Objects of the user's that follow a training: hooks, which are called at its events, and loggers, which are given its
records.
"""

from __future__ import annotations

from dslc.dsl.language.calls import PythonCall
from dslc.dsl.language.registry import arg, call, word


@call("hook", "python", open=True)
class PythonHook(PythonCall):
    """An object of yours, or what a class or function of yours returns, with any of the methods `start`, `before_step`,
    `after_backward`, `after_step`, `evaluated`, `end` and `failed`, each called with a read-only view of the training:
    `step`, `steps`, `rank`, `world_size`, `model`, `optimizer`, `lr`, `loss`, `metrics`, `folder`, `error`. What
    `state_dict()` returns is kept in checkpoints, and given to `load_state_dict(state)` before `start`.
    """

    ranks: str = arg(word("first", "all"), "on which ranks it is called", default="first")


@call("logger", "python", open=True)
class PythonLogger(PythonCall):
    """An object of yours, or what a class or function of yours returns: on rank 0 `log(record)` is given each record of
    `metrics.jsonl`, a dict, and `close()`, if it has that, is called at the end.
    """
