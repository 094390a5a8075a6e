"""Jobs run for a few steps in real processes, and what their ranks held, beside what the account says.

`python tests/helpers/measured_memory.py` writes the tables of docs/memory.md anew.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.number_text import byte_text, percent_text
from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import prepare
from dslc.runtime.data.batches import batches
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.measure.report import tracker_of
from dslc.runtime.step import pipeline_step
from dslc.runtime.step.assemble import assemble
from dslc.runtime.step.stepper import stepper
from helpers.gang import gang
from helpers.paths import HELPERS, ROOT

STEPS = 3
Sums = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """Memory that the ranks of a job held: the highest of them, and the account's figures. Bytes."""

    predicted: MemoryNode
    rest: int
    peak: int
    at_rest: Sums  # by kind, of the rank with the highest peak
    at_peak: Sums
    when: str
    errors: tuple[float, ...] = ()  # the same of each rank

    @property
    def error(self) -> float:
        """Returns the error of the account's peak, as a share of the measured one. Ranks measure tensors alone."""
        return self.predicted.tensors / self.peak - 1

    @property
    def error_at_rest(self) -> float:
        others = self.predicted.peak - self.predicted.tensors
        return (self.predicted.rest - others) / self.rest - 1


NETWORKS = {
    "gpt": ("gpt(layers = 4, width = 128, heads = 4, context = 64, vocab = 256)", "stdlib()"),
    "tied gpt": ("gpt(layers = 2, width = 64, heads = 2, context = 64, vocab = 4000, tie = true)", "stdlib()"),
    "wide gpt": ("gpt(layers = 2, width = 64, heads = 2, context = 64, vocab = 4000)", "stdlib()"),
    "convnet": ("convnet(channels = [32, 64])", "digits()"),
    "mlp": ("mlp(widths = [1024, 1024])", "digits()"),
    "resnet": ("resnet(depth = 18, width = 16, stem = small)", "digits()"),
    "llama": (
        "llama(layers = 4, width = 128, heads = 4, kv_heads = 2, hidden = 344, context = 64, vocab = 256)",
        "stdlib()",
    ),
    "experts": (
        "llama(layers = 4, width = 128, heads = 4, context = 64, vocab = 256, hidden = 344, dense_layers = 1, "
        "experts = moe(experts = 8, top_k = 2, hidden = 96, shared = 1, score = sigmoid, balance = bias(0)))",
        "stdlib()",
    ),
    "balanced experts": (
        "llama(layers = 2, width = 128, heads = 4, context = 64, vocab = 256, "
        "experts = moe(experts = 64, top_k = 2, hidden = 32, score = sigmoid, balance = loss()))",
        "stdlib()",
    ),
    "softmax experts": (
        "llama(layers = 2, width = 128, heads = 4, context = 64, vocab = 256, "
        "experts = moe(experts = 64, top_k = 2, hidden = 32))",
        "stdlib()",
    ),
    **{
        f"{name} experts": (
            f"llama(layers = 2, width = 128, heads = 4, context = 64, vocab = 256, init_std = {std}, "
            f"experts = moe(experts = 8, top_k = {top_k}, hidden = 192))",
            "stdlib()",
        )
        for name, std, top_k in (("even", "0.02", 8), ("idle", "0.0", 2))  # idle: all tokens choose the first two
    },
    "tiny": ("vit(layers = 3, width = 16, heads = 2, patch = 4, dropout = 0.1)", "digits()"),
    "own": (f'python("{HELPERS}/frozen_networks:plain")', "digits()"),
    "own frozen": (f'python("{HELPERS}/frozen_networks:frozen")', "digits()"),
    **{
        name: (f'python("{HELPERS}/convolutions:{name}")', "digits()")
        for name in ("strided", "grouped", "unstrided", "activated", "summed")
    },
    "residuals": (
        "[conv2d(16, padding = 1), batch_norm(), relu(), repeat(4, [residual([conv2d(16, padding = 1), batch_norm(), "
        "relu()])]), adaptive_avg_pool2d(1), flatten(), linear(10)]",
        "digits()",
    ),
    "vit": ("vit(layers = 4, width = 128, heads = 4, patch = 2)", "digits()"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, by its differences from the others."""

    network: str = "gpt"
    ranks: int = 1
    batch: int = 16
    zero: int = 0
    replicas: int = 1
    gradients: str = "allreduce()"
    microbatches: int = 1
    recompute: str = "none"
    precision: str = "fp32"
    optimizer: str = "adamw()"
    clip: str = "none"
    ema: str = "none"
    context: int = 1
    tensor: int = 1
    sequence: str = "none"
    expert: int = 1
    skew: str = "none"
    pipeline: int = 1
    schedule: str = "1f1b"
    freeze: str = "[]"
    adapter: str = ""
    chunks: str = "1"

    def __str__(self) -> str:
        other = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        other.pop("network", None)
        return ", ".join([self.network, *(f"{name} {value}" for name, value in other.items())])

    @property
    def text(self) -> str:
        network, source = NETWORKS[self.network]
        return f"""
model {{
  network = {network}
  loss    = cross_entropy(chunks = {self.chunks})
  freeze  = {self.freeze}
  {self.adapter and f"adapter = {self.adapter}"}
}}
data {{
  source = {source}
  batch  = {self.batch}
}}
devices {{
  cpus = {self.ranks}
}}
parallelism {{
  pipeline     = {self.pipeline}
  schedule     = {self.schedule}
  context      = {self.context}
  tensor       = {self.tensor}
  sequence     = {self.sequence}
  zero         = {self.zero}
  expert       = {self.expert}
  expert_skew  = {self.skew}
  replicas     = {self.replicas}
  microbatches = {self.microbatches}
  gradients    = {self.gradients}
}}
memory {{
  recompute = {self.recompute}
}}
train {{
  steps     = {STEPS}
  optimizer = {self.optimizer}
  precision = {self.precision}
  clip      = {self.clip}
  ema       = {self.ema}
}}
"""


CASES = (
    Case(),
    Case(ranks=2),
    Case(precision="bf16"),
    Case(microbatches=4),
    Case(recompute="full", ranks=2, zero=3),
    Case(recompute="selective"),
    Case(recompute="every(2)", precision="fp16(level = O2)"),
    Case(ranks=2, microbatches=8),
    Case(ranks=2, zero=2, microbatches=4),
    Case(ranks=4, zero=3, replicas=2),
    Case(network="tied gpt", ranks=4, zero=1, clip="1.0"),
    Case(network="mlp", ranks=2, zero=1),
    Case(network="mlp", ranks=2, gradients="bf16()"),
    Case(network="mlp", ranks=2, gradients="bytegrad()"),
    Case(network="mlp", ranks=2, gradients="powersgd(rank = 4)"),
    Case(network="mlp", ranks=2, zero=2, gradients="fp16()"),
    Case(network="mlp", ranks=4, zero=3, replicas=2, microbatches=2, gradients="fp16()"),
    Case(network="mlp", ranks=2, zero=2, optimizer="sgd(lr = 0.1)", ema="0.99"),
    Case(network="mlp", ranks=2, zero=3, microbatches=4),
    Case(network="mlp", ranks=4, zero=3, precision="bf16(level = O2)"),
    Case(network="convnet", batch=64, ranks=2),
    Case(network="convnet", batch=64, ranks=2, zero=3),
    Case(network="resnet", batch=32, optimizer="sgd(lr = 0.1, momentum = 0.9)"),
    Case(network="resnet", batch=32, ranks=2, zero=2),
    Case(network="experts", recompute="selective", precision="bf16"),
    Case(network="vit", batch=32, ranks=4, zero=3, precision="bf16"),
    Case(ranks=2, tensor=2, sequence="true"),
    Case(ranks=2, tensor=2, sequence="true", precision="bf16", recompute="full"),
    Case(network="tied gpt", ranks=4, tensor=2, zero=3),
    Case(ranks=2, context=2),
    Case(network="tied gpt", ranks=4, context=2, zero=3, recompute="full", precision="bf16"),
    Case(network="llama", ranks=2, tensor=2, sequence="true"),
    Case(ranks=2, pipeline=2, microbatches=4),
    Case(ranks=4, pipeline=2, tensor=2, sequence="true", microbatches=4, schedule="zbv"),
    Case(ranks=2, pipeline=2, microbatches=4, schedule="zero_bubble", recompute="full"),
    Case(network="mlp", ranks=2, optimizer="qadam(warmup = 1)"),
    Case(network="mlp", ranks=2, optimizer="onebit_adam(freeze = 1)"),
)
# More plans of the tensor and the pipeline axis, unknown when the rules of the account were written.
MORE = (
    Case(network="experts"),
    Case(network="balanced experts"),
    Case(network="balanced experts", ranks=2, zero=3, microbatches=2, precision="bf16"),
    Case(network="experts", ranks=2, zero=3, recompute="full"),
    Case(network="experts", ranks=2, zero=2, microbatches=2),
    Case(network="experts", ranks=2, precision="bf16(level = O2)"),
    Case(network="experts", ranks=2, pipeline=2, microbatches=4, schedule="zero_bubble"),
    Case(network="experts", ranks=2, context=2, precision="bf16"),
    Case(network="experts", ranks=2, tensor=2, sequence="true"),
    Case(network="experts", ranks=2, tensor=2, precision="bf16"),
    Case(network="experts", ranks=4, tensor=2, sequence="true", zero=3, recompute="full"),
    Case(network="llama"),
    Case(network="llama", ranks=2, context=2, precision="bf16"),
    Case(network="llama", ranks=2, zero=3, recompute="full"),
    Case(ranks=2, zero=1, microbatches=4, precision="bf16(level = O2)"),
    Case(ranks=2, tensor=2),
    Case(ranks=2, tensor=2, sequence="true", microbatches=4),
    Case(ranks=4, tensor=4, sequence="true", precision="bf16(level = O2)"),
    Case(recompute="full", precision="bf16", batch=2),
    Case(recompute="selective", precision="bf16", batch=2),
    Case(network="mlp", ranks=2, tensor=2),
    Case(network="mlp", batch=4, precision="fp16", optimizer="sgd(lr = 0.1, momentum = 0.9, weight_decay = 0.1)"),
    Case(network="vit", batch=32, ranks=4, tensor=2, sequence="true", zero=1),
    Case(ranks=2, context=2, batch=2, recompute="selective"),
    Case(ranks=4, context=2, tensor=2, sequence="true", precision="bf16(level = O2)"),
    Case(ranks=4, context=2, pipeline=2, microbatches=4),
    Case(network="tied gpt", ranks=2, pipeline=2, microbatches=4, recompute="full"),
    Case(ranks=4, pipeline=2, zero=3, microbatches=2),
    Case(ranks=2, pipeline=2, microbatches=4, schedule="interleaved_1f1b"),
    Case(ranks=2, pipeline=2, microbatches=4, schedule="zbv", recompute="full"),
    Case(ranks=2, pipeline=2, microbatches=4, schedule="dualpipev", recompute="full"),
    Case(ranks=2, pipeline=2, microbatches=8, schedule="zbv", recompute="every(2)", precision="bf16"),
    Case(network="vit", batch=64, ranks=2, pipeline=2, microbatches=4, schedule="zero_bubble", recompute="full"),
)


def measure(text: str) -> MeasuredMemory:
    """Runs the job of that text. Raises AssertionError if it has a mistake."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.plt"
        path.write_text(text)
        report = Report()
        ready = prepare(load(str(path), []), report)
        assert ready is not None, [d.message for d in report.errors]
        program, places = ready.program, ready.places
        found = gang(program.world_size, _rank, program, places)
    highest = max(range(len(found)), key=lambda rank: sum(found[rank][1].values()))
    rest, peak, when = found[highest]
    nodes = ready.compiled.plan.ranks
    of_rank = [next(node.memory for node in nodes if node.first <= rank <= node.last) for rank in range(len(found))]
    return MeasuredMemory(
        predicted=of_rank[highest],
        rest=sum(rest.values()),
        peak=sum(peak.values()),
        at_rest=rest,
        at_peak=peak,
        when=when,
        errors=tuple(node.tensors / sum(held.values()) - 1 for node, (_, held, _) in zip(of_rank, found, strict=True)),
    )


def _rank(rank: int, job: JobProgram, places: tuple[RankPlace, ...]) -> tuple[Sums, Sums, str]:
    device = torch.device("cpu")
    parts = assemble(job, device)
    step = (stepper if job.pipeline is None else pipeline_step.stepper)(job, places[rank], parts)
    tracker = tracker_of(parts)
    for batch in batches(job.data, open_source(job.data), places[rank], job.microbatches, 0, STEPS, device):
        with tracker.step():
            step(batch)
    return tracker.rest, tracker.peak, tracker.when


# ------------------------------------------------------------------------------------------ the tables of the page

PAGE = ROOT / "docs" / "memory.md"
MARK = "<!-- {} by tests/helpers/measured_memory.py -->"


def _accuracy() -> str:
    lines = [
        "| job | predicted | measured | off by | at rest | off by | when |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    errors = []
    for case in CASES:
        found = measure(case.text)
        errors.append(abs(found.error))
        lines.append(
            f"| {case} | {byte_text(found.predicted.peak)} | {byte_text(found.peak)} | {100 * found.error:+.1f}% "
            f"| {byte_text(found.rest)} | {100 * found.error_at_rest:+.1f}% | {found.predicted.when} |"
        )
    errors.sort()
    return "\n".join(
        [
            *lines,
            "",
            f"Off by {percent_text(statistics.median(errors))} at the median, {percent_text(errors[-1])} at worst.",
        ]
    )


def _zero() -> str:
    lines = [
        "| | ranks | paper | at rest | account | peak | account | gathered and scattered at the peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for precision in ("fp32", "bf16(level = O2)"):
        for ranks in (2, 4):
            for zero in range(4):
                case = Case(ranks=ranks, zero=zero, precision=precision, batch=4 * ranks)
                found = measure(case.text)
                numbers = _numbers(case)
                whole, parted = PAPER[zero]
                low = precision != "fp32"
                paper = numbers * (_bytes(whole, low) + _bytes(parted, low) / ranks)
                said = found.predicted
                sizes = (paper, found.rest, said.rest, found.peak, said.peak, said.communication)
                shown = " | ".join(byte_text(size) for size in sizes)
                lines.append(f"| zero {zero}{', O2' if low else ''} | {ranks} | {shown} |")
    return "\n".join(lines)


# Bytes whole on each rank, and bytes divided: parameters, gradients, optimizer state.
PAPER = (("pgo", ""), ("pg", "o"), ("p", "go"), ("", "pgo"))


def _bytes(kinds: str, low: bool) -> int:
    """For each parameter: with Adam in float32, or as the paper has it, in 16 bits with a float32 copy."""
    each = {"p": 2, "g": 2, "o": 12} if low else {"p": 4, "g": 4, "o": 8}
    return sum(each[kind] for kind in kinds)


def _numbers(case: Case) -> int:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "made.plt").write_text(case.text)
        ready = prepare(load(str(Path(folder) / "made.plt"), []), Report())
    assert ready is not None and ready.compiled.plan.parameters is not None
    return ready.compiled.plan.parameters


def write_page() -> None:
    """Writes the tables between their marks."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("accuracy", _accuracy()), ("zero", _zero())):
        first, last = MARK.format(f"{name}, written"), MARK.format(f"end of {name}, written")
        before, _, rest = text.partition(first)
        _, _, after = rest.partition(last)
        text = f"{before}{first}\n{table}\n{last}{after}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_page()
