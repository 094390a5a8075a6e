"""The texts that a network writes during its training: their step, and rules for what they need. E0354 to E0356."""

from __future__ import annotations

import os
from collections.abc import Iterator

from dslc.compiler.facts.sources import context_of
from dslc.compiler.facts.untrusted_files import parse_json, read_text
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.steps import GenerateStep
from dslc.compiler.model.value import say
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.workload import Workload, document_end, in_steps
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.blocks import PROMPTS
from dslc.dsl.language.job import JobSpec, values_within
from dslc.dsl.language.layers import GPT, LSTM, Attention, Llama, TransformerBlock, TransformersNetwork
from dslc.dsl.language.preferences import Preferences
from dslc.dsl.paths import portable
from dslc.dsl.remedy import remedy, remove_field, set_argument
from dslc.dsl.source import short_line

_FILE_LIMIT = 1 << 20  # bytes of a file of prompts


class _PromptsError(Exception):
    """Why a file has no prompts, and the remedy."""

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


def generate_step(job: JobSpec, source: SourceFacts, layout: Layout, workload: Workload) -> GenerateStep | None:
    """Returns the step of the texts; None if the job asks for none."""
    generate, prompts = job.generate, job.generate.prompts
    context = source.input.shape[0] if source.input is not None and source.input.shape else context_of(job)
    if prompts is None or context is None:
        return None
    chat = _chat(job)
    tokenizer = generate.tokenizer or (chat.tokenizer if chat is not None else "")
    template = chat.template if chat is not None and chat.template != "default" else ""
    return GenerateStep(
        every=(in_steps(generate.every, workload) or 0) if generate.every else 0,
        prompts=_read_prompts(prompts) if isinstance(prompts, str) else prompts,
        max_tokens=generate.max_tokens,
        temperature=generate.temperature,
        context=context,
        tokenizer=portable(tokenizer, job.folder) if tokenizer else "",
        chat=chat is not None,
        template=portable(template, job.folder) if template else "",
        filler=job.data.pad or 0,
        end=document_end(job, source),
        caches=_caches(job, layout),
        line=short_line(generate.value_span("prompts")),
    )


def _caches(job: JobSpec, layout: Layout) -> bool:
    """True if texts take a cache of keys and values: of the language's own networks, on ranks that have all layers and
    whole sequences. What follows from other positions, as scales of 8 bits do, or from shapes, takes none.
    """
    in_pieces = layout.sequence and layout.sizes["tensor"] > 1
    is_whole = layout.sizes["pipeline"] == layout.sizes["context"] == 1 and not in_pieces
    plain = not (job.data.has_documents or job.train.compile or isinstance(job.train.precision, c.Fp8))
    network = job.model.network
    drops = getattr(getattr(network, "experts", None), "capacity", None) is not None
    return is_whole and plain and not drops and isinstance(network, GPT | Llama)


def _chat(job: JobSpec) -> c.Chat | Preferences | None:
    """Returns a source of conversations or of answers, if all of the job's sources are such."""
    sources = list(c.parts_of(job.data.source))
    chats = [source for source in sources if isinstance(source, c.Chat | Preferences)]
    return chats[0] if chats and len(chats) == len(sources) else None


def _read_prompts(path: str) -> tuple[str, ...]:
    """Returns the prompts in a file. Raises _PromptsError."""
    try:
        lines = [line for line in read_text(path, _FILE_LIMIT).splitlines() if line.strip()]
        prompts = tuple(map(_prompt_of_json, lines)) if path.endswith(".jsonl") else tuple(lines)
    except FileNotFoundError as error:
        raise _PromptsError(f"there is no {path}", "paths are relative to the file that wrote them") from error
    except OSError as error:
        raise _PromptsError(f"{error.strerror}: {path}", "a file with a prompt on each line") from error
    except ValueError as error:
        raise _PromptsError(
            f"{path} holds no prompts: {error}", "UTF-8 with a prompt on each line, or `.jsonl` with a `prompt` on each"
        ) from error
    if not prompts:
        raise _PromptsError(f"{path} holds no prompts", "a prompt on each line")
    if len(prompts) > PROMPTS:
        raise _PromptsError(f"{path} holds {len(prompts):,} prompts", f"at most {PROMPTS}")
    return prompts


def _prompt_of_json(line: str) -> str:
    value = parse_json(line)
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("a line is neither a text in quotes nor an object with a `prompt`")
    return prompt


# -------------------------------------------------------------------------------------------------------------- rules


