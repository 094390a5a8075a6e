"""Writes a draft as a job, in the layout of `dslc fmt`, with the key of each setting as a comment."""

from __future__ import annotations

from dslc.conversion.batch_size import RANKS
from dslc.conversion.draft import CallDraft, Draft, Setting
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.registry import BLOCKS, fields
from dslc.dsl.source import Source
from dslc.dsl.syntax.format import format_document
from dslc.dsl.syntax.parser import parse

NETWORK, SOURCE = 'python("your_module:your_network")', 'python("your_module:your_data")'


def job_text(draft: Draft, title: str) -> str:
    """Returns the text of the job. What no configuration states is a placeholder with a comment that says so."""
    settings = _completed(draft)
    lines = [f"# {title}"]
    if any(RANKS in setting.text.split() for setting in settings.values()):
        lines.append(f"param {RANKS} = 1  # no file states the number of GPUs: set it to yours")
    for word, block in BLOCKS.items():
        entries = [
            f"  {field.word} = {setting.text}{_comment(setting.origin)}\n"
            for field in fields(block)
            if (setting := settings.get(f"{word}.{field.word}"))
        ]
        if entries:
            lines.append(f"\n{word} {{\n{''.join(entries)}}}")
    return _formatted("\n".join(lines) + "\n")


def _comment(origin: str) -> str:
    return f"  # {' '.join(origin.split())}" if origin else ""


def _completed(draft: Draft) -> dict[str, Setting]:
    """Returns all settings, with placeholders for what a job must have."""
    settings = dict(draft.settings)
    settings.setdefault("model.network", Setting(NETWORK, "name your network"))
    settings.setdefault("model.loss", Setting("cross_entropy()", "name your loss"))
    settings.setdefault("data.source", Setting(SOURCE, "name your data"))
    batch = draft.batch.resolved()
    text = batch.batch_text
    settings["data.batch"] = Setting(text, "the global batch") if text else Setting(RANKS, "no file states the batch")
    if text and (microbatches := batch.microbatches_text):
        settings["parallelism.microbatches"] = Setting(microbatches, "accumulation")
    settings.update(_devices(draft, batch.ranks))
    optimizer = draft.optimizer or CallDraft("adamw")
    origin = settings.get("train.optimizer", Setting("")).origin
    if draft.optimizer is None:
        origin = "no file states the optimizer"
    elif "lr" not in optimizer.arguments:
        origin = origin or "no file states the learning rate"
    settings["train.optimizer"] = Setting(optimizer.text(), origin)
    if draft.schedule is not None:
        settings["train.lr_schedule"] = Setting(draft.schedule.text())
    if "train.steps" not in settings and "train.epochs" not in settings:
        settings["train.epochs"] = Setting("1", "no file states the length")
    return settings


def _devices(draft: Draft, data_ranks: int | None) -> dict[str, Setting]:
    kind = "cpus" if draft.wants_cpu else "gpus"
    if draft.devices is not None:
        nodes, processes = draft.devices
    elif data_ranks is not None:
        world = data_ranks * draft.model_ranks
        nodes, processes = (world // 8, 8) if world > 8 and world % 8 == 0 else (1, world)
    else:
        ranks = RANKS if draft.model_ranks == 1 else f"{RANKS} * {draft.model_ranks}"
        return {f"devices.{kind}": Setting(ranks)}
    count = {"devices.nodes": Setting(str(nodes))} if nodes > 1 else {}
    return {**count, f"devices.{kind}": Setting(str(processes))}


def _formatted(text: str) -> str:
    report = Report()
    document = parse(Source("job.plt", text), report)
    assert document is not None and not report, [diagnostic.message for diagnostic in report]
    return format_document(document)
