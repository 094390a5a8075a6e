"""The calls that have no file of their own: losses, sources, exchanges, launchers and the like."""

from __future__ import annotations

from math import sqrt
from typing import Any, ClassVar, TypeAlias

from dslc.dsl.bounds import PATTERN, PATTERNS
from dslc.dsl.language.augmentations import AUGMENT, AUGMENT_DOC, NORMALIZE, NORMALIZE_DOC, Augmentation, Normalize
from dslc.dsl.language.registry import (
    AnyValue,
    Bool,
    Call,
    Float,
    Int,
    Kind,
    ListOf,
    Path,
    Quantity,
    Str,
    arg,
    call,
    calls,
    either,
    measure,
    word,
)
from dslc.dsl.record import record

_COUNT = Int(min=1)
_COLUMNS = ListOf(Str(), min_length=1, single=True)
_SIZE_DOC = "the height and width to which pictures are brought"
PATTERN_LIST = ListOf(Str(max_length=PATTERN.most), max_length=PATTERNS.most)
FUNCTION = Str(r"(.*/)?(?![^/]*\.py:)[\w.]+:[\w.]+", '"module:function"')
FUNCTION_DOC = "where it is; the folder of the job is searched first, or with `folder/module:function` that one"
_ARGUMENTS_DOC = "the arguments of the call"
_TRANSFORM_DOC = "a transform of yours for training pictures, before `normalize`"
Arguments: TypeAlias = tuple[tuple[str, object], ...]  # of a function or library, by name


@record
class PythonCall(Call):
    """A function of the user's: `python("module:function", …)`, whose further arguments are the function's."""

    function: str = arg(FUNCTION, FUNCTION_DOC)
    arguments: Arguments = arg(AnyValue(), _ARGUMENTS_DOC, default=())


# ------------------------------------------------------------------------------------------------ initial weights


@call("weights")
class Pretrained(Call):
    """The weights of a trained model, or some of them, or under other names: what it does not give keeps its initial
    value. Patterns are of whole names, and `*` is any text.
    """

    path: str = arg(
        Path("read"),
        "a `.safetensors` file, a run directory, a folder or an index of `save_pretrained`, or a file of `torch.save`",
    )
    only: tuple[str, ...] = arg(
        PATTERN_LIST, "patterns of the tensors that are taken, by their names in the file", default=(), shown="all"
    )
    rename: tuple[str, ...] = arg(
        ListOf(
            Str(r"\S+ -> \S+", 'a rename such as "model.* -> *"', max_length=PATTERN.most), max_length=PATTERNS.most
        ),
        'other names for tensors of the file: `"model.* -> *"`, `"*.gamma -> *.weight"`; the first that matches counts',
        default=(),
        shown="none",
    )
    allow_missing: tuple[str, ...] = arg(
        PATTERN_LIST,
        "patterns of the network's tensors that may keep their initial values: the file lacks them, or has them in "
        "another shape",
        default=(),
        shown="none",
    )
    allow_unused: tuple[str, ...] = arg(
        PATTERN_LIST, "patterns of tensors in the file for which the network has no use", default=(), shown="none"
    )
    quantize: str | None = arg(
        word("nf4", "int8"), "frozen weights of dense layers in 4 or 8 bits (QLoRA)", default=None, shown="none"
    )


# ------------------------------------------------------------------------------------------------------ adapters


