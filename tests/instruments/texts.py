"""Job texts for the tests of the language: four whole jobs, and strategies that make and spoil others."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

DIGITS = """\
# Handwritten digits on two processes: the classic first distributed job, on data that ships with it.
param rate = 0.05

model {
  network = [
    conv2d(16, kernel = 5, padding = 2), batch_norm(), relu(), max_pool2d(2),
    conv2d(32, kernel = 5, padding = 2), batch_norm(), relu(), max_pool2d(2),
    flatten(), linear(10),
  ]
  loss = cross_entropy()
}

data {
  source     = digits()
  batch      = 64
  validation = 20%
}

devices {
  cpus = 2
}

parallelism {
  data = 2
}

train {
  epochs    = 5
  optimizer = sgd(lr = rate, momentum = 0.9)
}

evaluate {
  every   = 1 epoch
  metrics = [loss, accuracy]
}
"""

CLUSTER = """\
# Two nodes of eight H100: checked, planned and drawn anywhere, run where the devices are.
model {
  network = gpt(layers = 32, width = 4096, heads = 32, context = 4096, vocab = 128_256)
  loss    = cross_entropy()
}

data {
  source  = tokens("/data/fineweb/*.bin")
  batch   = 512
  workers = 4
}

devices {
  nodes = 2
  gpus  = 8
  kind  = h100
}

parallelism {
  data         = 4
  zero         = 2
  pipeline     = 2
  tensor       = 2
  schedule     = interleaved_1f1b
  microbatches = 64
}

memory {
  recompute = selective
  limit     = 76GiB
}

train {
  steps       = 5_000
  precision   = bf16
  optimizer   = adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1)
  lr_schedule = warmup_cosine(warmup = 500 steps)
  clip        = 1.0
  compile     = true
}

checkpoint {
  every = 500 steps
  keep  = 3
}

launch {
  with     = slurm(partition = "gpu", time = 24h)
  restarts = 3
}

expect {
  devices == 16
  peak_memory < 76GiB
  bubble < 2%
}
"""

GPT = """\
# A byte-level GPT on the text of Python's own standard library, parameters sharded over two processes.
model {
  network = gpt(layers = 4, width = 128, heads = 4, context = 128, vocab = 256)
  loss    = cross_entropy()
}

data {
  source     = stdlib()
  batch      = 16
  validation = 1%
}

devices {
  cpus = 2
}

parallelism {
  data = 2
  zero = 3
}

memory {
  recompute = full
}

train {
  steps       = 100
  optimizer   = adamw(lr = 1e-3, weight_decay = 0.1)
  lr_schedule = warmup_cosine(warmup = 10 steps)
  clip        = 1.0
  precision   = bf16
}

evaluate {
  every   = 50 steps
  metrics = [loss, perplexity]
}

checkpoint {
  every = 50 steps
  keep  = 2
}
"""

PIPELINE = """\
# The same GPT cut into pipeline stages, two replicas of each.
import "gpt_cpu.plt"

devices {
  cpus = 4
}

