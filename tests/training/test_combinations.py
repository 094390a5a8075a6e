"""Every accepted job runs, and trains as one process does: every way to hold a model in memory, with every other.

Each job is compared with the same job in one process that shards, recomputes and accumulates nothing, in the same
precision. In fp32 losses agree to 1e-5 over 20 steps, as the language promises. In 16 bits the order of sums shows: the
tolerances below are a few times what was measured.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, ready, train
from instruments.pairwise import Choice, pairwise

from dslc.compiler.ir.codec import to_json

STEPS = 20
GPT = job_text(
    model={"network": "gpt(layers = 3, width = 32, heads = 2, context = 16, vocab = 256, tie = TIE)"},
    data={"source": "stdlib()", "batch": 16},
    train=None,
    log=None,
)
CONVNET = """
model {
  network = [
    conv2d(8, kernel = 3, padding = 1), relu(),
    residual([conv2d(8, kernel = 3, padding = 1), relu()]),
    residual([conv2d(8, kernel = 3, padding = 1)]), relu(),
    flatten(), linear(10),
  ]
  loss = cross_entropy()
}
data {
  source = digits()
  batch  = 48
}
"""
NETWORKS = {"gpt": GPT.replace("TIE", "false"), "tied gpt": GPT.replace("TIE", "true"), "convnet": CONVNET}
OPTIMIZERS = {
    "sgd": "sgd(lr = 0.05, momentum = 0.9)",
    "adamw": "adamw(lr = 1e-3, weight_decay = 0.1)",
}
FACTORS = {
    "network": tuple(NETWORKS),
    "ranks": ("1", "2", "4"),
    "zero": ("0", "1", "2", "3"),
    "replicas": ("1", "2"),
    "recompute": ("none", "full", "selective", "every(2)"),
    "offload": ("[]", "[optimizer]", "[optimizer, parameters]", "activations"),
    "precision": ("fp32", "bf16", "bf16(level = O2)", "fp16", "fp16(level = O2)"),
    "microbatches": ("1", "4"),
    "optimizer": tuple(OPTIMIZERS),
    "clip": ("none", "0.5", "value(0.001)"),
}
# Allowed differences from one process by precision: (loss, share of the parameters' own movement).
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "bf16(level = O2)": 2e-2, "fp16": 5e-3, "fp16(level = O2)": 5e-3}


def _allowed(choice: Choice) -> bool:
    return choice["replicas"] == "1" or (choice["ranks"] == "4" and choice["zero"] != "0")


def _text(choice: Choice) -> str:
    return f"""{NETWORKS[choice["network"]]}
devices {{
  cpus = {choice["ranks"]}
}}
parallelism {{
  zero         = {choice["zero"]}
  replicas     = {choice["replicas"]}
  microbatches = {choice["microbatches"]}
}}
memory {{
  recompute = {choice["recompute"]}
  offload   = {choice["offload"]}
}}
train {{
  steps     = {STEPS}
  optimizer = {OPTIMIZERS[choice["optimizer"]]}
  precision = {choice["precision"]}
  clip      = {choice["clip"]}
}}
log {{
  every       = 1 step
  tensorboard = false
}}
"""


class Trainer:
    """Trains choices, and keeps the result of each program: choices without effect on a CPU give the same program."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self._folders = itertools.count()  # one for each training, so that the files of a failed one stay
        self.trained: dict[str, Trained] = {}
        self.plain = cache(self._plain)

    def train(self, choice: Choice) -> Trained:
        job = self._folder / "made.plt"
        job.write_text(_text(choice))
        made = ready(job)
        program = json.dumps(to_json(made.program) | {"plan_hash": "", "memory": [], "memory_limit": None})
        if program not in self.trained:
            folder = self._folder / str(next(self._folders))
            self.trained[program] = train(self._launcher, folder, made.program, made.places)
        return self.trained[program]

    def _plain(self, network: str, precision: str, optimizer: str, clip: str) -> Trained:
        """Returns the job of one process."""
        return self.train(
            {
                **{name: values[0] for name, values in FACTORS.items()},
                "network": network,
                "precision": precision,
                "optimizer": optimizer,
                "clip": clip,
            }
        )

    def compare(self, choice: Choice) -> None:
        """Raises AssertionError if the choice does not train as one process does."""
        expected = self.plain(choice["network"], choice["precision"], choice["optimizer"], choice["clip"])
        bound = 1e-5 if choice["optimizer"] == "sgd" else 0.05 * 1e-3 * STEPS
        weights = bound if choice["precision"] == "fp32" else None
        agree(expected, self.train(choice), losses=TOLERANCE[choice["precision"]], weights=weights)


@pytest.fixture(scope="module")
def trainer(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(launcher, tmp_path_factory.mktemp("combinations"))


def _name(choice: Choice) -> str:
    return ", ".join(f"{name} {value}" for name, value in choice.items())


@pytest.mark.cases(2)
@pytest.mark.parametrize("choice", pairwise(FACTORS, _allowed), ids=_name)
def test_every_pair_of_settings_trains_as_one_process(trainer: Trainer, choice: Choice) -> None:
    trainer.compare(choice)


EXACT = FACTORS | {"precision": ("fp32",), "offload": ("[]",)}


@pytest.mark.long
@pytest.mark.parametrize("choice", pairwise(EXACT, _allowed), ids=_name)
def test_every_pair_of_what_has_to_agree_exactly(trainer: Trainer, choice: Choice) -> None:
    trainer.compare(choice)


@pytest.mark.long
@pytest.mark.parametrize("precision", FACTORS["precision"])
def test_the_full_product_trains_as_one_process(
    trainer: Trainer, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every sharding, with every recomputation, offload, count of micro-batches and ranks."""
    varied = FACTORS | {"precision": (precision,), "network": ("tied gpt",), "optimizer": ("sgd",), "clip": ("0.5",)}
    products = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
    choices = [*filter(_allowed, products)]
    trainer.trained.clear()
    failed = []
    for choice in choices:
        try:
            trainer.compare(choice)
        except AssertionError as error:
            failed.append(f"{_name(choice)}: {str(error).strip().splitlines()[0]}")
    with capsys.disabled():
        print(f"\n{precision}: {len(choices)} jobs, {len(trainer.trained)} programs, {len(failed)} differ")
    assert not failed, "\n".join(failed)
