"""A sequence of several documents gives each what it would give it alone: outputs, gradients and losses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.launcher import Launcher
from helpers.trained import agree, ready, train_job
from torch import Tensor

from dslc.compiler.ir.program import TransformersStep
from dslc.jobs.check_job import check_one
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.model import documents
from dslc.runtime.model.losses import count, loss_sum
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.model.transformers_model import build_transformers
from dslc.runtime.process.vision_library import let_torchvision_load

let_torchvision_load()
from transformers import CONFIG_MAPPING  # noqa: E402 - after torchvision

END = 10  # the byte of a new line
JOB = """
model {
  network = NETWORK
  loss    = cross_entropy()
}
data {
  source     = text("lines.txt", context = 24)
  batch      = 4
  documents  = 10
  validation = 20%
}
devices { cpus = 1 }
train {
  steps     = 4
  optimizer = sgd(lr = 0.1)
}
evaluate {
  metrics = [loss, accuracy]
}
log {
  every       = 1 step
  tensorboard = false
}
"""
NETWORKS = {
    "gpt": "gpt(layers = 2, width = 16, heads = 2, context = 24, vocab = 256)",
    "llama": "llama(layers = 2, width = 16, heads = 4, kv_heads = 2, hidden = 24, context = 24, window = 5)",
    "hub llama": """transformers("llama", num_hidden_layers = 2, hidden_size = 16, intermediate_size = 24,
        num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 256, max_position_embeddings = 24)""",
    "hub gpt2": """transformers("gpt2", n_layer = 2, n_embd = 16, n_head = 2, vocab_size = 256, n_positions = 24,
        attn_pdrop = 0.0, embd_pdrop = 0.0, resid_pdrop = 0.0)""",
    "hub qwen3 window": """transformers("qwen3", num_hidden_layers = 2, hidden_size = 16, intermediate_size = 24,
        num_attention_heads = 4, num_key_value_heads = 2, head_dim = 8, vocab_size = 256, sliding_window = 5,
        use_sliding_window = true, max_window_layers = 1, max_position_embeddings = 24)""",
    "layers": "[embedding(width = 16), positional_embedding(), attention(heads = 2), layer_norm(), linear(256)]",
}


def job_with(folder: Path, network: str) -> Path:
    lines = [f"a line of {n} words " * (n % 3 + 1) for n in range(40)]
    (folder / "lines.txt").write_text("\n".join(line[: 3 + n * 5 % 19] for n, line in enumerate(lines)))
    job = folder / "job.plt"
    job.write_text(JOB.replace("NETWORK", NETWORKS[network]))
    return job


SLOW = [pytest.param(name, marks=pytest.mark.slow) if name.startswith("hub") else name for name in NETWORKS]


@pytest.mark.parametrize("network", SLOW)
def test_the_loss_and_the_gradient_are_those_of_each_document_alone(tmp_path: Path, network: str) -> None:
    program = ready(job_with(tmp_path, network)).program
    assert program.loss.counts == "kept"
    model = build_model(program.model, "cpu")
    documents.apply(program.model.documents, model, masks=program.model.documents_masked)
    total = loss_sum(program.loss)
    inputs, targets = open_source(program.data).train.batch(torch.arange(4))
    assert (inputs == END).any(1).all() and torch.equal(targets == -100, inputs == END)

    def trained(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, int, list[Tensor]]:
        model.zero_grad()
        losses, kept = 0.0, 0
        for input, target in pairs:
            loss = total(model(input), target)
            loss.backward()
            losses, kept = losses + loss.item(), kept + int(count(program.loss, target))
        return losses, kept, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    alone = []
    for input, target in zip(inputs, targets, strict=True):
        bounds = [0, *((input == END).nonzero().flatten() + 1).tolist(), len(input)]
        alone += [(input[None, a:b], target[None, a:b]) for a, b in pairwise(bounds) if b > a]
    assert len(alone) > 6
    whole, each = trained([(inputs, targets)]), trained(alone)
    assert whole[1] == each[1] and whole[0] == pytest.approx(each[0], rel=1e-5)
    for found, expected in zip(whole[2], each[2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("network", "plan"),
    [
        ("gpt", ("devices.cpus=4", "parallelism.tensor=2", "parallelism.sequence=true", "parallelism.microbatches=2")),
        ("llama", ("devices.cpus=2", "parallelism.zero=3", "memory.recompute=full")),
        ("gpt", ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=4", "memory.recompute=full")),
        ("gpt", ("devices.cpus=2", "parallelism.context=2", "parallelism.microbatches=2")),
        *(
            pytest.param("llama", (f"devices.cpus={ranks}", *plan), marks=pytest.mark.long)
            for ranks, plan in (
                (2, ("parallelism.pipeline=2", "parallelism.microbatches=4")),
                (2, ("parallelism.pipeline=2", "parallelism.schedule=zbv", "parallelism.microbatches=4")),
                (2, ("parallelism.context=2", "memory.recompute=full", "parallelism.zero=3")),
                (4, ("parallelism.context=2", "parallelism.pipeline=2", "parallelism.microbatches=2")),
                (4, ("parallelism.context=2", "parallelism.tensor=2", "memory.recompute=selective")),
            )
        ),
        *(
            pytest.param("hub llama", ("devices.cpus=2", *plan), marks=pytest.mark.slow)
            for plan in (
                ("parallelism.zero=3", "memory.recompute=full"),
                ("parallelism.tensor=2", "parallelism.microbatches=2"),
                ("parallelism.context=2",),
                ("parallelism.pipeline=2", "parallelism.microbatches=4", "memory.recompute=full"),
            )
        ),
        *(
            pytest.param(network, (f"devices.cpus={ranks}", *plan), marks=pytest.mark.long)
            for network, ranks, plan in (
                ("hub gpt2", 2, ("parallelism.pipeline=2", "parallelism.microbatches=2")),
                ("hub qwen3 window", 2, ("parallelism.pipeline=2", "parallelism.microbatches=2")),
                ("hub gpt2", 2, ("parallelism.context=2", "parallelism.microbatches=2")),
                ("hub llama", 4, ("parallelism.context=2", "parallelism.pipeline=2", "parallelism.microbatches=2")),
            )
        ),
        *(
            pytest.param(network, ("train.compile=true", *plan), marks=mark)
            for network, plan, mark in (
                ("gpt", ("memory.recompute=full",), pytest.mark.slow),
                ("hub llama", (), pytest.mark.long),
                ("gpt", ("devices.cpus=2", "parallelism.context=2"), pytest.mark.long),
                ("llama", ("devices.cpus=2", "parallelism.zero=3"), pytest.mark.long),
                ("gpt", ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=4"), pytest.mark.long),
                ("gpt", ("devices.cpus=2", "parallelism.tensor=2"), pytest.mark.long),
            )
        ),
    ],
)
def test_documents_train_over_ranks_as_in_one_process(
    launcher: Launcher, tmp_path: Path, network: str, plan: tuple[str, ...]
) -> None:
    job = job_with(tmp_path, network)
    one = train_job(launcher, job)
    agree(one, train_job(launcher, job, *plan))


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "ffn_dim": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "word_embed_proj_dim": 32,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
ARCHITECTURES = (
    *("mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi", "phi3", "olmo2", "gpt_neox", "mixtral", "qwen3_moe"),
    *("opt", "deepseek_v3", "smollm3", "granite", "cohere", "starcoder2", "glm4", "ernie4_5"),
)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES)]
)
def test_architectures_of_the_library_keep_documents_apart(name: str) -> None:
    config = CONFIG_MAPPING[name]()
    arguments = {key: value for key, value in SIZES.items() if key in config.to_dict() or key in config.attribute_map}
    step = TransformersStep(name=name, arguments=arguments)
    model, plain = build_transformers(step).eval(), build_transformers(step).eval()
    plain.load_state_dict(model.state_dict())
    inputs = torch.arange(48).reshape(2, 24) % 63 + 1
    for row, place in ((0, 5), (0, 11), (1, 7), (1, 20), (1, 21), (1, 22)):
        inputs[row, place] = 0
    reason, is_masked = documents.document_attention(model, 24)
    assert not reason and not is_masked
    documents.apply(0, model)

    def trained(network: torch.nn.Module, batches: list[Tensor]) -> tuple[float, Tensor]:
        losses = [(network(batch).square() * torch.linspace(0.5, 1, 64)).sum() for batch in batches]
        sum(losses).backward()
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        return sum(loss.item() for loss in losses), torch.cat([gradient.flatten() for gradient in gradients])

    one, other = trained(model, [inputs]), trained(plain, [part for row in inputs for part in parts_of(row)])
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert (one[1] - other[1]).norm() < 1e-5 * other[1].norm()


def parts_of(row: Tensor) -> list[Tensor]:
    bounds = [0, *((row == 0).nonzero().flatten() + 1).tolist(), len(row)]
    return [row[None, a:b] for a, b in pairwise(bounds) if b > a]


@pytest.mark.slow
def test_a_network_of_the_library_computes_what_it_does_by_position_ids(tmp_path: Path) -> None:
    """The library tells documents apart by their positions, as padding-free batches of TRL do: all in one row."""
    program = ready(job_with(tmp_path, "hub llama")).program
    model, plain = (build_model(program.model, "cpu").eval() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    documents.apply(program.model.documents, model)
    inputs, _ = open_source(program.data).train.batch(torch.arange(4))
    ends = F.pad(inputs.flatten() == END, (1, 0), value=True)[:-1]
    ends[:: inputs.shape[1]] = True
    places = torch.arange(len(ends))
    positions = places - torch.where(ends, places, 0).cummax(0).values
    with torch.no_grad():
        expected = plain(inputs.view(1, -1), position_ids=positions[None])
        torch.testing.assert_close(model(inputs).view_as(expected), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_keep_documents_apart_is_refused() -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    for name, arguments, reason in (
        ("bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}, "not exchangeable"),
        ("gemma2", small | {"num_key_value_heads": 1, "head_dim": 8}, "caps the scores"),
        ("gpt_oss", small | {"num_key_value_heads": 1, "num_local_experts": 2}, "sinks"),
        ("lfm2", small | {"layer_types": ["conv"]}, "layers of `conv`"),
    ):
        with torch.device("meta"):
            model = build_transformers(TransformersStep(name=name, arguments=arguments))
        assert reason in documents.document_attention(model, 8)[0]


@pytest.mark.slow
def test_check_refuses_what_cannot_keep_documents_apart(tmp_path: Path) -> None:
    job = job_with(tmp_path, "gpt")
    network = 'transformers("bloom", n_layer = 1, hidden_size = 16, n_head = 2, vocab_size = 256)'
    job.write_text(job.read_text().replace(NETWORKS["gpt"], network))
    report, _ = check_one(str(job), [], trace=True)
    (error,) = [each for each in report.errors if each.code == "E0329"]
    assert "not exchangeable" in error.message


@pytest.mark.parametrize(
    ("network", "settings", "masks"),
    [
        ("gpt", (), 0),
        ("gpt", ("devices.cpus=2", "parallelism.context=2"), 0.5),
        ("llama", (), 1),
        ("llama", ("model.network.window=24",), 0),
        pytest.param("hub llama", (), 0, marks=pytest.mark.slow),
    ],
)
def test_a_mask_is_in_the_account_where_attention_takes_one(
    tmp_path: Path, network: str, settings: tuple[str, ...], masks: float
) -> None:
    job = job_with(tmp_path, network)
    found = [
        check_one(str(job), list(changes), trace=True)[1] for changes in (settings, (*settings, "data.documents=none"))
    ]
    one, other = (analysis.costs[0].memory.peak for analysis in found if analysis is not None)
    assert one - other == masks * 4 * 24 * 24 * 4  # samples, pairs of positions, bytes
