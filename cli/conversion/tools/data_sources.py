"""Data that a configuration names: files of text and folders of images on disk, data sets with columns of images.

A data set of instructions needs the tool's templates: no source of a job reads it. `chat_sources` reads conversations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from dslc.conversion.draft import CallDraft
from dslc.conversion.key_reader import KeyReader
from dslc.dsl.json_value import Json
from dslc.dsl.words import quoted

_CONTEXT = re.compile(r"context = (\d+)")
_SHOWN = 3  # names in a reason


def set_text_source(reader: KeyReader, key: str, files: Sequence[str]) -> None:
    """Sets the tokens of files of text as the source, and the command that makes them as its comment."""
    source = reader.draft.settings.get("data.source")
    context = _CONTEXT.search(source.text) if source else None
    made = f"{os.path.splitext(files[0])[0]}.bin"
    base = reader.draft.settings.get("model.weights")
    tokenizer = f" --tokenizer {base.text.strip(chr(34))}/tokenizer.json" if base else ""
    command = f"dslc tokens {' '.join(files)}{tokenizer} -o {made}"
    text = f"tokens({quoted(job_path(made))}, context = {context[1] if context else 1024})"
    reader.draft.set("data.source", text, f"`{command}` makes it")
    reader.carry(key, f"data.source = {text}, which `dslc tokens` makes")


def read_text_data(reader: KeyReader, key: str) -> None:
    """Reads a list of data sets, each plain text: in files on disk they become the source."""
    value = reader.file.value(key)
    entries = value if isinstance(value, list) else [value]
    files = [file for entry in entries if isinstance(entry, dict) for file in _text_files(entry)]
    if files and all(isinstance(entry, dict) and _text_files(entry) for entry in entries):
        set_text_source(reader, key, files)
        return
    names = [str(entry.get("path")) for entry in entries if isinstance(entry, dict) and entry.get("path")]
    kinds = {str(entry.get("type") or "text").partition(".")[0] for entry in entries if isinstance(entry, dict)}
    shown = ", ".join(name[:60] for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    if names and kinds <= {"completion", "pretrain", "text"}:
        reader.name(key, f"no source reads {shown}: write its text into a file, of which `dslc tokens` makes tokens")
    elif names:
        kind = "`, `".join(sorted(kinds))
        reader.name(
            key, f"templates such as `{kind}` belong to {reader.tool}: read {shown} by `data.source = python(…)`"
        )


def _text_files(entry: Mapping[str, Json]) -> list[str]:
    """Returns the files of a data set of plain text on disk; none for any other."""
    listed = entry.get("data_files") or entry.get("path")
    files = [str(file) for file in (listed if isinstance(listed, list) else [listed]) if file]
    is_text = entry.get("ds_type") == "text" or all(file.endswith(".txt") for file in files)
    is_plain = entry.get("type") in (None, "completion", "pretrain")
    is_local = all(re.fullmatch(r"[\w./~*-]+", file) and "://" not in file for file in files)
    return files if is_text and is_plain and is_local else []


def read_image_data(reader: KeyReader) -> None:
    """Reads the data of a classification of images: a folder, or a data set with its columns."""
    folder, name = reader.text("train_dir"), reader.text("dataset_name")
    image, label = reader.text("image_column_name"), reader.text("label_column_name")
    if folder:
        reader.put("train_dir", "data.source", f"images({quoted(job_path(folder))})")
    elif name and (image or label):
        columns = {"input": quoted(image or "image"), "target": quoted(label or "label")}
        config = reader.text("dataset_config_name")
        call = CallDraft("datasets", {"path": quoted(name), **columns, **({"name": quoted(config)} if config else {})})
        text = call.text().replace("path = ", "", 1)
        reader.draft.set("data.source", text, "dataset_name")
        for key in ("dataset_name", "dataset_config_name", "image_column_name", "label_column_name"):
            reader.carry(key, f"data.source = {text}")


def job_path(path: str) -> str:
    """Returns a path as the language takes it."""
    return path if path.startswith((".", "/", "~")) else f"./{path}"
