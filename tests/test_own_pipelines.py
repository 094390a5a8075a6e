"""Networks of a user's own and of the `transformers` library, cut into stages: they train as in one process.

What is cut: sequences of blocks; a module whose skip connections cross every cut, which hands views of its input along
and computes with numbers that grow with the batch; one with parameters and buffers of its own that belong to no layer;
decoders, whose masks and tables of positions each stage computes for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from launcher import Launcher
from tiny_llama import write_llama
from trained import Trained, agree, ready, staged, train, train_job

from dslc.compiler.program import CheckpointStep
from dslc.dsl.diagnostics import Report
from dslc.dsl.load import load
from dslc.runs import lay_down, prepare, report_on
from dslc.runtime.collectives import FIRST_STEP, STEPS

MODULE = '''
import torch
from torch import nn


def sequence():
    """Sequences within a sequence, one of which has statistics of its own."""
    inner = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Sequential(*inner), nn.Linear(24, 10))


class Skips(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter = nn.Linear(64, width)
        self.down = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)])
        self.up = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)])
        self.leave = nn.Linear(width, 10)

    def forward(self, x):
        samples = len(x)
        flat = x.reshape(samples, -1)
        with torch.no_grad():
            scale = flat.std(dim=1, keepdim=True) + 1
        first = self.enter(flat / scale)
        second = self.down[0](first)
        x = self.down[1](second)
        x = self.up[0](x) + second
        x = self.up[1](x) * torch.sigmoid(first)
        if self.training:
            x = x * 1.0
        return self.leave(x.view(samples, 1, -1)[:, 0])


def skips(width=24):
    return Skips(width)


class Shifted(nn.Module):
    """Both stages need its buffer, which is drawn after its parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(*ends) for ends in ((64, 24), (24, 24), (24, 24), (24, 10))])
        self.gain = nn.Parameter(torch.empty(24))
        self.register_buffer("shift", torch.empty(24))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.uniform_(self.gain)
        nn.init.uniform_(self.shift)

    def forward(self, x):
        x = self.layers[0](x.flatten(1)) * self.gain + self.shift
        return self.layers[3](self.layers[2](self.layers[1](x).tanh()).tanh() + self.shift)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x, *, mask):
        weights = (self.mix(x) @ x.transpose(1, 2)).masked_fill(mask, float("-inf")).softmax(-1)
        return x + self.down(self.up(self.norm(weights @ x)).relu()), mask


class Decoder(nn.Module):
    """A transformer whose positions are a parameter of its own, and whose head is its table of tokens."""

    def __init__(self, width, blocks):
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.position = nn.Parameter(0.1 * torch.randn(16, width))
        self.register_buffer("later", torch.ones(16, 16, dtype=torch.bool).triu(1), persistent=False)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        length = tokens.size(1)
        assert length <= 16
        x = self.table(tokens) + self.position[:length]
        mask = self.later[:length, :length].expand(tokens.size(0), length, length)
        for block in self.blocks:
            x, mask = block(x, mask=mask)
        return self.head(x * self.scale)


def decoder(width=32, blocks=4):
    return Decoder(width, blocks)
