"""Tensors on the CPU beside those of a GPU are found, by module and line, and code that is right on a GPU is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.devices import NamedDevices, cpu_tensor_of_loss, cpu_tensor_of_network

WORDS = TensorFact(shape=(6,), dtype="int64")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WEIGHTS = torch.ones(8)


class Network(nn.Module):
    """Adds what `way` makes of the words to their embeddings."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.words, self.places, self.memory = nn.Embedding(8, 8), nn.Embedding(6, 8), nn.GRU(8, 8, batch_first=True)
        self.register_buffer("ahead", torch.ones(6, 8))
        self.kept = torch.ones(6, 8)

    def forward(self, words: Tensor) -> Tensor:
        rows: Tensor = self.words(words)
        return rows + getattr(self, self.way)(words, rows)

    def made(self, words: Tensor, rows: Tensor) -> Tensor:
        return self.places(torch.arange(6))

    def attribute(self, words: Tensor, rows: Tensor) -> Tensor:
        return self.kept

    def mask(self, words: Tensor, rows: Tensor) -> Tensor:
        return rows.masked_fill(torch.ones(6, 8, dtype=torch.bool), 0.0)

    def numpy(self, words: Tensor, rows: Tensor) -> Tensor:
        return torch.from_numpy(WEIGHTS.numpy())

    def fetched(self, words: Tensor, rows: Tensor) -> Tensor:
        return rows.cpu()

    def lengths(self, words: Tensor, rows: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(rows, words.ge(0).sum(1), batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.memory(packed)[0], batch_first=True)[0]

    def beside(self, words: Tensor, rows: Tensor) -> Tensor:
        return self.places(torch.arange(6, device=words.device)) + self.ahead

    def by_name(self, words: Tensor, rows: Tensor) -> Tensor:
        return self.places(torch.arange(6, device="cuda")) + torch.ones(8).cuda() + torch.ones(8).to("cuda:0")

    def by_idiom(self, words: Tensor, rows: Tensor) -> Tensor:
        return self.places(torch.arange(6, device=DEVICE)) + torch.ones(8).to(DEVICE)

    def number(self, words: Tensor, rows: Tensor) -> Tensor:
        return rows * torch.tensor(2.0) + rows.new_ones(8) + torch.zeros_like(rows)

    def index(self, words: Tensor, rows: Tensor) -> Tensor:
        return self.places.weight[torch.arange(6)]

    def read(self, words: Tensor, rows: Tensor) -> Tensor:
        return rows[: words.max().item()].mean() + torch.ones(8)


@pytest.mark.parametrize(
    "way, module",
    [("made", "places"), ("attribute", ""), ("mask", ""), ("numpy", ""), ("fetched", ""), ("lengths", "")],
)
def test_a_tensor_on_the_cpu_is_found(way: str, module: str) -> None:
    place = cpu_tensor_of_network(Network(way), WORDS)
    assert place is not None and (place.module, place.line.partition(":")[0]) == (module, Path(__file__).name)


@pytest.mark.parametrize("way", ("beside", "by_name", "by_idiom", "number", "index", "read"))
def test_code_that_is_right_on_a_gpu_is_not_found(way: str) -> None:
    """Nor is code after a number that is read, which has none here."""
    network = Network(way)
    before = {name: id(tensor) for name, tensor in network.state_dict(keep_vars=True).items()}
    assert cpu_tensor_of_network(network, WORDS) is None
    assert {name: id(tensor) for name, tensor in network.state_dict(keep_vars=True).items()} == before


def test_the_tensors_of_a_loss_are_found() -> None:
    scores, words = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)
    place = cpu_tensor_of_loss(lambda output, target: F.cross_entropy(output, target, WEIGHTS), scores, words)
    assert place is not None and place.line.startswith(Path(__file__).name)
    right = cpu_tensor_of_loss(
        lambda output, target: F.cross_entropy(output, target, WEIGHTS.to(output)), scores, words
    )
    assert right is None


def test_code_that_names_a_gpu_runs_on_the_cpu() -> None:
    with NamedDevices(torch.device("cpu")):
        made = (
            torch.ones(2, device="cuda"),
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda:1"),
            torch.zeros(2, device=0),
        )
    assert {tensor.device.type for tensor in made} == {"cpu"}
