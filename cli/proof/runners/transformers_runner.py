"""Trains with the Trainer of `transformers` as its users do: `TrainingArguments` of the file, and `trainer.train()`."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from dslc.proof.runners.proof_files import (
    Curve,
    ProofSetup,
    count_targets,
    leave_curve,
    load_network,
    load_program,
    load_samples,
    mean_over_ranks,
    read_setup,
)

# Arguments that this machine cannot run, or that change no update.
_OFF = {
    "bf16": "both train in fp32",
    "fp16": "both train in fp32",
    "tf32": "",
    "torch_compile": "nothing is compiled",
    "gradient_checkpointing": "nothing is recomputed: the updates are the same",
    "fsdp": "the ranks hold copies, by DDP: the updates are the same",
    "fsdp_config": "",
    "load_best_model_at_end": "",
    "push_to_hub": "",
    "label_smoothing_factor": "the loss is the job's",
    "neftune_noise_alpha": "no noise is added",
    "parallelism_config": "",
    "accelerator_config": "",
    "deepspeed": "",
    "resume_from_checkpoint": "",
}
_SMALL_STATE = ("8bit", "4bit", "paged", "fused", "torchao", "apex", "npu", "xla", "bnb")


def adapt_arguments(setup: ProofSetup, known: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the arguments for CPUs and these ranks, and what was changed for it. Keys of the script are left out."""
    arguments, changes = {key: value for key, value in setup.config.items() if key in known}, []
    for key, reason in _OFF.items():
        value = arguments.pop(key, None)
        if reason and value not in (None, False, "", 0, []):
            changes.append(f"{key} is off: {reason}")
    optimizer = str(arguments.get("optim") or "")
    if "adamw" in optimizer and any(word in optimizer for word in _SMALL_STATE):
        arguments["optim"] = "adamw_torch"
        changes.append(f"optim {optimizer} -> adamw_torch")
    ratio = setup.config.get("warmup_ratio")
    if ratio and "warmup_ratio" not in known and not setup.config.get("warmup_steps"):
        arguments["warmup_steps"] = float(ratio)
        changes.append(f"warmup_ratio -> warmup_steps = {ratio}: its name in this version of transformers")
    for key in [key for key in arguments if key.startswith(("eval", "save", "hub", "report", "logging", "dataloader"))]:
        del arguments[key]
    for key in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_ratio"):
        if isinstance(arguments.get(key), str):
            arguments[key] = float(arguments[key])  # such as 5e-5, which YAML reads as text
    return {
        **arguments,
        "per_device_train_batch_size": setup.micro,
        "gradient_accumulation_steps": setup.accumulation,
        "max_steps": setup.length,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }, changes


def main(folder: str) -> None:
    import torch
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    setup = read_setup(folder)
    job, place = load_program(folder)
    arguments, changes = adapt_arguments(setup, {field.name for field in fields(TrainingArguments)})
    arguments["output_dir"] = os.path.join(folder, "transformers")
    curve = Curve(name=f"transformers {transformers.__version__}", changes=changes)
    samples = load_samples(job, place, setup.steps)
    curve.targets = count_targets(samples, setup, job)
    rows = [{"input": input, "target": target} for input, target in (samples[n] for n in range(len(samples)))]
    losses: list[torch.Tensor] = []
    rates: list[float] = []

    class RecordedTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            loss = model(**inputs)
            losses.append(loss.detach())
            return loss

    class CurveRecorder(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            rates.append(float(parts["optimizer"].param_groups[0]["lr"]))

        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            control.should_training_stop = state.global_step >= setup.steps

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **parts: Any) -> None:
            if "loss" not in logs:
                return
            norm = logs.get("grad_norm")
            curve.add(mean_over_ranks(torch.stack(losses).mean()), None if norm is None else float(norm), rates[-1])
            losses.clear()

    trainer = RecordedTrainer(
        model=load_network(job), args=TrainingArguments(**arguments), train_dataset=rows, callbacks=[CurveRecorder()]
    )
    trainer.train()
    leave_curve(folder, curve)