@call("adapter")
class Lora(Call):
    """Trains two small matrices beside the weight of each dense layer, or of each expert of a stack, that `targets`
    names, as the library `peft` does (Hu et al. 2021, arXiv:2106.09685): it adds alpha / rank times their product to
    the weight. All else is frozen.
    """

    rank: int = arg(_COUNT, "the width between the two matrices; `r` of peft")
    targets: tuple[str, ...] = arg(
        ListOf(Str(max_length=PATTERN.most), min_length=1, max_length=PATTERNS.most, single=True),
        'the dense layers, by the end of their names, `"q_proj"`, or by pattern, `"*.layers.0.*_proj"`; stacks of '
        'experts with their module, `"experts.gate_up_proj"`',
    )
    alpha: float = arg(Float(above=0), "the change of a weight is multiplied by alpha / rank", default=8.0)
    dropout: float = arg(Float(min=0, below=1), "the share of a layer's input that the adapter drops", default=0.0)
    save: tuple[str, ...] = arg(
        ListOf(Str(max_length=PATTERN.most), max_length=PATTERNS.most, single=True),
        "modules that train whole, named as in `targets`, such as a new head; `modules_to_save` of peft",
        default=(),
        shown="none",
    )
    rslora: bool = arg(Bool(), "divides by the root of the rank (Kalajdzievski 2023, arXiv:2312.03732)", default=False)

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


# ------------------------------------------------------------------------------------------------------- losses


@call("loss")
class CrossEntropy(Call):
    """Minus the logarithm of the probability of the right class (of each token, for sequences)."""

    ignore: int = arg(Int(), "the target that does not count", default=-100)
    label_smoothing: float = arg(Float(min=0, below=1), "the share of the target spread over all classes", default=0.0)
    chunks: int | str = arg(either(_COUNT, word("auto")), "parts in which the last layer and the loss run", default=1)


@call("loss", "mse")
class MSE(Call):
    """The squared difference, averaged over a sample's numbers."""


@call("loss", "l1")
class L1(Call):
    """The absolute difference, averaged over a sample's numbers."""


@call("loss", "bce")
class BCE(Call):
    """Binary cross entropy of logits, averaged over a sample's numbers."""


@call("loss")
class Contrastive(Call):
    """The contrastive loss of embeddings, which are brought to length 1 (NT-Xent, Chen et al. 2020, arXiv:2002.05709;
    with classes Khosla et al. 2020, arXiv:2004.11362): the mean over the positives p of an embedding z of
    -log(exp(z.p/t) / sum over all others a of exp(z.a/t)). Of an output (samples, views, width) or a pair, positives
    are the other views of the sample. Of one embedding a sample, they are the embeddings of its class. Without any the
    loss is 0.
    """

    over: str = arg(word("node", "all"), "the samples that are compared: those of a node, or all", default="node")
    temperature: float = arg(Float(above=0), "divides the similarities", default=0.07)


@call("loss", "python", open=True)
class PythonLoss(PythonCall):
    """`f(output, target)` of yours, giving one loss for each sample or token, in the order of the targets; or a pair
    (sum, count) of what its batch holds; or either with a dict of further losses, which are logged by name. With `over`
    it is given the outputs and targets of all these samples, and gives one loss for each, or their mean.
    """

    ignore: int = arg(Int(), "the target that does not count, where targets are whole numbers", default=-100)
    over: str | None = arg(word("all", "node"), "the samples that it compares, of all or of a node", default=None)


@call("loss", "own")
class NetworkLoss(Call):
    """The loss that the network returns itself, as `loss` in its output, alone, or in a tuple as the one number, as in
    (logits, loss): one for each sample, a pair (sum, count), or one number, which is taken to be a mean. The network is
    given whole samples.
    """

    mean_of: str | None = arg(
        Str(),
        "the part of the batch that the mean is of, as in `labels`, or `1` of a tuple: over its entries that are not "
        "`ignore`",
        default=None,
        shown="samples",
    )
    ignore: int = arg(Int(), "the entry of `mean_of` that does not count", default=-100)
    shift: int = arg(
        Int(min=0), "entries at the beginning of each sequence of `mean_of` that have no prediction", default=0
    )


# ------------------------------------------------------------------------------------------------------ sources


@call("transform", "python", open=True)
class PythonTransform(PythonCall):
    """A transform of yours, such as a `v2.Compose`: an object that is called with a picture (of Pillow) and gives a
    picture or a tensor; or a function `f(picture)`; or a class or a function without a picture that returns one.
    """


_EXCLUSIVE = (("augment", "transform"),)  # of sources of pictures


def _optional(kind: Kind, doc: str) -> Any:
    return arg(kind, doc, default=None, shown="none")


