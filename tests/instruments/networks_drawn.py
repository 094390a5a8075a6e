"""Draws a network for data of a shape: a library network, a list of layers, or what a function makes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from instruments.own_networks_drawn import draw_plan, families

Shape = tuple[int, ...]
Part = tuple[list[str], Shape, str]  # layers, the output's shape, and the kind of samples with this shape


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data, and the output that a network must have for it."""

    source: str
    shape: Shape  # of a sample
    kind: str  # image, signal, sequence, vector, tokens
    output: Shape
    classes: bool  # targets are classes; else numbers
    samples: int
    own_validation: bool = False
    large: bool = False  # a part of it takes long to look at


class NetworkDrawing:
    """`axes` are those that divide layers. After `network`, `plan` has the `tensor_plan` that it needs, if any."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.axes: set[str] = set()
        self.plan = ""

    def one(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def number(self, first: int, last: int) -> int:
        return self.rng.randint(first, last)

    def network(self, task: Task) -> str:
        library = self.library(task)
        split = bool({"tensor", "context"} & self.axes)
        if self.chance(0.12 if not self.axes or "context" in self.axes else 0.5):
            return self.function(task)
        return self.rng.choice(library) if library and self.chance(0.8 if split else 0.4) else self.layers(task)

    def function(self, task: Task) -> str:
        """A network that a function makes."""
        family = self.rng.choice(families(self.rng, task.shape, task.output, tokens=task.kind == "tokens"))
        if "tensor" in self.axes or self.chance(0.02):
            self.plan = draw_plan(self.rng, family.groups)
        return family.call

    def library(self, task: Task) -> list[str]:
        rng, flag = self.rng, self.one("true", "false")
        width, heads = rng.choice(((8, 2), (8, 4), (12, 2), (6, 3), (8, 3)) if self.chance(0.15) else ((8, 2), (16, 4)))
        count = task.output[-1]
        if task.kind == "tokens":
            length = task.shape[0] + (8 if self.chance(0.1) else 0)
            more = "".join([", bias = false"] * self.chance(0.3) + [", dropout = 0.1"] * self.chance(0.3))
            return [
                f"gpt(layers = {rng.randint(1, 4)}, width = {width}, heads = {heads}, context = {length}, "
                f"tie = {flag}{more})",
                self.llama(width, heads, length, flag),
            ]
        classes = f", classes = {count}" if not task.classes or self.chance(0.3) else ""
        made = [f"mlp(widths = {self.rng.choice(([8], [8, 6], [], [5, 5, 5]))}, activation = tanh{classes})"] * 2
        if task.kind == "image":
            made += [f"convnet(channels = {rng.choice(([3], [4, 6]))}{classes})"] * 2
            made += [f"vit(patch = {rng.choice((1, 2, 2, 3))}, layers = {rng.randint(1, 3)}, width = {width}, "
                     f"heads = {heads}{classes})"] * 2  # fmt: skip
            made += [f"resnet(width = 4, stem = small{classes})"] * self.chance(0.2)
        return made

    def llama(self, width: int, heads: int, length: int, flag: str) -> str:
        more = [f"kv_heads = {self.rng.choice((1, 2, 2, heads))}"] * self.chance(0.6)
        more += [f"head_dim = {self.rng.choice((2, 4, 4, 3))}"] * self.chance(0.3)
        more += ["qk_norm = true"] * self.chance(0.4) + ["bias = true"] * self.chance(0.2)
        more += [f"window = {self.number(1, 5)}"] * self.chance(0.3) + ["max_window_layers = 1"] * self.chance(0.1)
        more += ["rope_scaling = llama3(4, original_context = 4)"] * self.chance(0.2)
        sizes = f"layers = {self.number(1, 4)}, width = {width}, heads = {heads}, hidden = {self.number(3, 8) * 2}"
        return f"llama({', '.join([sizes, f'context = {length}', f'tie = {flag}', *more])})"

    def layers(self, task: Task) -> str:
        made: list[str] = []
        shape, kind = task.shape, task.kind
        if kind == "tokens":
            width = self.rng.choice((4, 8, 12))
            made.append(f"embedding(width = {width})")
            shape, kind = (*shape, width), "sequence"
        for _ in range(self.number(0, 4)):
            more, shape, kind = self.step(shape, kind)
            if task.kind == "tokens" and kind != "sequence" and self.chance(0.95):
                break  # a token wants an answer at each position
            made += more
        if task.kind != "tokens" and kind == "sequence":
            made.append(self.one("last_step()", "mean_steps()", "flatten()"))
        elif kind in ("image", "signal"):
            made.append("flatten()")
        out = task.output[-1] + (1 if self.chance(0.03) else 0)
        return f"[{', '.join([*made, f'linear({out})'])}]"

    def step(self, shape: Shape, kind: str) -> Part:
        """Draws a layer (or some) that takes `shape`."""
        if self.chance(0.25):
            return [self.pointwise()], shape, kind
        if self.chance(0.25):
            body = ", ".join(self.body(shape, kind))
            return [self.one(f"residual([{body}])", f"repeat({self.number(1, 3)}, [{body}])")], shape, kind
        steps = {"image": self.image, "signal": self.signal, "sequence": self.sequence, "vector": self.vector}
        return steps[kind](shape)

    def pointwise(self) -> str:
        if self.chance(0.12):
            return self.one("dropout(0.2)", "dropout(0.1)", "dropout(p = 0.0)")
        return self.one("relu()", "gelu()", "gelu(approximate = tanh)", "silu()", "tanh()", "sigmoid()",
                        "leaky_relu(slope = 0.1)", "elu(alpha = 0.5)")  # fmt: skip

    def body(self, shape: Shape, kind: str) -> Sequence[str]:
        """Draws layers that keep the shape of their input."""
        bias, heads = self.one("true", "false"), self.one("1", "2", "2", "2", "2", "2", "3")
        options = {
            "image": (
                (f"conv2d({shape[0]}, padding = 1, bias = {bias})", self.pointwise()),
                (f"conv2d({shape[0]}, padding = 1, groups = {shape[0]})", "batch_norm()", self.pointwise()),
            ),
            "signal": ((f"conv1d({shape[0]}, padding = 1)", self.pointwise()), ("batch_norm()",)),
            "sequence": (
                ("layer_norm()", f"attention(heads = {heads}, causal = {bias}, bias = {bias})"),
                (f"transformer_block(heads = {heads}, ratio = 2, causal = true, bias = {bias})",),
                ("rms_norm()", f"attention(heads = {heads}, causal = true, rope_theta = 100, bias = {bias})"),
                (f"llama_block(heads = {heads}, hidden = 6, kv_heads = {self.number(1, 2)})", "gated_mlp(4)"),
                ("rms_norm()", f"linear({shape[-1]})", self.pointwise()),
            ),
            "vector": ((f"linear({shape[0]})", self.pointwise()), ("layer_norm()", f"linear({shape[0]})")),
        }
        return self.rng.choice(options[kind])

    def image(self, shape: Shape) -> Part:
        channels, height, width = shape
        side = min(height, width)
        match self.one("conv", "conv", "pool", "norm", "adaptive", "shortcut", "patch", "flatten"):
            case "conv":
                padding, stride, out = self.number(0, 2), self.number(1, 2), self.number(2, 6)
                kernel = self.number(1, min(4, side + 2 * padding))
                arguments = f"{out}, kernel = {kernel}, stride = {stride}, padding = {padding}"
                size = [(n + 2 * padding - kernel) // stride + 1 for n in (height, width)]
                return [f"conv2d({arguments}, bias = {self.one('true', 'false')})"], (out, *size), "image"
            case "pool" if side >= 2:
                kind, stride = self.one("max", "avg"), self.number(1, 2)
                size = [(n - 2) // stride + 1 for n in (height, width)]
                return [f"{kind}_pool2d(2, stride = {stride})"], (channels, *size), "image"
            case "norm":
                return [self.one("batch_norm()", "batch_norm()", "batch_norm(sync = false)")], shape, "image"
            case "adaptive":
                size = [self.number(1, 2)] * 2
                return [f"adaptive_{self.one('max', 'avg')}_pool2d({size[0]})"], (channels, *size), "image"
            case "shortcut":
                size = [(n - 1) // 2 + 1 for n in (height, width)]
                straight = "shortcut = [conv2d(4, kernel = 1, stride = 2)]"
                return [f"residual([conv2d(4, stride = 2, padding = 1), tanh()], {straight})"], (4, *size), "image"
            case "patch":
                patch = next((p for p in (3, 2) if height % p == 0 and width % p == 0), 1)
                layer = f"patch_embedding(patch = {patch}, width = 8)"
                return [layer], (height // patch * (width // patch), 8), "sequence"
        return ["flatten()"], (channels * height * width,), "vector"

    def signal(self, shape: Shape) -> Part:
        channels, length = shape
        match self.one("conv", "conv", "pool", "norm", "adaptive", "flatten"):
            case "conv":
                padding, stride = self.number(0, 1), self.number(1, 2)
                kernel = self.number(1, min(3, length + 2 * padding))
                layer = f"conv1d(6, kernel = {kernel}, stride = {stride}, padding = {padding})"
                return [layer], (6, (length + 2 * padding - kernel) // stride + 1), "signal"
            case "pool" if length >= 2:
                return [f"{self.one('max', 'avg')}_pool1d(2)"], (channels, length // 2), "signal"
            case "norm":
                return ["batch_norm()"], shape, "signal"
            case "adaptive":
                return ["adaptive_avg_pool1d(2)"], (channels, 2), "signal"
        return ["flatten()"], (channels * length,), "vector"

    def sequence(self, shape: Shape) -> Part:
        length, width = shape
        match self.one("linear", "norm", "position", "lstm", "body", "last", "mean"):
            case "linear":
                return [f"linear(8, bias = {self.one('true', 'false')})"], (length, 8), "sequence"
            case "norm":
                return [self.one("layer_norm()", "rms_norm()", "layer_norm(bias = false)")], shape, "sequence"
            case "position":
                return ["positional_embedding()"], shape, "sequence"
            case "lstm":
                both = self.chance(0.4)
                layer = f"lstm(4, layers = {self.number(1, 2)}, bidirectional = {'true' if both else 'false'})"
                return [layer], (length, 8 if both else 4), "sequence"
            case "last":
                return ["last_step()"], (width,), "vector"
            case "mean":
                return ["mean_steps()"], (width,), "vector"
        return [*self.body(shape, "sequence")], shape, "sequence"

    def vector(self, shape: Shape) -> Part:
        out = self.number(2, 9)
        match self.one("linear", "linear", "norm", "batch"):
            case "norm":
                return ["layer_norm()"], shape, "vector"
            case "batch":
                return ["batch_norm()"], shape, "vector"
        return [f"linear({out})"], (out,), "vector"
