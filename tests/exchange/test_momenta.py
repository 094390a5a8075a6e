"""`qadam` and `onebit_adam`, beside all ranks simulated in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.commands import dslc
from helpers.exchanged_gradients import coded
from helpers.exchanges import JOB, NAMES, Array, Simulated, Weights, agree, apart, flat, job, run, weights_of
from helpers.launcher import Launcher
from helpers.trained import Trained, exchanges_as_planned, ready

from dslc.runs import lay_down

STEPS, ALONE = 6, 2
RATE, BETAS, EPS = np.float32(0.01), (np.float32(0.9), np.float32(0.999)), np.float32(1e-8)
OPTIMIZERS = {
    "qadam": f"qadam(lr = 0.01, warmup = {ALONE})",
    "onebit_adam": f"onebit_adam(lr = 0.01, freeze = {ALONE})",
}
TEXT = JOB.replace("gradients = EXCHANGE", "").replace("sgd(lr = 0.1)", "EXCHANGE")
HOOKS = '  hooks     = python("own_hooks:Weights", ranks = all)\n'


def signed(row: Array, real: int) -> Array:
    """Returns a row, of whose numbers the first `real` are no filling, as signs and the mean of absolute values."""
    size = np.abs(row[:real]).mean(dtype=np.float32) if real else np.float32(0)
    return np.where(row >= 0, size, -size)


class Momenta:
    """The exchange of one piece of a bucket, of which the first `real` numbers are no filling."""

    def __init__(self, kind: str, members: int, size: int, real: int) -> None:
        unit = 8 if kind == "onebit_adam" else 1
        chunk = -(-size // (members * unit)) * unit
        self.kind, self.size, self.members, self.chunk = kind, size, members, chunk
        self.real = [min(max(real - n * chunk, 0), chunk) for n in range(members)]
        self.worker = np.zeros((members, members, chunk), np.float32)
        self.server = np.zeros((members, chunk), np.float32)

    def agree(self, momenta: list[Array]) -> Array:
        left = self.members * self.chunk - self.size
        rows = np.stack([np.pad(m, (0, left)).reshape(-1, self.chunk) for m in momenta])
        if self.kind == "qadam":
            found = [
                coded(np.asarray(np.mean([coded(row) for row in rows[:, n]], axis=0, dtype=np.float32)))
                for n in self.owners
            ]
            return np.concatenate(found)[: self.size]
        rows += self.worker
        sent = np.stack([[signed(row, real) for row, real in zip(each, self.real, strict=True)] for each in rows])
        self.worker = self._error(rows - sent)
        mean = sent.mean(axis=0, dtype=np.float32) + self.server
        agreed = np.stack([signed(mean[n], self.real[n]) for n in self.owners])
        self.server = self._error(mean - agreed)
        return agreed.reshape(-1)[: self.size]

    @property
    def owners(self) -> range:
        return range(self.members)

    def _error(self, left: Array) -> Array:
        for n in self.owners:
            left[..., n, self.real[n] :] = 0
        return left


class Adams(Simulated):
    """All ranks under an optimizer of momenta; `rate` and `decay` may be a number for each of a model's."""

    def __init__(
        self,
        start: Weights,
        ranks: int,
        kind: str,
        *,
        pieces: int = 1,
        rate: Array | np.float32 = RATE,
        decay: Array | float = 0.0,
        alone: int = ALONE,
        names: tuple[str, ...] = NAMES,
    ) -> None:
        super().__init__(start, ranks)
        self.names, self.rate, self.decay, self.alone, self.pieces = names, rate, decay, alone, pieces
        self.count = flat(start, names).size
        self.piece = -(-self.count // pieces)
        reals = [min(self.count - n * self.piece, self.piece) for n in range(pieces)]
        self.exchanges = [Momenta(kind, ranks // pieces, self.piece, real) for real in reals] if ranks > 1 else []
        self.m, self.v = np.zeros(self.count, np.float32), np.zeros(self.count, np.float32)
        self.updates = 0

    def advance(self) -> None:
        """Does a step."""
        self.update([flat(each, self.names) for each in self.gradients()])

    def update(self, gradients: list[Array]) -> None:
        start = self.weights[0]
        x, t = flat(start, self.names), self.updates + 1
        one, two = (np.float32(1) - beta for beta in BETAS)
        if t <= self.alone:
            g = np.mean(gradients, axis=0, dtype=np.float32) + np.asarray(self.decay, np.float32) * x
            self.m = self.m + one * (g - self.m)
            self.v = BETAS[1] * self.v + two * g * g
        else:
            nodes = [
                np.mean(gradients[n : n + self.pieces], axis=0, dtype=np.float32)
                + np.asarray(self.decay, np.float32) * x
                for n in range(0, self.ranks, self.pieces)
            ]
            self.m = self._agreed([self.m + one * (g - self.m) for g in nodes])
            self.m = np.where(self.v == 0, np.float32(0), self.m)
        first = 1 - 0.9**t
        second = 1 - 0.999 ** min(t, self.alone)
        root = np.sqrt(self.v) / np.float32(second**0.5) + EPS
        x = x - self.rate * self.m / np.float32(first) / root
        self.weights = [start | apart(x, start, self.names)] * self.ranks
        self.updates = t

    def _agreed(self, momenta: list[Array]) -> Array:
        if not self.exchanges:
            return momenta[0]
        cut = [np.pad(m, (0, -self.count % self.pieces)).reshape(self.pieces, -1) for m in momenta]
        found = [each.agree([m[n] for m in cut]) for n, each in enumerate(self.exchanges)]
        return np.concatenate(found)[: self.count]


def alike(trained: Trained, ranks: int) -> None:
    """Asserts that all ranks have the same weights after each step."""
    alike_from(trained, ranks, 0)


def alike_from(trained: Trained, ranks: int, first: int) -> None:
    for step in range(first, STEPS + 1):
        of_ranks = [flat(weights_of(trained, rank, step)) for rank in range(ranks)]
        assert all(np.array_equal(of_ranks[0], each) for each in of_ranks), step


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "pieces"), ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2)))
def test_updates_are_those_of_the_rule(launcher: Launcher, tmp_path: Path, kind: str, ranks: int, pieces: int) -> None:
    trained = run(launcher, job(tmp_path / "job", ranks, OPTIMIZERS[kind], TEXT), pieces=pieces)
    alike(trained, ranks)
    simulated = Adams(weights_of(trained, 0, 0), ranks, kind, pieces=pieces)
    for step in range(1, STEPS + 1):
        simulated.advance()
        agree(trained, simulated, step, 1e-5)


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
    simulated = Adams(start, 2, kind, rate=rate, decay=decay)
    for step in range(1, STEPS + 1):
        simulated.advance()
        agree(trained, simulated, step, 1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_parameters_stay(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    made = job(tmp_path / "job", 3, OPTIMIZERS[kind], TEXT)
    trained = run(launcher, made, 'model.freeze=["0.weight"]')
    alike(trained, 3)
    simulated = Adams(weights_of(trained, 0, 0), 3, kind, names=("0.bias", "2.bias", "2.weight"))
    for step in range(1, STEPS + 1):
        simulated.advance()
        agree(trained, simulated, step, 1e-5)


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
    lay_down(ready_, str(folder))
    outcome, shown = launcher.launch(ready_.program, ready_.places, folder)
    said = f"{outcome.failure}{shown}"
    assert "the loss of step 4 is finite, and its gradient is not" in said and "`2.bias`" in said, said


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
