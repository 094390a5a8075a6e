"""The optimizers: torch's, ours in runtime/optimizer, and a user's own. One class says everything that dslc must know
of an optimizer that is not a user's.

Its fields are its arguments, with the defaults of its class. The class variables and properties describe that class:
its name, the state that it keeps, its fused kernels, and the memory of an update without a fused kernel. The account of
memory, the programs of the ranks, checkpoints and `dslc verify` all read these, and name no optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Literal

from dslc.dsl.bounds import PATTERN, PATTERNS
from dslc.dsl.language.calls import PATTERN_LIST, PythonCall
from dslc.dsl.language.exchanges import HIERARCHICAL
from dslc.dsl.language.registry import CALLS, Bool, Call, Float, Int, ListOf, Str, arg, call, measure, word
from dslc.dsl.record import record

Device = Literal["cpu", "cuda"]

_LR = Float(above=0)
_LR_DOC = "the learning rate"
_DECAY = Float(min=0)
_DECAY_DOC = "weight decay"
_BETAS = ListOf(Float(min=0, below=1), length=2)
_BETAS_DOC = "the decay of the two moments"
_EPS_DOC = "added to the denominator"
_MOMENTUM = Float(min=0, below=1)
_MOMENTUM_DOC = "how much of the last update is kept"
_MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 256  # numbers of a moment in 8 bits that share a scale
_LEAST_CODES = 4096  # numbers of a parameter whose moments are in 8 bits
CODE_CHUNK = 2**16  # numbers that an update of moments in 8 bits runs over at once
CODE_SCRATCH = 48  # about the bytes of temporary tensors for each of them


def keeps_codes(shape: tuple[int, ...]) -> bool:
    """True if a parameter of this shape has moments in 8 bits, where they are asked for; torchao's rule."""
    return prod(shape) >= _LEAST_CODES and prod(shape) % BLOCK == 0


@record
class Optimizer(Call):
    """An optimizer; a subclass is its one registration.

    `state` names the tensors that it keeps for each parameter, of the parameter's shape unless `state_bytes` says
    otherwise; `counts` the tensors of one number each. `coupling` is the reason why a rank needs whole parameters.
    `rounding` is for `dslc verify`: the distance by which rounding may move a parameter in a step, as a share of the
    learning rate. It is 0 where the update does not divide by a gradient.
    """

    torch_class: ClassVar[str] = ""  # in `torch.optim`; "": runtime/optimizer or runtime/exchange has it
    counts: ClassVar[tuple[str, ...]] = ("step",)
    fused: ClassVar[tuple[Device, ...]] = ()  # devices for which torch has a fused kernel
    fused_skips: ClassVar[bool] = True  # it can skip a step, or a parameter in it, without harm to its state
    rounding: ClassVar[float] = 0.5
    coupling: ClassVar[str] = ""  # "": each number is updated alone
    rates: ClassVar[tuple[str, ...]] = ()  # further arguments that are learning rates
    apart: ClassVar[tuple[str, ...]] = ("lr",)  # arguments here that are none of its class

    lr: float = arg(_LR, _LR_DOC)

    @property
    def state(self) -> tuple[str, ...]:
        return ()

    @property
    def scratch(self) -> int:
        """Returns the float32 values that an update without the fused kernel makes for each number that it updates."""
        return 1

    @property
    def has_codes(self) -> bool:
        """True if its moments are codes with scales for blocks of numbers."""
        return False

    @classmethod
    def class_names(cls) -> tuple[str, ...]:
        """Returns the names of its classes in a program; the second has moments in 8 bits."""
        return (cls.torch_class or cls.__name__,)

    @property
    def class_name(self) -> str:
        """Returns the name of its class in a program."""
        return self.class_names()[int(self.has_codes)]

    @property
    def fallback(self) -> Optimizer | None:
        """Returns the optimizer of the parameters that it leaves to another; None if it has all."""
        return None

    @property
    def bytes_of_a_number(self) -> float:
        """Returns about how many bytes of state a number of a parameter has."""
        return 4.0 * len(self.state)

    def state_bytes(self, shape: tuple[int, ...], numbers: int) -> int:
        """Returns the bytes of the state, without `counts`, of a parameter with `numbers` numbers on a rank."""
        return 4 * len(self.state) * numbers

    def scratch_bytes(self, shapes: Sequence[tuple[tuple[int, ...], int]]) -> int:
        """Returns the temporary bytes of an update without the fused kernel, given shapes and numbers of parameters."""
        return 4 * self.scratch * sum(numbers for _, numbers in shapes)

    @property
    def more(self) -> dict[str, object]:
        """Returns arguments of its class that follow from those here."""
        return {}

    def fused_on(self, *, skipping: bool) -> tuple[Device, ...]:
        """Returns the devices that use the fused kernel, if steps may be skipped."""
        return self.fused if self.fused_skips or not skipping else ()


