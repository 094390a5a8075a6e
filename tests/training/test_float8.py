"""Products in 8 bits: step by step as a hand-written loop with torchao, and on every plan as on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.job_texts import SENTENCES, job_text
from helpers.launcher import Launcher
from helpers.measured_memory import Case, measure
from helpers.tiny_llama import TINY_LLAMA, save_llama
from helpers.trained import Trained, agree, ready, train_job
from torch import Tensor, nn

from dslc.runtime.data.batches import batches
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.model.meta_model import build_model

STEPS, BATCH, RATE = 4, 8, 1e-2
PRECISION = 'fp8({}, skip = "head", emulate = true)'
TWO, FOUR = "devices.cpus=2", "devices.cpus=4"
PLANS = {
    "zero 0": (TWO,),
    "zero 1": (TWO, "parallelism.zero=1"),
    "zero 2": (TWO, "parallelism.zero=2", "parallelism.microbatches=2"),
    "zero 3": (TWO, "parallelism.zero=3"),
    "pipeline": (TWO, "parallelism.pipeline=2", "parallelism.microbatches=2"),
    "context": (TWO, "parallelism.context=2"),
    "tensor": (TWO, "parallelism.tensor=2", "parallelism.sequence=true"),
    "tensor whole": (TWO, "parallelism.tensor=2", "memory.recompute=full"),
    "tensor zero 3": (FOUR, "parallelism.tensor=2", "parallelism.zero=3"),
    "recomputed": ("memory.recompute=full",),
    "all": (FOUR, "parallelism.pipeline=2", "parallelism.microbatches=2", "parallelism.zero=3"),
}
QUICK = ("zero 3", "pipeline", "tensor")
GPT: dict[str, object] = {"network": "gpt(layers = 2, width = 32, heads = 2, context = 16, vocab = 256)"}
LLAMA: dict[str, object] = {"network": 'transformers("saved")', "weights": '"saved"'}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float8")
    (folder / "sentences.py").write_text(SENTENCES)
    for name, model in (("gpt", GPT), ("llama", LLAMA)):
        text = job_text(
            model=model,
            data={"source": "stdlib()", "batch": BATCH},
            train={
                "steps": STEPS,
                "optimizer": f"adamw(lr = {RATE})",
                "precision": PRECISION.format("tensorwise").replace('"head"', '"*head"'),
            },
        )
        source = 'python("sentences:Sentences")'
        (folder / f"{name}.plt").write_text(text if name == "gpt" else text.replace("stdlib()", source))
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, folder / "gpt.plt")


@contextmanager
def torchao_autocast() -> Iterator[None]:
    """Autocast on a CPU. torchao asks for the settings of a GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def train_by_hand(
    model: nn.Module, samples: Sequence[tuple[Tensor, Tensor]], recipe: str, parts: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses and the weights of a plain loop with torchao, each batch in so many parts."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: not name.endswith("head"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses: list[float] = []
    for inputs, targets in samples:
        optimizer.zero_grad()
        total = 0.0
        for input, target in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with torchao_autocast():
                output: Any = model(input)
                logits = getattr(output, "logits", output).flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, target.flatten()) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, dict(model.named_parameters())


def compare(trained: Trained, by_hand: tuple[list[float], dict[str, Tensor]], *, exact: bool) -> None:
    """Asserts equal losses and weights. Adam divides a gradient by its size, so that the rounding of small ones
    counts.
    """
    losses, weights = by_hand
    np.testing.assert_allclose(trained.losses(), losses, rtol=0, atol=1e-6 if exact else 1e-5)
    for name, weight in weights.items():
        limit = 1e-6 if exact else 0.05 * RATE * STEPS
        np.testing.assert_allclose(trained.weights[name], weight.detach().numpy(), rtol=0, atol=limit, err_msg=name)


@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")
@pytest.mark.parametrize(
    ("recipe", "plan"),
    [
        ("tensorwise", ""),
        pytest.param("rowwise", "", marks=pytest.mark.slow),
        pytest.param("tensorwise", "zero 3", marks=pytest.mark.slow),
        pytest.param("rowwise", "zero 3", marks=pytest.mark.long),
    ],
)
def test_a_job_trains_as_a_loop_with_torchao(
    folder: Path, launcher: Launcher, one_rank: Trained, recipe: str, plan: str
) -> None:
    """A rank scales the numbers of its own samples: the loop computes as many parts of a batch as there are ranks."""
    settings = (f"train.precision={PRECISION.format(recipe)}", *PLANS.get(plan, ()))
    trained = one_rank if recipe == "tensorwise" and not plan else train_job(launcher, folder / "gpt.plt", *settings)
    made = ready(folder / "gpt.plt")
    data, device = made.program.data, torch.device("cpu")
    steps = batches(data, open_source(data), made.places[0], 1, 0, STEPS, device)
    samples: Any = [batch.micro[0] for batch in steps]
    model = build_model(made.program.model, device)
    compare(trained, train_by_hand(model, samples, recipe, 2 if plan else 1), exact=not plan)


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=pytest.mark.slow if plan in QUICK else pytest.mark.long) for plan in PLANS]
)
def test_each_plan_as_one_rank(folder: Path, launcher: Launcher, one_rank: Trained, plan: str) -> None:
    """Other scales round otherwise: numbers in 8 bits are a sixteenth of their size apart."""
    other = train_job(launcher, folder / "gpt.plt", *PLANS[plan])
    agree(one_rank, other, losses=0.02, weights=None)


