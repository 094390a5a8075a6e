"""`dslc export`: the whole weights of a checkpoint, under plain names, for torch or `transformers` without dslc."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dslc.compiler.ir.parameter_names import base_name
from dslc.compiler.ir.program import TransformersStep
from dslc.compiler.model.job_steps import adapter_step, locate_paths, transformers_step
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec, python_calls
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.words import plural, shorten_list
from dslc.jobs.check_job import inspect, show
from dslc.runs.checkpoints import SelectedWeights, check_compatibility, select_weights
from dslc.runs.load_one import load_trained
from dslc.runs.model_card import model_card
from dslc.runtime.model.errors import ModelError
from dslc.runtime.process.vision_library import true_cause
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, TRAINING_FAILED, CommandFailedError
from dslc.terminal.system_errors import in_words

if TYPE_CHECKING:
    from dslc.runtime.checkpoint.export import Adapted

_PEFT_KINDS = {"causal_lm": "CAUSAL_LM", "sequence_classification": "SEQ_CLS"}
_FILES = (".safetensors", ".pt")
_OTHERS = (".bin", ".ckpt", ".csv", ".json", ".npz", ".onnx", ".pth", ".pkl", ".h5")  # no names of folders


def main(arguments: argparse.Namespace) -> int:
    output = arguments.output.rstrip(os.sep) or os.sep
    fault = _fault(output, arguments.adapter)
    if fault:
        raise CommandFailedError(plain(fault))
    loaded, weights = load_trained(arguments.job, arguments.settings, arguments.checkpoint)
    report = Report()
    job = loaded.job
    analysis = inspect(loaded, report, trace=_needs_trace(job, output))
    if report.errors and output.endswith(".safetensors") and job is not None and job.model.adapter is None:
        report = Report()
        analysis = inspect(loaded, report)  # without the names of tied weights
    if report.errors or analysis is None:
        show(report.errors)
        return JOB_AT_FAULT
    fault = _fault_of_folder(analysis, arguments.adapter) if not output.endswith(_FILES) else ""
    if fault:
        raise CommandFailedError(plain(fault))
    selected = weights or select_weights(analysis.job, arguments.checkpoint)
    check_compatibility(selected, analysis)
    return _export(analysis, selected, output, arguments)


def _needs_trace(job: JobSpec | None, output: str) -> bool:
    """True if the user's functions must be called: for the names of tied weights, and for the kinds of layers with
    adapters. The head of a model in a folder may also follow from the user's data.
    """
    if job is None:
        return False
    if output.endswith(_FILES) or job.model.adapter is not None:
        return True
    network = job.model.network
    headless = isinstance(network, TransformersNetwork) and network.task is None
    return headless and any(python_calls(job))


def _export(analysis: Analysis, selected: SelectedWeights, output: str, arguments: argparse.Namespace) -> int:
    from dslc.runtime.checkpoint.companion_files import CompanionFiles
    from dslc.runtime.checkpoint.export import SHARD, export, export_adapter, export_folder
    from dslc.runtime.checkpoint.state import CheckpointError

    job, raw, network = analysis.job, arguments.raw, analysis.job.model.network
    adapter_weights = _known_adapter(analysis)
    step: TransformersStep | None = None
    if isinstance(network, TransformersNetwork):
        step = locate_paths(transformers_step(job, network, analysis.source), job.folder)
    ties = dict(analysis.model.ties) if analysis.model else {}
    start = job.model.start.path if job.model.start else ""
    library = "peft" if arguments.adapter else "transformers"
    task = step.kind if step else ""
    card = model_card(job.name, selected, task=task, start=start, library=library)
    companions = CompanionFiles(folders=_companion_folders(start, step), card=card)
    if job.model.start is not None and job.model.start.quantize is not None and analysis.facts.model is None:
        raise CommandFailedError("the forms of weights in 4 or 8 bits are known only where the data can be read")
    try:
        if output.endswith(_FILES):
            ties = {base_name(a): base_name(b) for a, b in ties.items()}
            count = export(selected.path, ties, output, raw=raw, adapter_weights=adapter_weights)
        elif arguments.adapter:
            assert adapter_weights is not None
            base = start if os.path.isdir(start) else ""
            kind = _PEFT_KINDS.get(task, "")
            count = export_adapter(
                selected.path,
                adapter_weights,
                output,
                base=base,
                kind=kind,
                raw=raw,
                ties=ties,
                companions=companions,
            )
        else:
            assert step is not None
            shard_bytes = arguments.max_shard_size or SHARD
            count = export_folder(
                selected.path,
                step,
                output,
                shard_bytes,
                raw=raw,
                adapter_weights=adapter_weights,
                companions=companions,
            )
    except OSError as error:
        raise CommandFailedError(plain(f"{output} cannot be written: {in_words(error)}"), TRAINING_FAILED) from error
    except (CheckpointError, ModelError, ImportError) as error:
        _show_error(error)
        return TRAINING_FAILED
    size = os.path.getsize(output)
    if os.path.isdir(output):
        size = sum(entry.stat().st_size for entry in os.scandir(output) if entry.name.endswith(".safetensors"))
    if output.endswith(".safetensors") and ties:
        print(plain(_once(ties)))
    print(plain(f"{output}: {plural(count, 'tensor')}, {plural(size, 'byte')}, of {selected}"))
    return GOOD


def _known_adapter(analysis: Analysis) -> Adapted | None:
    """Returns the network's adapter, with the facts by which it is merged; None without one."""
    from dslc.runtime.checkpoint.export import Adapted

    adapter, facts = adapter_step(analysis.job.model.adapter), analysis.facts.model
    if adapter is None:
        return None
    unknown = None if analysis.job.model.has_user_network else frozenset[str]()
    return Adapted(
        step=adapter,
        transposed=frozenset(facts.transposed) if facts else unknown,
        quantized={weight.name: weight for weight in facts.quantized} if facts else {},
    )


