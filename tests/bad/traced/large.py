import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(20_000, 20_000))

    def forward(self, x):
        return torch.softmax(x[:, :10] + self.table[0, :10], 1)


def data():
    return [(torch.rand(16), n % 10) for n in range(32)]


def divergence(output, target):
    assert torch.allclose(output.sum(1), torch.ones(len(output))), "no probabilities"
    return -output.log().gather(1, target[:, None])[:, 0]