'''
GPT2 = (
    'transformers("gpt2", n_layer = 4, n_embd = 32, n_head = 2, vocab_size = 256, n_positions = 32, '
    "resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0)"
)
NETWORKS = {
    "sequence": ('python("mine:sequence")', "digits()", 0.01),
    "skips": ('python("mine:skips")', "digits()", 0.1),
    "shifted": ('python("mine:Shifted")', "digits()", 0.1),
    "decoder": ('python("mine:decoder")', "stdlib(context = 16)", 0.1),
    "gpt2": (GPT2, "stdlib(context = 16)", 0.1),
    "llama": ('transformers("tiny")', "stdlib(context = 16)", 0.1),
}
JOB = """
model {
  network = NETWORK
  loss    = cross_entropy()
}
data {
  source     = SOURCE
  batch      = 16
  validation = 0.2%
}
devices {
  cpus = 1
}
train {
  steps     = 8
  optimizer = sgd(lr = RATE, momentum = 0.9)
  clip      = 1.0
  no_decay  = ["*0.*"]
}
log {
  every       = 1 step
  tensorboard = false
}
"""

Run = Callable[..., Trained]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(MODULE)
    write_llama(folder / "tiny", num_hidden_layers=4)

    def written(name: str) -> Path:
        network, source, rate = NETWORKS[name]
        text = JOB.replace("NETWORK", network).replace("SOURCE", source).replace("RATE", str(rate))
        (folder / f"{name}.plt").write_text(text)
        return folder / f"{name}.plt"

    return written


@pytest.fixture(scope="module")
def trained(job: Callable[[str], Path], launcher: Launcher) -> Run:
    @cache
    def run(name: str, *settings: str) -> Trained:
        return train_job(launcher, job(name), *settings)

    return run


PLANS = [
    ("sequence", staged("interleaved_1f1b", 2, 1, 2)),
    ("skips", staged("zbv", 2, 1, 4)),
    ("decoder", staged("1f1b", 2, 2, 2, "parallelism.zero=3", "memory.recompute=full")),
    ("llama", staged("1f1b", 2, 1, 2)),
]
MORE = [
    ("sequence", staged("1f1b", 2, 1, 4)),
    ("sequence", staged("interleaved_1f1b", 2, 2, 2)),
    ("skips", staged("1f1b", 2, 2, 4, "parallelism.stages=[4, 3]")),
    ("decoder", staged("zero_bubble", 2, 1, 4)),
    ("gpt2", staged("1f1b", 2, 2, 2, "parallelism.zero=1")),
    ("gpt2", staged("zbv", 2, 1, 4)),
    ("llama", staged("interleaved_1f1b", 2, 2, 2)),
]


def _ids(plans: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    return [f"{name}-{plan[3].partition('=')[2]}" for name, plan in plans]


@pytest.mark.parametrize("name, plan", PLANS, ids=_ids(PLANS))
def test_it_trains_as_in_one_process(name: str, plan: tuple[str, ...], trained: Run) -> None:
    one = trained(name)
    assert len(set(one.losses())) == 8
    agree(one, trained(name, *plan))


@pytest.mark.long
@pytest.mark.parametrize("name, plan", MORE, ids=_ids(MORE))
def test_and_in_more_ways(name: str, plan: tuple[str, ...], trained: Run) -> None:
    test_it_trains_as_in_one_process(name, plan, trained)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "bf16(level = O2)"])
def test_stages_in_16_bits(precision: str, trained: Run) -> None:
    same = (f"train.precision={precision}", "train.steps=4")
    agree(trained("llama", *same), trained("llama", *staged("1f1b", 2, 1, 2), *same), losses=2e-2, weights=None)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sequence", "skips", "decoder", "llama"])
def test_compiled_stages(name: str, trained: Run) -> None:
    agree(trained(name), trained(name, *staged("1f1b", 2, 1, 2), "train.compile=true"))


def test_a_frozen_table_and_blocks(trained: Run) -> None:
    same = ('model.freeze=["table*", "position", "blocks.0.*"]', "train.steps=4", "train.no_decay=none")
    agree(trained("decoder", *same), trained("decoder", *staged("zbv", 2, 1, 2), *same))


def test_modules_of_a_stage_make_their_own_numbers(
    tmp_path: Path, job: Callable[[str], Path], launcher: Launcher
) -> None:
    """Those that they would make in one process, also where the module itself is of another stage."""
    runs = []
    for name, plan in (("one", ()), ("two", staged("1f1b", 2, 1, 2))):
        made = ready(job("shifted"), *plan)
        model = dataclasses.replace(made.program.model, reset=True)
        runs.append(train(launcher, tmp_path / name, made.program, made.places, model=model))
    agree(runs[0], runs[1])


CHAIN = [
    staged("1f1b", 2, 1, 4),
    staged("zbv", 2, 2, 4, "parallelism.zero=1"),
    ("devices.cpus=2", "parallelism.zero=3"),
    staged("gpipe", 2, 1, 2),
]


def test_a_checkpoint_goes_from_any_plan_to_any_other(
    tmp_path: Path, job: Callable[[str], Path], launcher: Launcher, trained: Run
) -> None:
    for part, plan in enumerate(CHAIN):
        made = ready(job("decoder"), *plan)
        checkpoint = CheckpointStep(
            every=2, folder=str(tmp_path / "checkpoints"), resume="auto" if part else "none", keep=9
        )
        done = train(
            launcher, tmp_path / str(part), made.program, made.places, checkpoint=checkpoint, steps=2 * part + 2
        )
    got, expected = done.records, trained("decoder").records
    assert ("train", 8) in got and ("train", 6) not in got  # the last plan began after step 6
    for key, record in got.items():
        assert record["loss"] == pytest.approx(expected[key]["loss"], abs=1e-5), key


@pytest.mark.parametrize("name, schedule", [("skips", "zbv"), ("decoder", "1f1b")])
def test_a_step_exchanges_what_was_planned(
    name: str, schedule: str, tmp_path: Path, job: Callable[[str], Path], launcher: Launcher
) -> None:
    """All tensors that cross a cut, and the gradient of the weight that two stages share."""
    report = Report()
    settings = (*staged(schedule, 2, 1, 4), f"train.steps={FIRST_STEP + STEPS}")
    made = prepare(load(str(job(name)), list(settings)), report, profile=True)
    assert made is not None, [d.message for d in report.errors]
    lay_down(made, str(tmp_path))
    outcome, shown = launcher.launch(made.program, made.places, tmp_path)
    assert outcome.failure is None, f"{outcome.failure}\n{shown}"
    for rank in report_on(made, str(tmp_path), outcome.steps)["ranks"]:
        found = {each["operation"]: each["measured"] for each in rank["collectives"]}
        assert found == {each["operation"]: each["predicted"] for each in rank["collectives"]}
        assert any(each["count"] for each in found.values())
