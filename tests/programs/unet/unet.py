"""A U-Net for several classes as people train it: batch norm, transposed convolutions, cross entropy and Dice loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CLASSES, SIZE = 3, 18  # of which a half is odd, so that what comes up is padded

Sample = tuple[Tensor, Tensor]


class Scenes(Dataset[Sample]):
    """A disc and a stripe in noise, and the class of each pixel."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Sample:
        random = torch.Generator().manual_seed(index)
        row, column, radius, stripe = (int(n) for n in torch.randint(4, 14, (4,), generator=random))
        rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        mask = ((rows - row) ** 2 + (columns - column) ** 2 < radius * 2).long()
        mask[stripe : stripe + 2] = 2
        image = F.one_hot(mask, CLASSES).permute(2, 0, 1) + 0.5 * torch.randn(CLASSES, SIZE, SIZE, generator=random)
        return image, mask


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
        super().__init__(*layers)


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(inputs, inputs // 2, 2, stride=2), DoubleConv(inputs, outputs)

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        coarse = self.up(coarse)
        rows, columns = fine.size(2) - coarse.size(2), fine.size(3) - coarse.size(3)
        coarse = F.pad(coarse, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        joined: Tensor = self.conv(torch.cat([fine, coarse], dim=1))
        return joined


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inc = DoubleConv(CLASSES, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1, self.up2 = Up(4 * width, 2 * width), Up(2 * width, width)
        self.outc = nn.Conv2d(width, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.inc(image)
        middle = self.down1(fine)
        scores: Tensor = self.outc(self.up2(self.up1(self.down2(middle), middle), fine))
        return scores


def losses_of(scores: Tensor, masks: Tensor) -> Tensor:
    """Returns for each image the cross entropy of its pixels, and the Dice loss of its classes."""
    entropy = F.cross_entropy(scores, masks, reduction="none").mean((1, 2))
    likely, wanted = scores.softmax(1).flatten(2), F.one_hot(masks, CLASSES).permute(0, 3, 1, 2).flatten(2)
    dice = (2 * (likely * wanted).sum(2) + 1e-6) / (likely.sum(2) + wanted.sum(2) + 1e-6)
    return entropy + 1 - dice.mean(1)


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = UNet(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    while len(losses) < steps:
        for images, masks in DataLoader(Scenes(), batch_size=8):
            loss = losses_of(model(images), masks).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
