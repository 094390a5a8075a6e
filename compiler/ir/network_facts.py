"""Facts about the behaviour of a network's forward pass and of a user's own optimizer, from tracing and trying them
(runtime/step/network_trial.py, runtime/loop/optimizer_trial.py).
"""

from __future__ import annotations

from typing import Literal

from dslc.compiler.ir.steps import DrawDims
from dslc.dsl.record import Record, record


@record
class CodePlace(Record):
    """A module of a network, and the line of the user's code that runs in it, as in `nets.py:31`; "" without one."""

    module: str
    kind: str
    line: str = ""


UNSEEDED = "something that nothing seeds, such as the clock"
TENSORS, NUMBER, GENERATOR, ITERATOR = "tensors", "a number", "random numbers", "the place of an iterator"


@record
class AttributeFacts(Record):
    """A plain attribute that forward passes change and that later passes depend on, as in `encoder.hidden`."""

    name: str
    holds: str  # `TENSORS`, `NUMBER`, `GENERATOR` or `ITERATOR`
    line: str = ""


@record
class NetworkFacts(Record):
    """The behaviour of a network. What was not tried is empty, and `tried` is false."""

    torch_draws: CodePlace | None = None  # the first draw of torch's random numbers in training
    uncontrolled_draw: CodePlace | None = None  # the first of these that cannot be given by sample
    uncontrolled_because: str = ""  # in words
    joined_draw: CodePlace | None = None  # the first of them with several rows for each sample along its dim
    doubtful_draw: CodePlace | None = None  # the first of those whose rows are in an order that nothing tells
    draws: tuple[str, ...] = ()  # classes of modules that draw numbers for each sample
    shared_draws: tuple[str, ...] = ()  # classes of modules that draw the same numbers for all samples
    draw_dims: tuple[DrawDims, ...] = ()  # of modules some of whose draws do not have the samples along the first dim
    host_draws: CodePlace | None = None  # the first draw of Python's or numpy's random numbers in training
    draws_from: str = ""  # in words: the generator that `host_draws` uses, or `UNSEEDED`
    draws_globally: bool = False  # true if it is Python's or numpy's global one, whose state can be set
    restored: tuple[str, ...] = ()  # modules that the constructor puts into evaluation mode, and training mode undoes
    untracked: tuple[str, ...] = ()  # batch norms that have no running statistics
    tried: bool = False
    failure: str = ""  # the reason why a trial failed, with its line
    repeats: bool = True  # false: with equal random states two passes differ
    paths_differ: bool = False  # passes over equal shapes use different parameters
    mixes: CodePlace | None = None  # in training the output of a sample depends on other samples of its batch
    mixes_evaluation: CodePlace | None = None  # the same in evaluation
    evaluation_draw: CodePlace | None = None  # the first draw of torch's random numbers in evaluation
    loss_mixes: bool = False  # the loss that it returns for a sample depends on other samples of its batch
    moved: tuple[str, ...] = ()  # buffers that a forward pass moves by its samples
    counted: tuple[str, ...] = ()  # buffers that it moves the same way whatever the samples are
    written: tuple[str, ...] = ()  # parameters that a forward pass writes in training, as tracing shows it
    written_by_samples: tuple[str, ...] = ()  # those that get other numbers with other samples
    attributes: tuple[AttributeFacts, ...] = ()
    cpu_tensor: CodePlace | None = None  # where, on a GPU, a tensor on the CPU would meet the network's
    skipped_norms: tuple[str, ...] = ()  # batch norms that random numbers or samples call another number of times

    @property
    def varies(self) -> bool:
        """True if the parameters that a step uses may differ between steps, or between ranks."""
        return self.host_draws is not None or self.paths_differ


@record
class StateFact(Record):
    """One thing that an optimizer keeps for a parameter: a tensor `like` the parameter, a tensor of one `number`, a
    `plain` number of Python, or a tensor of another shape.

    `bytes` count one number of a tensor like the parameter, else the whole of it.
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