@call("source")
class Digits(Call):
    """1,797 handwritten digits, 8 x 8, that ship with the package (UCI, Alpaydin and Kaynak 1998)."""


@call("source")
class Stdlib(Call):
    """The text of Python's own standard library, in bytes."""

    context: int | None = arg(_COUNT, "the length of a sequence", default=None, shown="the model's")


@call("source")
class Text(Call):
    """A file of text, in bytes."""

    file: str = arg(Path("read"), "the file")
    context: int | None = arg(_COUNT, "the length of a sequence", default=None, shown="the model's")


@call("source")
class Tokens(Call):
    """Memory-mapped files of tokens, made by `dslc tokens`."""

    files: str = arg(Path("read", glob=True), "the files, in the order of their names")
    context: int | None = arg(_COUNT, "the length of a sequence", default=None, shown="the model's")


@call("source")
class Images(Call):
    """A folder with a subfolder of images for each class, or `train` and `val` with such subfolders."""

    exclusive: ClassVar = _EXCLUSIVE

    folder: str = arg(Path("read"), "the folder")
    size: int = arg(_COUNT, _SIZE_DOC, default=224)
    resize: int | None = arg(
        _COUNT,
        "the shorter side to which a picture is scaled before `size` is cut out of its middle",
        default=None,
        shown="`size`",
    )
    augment: tuple[Augmentation, ...] | None = _optional(AUGMENT, AUGMENT_DOC)
    transform: Call | None = _optional(calls("transform"), _TRANSFORM_DOC)
    normalize: str | Normalize | None = _optional(NORMALIZE, NORMALIZE_DOC)


@call("source", "mnist")
class MNIST(Call):
    """The MNIST files as LeCun published them; their test set is the validation split."""

    exclusive: ClassVar = _EXCLUSIVE

    dir: str = arg(Path("read"), "the folder of the four files")
    augment: tuple[Augmentation, ...] | None = _optional(AUGMENT, AUGMENT_DOC)
    transform: Call | None = _optional(calls("transform"), _TRANSFORM_DOC)
    normalize: str | Normalize | None = _optional(NORMALIZE, NORMALIZE_DOC)


@call("source", "cifar10")
class CIFAR10(Call):
    """The CIFAR-10 files as Krizhevsky published them; their test set is the validation split."""

    exclusive: ClassVar = _EXCLUSIVE

    dir: str = arg(Path("read"), "the folder of the batches")
    augment: tuple[Augmentation, ...] | None = _optional(AUGMENT, AUGMENT_DOC)
    transform: Call | None = _optional(calls("transform"), _TRANSFORM_DOC)
    normalize: str | Normalize | None = _optional(NORMALIZE, NORMALIZE_DOC)


@call("source")
class Arrays(Call):
    """Two arrays of equal length in an `.npz` file, memory-mapped unless it is compressed."""

    file: str = arg(Path("read"), "the file")
    input: str = arg(Str(), "the name of the inputs", default="x")
    target: str = arg(Str(), "the name of the targets", default="y")


@call("source")
class Parquet(Call):
    """Columns of Parquet files: numbers, lists of numbers of one shape, or pictures."""

    exclusive: ClassVar = _EXCLUSIVE

    files: str = arg(Path("read", glob=True), "the files, in the order of their names")
    input: tuple[str, ...] = arg(_COLUMNS, "the column of the inputs, or several of one number each", default=("x",))
    target: tuple[str, ...] = arg(_COLUMNS, "the column of the targets, or several of one number each", default=("y",))
    size: int | None = arg(_COUNT, _SIZE_DOC, default=None, shown="their own")
    augment: tuple[Augmentation, ...] | None = _optional(AUGMENT, AUGMENT_DOC)
    transform: Call | None = _optional(calls("transform"), _TRANSFORM_DOC)
    normalize: str | Normalize | None = _optional(NORMALIZE, NORMALIZE_DOC)


