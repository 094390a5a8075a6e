"""Jobs of one's own drawn at random: structures, collates, losses, networks that look at numbers, steps, hooks,
loggers, metrics, and weights that a file gives in part, by the parts of own_parts.py.

Model: each method of `OwnDrawing` draws data with a network and a loss that fit it. `lay_out` writes the module and the
files of weights that the jobs name.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.paths import HELPERS

_LOSSES = ("classified", "classified", "weighed", "told", "each_told")


@dataclass(frozen=True, kw_only=True)
class Own:
    """Entries of `model`, `data` and `train`, and whether a metric of one's own fits."""

    model: dict[str, str]
    data: dict[str, str]
    train: dict[str, str]
    measured: bool = False
    own_validation: bool = False


def lay_out(folder: Path) -> None:
    """Writes what the jobs name."""
    import torch
    from helpers import own_parts
    from safetensors.torch import save_file

    shutil.copy(HELPERS / "own_parts.py", folder)
    torch.manual_seed(7)
    for name, made in (("mixed", own_parts.Mixed()), ("tagger", own_parts.Tagger()), ("duel", own_parts.Duel())):
        state = {f"old.{key}": value.clone() for key, value in made.state_dict().items()}
        save_file(state | {"unused": torch.zeros(2)}, folder / f"{name}.safetensors")


class OwnDrawing:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def one(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def flags(self, *names: str) -> str:
        """Returns arguments of which each is true now and then."""
        return "".join(f", {name} = true" for name in names if self.chance(0.3))

    def draw(self) -> Own:
        kind = self.rng.choice((self.points, self.points, self.ragged, self.whole, self.steps, self.steps))
        return kind()

    def loss(self, losses: Sequence[str] = _LOSSES) -> str:
        if self.chance(0.04):
            return self.one("cross_entropy()", "own()", "mse()")
        return f'python("own_parts:{self.rng.choice(losses)}")'

    def points(self) -> Own:
        named, pair = self.chance(0.3), self.chance(0.2)
        arguments = f', form = "{self.one("dict", "tuple")}"' + (", named = true" if named else "")
        network = f'python("own_parts:Mixed"{self.flags("looks", "idle")}{", named = true" if named else ""})'
        function = "points" if pair else "Points"
        return Own(
            model={"network": network, "loss": self.loss()} | self.weights("mixed"),
            data={"source": f'python("own_parts:{function}"{arguments})'},
            train={},
            measured=True,
            own_validation=pair,
        )

    def ragged(self) -> Own:
        recurrent = self.flags("recurrent")
        return Own(
            model={"network": f'python("own_parts:Tagger"{recurrent})', "loss": self.loss()}
            | ({} if recurrent else self.weights("tagger")),
            data={
                "source": f'python("own_parts:Sentences"{self.flags("noise")})',
                "collate": 'python("own_parts:padded")',
            },
            train={},
            measured=True,
        )

    def whole(self) -> Own:
        gives = self.rng.choice(("mean", "shifted", "each", "pair", "further", "samples"))
        more = {"mean": 'mean_of = "labels"', "shifted": 'mean_of = "labels", shift = 1'}.get(gives, "")
        data = {"source": 'python("own_parts:Texts")'}
        if gives in ("mean", "pair") and self.chance(0.5):
            data = {"source": 'python("own_parts:Sentences")', "collate": 'python("own_parts:together")'}
        return Own(
            model={"network": f'python("own_parts:Teller", gives = "{gives}")', "loss": f"own({more})"},
            data=data,
            train={},
        )

    def steps(self) -> Own:
        shared, step = self.flags("shared"), self.rng.choice(("duel", "duel", "duel", "thrice", "at_once"))
        form = ', form = "pair"' if step == "duel" and self.chance(0.3) else ""
        return Own(
            model={"network": f'python("own_parts:Duel"{shared})', "loss": "own()"}
            | ({} if shared else self.weights("duel")),
            data={"source": 'python("own_parts:Rivals")'},
            train={"step": f'python("own_parts:{step}"{form})'},
        )

    def weights(self, name: str) -> dict[str, str]:
        """Sometimes numbers to begin with, whose names lack what `rename` mends."""
        if not self.chance(0.2):
            return {}
        rename = 'rename = ["old.* -> *"]'
        rest = 'allow_missing = ["*"], allow_unused = ["*"]'
        text = self.one(
            f'pretrained("{name}.safetensors", {rename}, {rest})',
            f'pretrained("{name}.safetensors", {rename}, {rest})',
            f'pretrained("{name}.safetensors", only = ["old.*.weight"], {rename}, allow_missing = ["*"])',
            f'pretrained("{name}.safetensors", {rename})',
        )
        return {"weights": text}


def around(rng: random.Random, own: Own, blocks: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Returns the blocks `model`, `evaluate` and `log` of a job, and adds to the others what is a user's own."""

    def chance(share: float) -> bool:
        return rng.random() < share

    train, data, evaluate = blocks["train"], blocks["data"], dict[str, str]()
    if chance(0.3) and not own.own_validation:
        data["validation"] = rng.choice(("10%", "0.25", "30%"))
    every = (
        'python("own_parts:Counts")',
        'python("own_parts:Shrinks", ranks = all)',
        'python("own_parts:Halves", ranks = all)',
    )
    hooks = [hook for hook in every if chance(0.2)]
    if hooks:
        train["hooks"] = f"[{', '.join(hooks)}]"
    if chance(0.15):
        train["optimizer"] = f'python("own_networks:{rng.choice(("Heavy", "Normed"))}", lr = 0.02)'
    if chance(0.4):
        evaluate["every"] = rng.choice(("2 steps", "1 step", "1 epoch"))
    if own.measured and chance(0.4):
        evaluate["metrics"] = f'[loss, python("own_parts:Spread"{rng.choice(("", ", scale = 2"))})]'
    log = {"every": "1 step", "tensorboard": "false"} | (
        {"loggers": 'python("own_parts:Keeps")'} if chance(0.15) else {}
    )
    freeze = {"freeze": rng.choice(('["*.bias"]', '["*kinds*", "*embedding*"]'))} if chance(0.08) else {}
    return {"model": own.model | freeze, "evaluate": evaluate, "log": log}
