"""The symmetric memory of asynchronous tensor parallelism, by hand."""

from __future__ import annotations

from pathlib import Path

from helpers.job_texts import job_text
from helpers.planning import compiled

JOB = job_text(
    model={
        "network": "llama(layers = 2, width = 64, heads = 4, kv_heads = 4, hidden = 192, context = 32, vocab = 256)",
        "loss": "cross_entropy()",
    },
    data={"source": "stdlib()", "batch": 16},
    devices={"gpus": 4, "kind": "h100"},
    parallelism={"tensor": 4, "microbatches": 2},
    train={"steps": 1, "optimizer": "adamw()", "compile": "true", "precision": "bf16"},
)


def test_it_is_two_pieces_of_the_widest_exchange(tmp_path: Path) -> None:
    """Exchanges have 64 numbers of each of 8 * 32 positions in a micro-batch, a quarter of them in a piece."""
    (tmp_path / "job.plt").write_text(JOB)
    plain, asynchronous = (
        compiled(tmp_path / "job.plt", f"parallelism.async_tensor={word}").plan for word in ("false", "true")
    )
    (one,), (other,) = ([rank.memory for rank in plan.ranks] for plan in (plain, asynchronous))
    assert other.framework - one.framework == other.peak - one.peak == 2 * 2 * 8 * 32 * 64 // 4
    assert "exchanges pieces beside products" in asynchronous.training.compiled != plain.training.compiled
