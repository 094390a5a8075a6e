"""`qadam` and `onebit_adam`, beside all ranks simulated in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.commands import dslc
from helpers.exchanged_momenta import ALONE, Adam
from helpers.exchanges import JOB, Simulated, agree, flat, job, run, weights_of
from helpers.launcher import Launcher
from helpers.trained import Trained, exchanges_as_planned, ready

from dslc.jobs.prepare_run import write_run_directory

STEPS = 6
OPTIMIZERS = {
    "qadam": f"qadam(lr = 0.01, warmup = {ALONE})",
    "onebit_adam": f"onebit_adam(lr = 0.01, freeze = {ALONE})",
}
TEXT = JOB.replace("gradients = EXCHANGE", "").replace("sgd(lr = 0.1)", "EXCHANGE")
HOOKS = '  hooks     = python("own_hooks:Weights", ranks = all)\n'


def alike(trained: Trained, ranks: int) -> None:
    """Asserts that all ranks have the same weights after each step."""
    alike_from(trained, ranks, 0)


def alike_from(trained: Trained, ranks: int, first: int) -> None:
    for step in range(first, STEPS + 1):
        of_ranks = [flat(weights_of(trained, rank, step)) for rank in range(ranks)]
        assert all(np.array_equal(of_ranks[0], each) for each in of_ranks), step


def follow(trained: Trained, ranks: int, adam: Adam) -> None:
    """Asserts that the weights of all ranks after each step are those of `adam`."""
    simulated = Simulated(weights_of(trained, 0, 0), ranks)
    for step in range(1, STEPS + 1):
        simulated.take([adam.step(simulated.gradients())] * ranks)
        agree(trained, simulated, step, 1e-5)


@pytest.mark.cases(2)
@pytest.mark.core
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "pieces"), ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2)))
def test_updates_are_those_of_the_rule(launcher: Launcher, tmp_path: Path, kind: str, ranks: int, pieces: int) -> None:
    trained = run(launcher, job(tmp_path / "job", ranks, OPTIMIZERS[kind], TEXT), pieces=pieces)
    alike(trained, ranks)
    follow(trained, ranks, Adam(weights_of(trained, 0, 0), ranks, kind, pieces=pieces))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_micro_batches_and_groups(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    made = job(tmp_path / "job", 2, OPTIMIZERS[kind], TEXT)
    settings = (
        *("parallelism.microbatches=2", "train.optimizer.weight_decay=0.1", 'train.no_decay=["*.bias"]'),
        'train.groups=[group("2.*", lr = 0.03)]',
    )
    trained = run(launcher, made, *settings)
    start = weights_of(trained, 0, 0)
    rate = flat({name: np.full_like(each, 0.03 if name[0] == "2" else 0.01) for name, each in start.items()})
    decay = flat({name: np.full_like(each, 0.1 * (each.ndim > 1)) for name, each in start.items()})
    follow(trained, 2, Adam(start, 2, kind, rate=rate, decay=decay))


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("until", (ALONE, ALONE + 2))
def test_a_resumed_training_goes_on_to_the_bit(launcher: Launcher, tmp_path: Path, kind: str, until: int) -> None:
    made = job(tmp_path / "job", 2, OPTIMIZERS[kind], TEXT)
    kept = (f"checkpoint.every={until} steps", f"checkpoint.dir={tmp_path / 'kept'}")
    whole = run(launcher, made)
    run(launcher, made, *kept, steps=until)
    parts = run(launcher, made, *kept, "checkpoint.resume=auto")
    for rank in range(2):
        for step in range(until + 1, STEPS + 1):
            assert np.array_equal(flat(weights_of(whole, rank, step)), flat(weights_of(parts, rank, step)))


@pytest.mark.core
def test_on_other_ranks_the_errors_begin_anew(launcher: Launcher, tmp_path: Path) -> None:
    kept = ("checkpoint.every=4 steps", f"checkpoint.dir={tmp_path / 'kept'}")
    run(launcher, job(tmp_path / "two", 2, OPTIMIZERS["onebit_adam"], TEXT), *kept, steps=4)
    three = run(launcher, job(tmp_path / "three", 3, OPTIMIZERS["onebit_adam"], TEXT), *kept, "checkpoint.resume=auto")
    notes = "".join(path.read_text() for path in three.folder.rglob("*") if path.suffix in (".jsonl", ".log"))
    assert "worker_error.0" in notes and "server_error.0" in notes
    alike_from(three, 3, 5)


def test_adam_and_qadam_resume_from_one_another(launcher: Launcher, tmp_path: Path) -> None:
    kept = ("checkpoint.every=3 steps", f"checkpoint.dir={tmp_path / 'kept'}", "checkpoint.resume=auto")
    adam = run(launcher, job(tmp_path / "a", 2, "adam(lr = 0.01)", TEXT), *kept, steps=3)
    run(launcher, job(tmp_path / "b", 2, "qadam(lr = 0.01, warmup = 5)", TEXT), *kept, steps=4)
    whole = run(launcher, job(tmp_path / "c", 2, "adam(lr = 0.01)", TEXT), steps=4)
    assert adam.records
    back = run(launcher, job(tmp_path / "d", 2, "adam(lr = 0.01)", TEXT), *kept, steps=5)
    assert back.records and whole.records


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_half_precision(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    made = job(tmp_path / "job", 4, OPTIMIZERS[kind], TEXT)
    trained = run(launcher, made, "train.precision=fp16")
    alike(trained, 4)
    assert np.isfinite(trained.losses()).all()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("number", ("nan", "inf"))
def test_a_gradient_that_is_not_finite_is_named(launcher: Launcher, tmp_path: Path, kind: str, number: str) -> None:
    made = job(tmp_path / "job", 3, OPTIMIZERS[kind], TEXT)
    hook = f'train.hooks=python("own_hooks:Broken", ranks = all, number = "{number}", rank = 1, step = 4)'
    ready_ = ready(made, hook)
    folder = tmp_path / "run"
    folder.mkdir()
    write_run_directory(ready_, str(folder))
    outcome, shown = launcher.launch(ready_.program, ready_.places, folder)
    said = f"{outcome.failure}{shown}"
    assert "the loss of step 4 is finite, and its gradient is not" in said and "`2.bias`" in said, said


@pytest.mark.cases(4)
@pytest.mark.parametrize("first", (1, 100))
@pytest.mark.parametrize("optimizer", ("qadam(warmup = FIRST)", "onebit_adam(freeze = FIRST)"))
@pytest.mark.parametrize("ranks", (2, 3))
def test_the_predicted_exchanges_are_those_that_run(
    launcher: Launcher, tmp_path: Path, optimizer: str, first: int, ranks: int
) -> None:
    made = job(tmp_path / "job", ranks, optimizer.replace("FIRST", str(first)), TEXT)
    folder = tmp_path / "run"
    folder.mkdir()
    exchanges_as_planned(launcher, folder, made)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values())
def test_verify_compares_one_rank_with_a_plain_loop(tmp_path: Path, optimizer: str) -> None:
    made = job(tmp_path / "job", 1, optimizer, TEXT.replace(HOOKS, ""))
    verified = dslc("verify", str(made), cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr
