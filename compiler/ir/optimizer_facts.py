"""Facts of a user's own optimizer, from trying it out (runtime/loop/optimizer_trial.py)."""

from __future__ import annotations

from typing import Literal

from dslc.dsl.record import Record, record


@record
class StateFact(Record):
    """One thing that an optimizer keeps for a parameter: a tensor `like` the parameter, a tensor of one `number`, a
    `plain` number of Python, or a tensor of another shape.

    `bytes` are those of one number of a tensor like the parameter, else of all of it.
    """

    name: str
    form: Literal["like", "number", "plain", "other"]
    bytes: int


@record
class OptimizerFacts(Record):
    """`kinds` are the different states of a parameter; `parameters` are (name, its kind, bytes of temporary tensors of
    an update of it alone). `at_once`: the temporary tensors of all parameters exist at one time.

    `alone` is the reason why a parameter cannot be updated without the others, `rows` why a part of a parameter cannot;
    "" where they can. `draws`: an update draws random numbers. `decays`: it takes a `weight_decay`. `group_state` are
    the entries of its groups that an update changes. `unkept`: a training that resumes from what a checkpoint keeps
    goes on otherwise. `modes`: it has `train()` and `eval()`, between which the weights are others.
    `closure`: its `step` needs a function that evaluates the loss and the gradients.
    """

    kinds: tuple[tuple[StateFact, ...], ...] = ()
    parameters: tuple[tuple[str, int, int], ...] = ()
    at_once: bool = False
    alone: str = ""
    rows: str = ""
    draws: bool = False
    decays: bool = True
    group_state: tuple[str, ...] = ()
    unkept: bool = False
    modes: bool = False
    closure: bool = False
