"""Pictures that are augmented: the same training as a plain loop of torchvision's, on any number of ranks and workers,
and wherever it resumes; evaluations see pictures as they are.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import made_data
from helpers.commands import dslc
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, ready, train_job
from safetensors.torch import save_file

from dslc.runtime.data.sampler import permutation
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.process.random_numbers import begin_sample

importlib.import_module("helpers.vision")  # so that children that try a job have torchvision already

AUGMENT = (
    "augment = [random_resized_crop(8, scale = [0.3, 1.0]), random_horizontal_flip(), color_jitter(0.4, 0.4, 0.4), "
    "rand_augment(), trivial_augment_wide(), random_erasing(0.25)]"
)
JOB = """
model {{ network = [flatten(), linear(2)], loss = cross_entropy() }}
data {{ source = {source}, batch = 8, validation = 0.2 }}
devices {{ cpus = 1 }}
train {{ steps = 9, optimizer = sgd(lr = 0.1) }}
evaluate {{ every = 3 steps }}
log {{ every = 1 step, tensorboard = false }}
"""
STEPS, FOUR = 9, "devices.cpus=4"


pytestmark = pytest.mark.usefixtures("loaded")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 pictures of two classes; those of an epoch make four steps."""
    folder = tmp_path_factory.mktemp("pictures")
    made_data.pictures(folder / "all", 24)
    return written(folder, f'images("all", size = 8, resize = 9, {AUGMENT}, normalize = imagenet)')


@pytest.fixture(scope="module")
def one(job: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, job, "checkpoint.every=5 steps", "checkpoint.keep=9")


def written(folder: Path, source: str) -> Path:
    (folder / "job.plt").write_text(JOB.format(source=source))
    return folder / "job.plt"


def samples(job: Path, *settings: str, training: bool = True) -> Any:
    return open_source(ready(job, *settings).program.data, training=training)


@pytest.mark.parametrize(
    "plan",
    [
        ("devices.cpus=2", "data.workers=2"),
        (FOUR, "parallelism.zero=3"),
        pytest.param((FOUR, "data.workers=2", "parallelism.zero=2"), marks=pytest.mark.long),
        pytest.param(("parallelism.microbatches=4", "data.workers=1"), marks=pytest.mark.long),
    ],
    ids=lambda plan: " ".join(plan),
)
def test_the_training_is_that_of_one_process(
    job: Path, launcher: Launcher, one: Trained, plan: tuple[str, ...]
) -> None:
    agree(one, train_job(launcher, job, *plan, "parallelism.microbatches=2"))
    assert len(set(one.losses())) == STEPS


@pytest.mark.core
def test_it_resumes_to_the_bit(job: Path, launcher: Launcher, one: Trained) -> None:
    """In the middle of its second epoch."""
    again = train_job(launcher, job, f'checkpoint.resume="{one.folder}/checkpoints/step-00000005"')
    assert again.losses() == one.losses()[5:]
    for name, value in one.weights.items():
        assert (again.weights[name] == value).all()


