"""The actions of a process in a step, one class for each kind; and the traffic of a rank, which is their sum.

Passes under a pipeline are emitted: the program of a rank lists them, and torch's schedule runtime runs them in this
order. All other actions are carried out by the engine that the steps of the program name, which issues them by itself:
the plan has them so that they can be counted, proved and shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Flag, StrEnum, auto
from math import prod
from typing import ClassVar, Literal, TypeAlias

from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.dsl.record import Record, record
from dslc.dsl.sums import float_sum

Shape: TypeAlias = tuple[int, ...]
Among = Literal["", "node", "nodes"]


class Role(Flag):
    """The meaning of a payload to the proofs of a plan."""

    NONE = 0
    AGREEMENT = auto()  # the members of an exchange agree on it, by the exchange's rule
    GRADIENT = auto()  # what it brings changes gradients
    COMPARISON = auto()  # a loss that compares samples needs it
    HOLDERS = auto()  # it goes to the ranks that hold copies or shares of the same parameters


class Payload(StrEnum):
    """The content of an exchange; the value is its text in plans."""

    role: Role

    NOTHING = ""
    PARAMETERS = "parameters", Role.HOLDERS
    GRADIENTS = "gradients", Role.AGREEMENT | Role.GRADIENT
    MOMENTA = "momenta", Role.AGREEMENT
    WEIGHTS = "weights", Role.AGREEMENT
    SCALE = "scale of the gradients", Role.AGREEMENT
    SCALE_OF_SUMS = "scale of sums of gradients", Role.AGREEMENT  # of what shards have summed, for replicas
    SECOND_FACTORS = "second factors of the gradients", Role.AGREEMENT
    ROUND_END = "whether a round of averages is over", Role.AGREEMENT
    SHARED_GRADIENTS = "gradients of shared weights", Role.GRADIENT
    PARTIAL_GRADIENTS = "gradients beside pieces", Role.GRADIENT  # of parameters that the tensor axis does not divide
    ACTIVATIONS = "activations"
    ACTIVATIONS_AGAIN = "activations, again"
    ACTIVATION_GRADIENTS = "gradients of activations", Role.GRADIENT
    WEIGHT_SCALES = "largest numbers of weights for 8 bits", Role.HOLDERS
    SCALES = "largest numbers for 8 bits"
    SCALES_AGAIN = "largest numbers for 8 bits, again"
    GRADIENT_SCALES = "largest numbers of gradients for 8 bits"
    KEYS_AND_VALUES = "keys and values"
    KEY_VALUE_GRADIENTS = "gradients of keys and values", Role.GRADIENT
    ROW_COUNTS = "counts of rows for experts"
    EXPERT_ROWS = "rows for experts"
    EXPERT_RESULTS = "results of experts"
    RESULT_GRADIENTS = "gradients of results of experts", Role.GRADIENT
    ROW_GRADIENTS = "gradients of rows for experts", Role.GRADIENT
    LOSS_PARTS = "parts of the loss"
    ANSWER_SUMS = "log-probabilities of answers"
    BATCH_STATISTICS = "batch statistics"
    KEPT_COUNT = "count of what is kept"
    LOSS_COUNT = "count of the losses"
    EXPERT_COUNTS = "tokens of each expert"
    CAPACITY_COUNTS = "tokens of each expert for the capacity"
    BALANCE_COUNTS = "tokens of each expert for the balance loss"
    USED_PARAMETERS = "which parameters were used"
    BUFFERS = "buffers"
    GRADIENT_NORM = "norm of the gradient", Role.HOLDERS
    NONFINITE = "whether a gradient is not finite", Role.HOLDERS
    OUTPUTS = "outputs", Role.COMPARISON
    TARGETS = "targets", Role.COMPARISON
    OUTPUT_GRADIENTS = "gradients of outputs", Role.COMPARISON | Role.GRADIENT

    def __new__(cls, text: str, role: Role = Role.NONE) -> Payload:
        member = str.__new__(cls, text)
        member._value_, member.role = text, role
        return member


# What ranks of an expert axis send each other, its sizes by the routing.
ROUTED = (Payload.EXPERT_ROWS, Payload.EXPERT_RESULTS, Payload.RESULT_GRADIENTS, Payload.ROW_GRADIENTS)
# What passes send of each sample, within a layer or from stage to stage.
OF_SAMPLES = frozenset(
    (
        Payload.ACTIVATIONS,
        Payload.ACTIVATIONS_AGAIN,
        Payload.ACTIVATION_GRADIENTS,
        Payload.KEYS_AND_VALUES,
        Payload.KEY_VALUE_GRADIENTS,
        *ROUTED,
        Payload.LOSS_PARTS,
        Payload.ANSWER_SUMS,
    )
)


@record
class Cadence(Record):
    """The steps in which an exchange takes place: every `every` steps (0: by the clock, not by steps), after step
    `after`, and up to step `until` if there is one (0: in none).
    """

    every: int = 1
    after: int = 0
    until: int | None = None

    def holds(self, step: int) -> bool:
        """True of a step, counted from 1, in which it surely takes place."""
        in_time = step > self.after and (self.until is None or step <= self.until)
        return in_time and self.every > 0 and step % self.every == 0

    @property
    def steady(self) -> bool:
        """True if it takes place in the steps after the first ones."""
        return self.until is None

    @property
    def share(self) -> float:
        """The share of the later steps in which it takes place."""
        return 1 / self.every if self.steady and self.every else 0.0


ALWAYS = Cadence()


@record
class Action(Record):
    """One action of a process. The actions of a process form one line."""

    emitted: ClassVar[bool] = False

    process: int

    def is_well_formed(self, axes: Collection[str], *, pipelined: bool) -> bool:
        """True if an action of this kind can have these values, in a job with these axes."""
        return True


@record
class Update(Action):
    """The optimizer's step."""

    def __str__(self) -> str:
        return f"update {self.process}"


