"""What someone may have meant: near names, and the names other tools give to the same things."""

from __future__ import annotations

from collections.abc import Iterable

from dslc.dsl.registry import BLOCKS, CALLS, CallOf, Either, Kind, ListOf, Node, fields

RESERVED = frozenset({"expert", "ema", "lora", "fp8", "wandb"})

# Names of Lightning, DeepSpeed, Accelerate, Hugging Face and Megatron, and where the same is said here.
ELSEWHERE = {
    "max_epochs": "train.epochs", "num_epochs": "train.epochs", "num_train_epochs": "train.epochs",
    "n_epochs": "train.epochs", "max_steps": "train.steps", "num_steps": "train.steps", "train_iters": "train.steps",
    "max_iters": "train.steps", "iterations": "train.steps", "total_steps": "train.steps",
    "batch_size": "data.batch", "global_batch_size": "data.batch", "train_batch_size": "data.batch",
    "per_device_train_batch_size": "data.batch", "train_micro_batch_size_per_gpu": "data.batch",
    "micro_batch_size": "parallelism.microbatches", "num_microbatches": "parallelism.microbatches",
    "accumulate_grad_batches": "parallelism.microbatches", "gradient_accumulation_steps": "parallelism.microbatches",
    "micro_batches": "parallelism.microbatches", "chunks": "parallelism.microbatches",
    "num_workers": "data.workers", "dataloader_num_workers": "data.workers", "dataset": "data.source",
    "val_split": "data.validation", "validation_split": "data.validation", "drop_last": "data.last_batch",
    "dataloader_drop_last": "data.last_batch",
    "gradient_clip_val": "train.clip", "gradient_clipping": "train.clip", "max_grad_norm": "train.clip",
    "clip_grad": "train.clip", "clip_grad_norm": "train.clip", "grad_clip": "train.clip",
    "num_nodes": "devices.nodes", "nnodes": "devices.nodes", "gpu": "devices.gpus", "num_gpus": "devices.gpus",
    "ngpus": "devices.gpus", "cpu": "devices.cpus", "devices": "devices.gpus", "nproc_per_node": "devices.gpus",
    "gpus_per_node": "devices.gpus", "num_processes": "devices.gpus", "accelerator": "devices.gpus",
    "process_group_backend": "devices.backend",
    "strategy": "parallelism", "zero_stage": "parallelism.zero", "stage": "parallelism.zero",
    "zero_optimization": "parallelism.zero", "sharding_strategy": "parallelism.zero", "dp": "parallelism.data",
    "tp": "parallelism.tensor", "tensor_parallel_size": "parallelism.tensor", "pp": "parallelism.pipeline",
    "tensor_model_parallel_size": "parallelism.tensor", "pipeline_model_parallel_size": "parallelism.pipeline",
    "pipeline_parallel_size": "parallelism.pipeline", "cp": "parallelism.context",
    "context_parallel_size": "parallelism.context", "sequence_parallel": "parallelism.sequence",
    "gradient_checkpointing": "memory.recompute", "activation_checkpointing": "memory.recompute",
    "checkpoint_activations": "memory.recompute", "cpu_offload": "memory.offload",
    "offload_optimizer": "memory.offload", "offload_param": "memory.offload",
    "fp16": "train.precision", "bf16": "train.precision", "amp": "train.precision", "amp_level": "train.precision",
    "mixed_precision": "train.precision", "dtype": "train.precision",
    "scheduler": "train.lr_schedule", "lr_scheduler": "train.lr_schedule",
    "lr_scheduler_type": "train.lr_schedule", "random_seed": "train.seed", "seed_everything": "train.seed",
    "torch_compile": "train.compile", "criterion": "model.loss", "architecture": "model.network",
    "val_check_interval": "evaluate.every", "check_val_every_n_epoch": "evaluate.every",
    "eval_steps": "evaluate.every", "eval_interval": "evaluate.every",
    "save_steps": "checkpoint.every", "save_interval": "checkpoint.every", "save_total_limit": "checkpoint.keep",
    "save_top_k": "checkpoint.keep", "ckpt_path": "checkpoint.resume", "resume_from_checkpoint": "checkpoint.resume",
    "log_every_n_steps": "log.every", "logging_steps": "log.every", "log_interval": "log.every",
    "steps_per_print": "log.every", "max_restarts": "launch.restarts", "rdzv_backend": "launch.with",
    "trainer": "train", "training": "train", "dataloader": "data", "optim": "train.optimizer",
    "scheduling": "train.lr_schedule", "logging": "log", "logger": "log", "evaluation": "evaluate",
    "hardware": "devices", "cluster": "devices", "save": "checkpoint",
}  # fmt: skip

