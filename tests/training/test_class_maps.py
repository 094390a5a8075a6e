"""Segmentations, whose scores have the classes first: losses and metrics on two ranks as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.launcher import Launcher
from helpers.trained import agree, train_job

SEGMENTS = """
import torch
import torch.nn.functional as F
from torch import nn

class Images:
    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 24

    def __getitem__(self, index):
        numbers = torch.Generator().manual_seed(self.first + index)
        mask = torch.randint(3, (6, 8), generator=numbers)
        mask[torch.rand(6, 8, generator=numbers) < index / 50] = -100
        return torch.randn(2, 6, 8, generator=numbers), mask

def images():
    return Images(0), Images(1000)

def network():
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

def of_samples(output, target):
    return F.cross_entropy(output, target, reduction="none").flatten(1).mean(1)
"""
JOB = """
model { network = python("segments:network"), loss = LOSS }
data { source = python("segments:images"), batch = 8 }
devices { cpus = 1 }
train { steps = 3, optimizer = sgd(lr = 0.1) }
evaluate { metrics = [loss, accuracy, iou()] }
log { every = 1 step, tensorboard = false }
"""


@pytest.mark.parametrize("loss", ["cross_entropy()", 'python("segments:of_samples")'])
def test_a_segmentation_trains_on_two_ranks_as_on_one(tmp_path: Path, launcher: Launcher, loss: str) -> None:
    (tmp_path / "segments.py").write_text(SEGMENTS)
    path = tmp_path / "job.plt"
    path.write_text(JOB.replace("LOSS", loss))
    one = train_job(launcher, path)
    two = train_job(launcher, path, "devices.cpus=2", "parallelism.zero=3")
    agree(one, two)
    last, other = (trained.records["validation", 3] for trained in (one, two))
    assert last["accuracy"] == pytest.approx(other["accuracy"]) and last["iou"] == pytest.approx(other["iou"])
    space: dict[str, object] = {}
    exec(SEGMENTS, space)
    held, model = space["Images"](1000), space["network"]()  # type: ignore[operator]
    model.load_state_dict({name: torch.from_numpy(value) for name, value in one.weights.items()})
    images, masks = (torch.stack(parts) for parts in zip(*(held[n] for n in range(24)), strict=True))
    scores = model(images)
    right = (scores.argmax(1) == masks)[masks != -100].float().mean()
    assert last["accuracy"] == pytest.approx(right.item())
    losses = F.cross_entropy(scores, masks, reduction="none").flatten(1).mean(1).mean()
    assert last["loss"] == pytest.approx(
        (losses if "python" in loss else F.cross_entropy(scores, masks)).item(), rel=1e-5
    )