@record
class StageAction(Action):
    """An action of one stage. `notation` is torch's."""

    notation: ClassVar[str]

    stage: int

    def is_well_formed(self, axes: Collection[str], *, pipelined: bool) -> bool:
        return self.stage >= 0

    def __str__(self) -> str:
        return f"{self.stage}{self.notation}"


@record
class Unshard(StageAction):
    """Gathers the parameters of a stage."""

    notation: ClassVar[str] = "UNSHARD"


@record
class Reshard(StageAction):
    """Frees the gathered parameters of a stage."""

    notation: ClassVar[str] = "RESHARD"


@record
class ReduceGradients(StageAction):
    """Sums the gradients of a stage."""

    notation: ClassVar[str] = "REDUCE_GRAD"


@record
class MicrobatchAction(StageAction):
    """An action of one stage on one micro-batch."""

    microbatch: int

    def is_well_formed(self, axes: Collection[str], *, pipelined: bool) -> bool:
        return self.stage >= 0 and self.microbatch >= 0

    def __str__(self) -> str:
        return f"{self.stage}{self.notation}{self.microbatch}"


@record
class ForwardAhead(MicrobatchAction):
    """A forward pass without autograd, which makes an output before the loss that compares it."""

    notation: ClassVar[str] = "E"


@record
class StagePass(MicrobatchAction):
    """A forward or a backward pass. `overlaps`: it is computed together with the pass before it."""

    emitted: ClassVar[bool] = True

    overlaps: bool = False

    def is_well_formed(self, axes: Collection[str], *, pipelined: bool) -> bool:
        return self.stage >= 0 and self.microbatch >= 0 and (pipelined or not self.overlaps)


@record
class Forward(StagePass):
    notation: ClassVar[str] = "F"


@record
class Backward(StagePass):
    """A whole backward pass."""

    notation: ClassVar[str] = "B"


@record
class InputBackward(StagePass):
    """The half of a backward pass that makes the gradient of the input."""

    notation: ClassVar[str] = "I"


@record
class WeightBackward(StagePass):
    """The half of a backward pass that makes the gradients of the weights."""

    notation: ClassVar[str] = "W"