@call("source", open=True)
class Datasets(Call):
    """A data set of the Hugging Face `datasets` library, mapped into memory."""

    exclusive: ClassVar = _EXCLUSIVE

    path: str = arg(Path("read", name=True), "its name, or with `./` a folder of files or of `save_to_disk`")
    data_files: tuple[str, ...] | None = arg(
        ListOf(Path("read", glob=True, name=True), single=True), "its files; with `./` local ones", default=None
    )
    data_dir: str | None = arg(Path("read", name=True), "its folder; with `./` a local one", default=None)
    input: tuple[str, ...] | None = arg(
        _COLUMNS, "the column of the inputs, or several of one number each", default=None, shown="the first of two"
    )
    target: tuple[str, ...] | None = arg(
        _COLUMNS, "the column of the targets, or several of one number each", default=None, shown="the second of two"
    )
    size: int | None = arg(_COUNT, _SIZE_DOC, default=None, shown="their own")
    augment: tuple[Augmentation, ...] | None = _optional(AUGMENT, AUGMENT_DOC)
    transform: Call | None = _optional(calls("transform"), _TRANSFORM_DOC)
    normalize: str | Normalize | None = _optional(NORMALIZE, NORMALIZE_DOC)
    arguments: Arguments = arg(AnyValue(), "further arguments of `load_dataset`", default=())


@call("source")
class Chat(Call):
    """Conversations as tokens, by the chat template of a tokenizer. The loss counts the chosen turns alone."""

    conversations: str | Call = arg(
        either(Path("read", glob=True), calls("source")),
        "files of JSON Lines with `messages` on each line, in the order of their names, or `datasets(…)`",
    )
    tokenizer: str = arg(Path("read"), "the folder of the tokenizer, as `save_pretrained` writes it")
    template: str = arg(
        either(word("default"), Path("read")), "the tokenizer's chat template, or a file with one", default="default"
    )
    train_on: str = arg(word("assistant", "all"), "the turns whose tokens count in the loss", default="assistant")
    pack: str | None = _optional(word("documents"), "puts several whole conversations into a sequence, kept apart")
    max_length: int | None = arg(Int(min=2), "the tokens of a sequence", default=None, shown="the model's")

    @property
    def context(self) -> int | None:
        """The length of a sequence."""
        return self.max_length


@call("source")
class Synthetic(Call):
    """Random samples, a pure function of the seed: numbers with a class each, or with real `targets`, or tokens."""

    exclusive: ClassVar = (("shape", "vocab"), ("classes", "targets"), ("classes", "vocab"), ("targets", "vocab"))
    one_of: ClassVar = (("shape", "vocab"),)

    samples: int = arg(_COUNT, "how many", default=1024)
    shape: tuple[int, ...] | None = arg(
        ListOf(_COUNT, min_length=1), "the shape of a sample of real numbers", default=None
    )
    classes: int | None = arg(Int(min=2), "targets are classes; they follow from the sample", default=None)
    targets: tuple[int, ...] | None = arg(
        ListOf(_COUNT, min_length=1), "the shape of a target of real numbers", default=None
    )
    vocab: int | None = arg(Int(min=2), "samples are tokens, targets the tokens that follow", default=None)
    context: int | None = arg(_COUNT, "the length of a sequence of tokens", default=None, shown="the model's")


@call("source", "python", open=True)
class PythonSource(PythonCall):
    """A data set of yours with `len` and indexing, a stream, or several of them: a pair (train, validation), or a
    triple with a data set for the test. In a pair, `validation` may be a dict of data sets by name. A stream is an
    `IterableDataset`, or an object with a number `shards` and a method `shard(n)`, which gives something to iterate
    over. The random numbers that a sample draws from `random`, `numpy.random` and `torch` follow from the seed, the
    epoch and the sample.
    """


