"""Converts the configuration files of one training into a draft of a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from dslc.conversion.config_file import ConfigFile, read_config
from dslc.conversion.draft import Draft
from dslc.conversion.recognize import TOOLS, recognize_tool
from dslc.conversion.tools.accelerate import read_accelerate
from dslc.conversion.tools.axolotl import read_axolotl
from dslc.conversion.tools.deepspeed import read_deepspeed
from dslc.conversion.tools.lightning import read_lightning
from dslc.conversion.tools.torchtitan import read_torchtitan
from dslc.conversion.tools.transformers_arguments import read_transformers
from dslc.dsl.diagnostics import TooManyErrors
from dslc.dsl.words import plural

Reader = Callable[[ConfigFile, Draft], None]
# In the order in which they are read: a later file overrides what an earlier one states.
_READERS: dict[str, Reader] = {
    "transformers": read_transformers,
    "axolotl": read_axolotl,
    "lightning": read_lightning,
    "torchtitan": read_torchtitan,
    "accelerate": read_accelerate,
    "deepspeed": read_deepspeed,
}


def convert(paths: Sequence[str], *, tool: str = "", devices: tuple[int, int] | None = None) -> Draft:
    """Reads the files as one training. Mistakes are in the draft's report; `devices` are nodes and GPUs of each."""
    draft = Draft(devices=devices)
    try:
        files = [file for path in paths if (file := read_config(path, draft.report))]
        tools = [(tool or recognize_tool(file, draft.report), file) for file in files]
        if all(name != "deepspeed" for name, _ in tools):
            tools += [("deepspeed", file) for file in _referenced_files(files, draft)]
        convert_files(tools, draft)
    except TooManyErrors:
        pass  # the report says so
    return draft


_REFERENCES = ("deepspeed", "deepspeed_config", "deepspeed_config.deepspeed_config_file")


def _referenced_files(files: Sequence[ConfigFile], draft: Draft) -> list[ConfigFile]:
    """Returns the first DeepSpeed configuration that a file names or holds, if there is one."""
    result: list[ConfigFile] = []
    for file in files:
        for key in _REFERENCES:
            value = file.value(key)
            if isinstance(value, dict) and value and key == "deepspeed":
                result.append(file.section(key))
            elif isinstance(value, str) and value.endswith(".json"):
                beside = os.path.join(os.path.dirname(file.path), value)
                path = next((path for path in (value, beside) if os.path.isfile(path)), "")
                if path and (referenced := read_config(path, draft.report)):
                    result.append(referenced)
                else:
                    message = f"`{key}` names {value}, which is not there: its settings are not in the job"
                    help = "give that file, too"
                    draft.report.add("W1104", message, file.place(key), help=help)
    return result[:1]


def convert_files(files: Sequence[tuple[str | None, ConfigFile]], draft: Draft) -> None:
    """Adds what the files state to the draft. Each has its tool; None for a file that no reader takes."""
    for name, read in _READERS.items():
        for tool, file in files:
            if tool == name:
                if name in draft.tools:
                    draft.report.add(
                        "E1103",
                        f"{file.path} is a second configuration of {TOOLS[name]}",
                        None,
                        help="a job is made of one file of each tool",
                    )
                    continue
                draft.tools.append(name)
                draft.files[name] = file
                read(file, draft)
    if draft.tools:
        _resolve_batch(draft)


def _resolve_batch(draft: Draft) -> None:
    """Fills in the data ranks, and reports a batch that cannot be."""
    if draft.devices is not None:
        world = draft.devices[0] * draft.devices[1]
        if world % draft.model_ranks:
            axes = ", ".join(f"{axis} = {size}" for axis, size in draft.axes.items())
            draft.report.add(
                "E1103",
                f"{world} devices cannot be shared out over {axes}",
                None,
                help=f"the number of devices is a multiple of {draft.model_ranks}",
            )
            return
        ranks = world // draft.model_ranks
        if draft.batch.ranks not in (None, ranks):
            message = (
                f"{world} devices leave {plural(ranks, 'data rank')}, and the configuration states {draft.batch.ranks}"
            )
            draft.report.add("E1103", message, None, help="change the number of devices, or the sizes of the axes")
            return
        draft.batch = replace(draft.batch, ranks=ranks)
    try:
        draft.batch = draft.batch.resolved()
    except ValueError as error:
        draft.report.add("E1103", str(error), None, help="change one of them so that the product is right")
