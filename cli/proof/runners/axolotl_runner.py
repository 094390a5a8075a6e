"""Trains with Axolotl's own trainer, made by its builder from the YAML that its schema has validated.

Axolotl would load a model of the hub and tokenize data sets. The job's network and samples stand in their place.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dslc.proof.runners.accelerate_state import blocks_of, engine_title, start_engine_on_cpus
from dslc.proof.runners.proof_files import (
    Curve,
    ProofSetup,
    as_section,
    leave_curve,
    load_network,
    load_program,
    read_setup,
)
from dslc.proof.runners.transformers_runner import load_rows, record_trainer

if TYPE_CHECKING:
    from axolotl.utils.dict import DictDefault
    from torch import nn

# Keys that this machine cannot run or that change no update, each with the reason where the updates could differ.
_OFF = {
    "bf16": "both train in fp32",
    "fp16": "both train in fp32",
    "fp8": "both train in fp32",
    "tf32": "",
    "load_in_8bit": "the network is not quantized",
    "load_in_4bit": "the network is not quantized",
    "adapter": "all parameters train",
    "flash_attention": "",
    "xformers_attention": "",
    "sdp_attention": "",
    "flex_attention": "",
    "attn_implementation": "",
    "torch_compile": "nothing is compiled",
    "gradient_checkpointing": "nothing is recomputed: the updates are the same",
    "activation_offloading": "",
    "layer_offloading": "",
    "sample_packing": "the samples are the job's",
    "eval_sample_packing": "",
    "pad_to_sequence_len": "",
    "deepspeed": "the ranks hold copies, by DDP: the updates are the same",
    "tensor_parallel_size": "the ranks share the samples out",
    "context_parallel_size": "the ranks share the samples out",
    "dp_shard_size": "",
    "dp_replicate_size": "",
    "rl": "the loss is the job's",
    "reward_model": "the loss is the job's",
    "process_reward_model": "the loss is the job's",
    "trl": "",
    "plugins": "plugins change the model, which is the job's",
    "neftune_noise_alpha": "no noise is added",
    "noisy_embedding_alpha": "no noise is added",
    "chat_template": "",
    "use_wandb": "",
    "wandb_project": "",
    "use_mlflow": "",
    "use_comet": "",
    "hub_model_id": "",
    "resume_from_checkpoint": "",
    "auto_resume_from_checkpoints": "",
    "early_stopping_patience": "",
    "loss_watchdog_threshold": "",
    "load_best_model_at_end": "",
    "val_set_size": "nothing is evaluated",
    "test_datasets": "",
    "eval_steps": "",
    "evals_per_epoch": "",
    "eval_strategy": "",
    "saves_per_epoch": "",
    "save_steps": "",
    "dataloader_num_workers": "",
    "dataloader_prefetch_factor": "",
}
_FSDP_OFF = {
    "activation_checkpointing": "nothing is recomputed: the updates are the same",
    "offload_params": "all memory is the host's here",
    "cpu_offload_pin_memory": "",
    "transformer_layer_cls_to_wrap": "the blocks of this network are wrapped",
}
_SMALL_STATE = ("8bit", "4bit", "paged", "fused", "torchao", "apex", "bnb", "fp8")
_MACHINE = {"bf16": False, "fp8": False, "tf32": False, "n_gpu": 1, "compute_capability": ""}


def adapt_config(setup: ProofSetup) -> tuple[dict[str, object], list[str]]:
    """Returns the configuration for CPUs and these ranks, and what was changed for it."""
    config, changes = dict(setup.config), []
    if not shards_by_fsdp(setup):
        for key in [key for key in config if key.startswith("fsdp")]:
            if config.pop(key) and key != "fsdp_version":
                changes.append(f"{key} is off: one rank shards nothing")
    for key, reason in _OFF.items():
        value = config.pop(key, None)
        if reason and value not in (None, False, "", 0, []):
            changes.append(f"{key} is off: {reason}")
    for key in [key for key in config if key.startswith(("lora_", "liger_", "cut_cross_", "fused_", "peft_"))]:
        del config[key]
    optimizer = str(config.get("optimizer") or "")
    if "adamw" in optimizer and any(word in optimizer for word in _SMALL_STATE):
        config["optimizer"] = "adamw_torch"
        changes.append(f"optimizer {optimizer} -> adamw_torch")
    rate = config.get("learning_rate")
    if isinstance(rate, str):
        config["learning_rate"] = float(rate)  # such as 5e-5, which YAML reads as text
    config.pop("batch_size", None)
    config.update(
        bf16=False,
        fp16=False,
        micro_batch_size=setup.micro,
        gradient_accumulation_steps=setup.accumulation,
        max_steps=setup.length,
        logging_steps=1,
        save_strategy="no",
        val_set_size=0,
    )
    return config, changes


def shards_by_fsdp(setup: ProofSetup) -> bool:
    """True if several ranks train, and the configuration names FSDP for them."""
    return setup.ranks > 1 and bool(setup.config.get("fsdp") or setup.config.get("fsdp_config"))


def adapt_fsdp(config: dict[str, object], network: nn.Module) -> list[str]:
    """Changes the configuration of FSDP for CPUs and the network of the job, and returns what was changed."""
    settings = {key.removeprefix("fsdp_"): value for key, value in as_section(config.get("fsdp_config")).items()}
    changes = ["FSDP over gloo: the state of Accelerate is made on CPUs, where the Trainer chooses DDP by itself"]
    for key, reason in _FSDP_OFF.items():
        if settings.get(key) and reason:
            changes.append(f"fsdp_config.{key} {settings[key]} is off: {reason}")
        settings.pop(key, None)
    blocks = sorted({type(block).__name__ for block in blocks_of(network)})
    settings.update(sync_module_states=False, cpu_ram_efficient_loading=False)
    if blocks:
        settings.update(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap=",".join(blocks))
    config["fsdp_config"] = settings
    config.pop("fsdp", None)
    return changes


def start_fsdp(config: DictDefault) -> None:
    """Starts FSDP as Axolotl does: by the variables of Accelerate, and FSDP 2 with its own preparation of a model."""
    from axolotl.monkeypatch.accelerate.fsdp2 import patch_accelerate_fsdp2
    from axolotl.utils.trainer import setup_fsdp_envs

    config.accelerator_config = {"use_configured_state": True}
    setup_fsdp_envs(config)
    start_engine_on_cpus("fsdp")
    if str(config.fsdp_version) == "2":
        patch_accelerate_fsdp2()


def main(folder: str) -> None:
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    from importlib.metadata import version

    from axolotl.core.builders import HFCausalTrainerBuilder
    from axolotl.core.trainers import AxolotlTrainer
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault
    from datasets import Dataset

    setup = read_setup(folder)
    job, place = load_program(folder)
    adapted, changes = adapt_config(setup)
    network, sharded = load_network(job), shards_by_fsdp(setup)
    if sharded:
        changes += adapt_fsdp(adapted, network)
    curve = Curve(name=f"Axolotl {version('axolotl')}", changes=changes)
    config = validate_config(DictDefault(adapted), _MACHINE, {"torch_version": version("torch").partition("+")[0]})
    if sharded:
        start_fsdp(config)
    config.output_dir = os.path.join(folder, "axolotl")
    config.datasets = config.pretraining_dataset = None
    config.remove_unused_columns = False
    rows = [{key: value.numpy() for key, value in row.items()} for row in load_rows(job, place, setup, curve)]

    class StatefulTrainer(AxolotlTrainer):  # type: ignore[misc]
        """Axolotl's trainer, which else forgets the state of Accelerate that was made for CPUs."""

        def create_accelerator_and_postprocess(self) -> None:
            self.args.accelerator_config.use_configured_state = sharded
            super().create_accelerator_and_postprocess()

    recorded, recorder = record_trainer(StatefulTrainer, curve, setup)

    class ProofBuilder(HFCausalTrainerBuilder):  # type: ignore[misc]
        """Axolotl's builder, for the network and the samples of the job."""

        def _get_trainer_cls(self) -> object:
            return recorded

        def build_collator(self, *arguments: object, **options: object) -> None:
            return None

        def hook_pre_create_training_args(self, arguments: dict[str, object]) -> dict[str, object]:
            return {
                **arguments,
                "use_cpu": not sharded,
                "train_sampling_strategy": "sequential",
                "curriculum_sampling": True,
                "dataloader_num_workers": 0,
                "dataloader_prefetch_factor": None,
                "disable_tqdm": True,
            }

    builder = ProofBuilder(config, network, None)
    builder.train_dataset = Dataset.from_list(rows).with_format("torch")
    trainer = builder.build(setup.length)
    trainer.add_callback(recorder)
    trainer.train()
    curve.name += f", {engine_title(trainer.model_wrapped)}"
    leave_curve(folder, curve)
