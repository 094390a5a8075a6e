"""Reads the conversations or the pairs of answers in an Axolotl configuration: `datasets` of type `chat_template`."""

from __future__ import annotations

from collections.abc import Mapping

from dslc.conversion.key_reader import KeyReader
from dslc.conversion.tools.pair_arguments import LEAST_BETA, note_cross_entropy
from dslc.dsl.json_value import Json
from dslc.dsl.words import quoted

_PAIR_LOSSES = ("dpo", "ipo", "orpo", "simpo")
_RENAMED = frozenset({"field_messages", "field_chosen", "field_rejected", "message_property_mappings"})
_TYPES = ("chat_template", "sharegpt")  # the second in older versions
_OWN_TEMPLATE = ("tokenizer_default", "tokenizer_default_fallback_chatml")
_PACKING = "`pack = documents` takes one source, and a mixture has several"


def read_conversations(reader: KeyReader, key: str) -> bool:
    """Sets the source if all data sets hold conversations. Returns False if they do not."""
    value = reader.file.value(key)
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    model = reader.draft.settings.get("model.weights")
    if not entries or not all(entry.get("type") in _TYPES and entry.get("path") for entry in entries) or not model:
        return False
    arguments = f"tokenizer = {model.text}"
    if template := _template(reader):
        arguments += f", template = {template}"
    if reader.flag("train_on_inputs"):
        arguments += ", train_on = all"
        reader.carry("train_on_inputs", "data.source.train_on = all")
    else:
        reader.imply("train_on_inputs", "`train_on = assistant` is the default")
    length = reader.whole_number("sequence_len", least=2) or 512  # Axolotl's default
    arguments += f", max_length = {length}"
    packs = reader.flag("sample_packing") and len(entries) == 1
    if packs:
        arguments += ", pack = documents"
    sources = [f"chat({_conversations(entry)}, {arguments})" for entry in entries]
    text = sources[0] if len(sources) == 1 else f"mixture([{', '.join(sources)}])"
    reader.draft.set("data.source", text, key)
    reader.carry(key, "data.source = chat(…)")
    reader.carry("sequence_len", f"data.source.max_length = {length}")
    if packs:
        reader.carry("sample_packing", "data.source.pack = documents")
    elif reader.flag("sample_packing"):
        reader.name("sample_packing", _PACKING)
    else:
        reader.imply("sample_packing", "a sequence holds one conversation, as by default")
    return True


def read_pairs(reader: KeyReader, key: str) -> bool:
    """Sets the source and the loss of a training on pairs of answers. Returns False if a job cannot say them."""
    word, value = reader.text("rl"), reader.file.value(key)
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    model = reader.draft.settings.get("model.weights")
    if word not in _PAIR_LOSSES or len(entries) != 1 or model is None:
        return False
    kind, renamed = str(entries[0].get("type") or "chat_template"), _RENAMED & entries[0].keys()
    if not kind.startswith("chat_template") or renamed or not entries[0].get("path"):
        return False
    arguments = {"beta": "orpo_alpha" if word == "orpo" and reader.has("orpo_alpha") else "rl_beta"}
    arguments |= {"gamma": "simpo_gamma"} if word == "simpo" else {}
    least = {"beta": LEAST_BETA, "gamma": 0.0}
    given = {name: reader.number(its_key, least=least[name]) for name, its_key in arguments.items()}
    if given["beta"] is None:
        given["beta"] = 0.1  # TRL's default
    texts = [f"{name} = {number}" for name, number in given.items() if number is not None]
    reader.put("rl", "model.loss", f"{word}({', '.join(texts)})")
    for name, its_key in arguments.items():
        if given[name] is not None and reader.has(its_key):
            reader.carry(its_key, f"model.loss.{name} = {given[name]}")
    if word == "simpo":
        note_cross_entropy(reader, "rl")
    source = f"tokenizer = {model.text}"
    if template := _template(reader):
        source += f", template = {template}"
    length = reader.whole_number("sequence_len", least=2) or 512  # Axolotl's default
    reader.draft.set("data.source", f"preferences({_conversations(entries[0])}, {source}, max_length = {length})", key)
    reader.carry(key, "data.source = preferences(…)")
    reader.carry("sequence_len", f"data.source.max_length = {length}")
    reader.imply("train_on_inputs", "the loss counts the answers alone")
    reader.imply("sample_packing", "a row holds one answer")
    return True


def _template(reader: KeyReader) -> str:
    """Returns the file of the template; "" for the tokenizer's own."""
    name, file = reader.text("chat_template"), reader.text("chat_template_jinja")
    if name == "jinja" and file and "{" not in file:
        reader.carry("chat_template", "data.source.template")
        reader.carry("chat_template_jinja", f"data.source.template = {quoted(_relative(file))}")
        return quoted(_relative(file))
    if name in _OWN_TEMPLATE:
        reader.carry("chat_template", "data.source.template = default: the tokenizer's own")
    else:
        reader.name("chat_template", '`template = "file"` takes a file in Jinja; by default it is the tokenizer\'s own')
    return ""


def _conversations(entry: Mapping[str, Json]) -> str:
    """Returns the files of an entry, or its data set."""
    path, files = str(entry["path"]), entry.get("data_files")
    if path.endswith(".jsonl") and not entry.get("field_messages"):
        return quoted(_relative(path))
    arguments = [quoted(path)]
    if isinstance(files, str) or (isinstance(files, list) and files):
        names = [str(file) for file in (files if isinstance(files, list) else [files])]
        arguments.append(f"data_files = [{', '.join(quoted(name) for name in names)}]")
    for name, field in (("input", "field_messages"), ("split", "split"), ("name", "name")):
        if entry.get(field):
            arguments.append(f"{name} = {quoted(str(entry[field]))}")
    return f"datasets({', '.join(arguments)})"


def _relative(path: str) -> str:
    return path if path.startswith((".", "/", "~")) else f"./{path}"