def torch_optimizer(name: str) -> type[Optimizer]:
    """The declaration of a class, by its name in a program."""
    declarations = (each for each in CALLS["optimizer"].values() if issubclass(each, Optimizer))
    return next(each for each in declarations if name in each.class_names())


@call("optimizer", "sgd")
class SGD(Optimizer):
    """Stochastic gradient descent."""

    torch_class: ClassVar = "SGD"
    counts: ClassVar = ()
    fused: ClassVar = ("cpu", "cuda")
    # Skipping the first step leaves its momentum uninitialized, and skipping a later one on a GPU takes infinities into
    # it; a parameter whose first gradient comes in a later step, after others', is an error (torch 2.13).
    fused_skips: ClassVar = False
    rounding: ClassVar = 0.0

    lr: float = arg(_LR, _LR_DOC, default=1e-3)
    momentum: float = arg(_MOMENTUM, _MOMENTUM_DOC, default=0.0)
    dampening: float = arg(Float(min=0, max=1), "damps the gradient in the momentum", default=0.0)
    nesterov: bool = arg(Bool(), "Nesterov's momentum", default=False)
    weight_decay: float = arg(_DECAY, _DECAY_DOC, default=0.0)

    @property
    def state(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def scratch(self) -> int:
        return int(self.weight_decay > 0)


@call("optimizer")
class Adam(Optimizer):
    """Adam (Kingma and Ba 2014, arXiv:1412.6980)."""

    torch_class: ClassVar = "Adam"
    apart: ClassVar = ("lr", "state_")
    fused: ClassVar = ("cpu", "cuda")
    rounding: ClassVar = 0.05

    lr: float = arg(_LR, _LR_DOC, default=1e-3)
    betas: tuple[float, float] = arg(_BETAS, _BETAS_DOC, default=(0.9, 0.999))
    eps: float = arg(Float(above=0), _EPS_DOC, default=1e-8)
    weight_decay: float = arg(_DECAY, _DECAY_DOC, default=0.0)
    amsgrad: bool = arg(Bool(), "the AMSGrad variant", default=False)
    state_: str = arg(
        word("fp32", "8bit"),
        "the moments: in fp32, or torchao's codes with a scale for 256 of them",
        default="fp32",
    )

    @property
    def has_codes(self) -> bool:
        return self.state_ == "8bit"

    @classmethod
    def class_names(cls) -> tuple[str, ...]:
        return (cls.torch_class, f"{cls.torch_class}8bit")

    @property
    def state(self) -> tuple[str, ...]:
        moments = (*_MOMENTS, "max_exp_avg_sq") if self.amsgrad and not self.has_codes else _MOMENTS
        return (*moments, *(f"{moment}_scale" for moment in moments)) if self.has_codes else moments

    @property
    def bytes_of_a_number(self) -> float:
        moments = 3 if self.amsgrad else 2
        return moments * (1 + 4 / BLOCK) if self.has_codes else 4.0 * moments

    def state_bytes(self, shape: tuple[int, ...], numbers: int) -> int:
        moments = 3 if self.amsgrad else 2
        return moments * (numbers + 4 * (numbers // BLOCK) if self.has_codes and keeps_codes(shape) else 4 * numbers)

    def scratch_bytes(self, shapes: Sequence[tuple[tuple[int, ...], int]]) -> int:
        """Returns the temporary bytes; of codes, for the chunk that an update runs over."""
        if not self.has_codes:
            return Optimizer.scratch_bytes(self, shapes)
        return CODE_SCRATCH * min(CODE_CHUNK, max((numbers for _, numbers in shapes), default=0))

    def fused_on(self, *, skipping: bool) -> tuple[Device, ...]:
        return () if self.has_codes else Optimizer.fused_on(self, skipping=skipping)


@call("optimizer", "adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101)."""

    torch_class: ClassVar = "AdamW"

    weight_decay: float = arg(_DECAY, _DECAY_DOC, default=1e-2)


@call("optimizer", "nadam")
class NAdam(Optimizer):
    """Adam with Nesterov's momentum (Dozat 2016, "Incorporating Nesterov Momentum into Adam")."""

    torch_class: ClassVar = "NAdam"
    counts: ClassVar = ("step", "mu_product")
    rounding: ClassVar = 0.05

    lr: float = arg(_LR, _LR_DOC, default=2e-3)
    betas: tuple[float, float] = arg(_BETAS, _BETAS_DOC, default=(0.9, 0.999))
    eps: float = arg(Float(above=0), _EPS_DOC, default=1e-8)
    weight_decay: float = arg(_DECAY, _DECAY_DOC, default=0.0)
    momentum_decay: float = arg(Float(min=0), "how fast the momentum rises to the first of `betas`", default=4e-3)
    decoupled_weight_decay: bool = arg(Bool(), "weight decay as in `adamw`", default=False)

    @property
    def state(self) -> tuple[str, ...]:
        return _MOMENTS

    @property
    def scratch(self) -> int:
        return 1 + int(self.weight_decay > 0 and not self.decoupled_weight_decay)


@call("optimizer")
class Lion(Optimizer):
    """The sign of a momentum, with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675)."""

    counts: ClassVar = ()
    rounding: ClassVar = 2.0  # a sign may be another

    lr: float = arg(_LR, _LR_DOC, default=1e-4)
    betas: tuple[float, float] = arg(_BETAS, "the momentum's share of an update, and its decay", default=(0.9, 0.99))
    weight_decay: float = arg(_DECAY, _DECAY_DOC, default=0.0)

    @property
    def state(self) -> tuple[str, ...]:
        return ("exp_avg",)


@call("optimizer")
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011)."""

    torch_class: ClassVar = "Adagrad"
    fused: ClassVar = ("cpu",)

    lr: float = arg(_LR, _LR_DOC, default=1e-2)
    lr_decay: float = arg(Float(min=0), "the decay of the learning rate", default=0.0)
    eps: float = arg(Float(above=0), _EPS_DOC, default=1e-10)
    weight_decay: float = arg(_DECAY, _DECAY_DOC, default=0.0)

    @property
    def state(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    def scratch(self) -> int:
        return 2


@call("optimizer")
class Adafactor(Optimizer):
    """Adam without a first moment, whose second moment is row and column factors (Shazeer and Stern 2018,
    arXiv:1804.04235), as torch has it. The learning rate is the most of a rate that falls by the root of the steps, and
    multiplies the scale of the parameter.
    """

    torch_class: ClassVar = "Adafactor"
    rounding: ClassVar = 0.05
    coupling: ClassVar = "the size of an update follows from all numbers of the parameter"
    apart: ClassVar = ("lr", "scale_floor")

    lr: float = arg(_LR, _LR_DOC, default=1e-2)
    beta2_decay: float = arg(Float(max=0), "the power of the step by which the second moment is averaged", default=-0.8)
    scale_floor: float = arg(Float(min=0), "the least scale of a parameter, in the place of its mean", default=1e-3)
    d: float = arg(Float(min=1), "the root mean square at which an update is clipped", default=1.0)
    weight_decay: float = arg(_DECAY, "decoupled weight decay", default=0.0)

    @property
    def state(self) -> tuple[str, ...]:
        return ("row_var", "col_var", "variance")

    @property
    def more(self) -> dict[str, object]:
        return {"eps": (None, self.scale_floor)}

    @property
    def bytes_of_a_number(self) -> float:
        return 0.0  # of a matrix

    def state_bytes(self, shape: tuple[int, ...], numbers: int) -> int:
        return 4 * (numbers // shape[-1] + numbers // shape[-2] if len(shape) > 1 and numbers else numbers)

    def scratch_bytes(self, shapes: Sequence[tuple[tuple[int, ...], int]]) -> int:
        """Returns the bytes beside the update of one parameter: torch frees the previous parameter's later."""
        most = before = factors = squares = 0
        for shape, numbers in shapes:
            if len(shape) > 1:
                factors = self.state_bytes(shape, numbers) // 4
            else:
                squares = numbers
            most, before = max(most, before + numbers + factors + squares), numbers
        return 4 * most


@call("optimizer")
class Muon(Optimizer):
    """Momentum orthogonalised (Jordan 2024, kellerjordan.github.io/posts/muon), as torch has it, for the matrices of
    hidden layers. AdamW updates all else: embeddings, the head, vectors and kernels.
    """

    torch_class: ClassVar = "Muon"
    counts: ClassVar = ()
    coupling: ClassVar = "an update multiplies whole matrices"
    apart: ClassVar = ("lr", "adamw")
    rates: ClassVar = ("adamw_lr",)

    lr: float = arg(_LR, "the learning rate of matrices", default=1e-3)
    weight_decay: float = arg(_DECAY, "decoupled weight decay, of all parameters", default=0.1)
    momentum: float = arg(_MOMENTUM, _MOMENTUM_DOC, default=0.95)
    nesterov: bool = arg(Bool(), "Nesterov's momentum", default=True)
    ns_steps: int = arg(Int(min=1, max=99), "iterations that orthogonalise an update", default=5)
    adjust_lr_fn: str = arg(
        word("original", "match_rms_adamw"),
        "how a matrix's shape scales its rate: `match_rms_adamw` makes updates as large as AdamW's",
        default="original",
    )
    adamw: tuple[str, ...] | None = arg(
        PATTERN_LIST, "patterns of the matrices that AdamW updates", default=None, shown="embeddings and the head"
    )
    adamw_lr: float = arg(_LR, "the learning rate of AdamW's parameters", default=1e-3)
    adamw_betas: tuple[float, float] = arg(_BETAS, _BETAS_DOC, default=(0.9, 0.999))
    adamw_eps: float = arg(Float(above=0), _EPS_DOC, default=1e-8)

    @property
    def state(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    @property
    def fallback(self) -> AdamW:
        return AdamW(lr=self.adamw_lr, betas=self.adamw_betas, eps=self.adamw_eps, weight_decay=self.weight_decay)

    def scratch_bytes(self, shapes: Sequence[tuple[tuple[int, ...], int]]) -> int:
        """Returns the bytes beside the update of the largest matrix: its direction, two copies in bfloat16, and two
        products of the shorter side.
        """
        return max(
            ((8 if self.nesterov else 4) * numbers + 4 * min(shape) ** 2 for shape, numbers in shapes), default=0
        )


@call("optimizer")
class Rmsprop(Optimizer):
    """RMSprop (Tieleman and Hinton 2012)."""

    torch_class: ClassVar = "RMSprop"

    lr: float = arg(_LR, _LR_DOC, default=1e-2)
    alpha: float = arg(Float(min=0, below=1), "the decay of the mean square", default=0.99)
    eps: float = arg(Float(above=0), _EPS_DOC, default=1e-8)
    momentum: float = arg(_MOMENTUM, _MOMENTUM_DOC, default=0.0)
    centered: bool = arg(Bool(), "divides by the variance instead of the mean square", default=False)
    weight_decay: float = arg(_DECAY, _DECAY_DOC, default=0.0)

    @property
    def state(self) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if self.momentum else ()
        return ("square_avg", *momentum, *(("grad_avg",) if self.centered else ()))

    @property
    def scratch(self) -> int:
        return 1 + int(self.weight_decay > 0)


@call("optimizer", "python", open=True)
class PythonOptimizer(Optimizer, PythonCall):
    """`f(params, lr = …, …)` of yours, or a class, giving a `torch.optim.Optimizer` over all of `params`: a list of
    parameters, or groups with a `weight_decay` of 0 for the parameters of `no_decay`. If its first argument is called
    `named_parameters`, it gets pairs (name, parameter) in their place. The schedule multiplies the `lr` of each group.
    What it keeps for each parameter (tensors, numbers) is measured before a training, and is kept in checkpoints. A
    trial shows whether a rank may update a part of the parameters, or of each parameter.
    """

    rounding: ClassVar = 2.0  # a sign may be another

    lr: float = arg(_LR, _LR_DOC)


# Torch has none of the following: runtime/exchange/ has them.


@record
class Compressed(Optimizer):
    """Adam whose momentum is exchanged in fewer bits after first steps of plain Adam, with its second moment frozen."""

    rounding: ClassVar = 0.05
    apart: ClassVar = ("lr", "hierarchical", "warmup", "freeze")

    lr: float = arg(_LR, _LR_DOC, default=1e-3)
    betas: tuple[float, float] = arg(_BETAS, _BETAS_DOC, default=(0.9, 0.999))
    eps: float = arg(Float(above=0), _EPS_DOC, default=1e-8)
    weight_decay: float = arg(_DECAY, _DECAY_DOC, default=0.0)
    hierarchical: bool = arg(Bool(), HIERARCHICAL, default=True)

    @property
    def state(self) -> tuple[str, ...]:
        return _MOMENTS

    @property
    def more(self) -> dict[str, object]:
        return {"alone": self.exact_steps}

    @property
    def exact_steps(self) -> int:
        """The first steps, which are plain Adam's."""
        return int(getattr(self, "warmup", getattr(self, "freeze", 0)))


@call("optimizer", "qadam")
class QAdam(Compressed):
    """Adam whose momentum is exchanged in 8 bits after a warm-up (Bagua)."""

    warmup: int = arg(measure("steps", min=1), "steps of plain Adam first", default=100)


@call("optimizer")
class OnebitAdam(Compressed):
    """Adam whose momentum is exchanged as signs after a warm-up (Tang et al. 2021, arXiv:2102.02888)."""

    freeze: int = arg(measure("steps", min=1), "steps of plain Adam first", default=100)


@call("group")
class Group(Call):
    """The parameters that a pattern matches, with a learning rate or a weight decay of their own. A tied weight has
    several names, and each of them stands for it. A parameter of several groups belongs to the first of them.
    """

    parameters: tuple[str, ...] = arg(
        ListOf(Str(max_length=PATTERN.most), min_length=1, max_length=PATTERNS.most, single=True),
        "patterns of their names",
    )
    lr: float | None = arg(Float(min=0), "their learning rate", default=None, shown="the optimizer's")
    weight_decay: float | None = arg(Float(min=0), "their weight decay", default=None, shown="the optimizer's")
