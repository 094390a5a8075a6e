"""Ranks that would exchange different things, or that hold other data or parameters than each other, end with an error
that names them; nothing else is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import own_forward_passes
from helpers.launcher import Launcher
from helpers.trained import agree, ready, train, train_job, write_job_with_helper

from dslc.runtime.process.failure import describe

JOB = """
model {
  network = python("own_ranks:Chooses", how = "none")
  loss    = cross_entropy()
}
data {
  source     = python("own_ranks:data", how = "same")
  batch      = 8
  validation = 8/48
}
devices { cpus = 2 }
train {
  steps     = 8
  optimizer = sgd(lr = 0.1)
}
evaluate { every = 6 steps }
log { every = 8 steps, tensorboard = false }
launch { timeout = 30s }
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job_with_helper("own_ranks.py", tmp_path, JOB)


def failure(launcher: Launcher, job: Path, *settings: str) -> str:
    """Returns the message of a training that fails, on rank 0."""
    made = ready(job, *settings)
    folder = job.parent / "run"
    folder.mkdir(exist_ok=True)
    outcome, shown = launcher.launch(made.program, made.places, folder)
    assert outcome is not None and outcome.failure is not None, shown
    assert outcome.failure.rank == 0
    return describe(outcome)


def network(**arguments: object) -> str:
    given = "".join(f", {name} = {value}" for name, value in arguments.items()).replace("'", '"')
    return f'model.network=python("own_ranks:Chooses"{given})'


