"""Jobs that several files of tests train, as text."""

from __future__ import annotations

# A network on a language, in one process, with what its training is compared by; NETWORK is to be filled in.
LANGUAGE_JOB = """
model {
  network = NETWORK
  loss    = cross_entropy()
}
data {
  source     = stdlib(context = 16)
  batch      = 8
  validation = 0.1%
}
devices {
  cpus = 1
}
train {
  steps     = 8
  optimizer = sgd(lr = 0.05, momentum = 0.9)
  clip      = 0.5
}
evaluate {
  metrics = [loss, accuracy]
}
log {
  every       = 1 step
  tensorboard = false
}
"""
# A network with experts; MOE (the rest of `moe`), STEPS and RATE are to be filled in.
EXPERTS_JOB = """
model {
  network = llama(
    layers = 2, width = 16, heads = 2, context = 8, vocab = 32,
    experts = moe(experts = 4, top_k = 2, hidden = 16, shared = 1MOE),
  )
  loss = cross_entropy()
}
data {
  source     = synthetic(samples = 400, vocab = 32)
  batch      = 16
  validation = 6%
}
devices {
  cpus = 1
}
train {
  steps     = STEPS
  optimizer = sgd(lr = RATE, momentum = 0.9)
  clip      = 0.5
}
log {
  every       = 1 step
  tensorboard = false
}
"""
# A module that a job names `sentences:Sentences`.
SENTENCES = """
import torch


class Sentences:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = torch.randint(0, 256, (17,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]
"""


def model_job(network: str, *more: str, source: str = "stdlib(context = 16)", steps: int = 6) -> str:
    """Returns a job in one process; `more` are lines of its `model` block."""
    lines = "".join(f"\n  {line}" for line in more)
    return f"""
model {{
  network = {network}
  loss    = cross_entropy(){lines}
}}
data {{
  source = {source}
  batch  = 8
}}
devices {{
  cpus = 1
}}
train {{
  steps     = {steps}
  optimizer = sgd(lr = 0.1, momentum = 0.9)
}}
log {{
  every       = 1 step
  tensorboard = false
}}
"""


def epochs_job(model: str, data: str, epochs: int = 2, devices: str = "devices { cpus = 1 }") -> str:
    """Returns a job of some epochs in one process, by the lines of its `model` and `data` blocks."""
    return f"""
model {{{model}}}
data {{{data}}}
{devices}
train {{
  epochs    = {epochs}
  optimizer = sgd(lr = 0.1)
}}
log {{
  every       = 1 step
  tensorboard = false
}}
"""


_DEFAULTS: dict[str, dict[str, object]] = {
    "model": {"network": "[flatten(), linear(10)]", "loss": "cross_entropy()"},
    "train": {"optimizer": "sgd(lr = 0.1)"},
    "log": {"every": "1 step", "tensorboard": "false"},
}
_BLOCKS = (
    "model",
    "data",
    "devices",
    "parallelism",
    "memory",
    "train",
    "evaluate",
    "generate",
    "checkpoint",
    "launch",
    "log",
    "expect",
    "sweep",
)
_FIRST = ("network", "loss", "steps", "epochs", "optimizer")


def job_text(**blocks: dict[str, object] | None) -> str:
    """Returns a job by its blocks, each a dict of entries; defaults stand for what `model`, `train` and `log` leave
    out. None leaves out an entry, or a block that has defaults.
    """
    lines = [""]
    for name in _BLOCKS:
        given = blocks.get(name, {})
        entries = {} if given is None else {k: v for k, v in (_DEFAULTS.get(name, {}) | given).items() if v is not None}
        if not entries:
            continue
        ordered = sorted(entries, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
        width = max(map(len, ordered))
        lines += [f"{name} {{", *(f"  {key:<{width}} = {entries[key]}" for key in ordered), "}"]
    return "\n".join(lines) + "\n"


def mlp_job_text(widths: str) -> str:
    """Returns a job that trains a small `mlp` on two processes for two epochs."""
    return job_text(
        model={"network": f"mlp(widths = [{widths}])", "loss": "cross_entropy()"},
        data={"source": "synthetic(samples = 960, shape = [8], classes = 4)", "batch": 64},
        devices={"cpus": 2},
        train={"epochs": 2, "optimizer": "adam(lr = 0.01)"},
    )