@call("source")
class Mixture(Call):
    """Samples of several sources, drawn by weights; each source has an order of its own, and goes on in the next epoch
    where it stopped. The samples are of one kind: alike in their shapes, types, vocabulary and classes.
    """

    exclusive: ClassVar = (("stopping_strategy", "samples"),)

    sources: tuple[Call, ...] = arg(
        ListOf(calls("source"), min_length=2, max_length=100), 'the sources: `[text("a.txt"), text("b.txt")]`'
    )
    weights: tuple[float, ...] | None = arg(
        ListOf(Float(above=0), min_length=1, max_length=100),
        "the share of each in an epoch; they need not sum to 1",
        default=None,
        shown="by their samples",
    )
    stopping_strategy: str | None = arg(
        word("first_exhausted", "all_exhausted"),
        "an epoch ends when one source has given all of its samples, or all have, some of them again",
        default=None,  # `write` writes what is not None, and `samples` may stand in its place
        shown="first_exhausted",
    )
    samples: int | None = arg(_COUNT, "how many an epoch has", default=None, shown="by `stopping_strategy`")


def parts_of(source: Call) -> tuple[Call, ...]:
    """Returns the sources of a mixture; any other source alone."""
    return source.sources if isinstance(source, Mixture) else (source,)


@call("step", "python", open=True)
class PythonStep(PythonCall):
    """`f(training, batch)` of yours, which does a step by itself: `training.update(losses, "generator")` updates that
    part of `training.model` by the mean of the losses over all ranks. It returns the losses to be logged.
    """


@call("collate", "python", open=True)
class PythonCollate(PythonCall):
    """`f(samples)` of yours, which makes a list of samples a batch, as the `collate_fn` of a `DataLoader` does: a pair
    (input, target), each a tensor or a structure of tensors. A class is made an object first, with the arguments.
    """


# -------------------------------------------------------------------------------------------- precision, memory

_LEVEL = word("O1", "O2")
_LEVEL_DOC = "O1: autocast over fp32 parameters; O2: a low-precision copy with an fp32 master"


@call("clip", "norm")
class ClipNorm(Call):
    """Scales all gradients down where their norm over every axis is larger, as a number alone does."""

    limit: float = arg(Float(above=0), "the largest norm")


@call("clip", "value")
class ClipValue(Call):
    """Cuts off each number of a gradient above the limit, and below its negative."""

    limit: float = arg(Float(above=0), "the largest absolute value")


@call("ema")
class EMA(Call):
    """After every `every`, average = decay * average + (1 - decay) * weights; the first time it is the weights. With
    `power` the decay after step s, from 1, is at most `1 - (1 + (s - 1 - after) / inv_gamma) ** -power`. It is 0 up to
    step `1 + after`: the warm-up of diffusers and `ema_pytorch` (there `beta`, `update_after_step`, `update_every`,
    `inv_gamma`, `power` = 2/3, `min_value`; https://github.com/lucidrains/ema-pytorch).
    """

    decay: float = arg(Float(above=0, below=1), "the share that stays", default=0.999)
    every: Quantity = arg(
        measure("steps", "epochs", above=0), "how often", default=Quantity(1, "steps"), shown="1 step"
    )
    warmup: bool = arg(Bool(), "the n-th decay is at most (1 + n) / (10 + n), as TensorFlow's", default=False)
    after: Quantity = arg(
        measure("steps", "epochs", min=0),
        "up to the step after this the average is the weights",
        default=Quantity(0, "steps"),
        shown="0 steps",
    )
    power: float | None = arg(Float(above=0), "of the warm-up of `ema_pytorch`", default=None, shown="none")
    inv_gamma: float = arg(Float(above=0), "of the warm-up with `power`: how many steps it takes", default=1.0)
    min_decay: float = arg(Float(min=0, below=1), "the least decay with `power`", default=0.0)


@call("precision")
class Fp32(Call):
    """Everything in 32 bits."""


@call("precision")
class Bf16(Call):
    """Matrix products in bfloat16."""

    level: str = arg(_LEVEL, _LEVEL_DOC, default="O1")


@call("precision")
class Fp16(Call):
    """Matrix products in half precision, with loss scaling."""

    level: str = arg(_LEVEL, _LEVEL_DOC, default="O1")