def check_generation(job: JobSpec, source: SourceFacts, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Reports prompts that cannot be read, data without text, and networks that predict no next token."""
    prompts = job.generate.prompts
    if prompts is None:
        return
    span = job.generate.value_span("prompts")
    if isinstance(prompts, str):
        try:
            _read_prompts(prompts)
        except _PromptsError as error:
            yield Diagnostic("E0354", str(error), span, help=error.help)
    elif not all(prompts):
        yield Diagnostic("E0354", "a prompt is empty", span, help="at least one character to continue")
    yield from _check_text(job)
    yield from _check_network(job, source, model)


def _check_text(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports sources whose tokens are not known as text, and a tokenizer where the source has one."""
    generate, sources = job.generate, list(c.parts_of(job.data.source))
    of_bytes = all(isinstance(each, c.Stdlib | c.Text) for each in sources)
    tokenizers = {(each.tokenizer, each.template) for each in sources if isinstance(each, c.Chat | Preferences)}
    if generate.tokenizer is not None and (of_bytes or tokenizers):
        known = "tokens are bytes" if of_bytes else "conversations have a tokenizer"
        yield Diagnostic(
            "E0355",
            f"the data's {known}, and no other tokenizer makes prompts into tokens",
            generate.value_span("tokenizer"),
            notes=(Note("the data", job.data.value_span("source")),),
            help=remedy(remove_field("generate.tokenizer")),
        )
    elif generate.tokenizer is None and not of_bytes and not (len(tokenizers) == 1 and _chat(job) is not None):
        several = len(tokenizers) > 1
        yield Diagnostic(
            "E0355",
            "the sources of the data have several tokenizers or templates"
            if several
            else "the data are numbers, and nothing says which text they stand for",
            generate.value_span("prompts"),
            notes=(Note("the data", job.data.value_span("source")),),
            help=remedy(
                "" if several else '`tokenizer = "folder"` in this block, or ', remove_field("generate.prompts")
            ),
        )
    elif generate.tokenizer is not None and not os.path.exists(generate.tokenizer):
        yield Diagnostic(
            "E0355",
            f"there is no {generate.tokenizer}",
            generate.value_span("tokenizer"),
            help="a folder that a tokenizer's `save_pretrained` wrote, or a `tokenizer.json`",
        )


def _check_network(job: JobSpec, source: SourceFacts, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Reports networks whose output is no score of each token at each position, or that see the tokens to come."""
    network, why, help = job.model.network, "", remedy(remove_field("generate.prompts"))
    notes: tuple[Note, ...] = ()
    if job.train.step is not None:
        why, notes = "the step is yours, and may train several networks", (Note("here", job.train.value_span("step")),)
    elif isinstance(job.model.loss, c.NetworkLoss):
        why = "the network returns its loss, and no scores of tokens alone"
        notes = (Note("the loss", job.model.loss_span),)
    elif source.structures is not None or (source.input is not None and _is_no_sequence(source)):
        why, notes = "a sample is no sequence of tokens", (Note("the data", job.data.value_span("source")),)
    elif model is not None and source.input is not None and not _scores_tokens(model, source):
        why = f"its output {say(model.output.shape)} is not a score for each token of {say(source.input.shape)}"
        notes = (Note("the network", job.model.network_span),)
    elif isinstance(network, TransformersNetwork) and network.task not in (None, "causal_lm"):
        why, notes = f"its task is `{network.task}`", (Note("the network", job.model.network_span),)
    else:
        layers: list[Attention | TransformerBlock] = [*values_within(network, Attention)]
        layers += values_within(network, TransformerBlock)
        attention = next((layer for layer in layers if not layer.causal), None)
        if attention is not None:
            why, notes = "its attention sees the tokens to come", (Note("the attention", attention.span),)
            help = remedy(set_argument(attention.span, "causal", "true"))
        elif any(layer.bidirectional for layer in values_within(network, LSTM)):
            why, notes = "its `lstm` reads the tokens to come", (Note("the network", job.model.network_span),)
    if why:
        yield Diagnostic(
            "E0356",
            f"the network cannot continue a text: {why}",
            job.generate.value_span("prompts"),
            notes=notes,
            help=help,
        )


def _is_no_sequence(source: SourceFacts) -> bool:
    assert source.input is not None
    return len(source.input.shape) != 1 or source.input.dtype != "int64"


def _scores_tokens(model: ModelGraph, source: SourceFacts) -> bool:
    assert source.input is not None
    shape = model.output.shape
    return len(shape) == 2 and shape[:1] == source.input.shape and (source.vocab is None or shape[1] >= source.vocab)