@pytest.mark.cases(2)
@pytest.mark.core
@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (
            {"how": "'one'"},
            (),
            ("at step 1 (<--set", "`blocks.1.0.weight` and 1 more are used on rank 0", "own_ranks.py:"),
        ),
        ({"how": "'one'"}, ("parallelism.zero=1",), ("at step 1 ", "and not on rank 1")),
        ({"how": "'other'"}, (), ("at step 1 ", "`blocks.1.0.weight` and 1 more are used on rank 1")),
        ({"how": "'one'"}, ("parallelism.zero=2",), ("at step 1 ", "rank 0 calls `blocks.1`")),
        (
            {"how": "'one'"},
            ("parallelism.zero=3",),
            ("rank 0 calls `blocks.1` (own_ranks.py:", "rank 1 has come to the end"),
        ),
        (
            {"how": "'order'"},
            ("parallelism.zero=3",),
            ("rank 0 calls `blocks.0`", "rank 1 calls `blocks.1`"),
        ),
        ({"how": "'one'", "since": 7}, (), ("at step 7 ",)),  # the first after an evaluation
        ({"how": "'one'", "since": 8}, ("parallelism.zero=3", "evaluate.every=100 steps"), ("at step 8 ",)),
        pytest.param(
            {"how": "'one'", "since": 8},
            ("parallelism.zero=3", "evaluate.every=100 steps", "train.compile=true"),
            ("at step 8 ", "rank 0 calls `blocks.1`"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_ranks_that_use_other_parameters_or_another_order(
    launcher: Launcher, job: Path, arguments: dict[str, object], settings: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = failure(launcher, job, network(**arguments), *settings)
    for each in words:
        assert each in message, message
    alike = "for the same samples" in message  # found by a pass of each rank over the same
    assert ("let all ranks take the same path" if alike else "torch.rand(()).item()") in message
    assert message.count("\n") < 8


PARAMETERS = (
    "the ranks use different parameters for the same samples: `blocks.1.0.weight` and 1 more are used on rank 0"
)


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ({"spare": "true"}, (), (PARAMETERS,)),  # DistributedDataParallel finds the parameters that a step has used
        ({"draws": "true"}, ("parallelism.zero=3",), (PARAMETERS,)),  # the ranks agree on them in each step
        pytest.param({"draws": "true"}, (), (PARAMETERS,), marks=pytest.mark.long),
        pytest.param({"experts": "true"}, ("parallelism.zero=2",), (PARAMETERS,), marks=pytest.mark.long),
        (
            {"how": "'scaled'"},
            ("parallelism.zero=2",),
            ("`blocks.0.0` (", ") gives different numbers on rank 0 and on rank 1 for the same samples"),
        ),
        pytest.param(
            {"draws": "true", "since": 7},
            ("evaluate.every=100 steps",),
            ("at step 8 ", PARAMETERS),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_path_that_follows_from_the_rank(
    launcher: Launcher, job: Path, arguments: dict[str, object], settings: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = failure(launcher, job, network(**{"how": "'one'", **arguments}), *settings)
    for each in (*words, "own_ranks.py:", "let all ranks take the same path"):
        assert each in message, message


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"draws": "true", "experts": "true"}, ("parallelism.zero=3",)),
        pytest.param({"draws": "true"}, (), marks=pytest.mark.long),
        pytest.param({"spare": "true"}, ("parallelism.zero=1",), marks=pytest.mark.long),
    ],
)
def test_a_path_that_follows_from_samples_and_draws_is_right(
    launcher: Launcher, job: Path, arguments: dict[str, object], settings: tuple[str, ...]
) -> None:
    train_job(launcher, job, network(how="'none'", **arguments), *settings)


@pytest.mark.parametrize("settings", [(), pytest.param(("parallelism.zero=3",), marks=pytest.mark.slow)])
def test_a_forward_pass_that_needs_gradients_is_right(launcher: Launcher, job: Path, settings: tuple[str, ...]) -> None:
    hooked = 'model.network=python("own_ranks:Hooked")'
    one = train_job(launcher, job, hooked, "devices.cpus=1")
    agree(one, train_job(launcher, job, hooked, *settings))


TENSOR = ("parallelism.data=1", "parallelism.tensor=2", 'parallelism.tensor_plan=["blocks.0.0: gathered"]')
CONTEXT = ("parallelism.data=1", "parallelism.context=2", "data.source=stdlib(context = 16)", "data.validation=0.1%")
RECORDED = ("the ranks record different forward passes: call ", " on rank 0", " on rank 1", "own_ranks.py")
STAGES = ("parallelism.data=1", "parallelism.pipeline=2", "parallelism.microbatches=2")


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ({"how": "'one'"}, TENSOR, ("at step 1 ", "`blocks.1.0.weight` and 1 more are used on rank 0 (own_ranks.py:")),
        pytest.param(
            {"how": "'order'"}, TENSOR, ("after step 1, `into.weight` is not the same",), marks=pytest.mark.long
        ),
        ({"how": "'scaled'"}, TENSOR, ("after step 1, `into.weight` is not the same on rank 0 and rank 1",)),
        (
            {"how": "'one'", "tokens": "true"},
            CONTEXT,
            ("at step 1 ", "rank 0 calls `blocks.1` (own_ranks.py:"),
        ),
        ({"how": "'one'"}, STAGES, ("before the first step", *RECORDED, "`blocks.1")),
        pytest.param({"how": "'scaled'"}, STAGES, ("before the first step", *RECORDED), marks=pytest.mark.long),
    ],
)
def test_ranks_of_other_axes_that_differ(
    launcher: Launcher, job: Path, arguments: dict[str, object], settings: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = failure(launcher, job, network(**arguments), *settings)
    for each in words:
        assert each in message, message


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('model.network=python("own_ranks:Chooses", marked = true)', ("at step 6 ", "`blocks.1.0.weight`")),
        pytest.param(
            'data.source=python("own_ranks:data", how = "marked")',
            ("before the first step", "its target differs"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_ranks_that_differ_after_a_resume(launcher: Launcher, job: Path, setting: str, words: tuple[str, ...]) -> None:
    settings = (setting, "checkpoint.every=5 steps", "checkpoint.resume=auto", "evaluate.every=100 steps")
    made = ready(job, *settings)
    folder = job.parent / "run"
    folder.mkdir()
    train(launcher, folder, made.program, made.places, steps=5)
    (job.parent / "mark").touch()
    message = failure(launcher, job, *settings)
    for each in words:
        assert each in message, message


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_batch_norm_that_a_rank_skips_late_is_named(launcher: Launcher, job: Path, zero: int) -> None:
    file = Path(own_forward_passes.__file__).with_suffix("")
    message = failure(
        launcher,
        job,
        f'model.network=python("{file}:SkippedNorms", how = "late", first = 9, classes = 4)',
        f"parallelism.zero={zero}",
        "train.steps=40",
        "evaluate.every=100 steps",
    )
    assert "the ranks run different modules: rank 0 " in message and " calls `blocks." in message
    assert "own_forward_passes.py:" in message


@pytest.mark.parametrize("zero", [0, 3])
def test_statistics_of_each_rank_alone_may_differ(launcher: Launcher, job: Path, zero: int) -> None:
    network = "model.network=[batch_norm(sync = false), linear(8), batch_norm(), linear(4)]"
    train_job(launcher, job, network, f"parallelism.zero={zero}")


@pytest.mark.parametrize("zero", [0, 3])
def test_models_whose_tensors_have_other_names(launcher: Launcher, job: Path, zero: int) -> None:
    message = failure(launcher, job, 'model.network=python("own_ranks:Named")', f"parallelism.zero={zero}")
    assert "before the first step" in message and "`layers.left.weight` (6, 6) float32 on rank 0" in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('python("own_ranks:data", how = "unseeded")', ("its input differs",)),
        ('python("own_ranks:data", how = "order"), data.workers = 2', ("its input differs",)),
        ('python("own_ranks:Noisy", targets = true)', ("its target differs",)),
        ('python("own_ranks:Noisy", cached = true)', ("drawn anew at each access on rank 1", "its input differs")),
    ],
)
def test_ranks_that_hold_other_samples(launcher: Launcher, job: Path, source: str, words: tuple[str, ...]) -> None:
    source, _, workers = source.partition(", data.workers = ")
    message = failure(launcher, job, f"data.source={source}", f"data.workers={workers or 0}")
    assert "before the first step (job.plt" in message or "before the first step (<--set" in message
    assert "sample 0 of the training data (`dataset[" in message and "rank 1" in message
    for each in words:
        assert each in message


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_ranks_whose_last_samples_alone_differ(launcher: Launcher, job: Path, workers: int) -> None:
    message = failure(launcher, job, 'data.source=python("own_ranks:data", how = "last")', f"data.workers={workers}")
    assert "before the first step" in message and "of the training data (`dataset[" in message
    assert "is not the same on rank 0 and rank 1: its input differs" in message


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_are_drawn_anew_for_each_access_are_not_compared(
    launcher: Launcher, job: Path, workers: int
) -> None:
    train_job(launcher, job, 'data.source=python("own_ranks:Noisy")', f"data.workers={workers}")


@pytest.mark.parametrize(
    ("hook", "settings", "words"),
    [
        ("step = 2", (), ("at step 2 ", "`into.weight` on rank 0 alone", "`after_step`")),
        ("step = 2", ("parallelism.zero=3",), ("at step 2 ", "`into.weight` on rank 0 alone")),
        ('event = "evaluated"', (), ("at step 6 ", "`into.weight` on rank 0 alone")),
        ('event = "after_backward"', (), ("at step 1 ", "the gradient of `into.weight` on rank 0 alone")),
        (
            "only = 1, step = 5, ranks = all",
            (),
            ("after step 6, `into.weight`", "rank 0 and rank 1", "`own_ranks:Scales`"),
        ),
    ],
)
def test_a_hook_that_changes_one_rank_alone(
    launcher: Launcher, job: Path, hook: str, settings: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = failure(launcher, job, f'train.hooks=python("own_ranks:Scales", {hook})', *settings)
    for each in words:
        assert each in message, message


def test_a_forward_pass_that_writes_other_numbers_on_each_rank(launcher: Launcher, job: Path) -> None:
    message = failure(launcher, job, 'model.network=python("own_ranks:Writes")')
    assert "after step 1, `layer.weight` is not the same on rank 0 and rank 1: it differs by 0.25" in message


def test_a_hook_that_does_the_same_on_all_ranks_is_right(launcher: Launcher, job: Path) -> None:
    hook = 'train.hooks=python("own_ranks:Scales", ranks = all)'
    for settings in ((), ("parallelism.zero=3",)):
        train_job(launcher, job, hook, *settings)


# ------------------------------------------------------------------------------------------- messages of other faults


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("none", ("has to be a pair (input, target), and this one is None",)),
        ("single", ("has to be a pair (input, target), and this one is a Tensor",)),
        (
            "raises",
            ('own_ranks.py", line', "in _raises", 'return files[f"image-{index}.png"]', "KeyError: 'image-20.png'"),
        ),
    ],
)
def test_a_sample_is_named_by_its_number_in_the_data_set_and_in_the_split(
    launcher: Launcher, job: Path, how: str, words: tuple[str, ...], workers: int
) -> None:
    source = f'data.source=python("own_ranks:Broken", how = "{how}")'
    message = failure(launcher, job, source, "devices.cpus=1", f"data.workers={workers}")
    for each in words:
        assert each in message, message
    (number,) = re.findall(r"in `dataset\[20\]`, sample (\d+) of the (?:training|validation) data", message)
    assert int(number) < 20
    assert "more)" not in message and "torch/utils" not in message


@pytest.mark.parametrize(
    ("how", "words"), [("killed", "was ended by SIGKILL"), ("exits", "left with exit status 3, without an exception")]
)
def test_a_loader_worker_that_ends_is_named(launcher: Launcher, job: Path, how: str, words: str) -> None:
    source = f'data.source=python("own_ranks:Broken", how = "{how}")'
    message = failure(launcher, job, source, "data.workers=2", "devices.cpus=1")
    assert "training failed on rank 0 at step" in message and "loader worker" in message
    assert " of 2 (process " in message and words in message


@pytest.mark.parametrize("kept", ["calls", "count", "listed.0"])
def test_a_network_whose_own_state_makes_a_loss_infinite_is_not_said_to_draw(
    launcher: Launcher, job: Path, kept: str
) -> None:
    message = failure(launcher, job, f'model.network=python("own_ranks:Counts", kept = "{kept}")', "devices.cpus=1")
    assert "the loss of step 3 is" in message
    assert f"repeated, the step gave a finite loss: the network keeps `{kept}` from call to call" in message
    assert "random" not in message