def _companion_folders(start: str, step: TransformersStep | None) -> tuple[str, ...]:
    """Returns the folders whose tokenizer goes with the model: the folder of its initial weights, and its own."""
    model = os.path.join(step.folder, os.path.expanduser(step.name)) if step else ""
    return tuple(filter(os.path.isdir, (start, model)))


def _show_error(error: Exception) -> None:
    """Shows what cannot be written and why: of libraries that import torchvision, a torchvision that fails."""
    cause = true_cause(error)
    print(plain_lines(f"dslc: {cause}"), file=sys.stderr)
    if remedy := getattr(cause, "remedy", ""):
        print(f"help: {remedy}", file=sys.stderr)


def _once(ties: Mapping[str, str]) -> str:
    """Says which names a file lacks, because the format holds a tensor once."""
    names = shorten_list([f"`{name}` is `{owner}`" for name, owner in ties.items()])
    return (
        f"note: {names}, which the file holds once, as the format requires: `safetensors.torch.load_model` takes it, "
        "or write a .pt"
    )


def _fault(output: str, adapter: bool) -> str:
    """Returns the reason why nothing can be written there; "" if there is none."""
    parent = os.path.dirname(os.path.abspath(output))
    if adapter and output.endswith(_FILES):
        return "an adapter is written into a folder, as peft's `save_pretrained` does"
    if output.endswith(_OTHERS):
        return "weights are written as .safetensors or .pt, or into a folder as `save_pretrained` does"
    if not os.path.isdir(parent):
        return f"there is no folder {parent}"
    if output.endswith(_FILES) or not os.path.lexists(output):
        return ""
    return "" if os.path.isdir(output) and not os.listdir(output) else f"{output} is not an empty folder"


def _fault_of_folder(analysis: Analysis, adapter: bool) -> str:
    if adapter:
        return "" if analysis.job.model.adapter else "the job has no adapter: `model.adapter = lora(…)`"
    network, source = analysis.job.model.network, analysis.source
    if not isinstance(network, TransformersNetwork):
        return "a folder is written for a `transformers(…)` network; others are written as .safetensors or .pt"
    if network.task is None and source.input is None and source.structures is None:
        return (
            "the data, from which the head of the model follows, is not known: write .safetensors or .pt, or name the "
            "head in the job: `transformers(…, task = causal_lm)`"
        )
    return ""