@record
class Message(MicrobatchAction):
    """One end of a message between neighbouring stages: tensors of these `shapes` and `dtypes`."""

    operation: ClassVar[Literal["send", "receive"]]
    carries: ClassVar[Payload]
    way: ClassVar[int]  # from a stage to the next, or to the one before
    compared: ClassVar[dict[str, str]] = {"shapes": "shape", "dtypes": "dtype"}  # both ends have the same

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]

    @property
    def sender(self) -> int:
        return self.stage if self.operation == "send" else self.stage - self.way

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each tensor."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return tuple(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in pairs)

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def is_well_formed(self, axes: Collection[str], *, pipelined: bool) -> bool:
        typed = len(self.shapes) == len(self.dtypes) > 0 and set(self.dtypes) <= DTYPE_BYTES.keys()
        return super().is_well_formed(axes, pipelined=pipelined) and typed


@record
class SendActivations(Message):
    notation: ClassVar[str] = "SEND_F"
    operation = "send"
    carries = Payload.ACTIVATIONS
    way = 1


@record
class ReceiveActivations(Message):
    notation: ClassVar[str] = "RECV_F"
    operation = "receive"
    carries = Payload.ACTIVATIONS
    way = 1


@record
class SendGradients(Message):
    notation: ClassVar[str] = "SEND_B"
    operation = "send"
    carries = Payload.ACTIVATION_GRADIENTS
    way = -1


@record
class ReceiveGradients(Message):
    notation: ClassVar[str] = "RECV_B"
    operation = "receive"
    carries = Payload.ACTIVATION_GRADIENTS
    way = -1


@record
class Collective(Action):
    """`count` collectives along an axis, or messages on it that belong to no micro-batch, of `bytes` of input in all.

    The group are `ranks` ranks, each `stride` after the one before; with a `run`, runs of `run` ranks that share a
    sequence, each run `stride` after the one before. `weights` are the names of the nodes whose
    parameters are gathered, or whose gradients, momenta or numbers are exchanged. `when`: the steps in which it takes
    place.
    """

    compared: ClassVar[dict[str, str]] = {
        "dtype": "dtype",
        "bytes": "bytes",
        "count": "count",
        "carries": "carries",
        "ranks": "group",
        "operation": "operation",
    }

    operation: str  # as of a TrafficNode
    axis: str
    carries: Payload
    dtype: str
    count: int
    bytes: int
    ranks: int
    stride: int
    weights: tuple[str, ...] = ()
    when: Cadence = ALWAYS
    run: int = 1

    @property
    def group(self) -> tuple[int, ...]:
        return (self.ranks, self.stride) if self.run == 1 else (self.ranks, self.stride, self.run)

    @property
    def gathers_parameters(self) -> bool:
        return self.operation == "all_gather" and self.carries is Payload.PARAMETERS

    @property
    def is_message(self) -> bool:
        """True if it is sent to, or received from, a peer."""
        return self.operation in ("send", "receive")

    def is_well_formed(self, axes: Collection[str], *, pipelined: bool) -> bool:
        return self.axis in axes and bool(self.carries) and self.count > 0

    def __str__(self) -> str:
        return f"{self.operation} of {self.carries} over {self.axis}"


STAGE_ACTIONS: dict[str, type[StageAction]] = {
    kind.notation: kind for kind in (Unshard, Reshard, ReduceGradients, ForwardAhead)
} | {kind.notation: kind for kind in (*StagePass.__subclasses__(), *Message.__subclasses__())}


@record
class TrafficNode(Record):
    """The exchanges of one rank on one axis in a step: `count` operations, with `bytes` of input in all.

    They are among `ranks` ranks, each `stride` after the one before; both 0 for a message between pipeline stages.
    `run` is that of a Collective. `among`: the ranks of one node alone, or those at one place in all nodes; else all of
    the axis. `when`: the steps in which they take place.
    """

    operation: str  # all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send, receive
    axis: str  # or `all` of them
    what: Payload
    dtype: str
    count: int
    bytes: int
    ranks: int
    stride: int
    among: Among = ""
    when: Cadence = ALWAYS
    run: int = 1


def handed_in(exchanged: Iterable[TrafficNode]) -> int:
    """Returns the bytes of a rank's input in a step, in the mean over later steps."""
    return round(float_sum(node.bytes * node.when.share for node in exchanged if node.operation != "receive"))