parallelism {
  data         = 2
  pipeline     = 2
  zero         = 0
  schedule     = 1f1b
  microbatches = 4
  stages       = balanced
}
"""

JOBS = (DIGITS, CLUSTER, GPT, PIPELINE)

# ----------------------------------------------------------------------------------------------- texts made at random

NAMES = st.sampled_from(["a", "lr", "width", "steps", "x1", "_b", "imported", "nonesuch", "language"])
COMMENT = st.sampled_from(["# c", "#", "# a = { (", "#!  two  ", '# "'])
ATOMS = st.one_of(
    st.sampled_from(["0", "64", "20_000", "3e-4", "1.5", "76GiB", "20%", "20 %", "1 epoch", "1f1b", "2 min"]),
    st.sampled_from(["true", "false", "none", '""', '"a # b"', r'"\"\n\\"', '"é"']),
    NAMES,
)


@st.composite
def space(draw: DrawFn, inside: bool) -> str:
    """Draws the space between two words: spaces, and inside brackets also line ends and comments."""
    kinds = ["", " ", "  ", "\t"] + (["\n", "\n\n", "\n \n\n  ", "  {c}\n", "\n{c}\n\n{c}\n"] if inside else [])
    chosen = draw(st.sampled_from(kinds))
    while "{c}" in chosen:
        chosen = chosen.replace("{c}", draw(COMMENT), 1)
    return chosen


@st.composite
def sequence(draw: DrawFn, items: list[str]) -> str:
    """Items inside brackets, with commas, spaces, comments and perhaps a trailing comma."""
    text = draw(space(True))
    for number, item in enumerate(items):
        comma = "," if number < len(items) - 1 or draw(st.booleans()) else ""
        text += item + draw(space(True)) + comma + draw(space(True))
    return text


@st.composite
def expressions(draw: DrawFn, depth: int = 3, inside: bool = False) -> str:
    kind = (
        draw(st.sampled_from(["atom", "atom", "list", "call", "binary", "unary", "group", "range"]))
        if depth
        else "atom"
    )
    deeper = depth - 1
    if kind == "list":
        items = draw(st.lists(expressions(deeper, True), max_size=4))
        return f"[{draw(sequence(items))}]"
    if kind == "call":
        values = draw(st.lists(expressions(deeper, True), max_size=3))
        names = [draw(st.one_of(st.just(""), NAMES)) for _ in values]
        gap = draw(space(True))
        arguments = [f"{name}{gap}={gap}{value}" if name else value for name, value in zip(names, values, strict=True)]
        return f"{draw(NAMES)}({draw(sequence(arguments))})"
    if kind == "binary":
        operator = draw(st.sampled_from(["+", "-", "*", "/", "//", "**"]))
        left, right = draw(expressions(deeper, inside)), draw(expressions(deeper, inside))
        return f"{left}{draw(space(inside))}{operator} {draw(space(inside))}{right}"
    if kind == "unary":
        return f"{draw(st.sampled_from('+-'))}{draw(expressions(deeper, inside))}"
    if kind == "group":
        return f"({draw(space(True))}{draw(expressions(deeper, True))}{draw(space(True))})"
    if kind == "range":
        return f"({draw(ATOMS)} .. {draw(ATOMS)})"
    return draw(ATOMS)


@st.composite
def blocks(draw: DrawFn) -> str:
    text = f"{draw(NAMES)}{draw(st.sampled_from([' ', '', chr(10)]))}{{{draw(space(True))}"
    entries = draw(st.lists(expressions(), max_size=4))
    for value in entries:
        sign = draw(st.sampled_from(["=", "=", "=", " < ", " == ", " >="]))
        name = ".".join(draw(st.lists(NAMES, min_size=1, max_size=3 if sign == "=" else 1)))
        end = draw(st.sampled_from(["\n", ", ", ",\n", "  # c\n", ", # c\n\n"]))
        text += f"{name} {sign} {value}{end}{draw(space(True)) if end.endswith(chr(10)) else ''}"
    return text + "}"


@st.composite
def job_texts(draw: DrawFn) -> str:
    """Draws texts of the language, in any layout, without meaning."""
    text = draw(space(True))
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["block", "block", "param", "given", "import", "setting"]))
        if kind == "block":
            text += draw(blocks())
        elif kind == "import":
            text += 'import "a b.plt"'
        elif kind == "given":
            text += f"param {draw(NAMES)}"
        else:
            left = f"param {draw(NAMES)}" if kind == "param" else draw(NAMES)
            text += f"{left}{draw(space(False))}= {draw(expressions())}"
        text += draw(st.sampled_from(["\n", "\n\n\n", " # c\n"])) + draw(space(True))
    return text


def mutated(text: str) -> SearchStrategy[str]:
    """Draws the text with some characters removed, doubled or replaced."""
    pieces = st.sampled_from(
        ["", "{", "}", "(", ")", "[", "]", ",", "=", '"', "'", "\n", " ", "#", ".", ":", "1", "a", "-"]
    )
    edits = st.lists(st.tuples(st.integers(0, len(text)), st.integers(0, 3), pieces), min_size=1, max_size=3)

    def apply(chosen: list[tuple[int, int, str]]) -> str:
        spoiled = text
        for at, removed, piece in chosen:
            spoiled = spoiled[:at] + piece + spoiled[at + removed :]
        return spoiled

    return edits.map(apply)