@call("precision")
class Fp8(Call):
    """Matrix products of dense layers in 8 bits, scaled by the largest number of each tensor or row, by torchao; all
    else as in bf16. Parameters stay in 32 bits. A layer whose dims are not multiples of 16 stays in bf16.
    """

    recipe: str = arg(
        word("tensorwise", "rowwise"), "one scale for a tensor, or one for each of its rows", default="tensorwise"
    )
    skip: tuple[str, ...] = arg(
        ListOf(Str(max_length=PATTERN.most), max_length=PATTERNS.most, single=True),
        'dense layers that stay in bf16, or modules with such: by the end of their names, `"head"`, or by pattern, '
        '`"*.layers.0.*_proj"`',
        default=(),
        shown="none",
    )
    emulate: bool = arg(Bool(), "the same numbers by products in 32 bits, on any device; slower", default=False)
    all_gather: bool = arg(
        Bool(), "`zero = 3` gathers the weights of these layers in 8 bits, with the same numbers", default=False
    )


@call("recompute", "every")
class EveryNthBlock(Call):
    """Every n-th block is recomputed in the backward pass."""

    n: int = arg(_COUNT, "one block in how many")


# -------------------------------------------------------------------------------------------------------- hooks


@call("hook", "python", open=True)
class PythonHook(PythonCall):
    """An object of yours, or the result of a class or function of yours. It has any of the methods `start`,
    `before_step`, `after_backward`, `after_step`, `evaluated`, `end` and `failed`. Each is called with a read-only view
    of the training: `step`, `steps`, `rank`, `world_size`, `model`, `optimizer`, `lr`, `loss`, `metrics`, `folder`,
    `error`. What `state_dict()` returns is kept in checkpoints, and given to `load_state_dict(state)` before `start`.
    """

    ranks: str = arg(word("first", "all"), "on which ranks it is called", default="first")


# --------------------------------------------------------------------------------------------- devices, launching


@call("gpus")
class Free(Call):
    """GPUs that no process is using."""

    count: int = arg(_COUNT, "how many")


@call("launch")
class Local(Call):
    """Processes on this machine."""


@call("launch", "ssh")
class SSH(Call):
    """Processes on hosts that the system's `ssh` reaches from here, one node each."""

    hosts: tuple[str, ...] = arg(ListOf(Str()), "the hosts, as `ssh` knows them; the first has rank 0")
    options: tuple[str, ...] = arg(ListOf(Str()), "further options of `ssh`, before the host", default=())


@call("launch")
class Slurm(Call):
    """Processes that SLURM starts."""

    partition: str | None = arg(Str(), "the partition", default=None)
    time: float | None = arg(measure("time", above=0), "the time limit", default=None)
    account: str | None = arg(Str(), "the account", default=None)
    options: tuple[str, ...] = arg(ListOf(Str()), "further lines of the script, without `#SBATCH`", default=())


@call("launch", "mpi")
class MPI(Call):
    """Processes that `mpirun` starts."""


@call("launch")
class Torchrun(Call):
    """Processes that `torchrun` starts."""


@call("launch")
class Kubernetes(Call):
    """Pods of an indexed Job, one for each node, which `dslc submit` hands to Kubernetes."""

    image: str = arg(Str(), "the container image, in which dslc is installed, and the job's data and modules are")
    namespace: str | None = arg(Str(), "the namespace", default=None)
    volumes: tuple[str, ...] = arg(
        ListOf(Str(r"[a-z0-9.-]+:/.*", '"claim:/where"'), single=True),
        "persistent volume claims, and where they are mounted; the run directory is in the first",
        default=(),
        shown="none",
    )
    options: tuple[str, ...] = arg(
        ListOf(Str(r"jobset|[A-Za-z][\w.]*=.*", '"jobset" or "spec.path=value"')),
        "fields of the Job to set, `spec.suspend=true`; `jobset` makes it a JobSet",
        default=(),
    )


PictureSource: TypeAlias = Images | MNIST | CIFAR10 | Parquet | Datasets  # sources that may hold pictures
