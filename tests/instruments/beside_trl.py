"""Trains a small Llama by TRL and by dslc on pairs of answers or on chats, from the same weights, and compares the
losses.

Model: `chat` is TRL's SFTTrainer with `assistant_only_loss`, `ipo` is TRL's DPOTrainer, `simpo` its CPOTrainer without
cross entropy, `orpo` its ORPOTrainer. Samples come in their order. TRL's `orpo` counts the prompt in its cross entropy,
and means over the tokens of a batch: prompts of one token and one chosen answer make both the same, as nothing predicts
the first token.

Run it where both are installed: TRL is no dependency of the project. `python -m venv DIR`, in it `pip install
'.[transformers]' 'trl==1.16.*'`, then `python tests/instruments/beside_trl.py`. The variable DSLC names another
command.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dslc.commands.new import TEMPLATES
from dslc.runtime.process.records import read_metrics
from dslc.runtime.process.vision_library import let_torchvision_load

STEPS, BATCH, LENGTH = 50, 8, 96
LOSSES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "chat": ("cross_entropy()", "trl", "SFT", {"assistant_only_loss": True}),
    "dpo": ("dpo(beta = 0.1)", "trl", "DPO", {"beta": 0.1}),
    "ipo": ("ipo(beta = 0.1)", "trl", "DPO", {"beta": 0.1, "loss_type": ["ipo"]}),
    "simpo": (
        "simpo(beta = 2, gamma = 0.5)",
        "trl.experimental.cpo",
        "CPO",
        {"beta": 2.0, "simpo_gamma": 0.5, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    "orpo": ("orpo(beta = 0.1)", "trl.experimental.orpo", "ORPO", {"beta": 0.1}),
}
JOB = """
model {
  network = transformers("start")
  weights = "start"
  loss    = LOSS
}
data {
  source  = SOURCE("rows.jsonl", tokenizer = "start", max_length = LENGTH)
  batch   = BATCH
  shuffle = false
}
devices { cpus = 1 }
train {
  steps     = STEPS
  optimizer = adamw(lr = 1e-3, weight_decay = 0)
  clip      = 1.0
}
log { every = 1 step, tensorboard = false }
"""


def main() -> int:
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    let_torchvision_load()
    worst = 0.0
    for word in sys.argv[1:] or LOSSES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_start(folder)
            rows = chats() if word == "chat" else pairs(one_token=word == "orpo")
            (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            theirs = train_by_trl(folder, word, rows)
            for settings in ((), ("devices.cpus=2", "parallelism.zero=3")):
                ours = train_by_dslc(folder, word, *settings)
                assert len(ours) == len(theirs) == STEPS
                apart = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
                worst = max(worst, apart)
                plan = " ".join(settings) or "one process"
                print(
                    f"{word}: {STEPS} losses, {theirs[0]:.5f} to {theirs[-1]:.5f}, apart {apart:.1e} ({plan})",
                    flush=True,
                )
    return int(worst > 1e-5)


def write_start(folder: Path) -> None:
    """Writes weights and a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(TEMPLATES / "dpo" / "tokenizer", folder / "start")
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=384,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "start")


def chats() -> list[dict[str, Any]]:
    """Returns conversations that a sequence has whole."""
    rows = [json.loads(line) for line in (TEMPLATES / "chat" / "conversations.jsonl").read_text().splitlines()]
    rows = [row for row in rows if sum(len(message["content"]) for message in row["messages"]) < LENGTH]
    return rows[: len(rows) // BATCH * BATCH]


def pairs(*, one_token: bool) -> list[dict[str, str]]:
    rows = []
    for line in (TEMPLATES / "dpo" / "pairs.jsonl").read_text().splitlines():
        pair = json.loads(line)
        prompt, chosen, rejected = (pair[key][-1]["content"] for key in ("prompt", "chosen", "rejected"))
        rows.append(
            {"prompt": "?", "chosen": "I do not know that.", "rejected": rejected[:40]}
            if one_token
            else {"prompt": prompt[:40], "chosen": chosen[:40], "rejected": rejected[:50]}
        )
    return rows[: len(rows) // BATCH * BATCH]


def train_by_trl(folder: Path, word: str, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, module, name, arguments = LOSSES[word]
    library, losses = importlib.import_module(module), list[float]()
    kind: Any = getattr(library, f"{name}Trainer")

    def compute_loss(self: Any, *given: Any, **named: Any) -> Any:
        """Keeps the loss of each step, which the trainer's logs round."""
        found = kind.compute_loss(self, *given, **named)
        losses.append((found[0] if isinstance(found, tuple) else found).item())
        return found

    recorder: Any = type("Recorder", (kind,), {"compute_loss": compute_loss})
    config = getattr(library, f"{name}Config")(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        max_length=LENGTH,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **arguments,
    )
    trainer = recorder(
        model=AutoModelForCausalLM.from_pretrained(folder / "start"),
        args=config,
        train_dataset=Dataset.from_list([*rows]),
        processing_class=AutoTokenizer.from_pretrained(folder / "start"),
    )
    trainer.train()
    return losses


def train_by_dslc(folder: Path, word: str, *settings: str) -> list[float]:
    text = JOB.replace("LOSS", LOSSES[word][0]).replace("SOURCE", "chat" if word == "chat" else "preferences")
    for name, number in (("STEPS", STEPS), ("BATCH", BATCH), ("LENGTH", LENGTH)):
        text = text.replace(name, str(number))
    (folder / "job.plt").write_text(text)
    run = folder / f"run{len(settings)}"
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [os.environ.get("DSLC", "dslc"), "run", "job.plt", "--out", str(run), *sets]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return [line["loss"] for line in read_metrics(str(run)) if line["split"] == "train"]


if __name__ == "__main__":
    sys.exit(main())