# The same for arguments: of optimizers and learning rate schedules, of networks and sources.
ARGUMENTS = {
    "learning_rate": "lr", "warmup_steps": "warmup", "warmup_ratio": "warmup", "beta": "betas",
    "num_warmup_steps": "warmup", "epsilon": "eps", "wd": "weight_decay", "decay": "weight_decay",
    "vocabulary": "vocab", "vocab_size": "vocab", "n_vocab": "vocab", "num_embeddings": "vocab",
    "n_layer": "layers", "n_layers": "layers", "num_layers": "layers", "num_hidden_layers": "layers",
    "n_head": "heads", "n_heads": "heads", "nhead": "heads", "num_heads": "heads", "num_attention_heads": "heads",
    "n_embd": "width", "d_model": "width", "dim": "width", "hidden_size": "width", "embedding_dim": "width",
    "block_size": "context", "seq_len": "context", "seq_length": "context", "max_seq_len": "context",
    "sequence_length": "context", "tie_weights": "tie", "tie_word_embeddings": "tie", "num_classes": "classes",
    "num_samples": "samples", "out_features": "features", "out_channels": "channels", "kernel_size": "kernel",
}  # fmt: skip


def distance(one: str, other: str, limit: int = 4) -> int:
    """How many letters must be put in, left out, changed or swapped with their neighbour; `limit` where more."""
    if abs(len(one) - len(other)) >= limit:
        return limit
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            best = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before, last = last, row
    return min(last[-1], limit)


def near(word: str, choices: Iterable[str]) -> str | None:
    """The choice that was likely meant, or None. Letters' case, `-` and `_` weigh little."""
    best: tuple[int, str] | None = None
    plain = word.lower().replace("-", "_")[:64]
    allowed = 1 if len(plain) <= 4 else 2 if len(plain) <= 8 else 3
    for choice in choices:
        away = distance(plain, choice.lower())
        if away > 0 and plain.replace("_", "") == choice.lower().replace("_", ""):
            away = 0
        if away <= allowed and away < len(plain) and (best is None or away < best[0]):
            best = away, choice
    return best[1] if best else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    found = near(word, choices)
    return f"did you mean `{found}`?" if found else ""


def listed(choices: Iterable[str], limit: int = 16) -> str:
    """`a`, `b` or `c`."""
    quoted = [f"`{choice}`" for choice in choices]
    if len(quoted) > limit:
        return ", ".join(quoted[:limit]) + f" and {len(quoted) - limit} more"
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def categories(kind: Kind) -> tuple[str, ...]:
    """The categories of calls that a value of this kind may be, or hold."""
    if isinstance(kind, CallOf):
        return kind.categories
    if isinstance(kind, Either):
        return tuple(category for inner in kind.kinds for category in categories(inner))
    return categories(kind.item) if isinstance(kind, ListOf) else ()


def words_of(declaration: type[Node]) -> list[str]:
    """The names of a block's fields or a call's arguments that a user may write."""
    hidden = {getattr(declaration, "whole", "") or "arguments"}
    return [f.word for f in fields(declaration) if f.word not in hidden]


def for_block(name: str) -> str:
    """What to say to someone who wrote a block that is none."""
    if name in ELSEWHERE:
        return _at(ELSEWHERE[name])
    found = near(name, [*BLOCKS, "expect", "sweep"])
    if found:
        return f"did you mean `{found}`?"
    return _elsewhere(name) or f"the blocks are {listed([*BLOCKS, 'expect', 'sweep'])}"


def for_field(block: str, name: str) -> str:
    """What to say to someone who wrote a field that the block does not have."""
    own = words_of(BLOCKS[block])
    place = ELSEWHERE.get(name)
    if place:
        return f"did you mean `{place.partition('.')[2]}`?" if place.startswith(f"{block}.") else _at(place)
    argument = ARGUMENTS.get(name, name)
    return (
        _argument(block, argument)
        or (f"did you mean `{near(name, own)}`?" if near(name, own) else "")
        or _elsewhere(name)
        or f"`{block}` has {listed(own)}"
    )


def _at(place: str) -> str:
    block, _, field = place.partition(".")
    return f"that is `{place}` here: `{block} {{ {field} = … }}`" if field else f"that is the block `{block}` here"


def _argument(block: str, name: str) -> str:
    """`lr` in `train` is an argument of the optimizer."""
    for field in fields(BLOCKS[block]):
        for category in categories(field.kind):
            having = [call for call in CALLS[category].values() if name in words_of(call)]
            usual = [call for call in having if call.word in ("adamw", "warmup_cosine")] or having
            # `warmup` is QAdam's too, but who asks for one means the schedule's.
            if not having or category in ("layer", "network", "source") or (name == "warmup" and usual == having):
                continue
            what = "the optimizer" if category == "optimizer" else f"`{field.word}`"
            return f"`{name}` is an argument of {what}: `{field.word} = {usual[0].word}({name} = …)`"
    return ""


def _elsewhere(name: str) -> str:
    """A field of this name, or a name near it, in another block."""
    for block, declaration in BLOCKS.items():
        if name in words_of(declaration):
            return f"`{name}` belongs to `{block}`: `{block} {{ {name} = … }}`"
    for block in ("train", "model", "data"):
        found = _argument(block, ARGUMENTS.get(name, name))
        if found:
            return f"in `{block}`, {found}"
    if len(name) > 4:
        for block, declaration in BLOCKS.items():
            meant = near(name, [word for word in words_of(declaration) if len(word) > 4])
            if meant:
                return f"did you mean `{block}.{meant}`?"
    return ""
