"""Trains with the Trainer of `transformers` as its users do: `TrainingArguments` of the file, and `trainer.train()`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dslc.proof.runners.accelerate_state import NO_DEVICES, engine_title, name_blocks, start_engine_on_cpus
from dslc.proof.runners.deepspeed_runner import adapt_engine
from dslc.proof.runners.proof_files import (
    Curve,
    ProofSetup,
    as_section,
    count_targets,
    leave_curve,
    load_network,
    load_program,
    load_samples,
    mean_over_ranks,
    read_setup,
)

if TYPE_CHECKING:
    import torch
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from dslc.compiler.ir.program import JobProgram, RankPlace

# Arguments that this machine cannot run, or that change no update.
_OFF = {
    "bf16": "both train in fp32",
    "fp16": "both train in fp32",
    "tf32": "",
    "torch_compile": "nothing is compiled",
    "gradient_checkpointing": "nothing is recomputed: the updates are the same",
    "load_best_model_at_end": "",
    "push_to_hub": "",
    "label_smoothing_factor": "the loss is the job's",
    "neftune_noise_alpha": "no noise is added",
    "parallelism_config": "",
    "accelerator_config": "",
    "resume_from_checkpoint": "",
}
# Settings of FSDP that need an accelerator, each with the reason.
_FSDP_OFF = {
    "cpu_ram_efficient_loading": "each rank loads the weights: it needs sync_module_states",
    "sync_module_states": NO_DEVICES,
    "activation_checkpointing": "nothing is recomputed: the updates are the same",
    "offload_params": "all memory is the host's here",
    "transformer_layer_cls_to_wrap": "the blocks of this network are wrapped",
}
_SMALL_STATE = ("8bit", "4bit", "paged", "fused", "torchao", "apex", "npu", "xla", "bnb")


def engine_of(setup: ProofSetup) -> str:
    """Returns `fsdp`, `deepspeed`, or the empty string for DDP."""
    if setup.ranks == 1:
        return ""
    return "deepspeed" if setup.engine else "fsdp" if setup.config.get("fsdp") else ""


def _adapt_engine(engine: str, arguments: dict[str, object], setup: ProofSetup) -> list[str]:
    """Adapts the arguments for FSDP or DeepSpeed, and returns what was changed for it."""
    stated = {key: arguments.pop(key, None) for key in ("fsdp", "fsdp_config", "deepspeed")}
    if not engine:
        named = [key for key in ("fsdp", "deepspeed") if stated[key]]
        return [f"{key} is off: one rank shards nothing" for key in named]
    title = "FSDP" if engine == "fsdp" else "DeepSpeed"
    changes = [f"{title} over gloo: the state of Accelerate is made on CPUs, where the Trainer chooses DDP by itself"]
    arguments["accelerator_config"] = {"use_configured_state": True}
    arguments["use_cpu"] = False
    if engine == "deepspeed":
        arguments["deepspeed"], others = adapt_engine(setup)
        return changes + others
    config = {key.removeprefix("fsdp_"): value for key, value in as_section(stated["fsdp_config"]).items()}
    for key in [key for key in setup.config if key.startswith("fsdp_") and key != "fsdp_config"]:
        changes.append(f"{key} is no argument of this Trainer")
    for key, reason in _FSDP_OFF.items():
        if config.get(key) and reason:
            changes.append(f"fsdp_config.{key} {config[key]} is off: {reason}")
        config.pop(key, None)
    config.update(sync_module_states=False, cpu_ram_efficient_loading=False)
    words = stated["fsdp"]
    words = words.split() if isinstance(words, str) else words
    if isinstance(words, list) and "offload" in words:
        words = [word for word in words if word != "offload"]
        changes.append("fsdp offload is off: all memory is the host's here")
    arguments["fsdp"], arguments["fsdp_config"] = words, config
    return changes


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
        arguments["warmup_steps"] = float(str(ratio))
        changes.append(f"warmup_ratio -> warmup_steps = {ratio}: its name in this version of transformers")
    for key in [key for key in arguments if key.startswith(("eval", "save", "hub", "report", "logging", "dataloader"))]:
        del arguments[key]
    for key in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_ratio"):
        value = arguments.get(key)
        if isinstance(value, str):
            arguments[key] = float(value)  # such as 5e-5, which YAML reads as text
    arguments = {"use_cpu": True, **arguments}
    changes += _adapt_engine(engine_of(setup), arguments, setup)
    return {
        **arguments,
        "per_device_train_batch_size": setup.micro,
        "gradient_accumulation_steps": setup.accumulation,
        "max_steps": setup.length,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }, changes


def record_trainer(
    base: type[Trainer], curve: Curve, setup: ProofSetup
) -> tuple[Callable[..., Trainer], TrainerCallback]:
    """Returns a class of Trainer that trains the network with its loss, and the callback that fills the curve."""
    import torch
    from transformers import TrainerCallback

    losses: list[torch.Tensor] = []
    rates: list[float] = []

    class RecordedTrainer(base):  # type: ignore[misc]
        def compute_loss(
            self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *rest: object, **options: object
        ) -> torch.Tensor:
            loss: torch.Tensor = model(**inputs)
            losses.append(loss.detach())
            rates.append(float(self.optimizer.param_groups[0]["lr"]))  # DeepSpeed updates in the backward pass
            return loss

    class CurveRecorder(TrainerCallback):  # type: ignore[misc]
        def on_step_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: object
        ) -> None:
            control.should_training_stop = state.global_step >= setup.steps

        def on_log(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            logs: dict[str, float] | None = None,
            **parts: object,
        ) -> None:
            if logs is None or "loss" not in logs:
                return
            norm = logs.get("grad_norm")
            curve.add(mean_over_ranks(torch.stack(losses).mean()), None if norm is None else float(norm), rates[-1])
            losses.clear()

    return RecordedTrainer, CurveRecorder()


def load_rows(job: JobProgram, place: RankPlace, setup: ProofSetup, curve: Curve) -> list[dict[str, torch.Tensor]]:
    """Returns the samples of the first steps as the Trainer takes them."""
    samples = load_samples(job, place, setup.steps)
    curve.targets = count_targets(samples, setup, job)
    return [{"input": input, "target": target} for input, target in (samples[n] for n in range(len(samples)))]


def main(folder: str) -> None:
    import transformers
    from transformers import Trainer, TrainingArguments

    setup = read_setup(folder)
    job, place = load_program(folder)
    if engine_of(setup):
        start_engine_on_cpus(engine_of(setup))
    arguments, changes = adapt_arguments(setup, {field.name for field in fields(TrainingArguments)})
    arguments["output_dir"] = os.path.join(folder, "transformers")
    curve = Curve(name=f"transformers {transformers.__version__}", changes=changes)
    rows = load_rows(job, place, setup, curve)
    network: Any = load_network(job)
    name_blocks(network, network.network)
    recorded, recorder = record_trainer(Trainer, curve, setup)
    trainer = recorded(model=network, args=TrainingArguments(**arguments), train_dataset=rows, callbacks=[recorder])
    trainer.train()
    curve.name += f", {engine_title(trainer.model_wrapped)}"
    leave_curve(folder, curve)
