"""Writes a draft as a job, in the layout of `dslc fmt`, with the key of each setting as a comment."""

from __future__ import annotations

from dslc.conversion.batch_size import RANKS
from dslc.conversion.draft import CallDraft, ConvertedSetting, Draft
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.registry import BLOCKS, fields
from dslc.dsl.plain import plain
from dslc.dsl.source import Source
from dslc.dsl.syntax.format import format_document
from dslc.dsl.syntax.parser import parse
from dslc.dsl.words import quoted

UNSTATED = "no file states"
NETWORK, SOURCE = 'python("your_module:your_network")', 'python("your_module:your_data")'


_OF_THE_BASE = ("model.network", "model.loss", "model.weights", "data.source")


def job_text(draft: Draft, title: str, *, base: str = "") -> str:
    """Returns the text of the job. What no configuration states is a placeholder with a comment that says so, or comes
    from the job at the path `base`, which is imported.
    """
    settings = _completed(draft)
    lines = [f"# {title}"]
    if base:
        lines.append(f"import {quoted(base)}\n")
        unstated = [path for path in ("train.epochs", "train.optimizer") if _is_unstated(settings.get(path))]
        absent = {*_OF_THE_BASE, *unstated}
        settings = {path: setting for path, setting in settings.items() if path not in absent}
    if any(RANKS in setting.text.split() for setting in settings.values()):
        lines.append(f"param {RANKS} = 1  # {_unstated('the number of GPUs: set it to yours')}")
    for word, block in BLOCKS.items():
        entries = [
            f"  {field.word} = {setting.text}{_comment(setting.origin)}\n"
            for field in fields(block)
            if (setting := settings.get(f"{word}.{field.word}"))
        ]
        if entries:
            lines.append(f"\n{word} {{\n{''.join(entries)}}}")
    return _formatted("\n".join(lines) + "\n")


def _is_unstated(setting: ConvertedSetting | None) -> bool:
    return setting is not None and setting.origin.startswith(UNSTATED)


def _unstated(what: str) -> str:
    return f"{UNSTATED} {what}"


def _comment(origin: str) -> str:
    return f"  # {plain(' '.join(origin.split()))}" if origin else ""


def _completed(draft: Draft) -> dict[str, ConvertedSetting]:
    """Returns all settings, with placeholders for what a job must have."""
    settings = dict(draft.settings)
    settings.setdefault("model.network", ConvertedSetting(NETWORK, "name your network"))
    settings.setdefault("model.loss", ConvertedSetting("cross_entropy()", "name your loss"))
    settings.setdefault("data.source", ConvertedSetting(SOURCE, "name your data"))
    batch = draft.batch.resolved()
    text = batch.batch_text
    if text:
        settings["data.batch"] = ConvertedSetting(text, "the global batch")
    else:
        least = (
            f"{batch.accumulation or 1} * {RANKS}"
            if batch.ranks is None
            else str(batch.ranks * (batch.accumulation or 1))
        )
        settings["data.batch"] = ConvertedSetting(least.removeprefix("1 * "), _unstated("the batch: name yours"))
    if (text or batch.accumulation) and (microbatches := batch.microbatches_text):
        settings["parallelism.microbatches"] = ConvertedSetting(microbatches, "accumulation")
    elif batch.accumulation == 1 and "pipeline" in draft.axes:
        settings["parallelism.microbatches"] = ConvertedSetting("1", "no accumulation")
    settings.update(_devices(draft, batch.ranks))
    optimizer = draft.optimizer or CallDraft("adamw")
    origin = settings.get("train.optimizer", ConvertedSetting("")).origin
    if draft.optimizer is None:
        origin = _unstated("the optimizer")
    elif "lr" not in optimizer.arguments:
        origin = origin or "no file states the learning rate"
    settings["train.optimizer"] = ConvertedSetting(optimizer.text(), origin)
    if draft.schedule is not None:
        settings["train.lr_schedule"] = ConvertedSetting(draft.schedule.text())
    if "train.steps" not in settings and "train.epochs" not in settings:
        settings["train.epochs"] = ConvertedSetting("1", _unstated("the length"))
    return settings


def _devices(draft: Draft, data_ranks: int | None) -> dict[str, ConvertedSetting]:
    kind = "cpus" if draft.wants_cpu else "gpus"
    if draft.devices is not None:
        nodes, processes = draft.devices
    elif data_ranks is not None:
        world = data_ranks * draft.model_ranks
        nodes, processes = (world // 8, 8) if world > 8 and world % 8 == 0 else (1, world)
    else:
        ranks = RANKS if draft.model_ranks == 1 else f"{RANKS} * {draft.model_ranks}"
        return {f"devices.{kind}": ConvertedSetting(ranks)}
    count = {"devices.nodes": ConvertedSetting(str(nodes))} if nodes > 1 else {}
    return {**count, f"devices.{kind}": ConvertedSetting(str(processes))}


def _formatted(text: str) -> str:
    report = Report()
    document = parse(Source("job.plt", text), report)
    assert document is not None and not report, [diagnostic.message for diagnostic in report]
    return format_document(document)