GATHERED = PRECISION.format("tensorwise, all_gather = true")
OTHERS = {
    "": (TWO,),
    "recomputed": (TWO, "memory.recompute=full", "parallelism.microbatches=2"),
    "replicas": (FOUR, "parallelism.replicas=2", "train.clip=1.0"),
    "pipeline": (FOUR, "parallelism.pipeline=2", "parallelism.microbatches=2"),
    "context": (TWO, "parallelism.context=2"),
    "compiled": (TWO, "train.compile=true"),
    "tied": (TWO, "model.network.tie=true"),
}


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=pytest.mark.slow if not plan else pytest.mark.long) for plan in OTHERS]
)
def test_a_gather_in_8_bits_has_the_numbers_of_one_in_32(folder: Path, launcher: Launcher, plan: str) -> None:
    """Validations are of the weights of a step, and of their average."""
    common = ("parallelism.zero=3", "data.validation=0.002%", "evaluate.every=2 steps", "train.ema=0.5", *OTHERS[plan])
    wide, narrow = (
        train_job(launcher, folder / "gpt.plt", f"train.precision={precision}", *common)
        for precision in (PRECISION.format("tensorwise"), GATHERED)
    )
    for split in ("train", "validation"):
        assert wide.losses(split) == narrow.losses(split), split
    for name, weight in wide.weights.items():
        np.testing.assert_array_equal(narrow.weights[name], weight, err_msg=name)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")
def test_a_network_of_transformers_as_a_loop_with_torchao(folder: Path, launcher: Launcher) -> None:
    model = save_llama(folder / "saved")
    trained = train_job(launcher, folder / "llama.plt", "data.shuffle=false")
    space: dict[str, Any] = {}
    exec(SENTENCES, space)
    sentences = space["Sentences"]()
    samples: Any = []
    for step in range(STEPS):
        pairs = [sentences[(step * BATCH + n) % len(sentences)] for n in range(BATCH)]
        samples.append(tuple(map(torch.stack, zip(*pairs, strict=True))))
    compare(trained, train_by_hand(model, samples, "tensorwise", 1), exact=True)
    in_stages = train_job(launcher, folder / "llama.plt", "data.shuffle=false", *PLANS["pipeline"])
    agree(trained, in_stages, losses=0.02, weights=None)


@pytest.mark.long
def test_the_account_of_a_traced_network_has_the_casts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("hidden_size", 256), ("intermediate_size", 512)):
        monkeypatch.setitem(TINY_LLAMA, name, size)
    save_llama(folder / "wide")
    text = (folder / "llama.plt").read_text().replace('"saved"', f'"{folder}/wide"')
    found = measure(text.replace('"sentences:', f'"{folder}/sentences:'))
    assert "matmul_with_hp_or_float8" in found.when
    assert abs(found.error) <= 0.02, (found.error, found.predicted, found.at_peak, found.when)


EMULATED, GATHERING = "fp8(emulate = true)", "fp8(emulate = true, all_gather = true)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(precision=EMULATED),
        Case(network="mlp", ranks=2, zero=3, precision=EMULATED),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                Case(precision=EMULATED, batch=2),
                Case(precision=EMULATED, recompute="full"),
                Case(network="mlp", precision="fp8(rowwise, emulate = true)"),
                Case(network="mlp", precision=EMULATED, microbatches=4),
                Case(ranks=2, precision=EMULATED),
                Case(ranks=2, zero=3, precision=EMULATED),
                Case(ranks=2, zero=3, precision=GATHERING),
                Case(network="mlp", ranks=2, zero=3, precision=GATHERING, microbatches=2),
                Case(ranks=2, zero=3, precision=GATHERING, recompute="full"),
                Case(ranks=2, tensor=2, sequence="true", precision=EMULATED),
                Case(network="mlp", ranks=2, tensor=2, precision="fp8(rowwise, emulate = true)"),
                Case(network="llama", precision='fp8(rowwise, emulate = true, skip = "lm_head")'),
            )
        ),
    ],
    ids=str,
)
def test_the_account_has_the_casts(case: Case) -> None:
    found = measure(case.text)
    assert abs(found.error) <= 0.02, (found.error, found.predicted, found.at_peak, found.when)
