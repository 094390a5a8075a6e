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
