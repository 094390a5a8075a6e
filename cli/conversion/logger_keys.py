"""Keys of other tools that name loggers, as `log.loggers` of a job."""

from __future__ import annotations

from collections.abc import Mapping

from dslc.conversion.draft import CallDraft, value_text
from dslc.conversion.key_reader import KeyReader
from dslc.dsl.json_value import Json

LOGGERS = "log.loggers"
_LIGHTNING: Mapping[str, tuple[str, Mapping[str, str]]] = {  # a class, its word, and its arguments by ours
    "TensorBoardLogger": ("tensorboard", {"dir": "save_dir"}),
    "WandbLogger": ("wandb", {"project": "project", "entity": "entity", "name": "name", "group": "group",
                              "tags": "tags"}),
    "MLFlowLogger": ("mlflow", {"experiment": "experiment_name", "uri": "tracking_uri", "name": "run_name"}),
    "CSVLogger": ("csv", {"dir": "save_dir"}),
}  # fmt: skip


def put_logger(reader: KeyReader, word: str, keys: tuple[str, ...], arguments: Mapping[str, str]) -> None:
    """Adds a logger to the job, which the keys state. `arguments` names the key of each argument that may be given."""
    texts = {name: reader.text(key) for name, key in arguments.items()}
    call = CallDraft(word, {name: value_text(text) for name, text in texts.items() if text})
    _add(reader, call, keys[0])
    for key in (*keys, *arguments.values()):
        reader.carry(key, f"{LOGGERS} = {call.text()}")


def put_lightning_loggers(reader: KeyReader, key: str) -> None:
    """Adds the loggers of Lightning's trainer: true, false, or one or several classes with their arguments."""
    value = reader.file.value(key)
    if isinstance(value, bool):
        reader.put(key, "log.tensorboard", "true" if value else "false")
        return
    calls = [_lightning_call(each) for each in (value if isinstance(value, list) else [value])]
    known = [call for call in calls if call is not None]
    for call in known:
        _add(reader, call, key)
    if known:
        reader.carry(key, f"{LOGGERS} = {', '.join(call.text() for call in known)}")
    else:
        reader.name(key, "no logger of a job is like it: `log.loggers = python(…)` takes one of yours")


def _lightning_call(value: Json) -> CallDraft | None:
    """Returns the logger that a class of Lightning and its arguments become; None for another class."""
    if not isinstance(value, dict):
        return None
    word, names = _LIGHTNING.get(str(value.get("class_path")).rpartition(".")[2], ("", {}))
    given = value.get("init_args")
    given = given if isinstance(given, dict) else {}
    arguments = {name: value_text(given[theirs]) for name, theirs in names.items() if given.get(theirs)}
    if given.get("offline") is True:
        arguments["mode"] = "offline"
    return CallDraft(word, arguments) if word else None


def _add(reader: KeyReader, call: CallDraft, origin: str) -> None:
    setting = reader.draft.settings.get(LOGGERS)
    if setting is None:
        reader.draft.set(LOGGERS, f"[{call.text()}]", origin)
        return
    origins = setting.origin if origin in setting.origin.split(", ") else f"{setting.origin}, {origin}"
    reader.draft.set(LOGGERS, f"{setting.text[:-1]}, {call.text()}]", origins)
