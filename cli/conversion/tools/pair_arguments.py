"""Reads a training on pairs of answers in the arguments of TRL and of LLaMA-Factory.

Model: LLaMA-Factory names the algorithm (`stage: dpo`) and the loss (`pref_loss`). A file of TRL belongs to a script,
which decides: a loss of DPOTrainer or of CPOTrainer, or a key that DPOTrainer alone has, tells that it is one of pairs.
`beta` alone does not, as other algorithms have it too.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslc.conversion.draft import value_text
from dslc.conversion.key_reader import KeyReader
from dslc.dsl.words import quoted

_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_DPO_KEYS = (
    "precompute_ref_log_probs",
    "precompute_ref_batch_size",
    "sync_ref_model",
    "reference_free",
    "rpo_alpha",
    "use_weighting",
    "ld_alpha",
    "f_divergence_type",
)
_MODERN = {"stage": "stage", "loss": "pref_loss", "beta": "pref_beta", "smoothing": "dpo_label_smoothing"}
_OLDER = {"stage": "stage", "loss": "dpo_loss", "beta": "dpo_beta", "smoothing": "dpo_label_smoothing"}
_TRL = {"loss": "loss_type", "beta": "beta", "smoothing": "label_smoothing"}
LEAST_BETA = 1e-9  # 0 is no loss
_NO_SUCH_LOSS = "losses of pairs are `dpo`, `ipo`, `orpo` and `simpo`; `train.step = python(…)` takes one of yours"
_UNSTATED = {
    "rpo_alpha": "no cross entropy is added to a loss of pairs",
    "pref_ftx": "no cross entropy is added to a loss of pairs",
    "dpo_ftx": "no cross entropy is added to a loss of pairs",
    "cpo_alpha": "no cross entropy is added to a loss of pairs: `simpo` is CPO with `cpo_alpha = 0`",
    "sync_ref_model": "the reference stays as it is: its numbers are computed once, before the first step",
    "reference_free": "`dpo` has a reference; `simpo` has none",
    "use_weighting": _NO_SUCH_LOSS,
    "ld_alpha": _NO_SUCH_LOSS,
}
_NEEDLESS = {
    "precompute_ref_log_probs": "the reference's numbers are computed once, before the first step",
    "precompute_ref_batch_size": "the pass over the pairs takes two micro-batches",
    "ref_model_mixup_alpha": "the reference stays as it is",
    "ref_model_sync_steps": "the reference stays as it is",
    "disable_dropout": "the reference has none, and the network that of its configuration",
    "train_on_prompt": "the loss counts the answers alone",
    "assistant_only_loss": "the loss counts the answers alone",
}


def read_pairs(reader: KeyReader, length_key: str | None) -> bool:
    """Sets the loss and the source of a training on pairs. Returns False if the file asks for none that a job has."""
    keys = _keys(reader)
    word = _loss_word(reader, keys)
    model = reader.draft.settings.get("model.weights")
    if not word or model is None:
        _name_others(reader)
        return False
    _set_loss(reader, keys, word)
    _set_source(reader, keys, length_key, model.text)
    for key, reason in _UNSTATED.items():
        if reader.value(key):
            reader.name(key, reason)
        else:
            reader.imply(key, "it does nothing, as here")
    for key, reason in _NEEDLESS.items():
        reader.imply(key, reason)
    kernel = reader.text("f_divergence_type")
    if kernel in (None, "reverse_kl", "FDivergenceType.REVERSE_KL"):
        reader.imply("f_divergence_type", "the divergence of `dpo`")
    else:
        reader.name("f_divergence_type", _NO_SUCH_LOSS)
    return True


def _keys(reader: KeyReader) -> Mapping[str, str]:
    if reader.has("stage"):
        return _OLDER if reader.has("dpo_loss") or reader.has("dpo_beta") else _MODERN
    return _TRL


def _loss_word(reader: KeyReader, keys: Mapping[str, str]) -> str:
    """Returns the loss of pairs that the file asks for; "" for none that a job has."""
    stage = (reader.text("stage") or "").lower()
    if stage == "orpo":
        return "orpo"
    value = reader.value(keys["loss"])
    names = [str(each) for each in (value if isinstance(value, list) else [value]) if each is not None]
    if stage:
        return _LOSSES.get(names[0] if names else "sigmoid", "") if stage == "dpo" and len(names) < 2 else ""
    if not names:
        return "dpo" if any(reader.has(key) for key in _DPO_KEYS) else ""
    return _LOSSES.get(names[0], "") if len(names) == 1 and names[0] != "orpo" else ""


def _set_loss(reader: KeyReader, keys: Mapping[str, str], word: str) -> None:
    arguments = {"beta": reader.number(keys["beta"], least=LEAST_BETA)}
    if arguments["beta"] is None:
        arguments["beta"] = 0.1
        reader.defaults.append(f"`{keys['beta']} = 0.1`")
    if word == "simpo":
        gamma = reader.number("simpo_gamma")
        arguments["gamma"] = 0.5 if gamma is None else gamma
        reader.carry("simpo_gamma", f"model.loss.gamma = {value_text(arguments['gamma'])}")
        if gamma is None:
            reader.defaults.append("`simpo_gamma = 0.5`")
        if keys is _TRL:
            note_cross_entropy(reader, keys["loss"])
    texts = [f"{name} = {value_text(number)}" for name, number in arguments.items() if number is not None]
    reference = reader.text("ref_model")
    if reference and word in ("dpo", "ipo"):
        texts.append(f"reference = {quoted(reference)}")
        reader.carry("ref_model", f"model.loss.reference = {quoted(reference)}")
    kernels = [key for key in ("use_liger_kernel", "enable_liger_kernel") if reader.flag(key)]
    if kernels:
        texts.append("chunks = auto")
    text = f"{word}({', '.join(texts)})"
    where = next((key for key in (keys["loss"], keys.get("stage", ""), keys["beta"]) if key and reader.has(key)), "")
    reader.draft.set("model.loss", text, where or "a key of DPOTrainer")
    for key in (keys["loss"], keys.get("stage", ""), *kernels):
        if key:
            reader.carry(key, f"model.loss = {text}")
    reader.carry(keys["beta"], f"model.loss.beta = {value_text(arguments['beta'] or 0)}")
    for key in ("use_liger_kernel", "enable_liger_kernel"):
        if key not in kernels:
            reader.imply(key, "the loss takes whole logits, as by default")
    for key in {keys["smoothing"], "label_smoothing_factor"}:
        if reader.number(key):
            reader.name(key, "the labels of pairs are not smoothed")
        else:
            reader.imply(key, "0 is the default")


def note_cross_entropy(reader: KeyReader, key: str) -> None:
    """Notes that CPOTrainer adds a cross entropy to its loss, unless a key forbids it. `key` asks for the loss."""
    if not reader.has("cpo_alpha"):
        message = "`simpo` of CPOTrainer adds the cross entropy of the chosen answers, which the job does not"
        reader.note_default(key, message, "`cpo_alpha: 0` trains by SimPO alone")


def _set_source(reader: KeyReader, keys: Mapping[str, str], length_key: str | None, model: str) -> None:
    default = 2048 if "stage" in keys else 1024  # of LLaMA-Factory, of TRL
    length = reader.whole_number(length_key, least=2) if length_key else None
    if length is None:
        length = default
        reader.defaults.append(f"`{'cutoff_len' if 'stage' in keys else 'max_length'} = {default}`")
    elif length_key:
        reader.carry(length_key, f"data.source.max_length = {length}: a longer answer loses its end")
    name = reader.text("dataset_name") if "stage" not in keys else None
    pairs, hint = quoted("your_pairs.jsonl"), "name your pairs: a `prompt`, `chosen` and `rejected` on each line"
    if name:
        arguments = [quoted(name)]
        for argument, key in (("name", "dataset_config"), ("split", "dataset_train_split")):
            if value := reader.text(key):
                arguments.append(f"{argument} = {quoted(value)}")
                reader.carry(key, f"data.source, {argument} = {quoted(value)}")
        pairs, hint = f"datasets({', '.join(arguments)})", "dataset_name"
        reader.carry("dataset_name", "data.source = preferences(…)")
    source = f"preferences({pairs}, tokenizer = {model}, max_length = {length})"
    reader.draft.set("data.source", source, hint)
    reader.name("dataset", hint)
    for key in ("template", "chat_template"):
        reader.name(key, '`template = "file"` takes a file in Jinja; by default it is the tokenizer\'s own')
    for key in ("packing", "padding_free", "neat_packing"):
        if reader.flag(key):
            reader.name(key, "a row of `preferences` holds one answer")
        else:
            reader.imply(key, "a row holds one answer")


def _name_others(reader: KeyReader) -> None:
    """Reports why keys of other algorithms are no loss of pairs."""
    stage = (reader.text("stage") or "").lower()
    if stage in ("sft", "pt"):
        reader.imply("stage", "the loss is cross entropy over next tokens")
    elif stage == "dpo":
        reader.name("pref_loss" if reader.has("pref_loss") else "dpo_loss", _NO_SUCH_LOSS)
    elif reader.has("beta") and not reader.has("loss_type"):
        reader.name("beta", "DPO, ORPO, KTO and GRPO have a `beta`: `model.loss = dpo(beta = …)` is the first's")
    value = reader.value("loss_type")
    if value is not None:
        reader.name("loss_type", _NO_SUCH_LOSS)
