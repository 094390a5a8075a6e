"""On GPUs the host waits for the device in no step of an exchange.

Torch tells of such waits itself, also on benchmarks/absent_gpu (without ABSENT_GPUS_COMPUTE, as the CPU would compute
in the place of the kernels that tell).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.exchanges import in_pieces, job, run
from helpers.launcher import Launcher
from helpers.trained import ready

from dslc.probe.gpus import gpus_here

pytestmark = pytest.mark.skipif(len(gpus_here()) < 4, reason="needs four GPUs")

# Between the steps in which ranks compare what they use: the first ten, and those of powers of two.
NEVER_WAITS = 'python("own_hooks:NeverWaits", ranks = all, first = 11, last = 15)'
WATCHED = (
    f"train.hooks={NEVER_WAITS}",
    "train.steps=18",
    "train.on_nonfinite=continue",  # what absent GPUs compute
    "log.every=100 steps",
)
EXCHANGES = (
    *("fp16()", "bf16()", "powersgd(rank = 1)", "bytegrad()", "local_sgd(period = 2)", "diloco(period = 2)"),
    *("decentralized()", "decentralized(peers = shift_one)", "low_precision_decentralized()"),
)


@pytest.mark.parametrize("pieces", (1, 2))
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_step_waits_for_the_device(launcher: Launcher, tmp_path: Path, exchange: str, pieces: int) -> None:
    made = job(tmp_path / "job", 4, exchange)
    made.write_text(made.read_text().replace("cpus = 4", "gpus = 4"))
    run(launcher, made, *WATCHED, pieces=pieces)


@pytest.mark.parametrize("pieces", (1, 2))
@pytest.mark.parametrize("optimizer", ("qadam(warmup = 2 steps)", "onebit_adam(freeze = 2 steps)"))
def test_no_update_of_momenta_waits_either(launcher: Launcher, tmp_path: Path, optimizer: str, pieces: int) -> None:
    made = job(tmp_path / "job", 4, "allreduce()")
    made.write_text(made.read_text().replace("cpus = 4", "gpus = 4").replace("sgd(lr = 0.1)", optimizer))
    run(launcher, made, *WATCHED, pieces=pieces)


@pytest.mark.parametrize("pieces", (1, 2))
def test_no_step_waits_between_two_rounds(launcher: Launcher, tmp_path: Path, pieces: int) -> None:
    """In a round its thread does. The training fails in the end, as ranks that compute nothing find no last round."""
    made = job(tmp_path / "job", 4, "async_average(interval = 10h)")
    made.write_text(made.read_text().replace("cpus = 4", "gpus = 4"))
    hooks = f'train.hooks=[{NEVER_WAITS}, python("own_hooks:Fails", at = 17)]'
    found = ready(made, *WATCHED, hooks)
    outcome, shown = launcher.launch(in_pieces(found.program, pieces), found.places, tmp_path / "run")
    assert outcome is not None and outcome.failure is not None, shown
    assert outcome.failure.message == "ValueError: no more", outcome
