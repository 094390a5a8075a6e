"""Detection: a picture has no, one or several boxes; targets are a dict for each picture, and boxes are matched."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

CLASSES, QUERIES = 3, 4
Target = dict[str, Tensor]
Batch = tuple[Tensor, list[Target]]


class Scenes:
    """Bright boxes on a dark picture of 16 x 16; a box's class is its brightness."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        random = torch.Generator().manual_seed(index)
        count = int(torch.randint(0, 4, (1,), generator=random))
        boxes = torch.cat([torch.rand(count, 2, generator=random) * 10, torch.full((count, 2), 4.0)], 1)
        labels = torch.randint(0, CLASSES, (count,), generator=random)
        picture = torch.zeros(1, 16, 16)
        for (x, y, width, height), label in zip(boxes.long().tolist(), labels.tolist(), strict=True):
            picture[0, y : y + height, x : x + width] = 1.0 + label
        return picture, {"boxes": boxes / 16, "labels": labels}


def listed(samples: list[tuple[Tensor, Target]]) -> Batch:
    return torch.stack([picture for picture, _ in samples]), [target for _, target in samples]


class Detector(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, 64), nn.ReLU()
        )
        self.boxes, self.classes = nn.Linear(64, QUERIES * 4), nn.Linear(64, QUERIES * (CLASSES + 1))

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        states = self.body(pictures)
        boxes, scores = self.boxes(states).sigmoid(), self.classes(states)
        return {"boxes": boxes.unflatten(1, (QUERIES, 4)), "scores": scores.unflatten(1, (QUERIES, CLASSES + 1))}


def matched(output: dict[str, Tensor], targets: list[Target]) -> Tensor:
    """Returns one loss for each picture: every box takes the nearest query that is left, and the others say nothing."""
    losses = []
    for boxes, scores, target in zip(output["boxes"], output["scores"], targets, strict=True):
        wanted = torch.full((QUERIES,), CLASSES, device=scores.device)
        far = torch.cdist(target["boxes"], boxes.detach(), p=1)
        distance = boxes.sum() * 0
        for number, label in enumerate(target["labels"]):
            query = int(far[number].argmin())
            far[:, query] = torch.inf
            wanted[query] = label
            distance = distance + (boxes[query] - target["boxes"][number]).abs().sum()
        losses.append(F.cross_entropy(scores, wanted) + distance)
    return torch.stack(losses)


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Detector()
    losses: list[float] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: DataLoader[Batch] = DataLoader(Scenes(), batch_size=8, collate_fn=listed)  # type: ignore[arg-type]
    while len(losses) < steps:
        for pictures, targets in loader:
            loss = matched(model(pictures), targets).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