def test_it_is_the_plain_loop(job: Path, launcher: Launcher) -> None:
    """The loop has torchvision's ImageFolder and transforms, seeded for each sample."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    torch.manual_seed(3)
    linear = torch.nn.Linear(192, 2)
    save_file({"1.weight": linear.weight.detach(), "1.bias": linear.bias.detach()}, job.parent / "start.safetensors")
    settings = (f"model.weights={job.parent}/start.safetensors",)
    found = train_job(launcher, job, *settings)
    step = ready(job, *settings).program.data
    folder = ImageFolder(
        str(job.parent / "all"),
        v2.Compose(
            [
                v2.RandomResizedCrop(8, scale=(0.3, 1.0)),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(0.4, 0.4, 0.4),
                v2.RandAugment(),
                v2.TrivialAugmentWide(),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
                v2.RandomErasing(0.25),
            ]
        ),
    )
    chosen = samples(job).train.chosen
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    losses = []
    per_epoch = step.train_samples // step.batch
    for number in range(STEPS):
        epoch, k = divmod(number, per_epoch)
        pairs = []
        for index in chosen[permutation(step, epoch)[k * step.batch : (k + 1) * step.batch]].tolist():
            begin_sample(step.seed, "train", epoch, index)
            pairs.append(folder[index])
        pictures, targets = torch.stack([picture for picture, _ in pairs]), torch.tensor([label for _, label in pairs])
        loss = torch.nn.functional.cross_entropy(linear(pictures.flatten(1)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(found.losses(), losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.weights["1.weight"], linear.weight.detach(), rtol=0, atol=1e-5)


def test_evaluations_and_predictions_see_pictures_as_they_are(job: Path) -> None:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    plain = v2.Compose(
        [
            v2.Resize(9),
            v2.CenterCrop(8),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    folder = ImageFolder(str(job.parent / "all"), plain)
    trained, evaluated = samples(job), samples(job, training=False)
    for part in (trained.validation, evaluated.validation, evaluated.train):
        pictures, targets = part.batch(torch.arange(len(part)))
        for picture, target, index in zip(pictures, targets, part.chosen.tolist(), strict=True):
            expected, label = folder[index]
            torch.testing.assert_close(picture, expected)
            assert target == label
    assert not torch.equal(trained.train.batch(torch.arange(4))[0], evaluated.train.batch(torch.arange(4))[0])


def test_a_picture_follows_from_seed_epoch_and_number(job: Path) -> None:
    train = samples(job).train
    whole, labels = train.batch(torch.arange(9), 1)
    for order in (torch.tensor([5, 2, 7]), torch.tensor([2])):
        pictures, targets = train.batch(order, 1)
        assert torch.equal(pictures, whole[order]) and torch.equal(targets, labels[order])
    assert not torch.equal(train.batch(torch.arange(9), 2)[0], whole)
    assert not torch.equal(samples(job, "train.seed=7").train.batch(torch.arange(9), 1)[0], whole)


GRAY = "augment = [random_crop({size}, padding = 2), random_horizontal_flip()], normalize = mnist"
COLOURED = "augment = [random_crop({size}, padding = 2), auto_augment(cifar10)], normalize = cifar10"
OTHERS: dict[str, tuple[Callable[[Path], object], str, str, tuple[int, ...]]] = {
    "mnist": (made_data.mnist, 'mnist("d", MORE)', GRAY.format(size=28), (1, 28, 28)),
    "cifar10": (made_data.cifar10, 'cifar10("d", MORE)', COLOURED.format(size=32), (3, 32, 32)),
    "parquet": (
        lambda folder: made_data.parquet(folder, x=made_data.encoded(), y=np.arange(40) % 2),
        'parquet("d/*.parquet", size = 5, MORE)',
        COLOURED.format(size=5),
        (3, 5, 5),
    ),
    "parquet of gray pictures": (
        lambda folder: made_data.parquet(folder, x=made_data.encoded(), y=np.arange(40) % 2),
        'parquet("d/*.parquet", MORE)',
        "augment = [random_vertical_flip(), rand_augment()], normalize = normalize(mean = 0.5, std = [0.25])",
        (1, 6, 7),
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_sources_of_pictures(tmp_path: Path, kind: str) -> None:
    make, source, more, shape = OTHERS[kind]
    make(tmp_path / "d")
    settings = () if kind.startswith("parquet") else ("data.validation=0",)
    settings = (*settings, "model.network=[flatten(), linear(10)]")
    plain = samples(written(tmp_path, source.replace(", MORE", "")), *settings)
    found = samples(written(tmp_path, source.replace("MORE", more)), *settings)
    some = torch.tensor([3, 0, 5])
    stored, labels = plain.train.batch(some)
    made, targets = found.train.batch(some)
    assert made.shape == (3, *shape) and made.dtype == torch.float32
    assert torch.equal(targets, labels) and targets.dtype == labels.dtype
    assert not torch.allclose(made, stored)
    assert torch.equal(made[1:], found.train.batch(some[1:])[0])
    numbers = ready(tmp_path / "job.plt", *settings).program.data.pictures
    assert numbers is not None
    mean, std = (torch.tensor(each)[:, None, None] for each in (numbers.mean, numbers.std))
    torch.testing.assert_close(found.validation.batch(some)[0], (plain.validation.batch(some)[0] - mean) / std)


TRANSFORMS = """
import torch
from torchvision.transforms import v2

composed = v2.Compose([v2.RandomResizedCrop(8), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

def function(picture):
    return composed(picture)

def made(size):
    return v2.Compose([v2.RandomResizedCrop(size)])

class Kept(torch.nn.Module):
    def __init__(self, size = 8):
        super().__init__()
        self.inner = v2.RandomResizedCrop(size)

    def forward(self, picture):
        return v2.functional.pil_to_tensor(self.inner(picture))

def numbers(picture):
    return [1, 2]

def uneven(picture):
    return v2.functional.center_crop(picture, [8, 8 if picture.size[0] < 200 else 9])
"""


def own(folder: Path, function: str) -> Path:
    (folder / "transforms_of_mine.py").write_text(TRANSFORMS)
    if not (folder / "all").exists():
        made_data.pictures(folder / "all", 24)
    source = f'images("all", size = 8, transform = python("transforms_of_mine:{function}"), normalize = imagenet)'
    return written(folder, source.replace('made"', 'made", size = 8'))


def test_a_transform_of_ones_own(tmp_path: Path) -> None:
    """All of these are one transform: an object, a function of a picture, and what a function or a class returns."""
    made = {}
    for name in ("composed", "function", "made", "Kept"):
        made[name], _ = samples(own(tmp_path, name)).train.batch(torch.arange(6), 1)
    for pictures in made.values():
        torch.testing.assert_close(pictures, made["composed"])


@pytest.mark.core
def test_a_transform_trains_and_its_faults_are_named(launcher: Launcher, tmp_path: Path) -> None:
    agree(train_job(launcher, own(tmp_path, "composed")), train_job(launcher, tmp_path / "job.plt", "devices.cpus=2"))
    with pytest.raises(AssertionError, match="gives list, which is no picture"):
        ready(own(tmp_path, "numbers"))
    from PIL import Image

    Image.new("RGB", (300, 20)).save(tmp_path / "all" / "cat" / "wide.png")
    with pytest.raises(AssertionError, match=r"job.plt:3:\d+: .*wide.png is of shape \(3, 8, 9\), and others are"):
        train_job(launcher, own(tmp_path, "uneven"), "data.validation=0", "data.workers=1")


def test_a_picture_that_is_too_small_is_named(tmp_path: Path) -> None:
    made_data.pictures(tmp_path / "all", 24)
    job = written(tmp_path, 'images("all", size = 40, augment = [random_crop(40)])')
    with pytest.raises(RuntimeError, match=r"job.plt:3:\d+: .*/all/\w+/\d+\.\w+ cannot be augmented: "):
        samples(job).train.batch(torch.arange(3))


def test_a_library_that_is_not_installed_is_named(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "torchvision" else found(name))
    from dslc.dsl.diagnostics import Report
    from dslc.dsl.meaning.load import load
    from dslc.jobs.check_job import inspect

    report = Report()
    inspect(load(str(job)), report)
    assert [(d.code, "dslc[torchvision]" in (d.help or "")) for d in report] == [("W0803", True)]


@pytest.mark.long
def test_a_plan_shows_it_and_it_holds_the_invariants(job: Path) -> None:
    run = dslc("verify", job, "--steps", "3", "--set", "devices.cpus=2", cwd=job.parent)
    made = dslc("plan", job, cwd=job.parent).stdout
    assert "random_resized_crop, random_horizontal_flip" in made and "normalised (imagenet), random_erasing" in made
    assert run.returncode == 0 and "the plan trains as one process does" in run.stdout, run.stdout + run.stderr
