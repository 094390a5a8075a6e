"""Jobs drawn at random whose parts are chosen for one another, so that about half of them are accepted.

`draw(seed)` is a pure function of the seed: the text of a job, and of the same training in one process that shards,
recomputes and accumulates nothing. Networks, losses, sources and every field that a training on CPUs takes are drawn,
with now and then a value that does not fit. Everything is tiny: a training takes a second. drawn_files.py makes the
files that the jobs name; the jobs are to be written beside them.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from instruments import odd_parts_drawn, own_parts_drawn
from instruments.experts_drawn import EXPERTS, draw_expert_axis, draw_experts
from instruments.losses_drawn import LOSS_DRAWS, draw_drawing_loss
from instruments.networks_drawn import NetworkDrawing, Shape, Task
from instruments.optimizers_drawn import draw_float8, draw_optimizer, draw_other_optimizer
from instruments.own_networks_drawn import DROPOUTS, draw_adapter, draw_dropout

# How often there are images, signals, vectors and tokens. Axes divide transformers, in nearly all jobs.
KINDS = {"context": (1, 0, 0, 20), "tensor": (2, 0, 4, 16), "pipeline": (3, 1, 3, 8), "": (4, 2, 3, 5)}

Blocks = dict[str, dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    seed: int
    text: str
    plain: str  # the same training in one process
    resumed: str = ""  # the same under another plan, from `CHECKPOINT` on, which `text` leaves after step 2


CHECKPOINT = "<checkpoint>"
CHUNKED = 0.3  # the share of those with cross entropy whose loss is computed in chunks
_CROSS_ENTROPY = "cross_entropy("
SAMPLERS = 0.1  # the share of jobs with a sampler
MIXTURES = 0.06  # the share of jobs with two sources
AUGMENTED = 0.3  # the share of those on digits whose pictures are augmented instead
AUGMENTATIONS = (
    "random_crop(8, padding = 1)",
    "random_horizontal_flip()",
    "random_resized_crop(8)",
    "random_resized_crop(7)",  # another size
    "rand_augment()",
    "random_erasing()",
)
OWN = 0.4  # the share of jobs whose data, network, loss or step is a user's own
RESUMED = 0.25  # the share of these that go on under another plan
ODD = 0.35  # the share of jobs over what public bug reports are about


def draw(
    seed: int,
    *,
    compile: float = 0.0,
    own: float = OWN,
    odd: float = ODD,
    dropout: float = DROPOUTS,
    experts: float = EXPERTS,
    loss_draws: float = LOSS_DRAWS,
) -> Drawn:
    """Returns a job; `compile` is the share of jobs with `train.compile`, which takes half a minute each. `dropout`,
    `experts` and `loss_draws` are those of the jobs which are neither `own` nor `odd`.
    """
    others = random.Random(f"odd {seed}")
    if others.random() < odd:
        drawing = _Drawing(others, compile)
        return _resumed(seed, others, odd_parts_drawn.draw(others, *drawing.parallelism(), drawing.train(50)))
    others = random.Random(f"own {seed}")  # of their own, so that jobs stay as they were
    if others.random() < own:
        return _draw_own(seed, others, compile)
    rng = random.Random(seed)
    blocks = _Drawing(rng, compile).blocks()
    others = random.Random(f"optimizers {seed}")  # of their own, so that the rest of a job stays
    if optimizer := draw_other_optimizer(others, random.Random(f"newer optimizers {seed}")):
        blocks["train"]["optimizer"] = optimizer
    draw_float8(random.Random(f"float8 {seed}"), blocks)
    blocks["model"]["loss"] = _draw_chunks(random.Random(f"chunks {seed}"), blocks["model"]["loss"])
    if "shuffle" not in blocks["data"] and others.random() < SAMPLERS:
        count = others.choice(("", "", f"samples = {others.randint(8, 90)}"))
        blocks["data"]["sampler"] = others.choice((f"balanced({count})", "by_length(window = 2)"))
    if others.random() < MIXTURES:
        source, how = blocks["data"]["source"], others.choice(("", ", weights = [1, 2]", ", samples = 90"))
        blocks["data"]["source"] = f"mixture([{source}, {source}]{how})"
    drawn = random.Random(f"pictures {seed}")
    if blocks["data"]["source"] == "digits()" and drawn.random() < AUGMENTED:
        chosen = ", ".join(drawn.sample(AUGMENTATIONS, drawn.randint(1, 3)))
        more = drawn.choice(("", ", normalize = mnist", ", normalize = imagenet"))
        blocks["data"]["source"] = f'parquet("pictures.parquet", augment = [{chosen}]{more})'
    adapter = draw_adapter(random.Random(f"adapters {seed}"), blocks["model"]["network"])
    blocks["model"] |= {"adapter": adapter} if adapter else {}
    blocks["model"]["network"] = draw_dropout(random.Random(f"dropout {seed}"), blocks["model"]["network"], dropout)
    draw_drawing_loss(random.Random(f"loss draws {seed}"), blocks, loss_draws)
    others = random.Random(f"experts {seed}")
    if draw_experts(others, blocks, experts):
        return _resumed(seed, others, blocks)
    return Drawn(seed=seed, text=_text(blocks), plain=_text(_single_process(blocks)))


def _draw_chunks(rng: random.Random, loss: str) -> str:
    """Returns the loss, now and then in chunks."""
    if not loss.startswith(_CROSS_ENTROPY) or rng.random() >= CHUNKED:
        return loss
    arguments = (f"chunks = {rng.choice(('2', '3', 'auto'))}", loss.removeprefix(_CROSS_ENTROPY)[:-1])
    return f"{_CROSS_ENTROPY}{', '.join(filter(None, arguments))})"


def _draw_own(seed: int, rng: random.Random, compile: float) -> Drawn:
    blocks = _Drawing(rng, compile).own_blocks()
    if "shuffle" not in blocks["data"] and rng.random() < SAMPLERS:
        length = 'python("own_parts:length"), ' if "Sentences" in blocks["data"]["source"] else ""
        blocks["data"]["sampler"] = rng.choice(("balanced()", f"by_length({length}window = 2)"))
    return _resumed(seed, rng, blocks)


def _resumed(seed: int, rng: random.Random, blocks: Blocks) -> Drawn:
    """Returns a job that goes on under another plan now and then."""
    if not rng.random() < RESUMED:
        return Drawn(seed=seed, text=_text(blocks), plain=_text(_single_process(blocks)))
    blocks["checkpoint"] |= {"every": "2 steps", "keep": "9"}
    devices, parallelism, _ = _Drawing(rng, 0.0).data_parallelism()
    parallelism.pop("data", None)
    if "moe(" in blocks["model"]["network"]:
        draw_expert_axis(rng, blocks["model"]["network"], devices, parallelism)
    after = blocks | {"devices": devices, "parallelism": parallelism}
    after["checkpoint"] = blocks["checkpoint"] | {"resume": f'"{CHECKPOINT}"'}
    return Drawn(seed=seed, text=_text(blocks), plain=_text(_single_process(blocks)), resumed=_text(after))


def _single_process(blocks: Blocks) -> Blocks:
    """Returns the same training in one process."""
    kept = ("model", "data", "train", "evaluate", "log")
    alone = {"devices": {"cpus": "1"}} | {name: blocks[name] for name in kept if name in blocks}
    alone["model"] = alone["model"] | {"loss": re.sub(r"chunks = \w+(, )?", "", alone["model"]["loss"])}
    alone["train"] = {name: text for name, text in alone["train"].items() if name != "compile"}
    return alone


def _text(blocks: Blocks) -> str:
    return "\n".join(
        f"{name} {{\n" + "".join(f"  {field} = {value}\n" for field, value in body.items()) + "}\n"
        for name, body in blocks.items()
        if body
    )


class _Drawing(NetworkDrawing):
    def __init__(self, rng: random.Random, compile: float) -> None:
        super().__init__(rng)
        self.compile = compile

    def blocks(self) -> Blocks:
        devices, parallelism, ranks = self.parallelism()
        self.axes = {"pipeline", "tensor", "context"} & {*parallelism}
        task = self.task()
        data = self.data(task, ranks, int(parallelism.get("microbatches", "1")))
        model = self.model(task)
        if self.plan:
            parallelism["tensor_plan"] = self.plan
        blocks = {
            "model": model,
            "data": data,
            "devices": devices,
            "parallelism": parallelism,
            "memory": self.memory(),
            "train": self.train(task.samples),
            "evaluate": self.evaluate(task),
            "checkpoint": self.checkpoint(),
            "launch": {"timeout": "1 min"},
            "log": {"every": "1 step", "tensorboard": "false"},
        }
        if "validation" in data or task.own_validation or self.chance(0.02):
            self.goals(blocks)
        return blocks

    def own_blocks(self) -> Blocks:
        """Draws a job whose parts are a user's own (own_parts_drawn.py)."""
        devices, parallelism, ranks = self.data_parallelism() if self.chance(0.93) else self.parallelism()
        own = own_parts_drawn.OwnDrawing(self.rng).draw()
        task = Task(
            source=own.data["source"], shape=(), kind="own", output=(), classes=True, samples=40,
            own_validation=own.own_validation,
        )  # fmt: skip
        blocks = {
            "data": self.data(task, ranks, int(parallelism.get("microbatches", "1"))) | own.data,
            "devices": devices,
            "parallelism": parallelism,
            "memory": self.memory() if self.chance(0.3) else {},
            "train": self.train(task.samples) | own.train,
            "checkpoint": self.checkpoint(),
            "launch": {"timeout": "1 min"},
        }
        blocks |= own_parts_drawn.around(self.rng, own, blocks)
        if "validation" in blocks["data"] or own.own_validation:
            self.goals(blocks)
        return blocks

    def data_parallelism(self) -> tuple[dict[str, str], dict[str, str], int]:
        """Draws the same for the data axis alone."""
        while True:
            devices, parallelism, ranks = self.parallelism()
            if not {"pipeline", "tensor", "context", "gradients"} & {*parallelism} and "nodes" not in devices:
                return devices, parallelism, ranks

    # ------------------------------------------------------------------------------------------------------- data

    def task(self) -> Task:
        rng = self.rng
        axis = next((axis for axis in KINDS if axis in self.axes), "")
        kind = rng.choices(("image", "signal", "vector", "tokens"), KINDS[axis])[0]
        if kind == "tokens":
            length, vocab = rng.choice((4, 6, 8)), rng.choice((11, 16, 50))
            samples = rng.choice((40, 61, 200))
            source, vocab = rng.choice(
                (
                    (f"stdlib(context = {length})", 256),
                    (f'text("corpus.txt", context = {length})', 256),
                    (f'tokens("*.bin", context = {length})', 50),
                    (f"synthetic(samples = {samples}, vocab = {vocab}, context = {length})", vocab),
                    (f"synthetic(samples = {samples}, vocab = {vocab}, context = {length})", vocab),
                )
            )
            return Task(
                source=source, shape=(length,), kind=kind, output=(length, vocab), classes=True,
                samples=samples if source.startswith("synthetic") else 600, large=source.startswith("stdlib"),
            )  # fmt: skip
        known = {
            "image": (
                Task(source="digits()", shape=(1, 8, 8), kind=kind, output=(10,), classes=True, samples=1797),
                Task(
                    source='arrays("images.npz")', shape=(2, 6, 5), kind=kind, output=(3,), classes=True, samples=37
                ),
            ),
            "vector": (
                Task(
                    source='arrays("vectors.npz")', shape=(7,), kind=kind, output=(2,), classes=False, samples=53
                ),
                Task(
                    source='python("own_networks:data")', shape=(6,), kind=kind, output=(3,), classes=True, samples=50,
                    own_validation=True,
                ),
            ),
            "signal": (),
        }[kind]  # fmt: skip
        if known and self.chance(0.5):
            return rng.choice(known)
        shape: Shape = {
            "image": (rng.randint(1, 3), rng.randint(5, 9), rng.randint(5, 9)),
            "signal": (rng.choice((2, 3, 4, 8)), rng.choice((4, 7, 8))),
            "vector": (rng.randint(2, 9),),
        }[kind]
        samples, count, classes = rng.choice((24, 41, 64)), rng.randint(2, 5), self.chance(0.6)
        targets = f"classes = {count}" if classes else f"targets = [{count}]"
        source = f"synthetic(samples = {samples}, shape = {list(shape)}, {targets})"
        return Task(source=source, shape=shape, kind=kind, output=(count,), classes=classes, samples=samples)

    def data(self, task: Task, ranks: int, microbatches: int) -> dict[str, str]:
        batch = ranks * microbatches * self.number(1, 3) if self.chance(0.85) else self.number(1, 12)
        body = {"source": task.source, "batch": str(batch)}
        if not task.large and self.chance(0.1 if task.own_validation else 0.4):
            body["validation"] = self.one("10%", "0.25", "30%")
        if self.chance(0.3):
            body["last_batch"] = "keep"
        if self.chance(0.3):
            body["shuffle"] = self.one("true", "false")
        if self.chance(0.08):
            body["workers"] = self.one("1", "2")
        return body

    # ---------------------------------------------------------------------------------------------------- the model

    def model(self, task: Task) -> dict[str, str]:
        body = {"network": self.network(task), "loss": self.loss(task)}
        if self.chance(0.12):
            body["freeze"] = self.one('["*.bias"]', '["*.bias", "nothing"]', '["0.*"]', '["*0*"]', '["nothing"]')
        if self.chance(0.01):
            body["weights"] = self.one('"missing.safetensors"', 'pretrained("missing", allow_missing = ["0.*"])')
        return body

    def loss(self, task: Task) -> str:
        if self.chance(0.04):  # any, whether it fits or not
            return self.one("mse()", "cross_entropy()", "contrastive()", 'python("own_networks:nothing")')
        if not task.classes:
            own = 'python("own_networks:measured"'
            return self.one("mse()", "l1()", "bce()", f"{own})", f"{own}, power = 1)")
        more = [f"ignore = {self.number(0, 2)}"] * self.chance(0.2) + ["label_smoothing = 0.1"] * self.chance(0.2)
        if task.kind != "tokens" and self.chance(0.12):
            return 'python("own_networks:classified")'
        return f"cross_entropy({', '.join(more)})"

    # -------------------------------------------------------------------------------------------------- the splitting

    def parallelism(self) -> tuple[dict[str, str], dict[str, str], int]:
        """Draws `devices`, `parallelism`, and the data ranks."""
        rng = self.rng
        world = rng.choice((1, 2, 2, 2, 3, 4, 4, 4))
        devices = {"cpus": str(world)}
        if self.chance(0.03):
            devices["backend"] = self.one("gloo", "gloo", "nccl")
        if self.chance(0.02):
            devices["nodes"] = self.one("2", "1..2")
        body: dict[str, str] = {}
        data = world
        if world in (2, 4) and self.chance(0.45):
            for axis in rng.sample(("pipeline", "tensor", "context"), 2 if world == 4 else 1):
                if data > 1 and self.chance(0.75):
                    body[axis] = "2"
                    data //= 2
            if "pipeline" in body:
                body |= self.pipeline()
        if self.chance(0.15):
            body["data"] = str(data if self.chance(0.85) else data + 1)
        if self.chance(0.7):
            body["zero"] = str(rng.randint(0, 3))
        if self.chance(0.2):
            body["replicas"] = self.one("2", "2", "1", "3", "4") if data > 1 else "1"
        if "microbatches" not in body and self.chance(0.35):
            body["microbatches"] = self.one("2", "2", "3", "4")
        if "tensor" in body and self.chance(0.5):
            body["sequence"] = "true"
        if self.chance(0.02):
            body["gradients"] = self.one("fp16()", "powersgd(rank = 2)", "local_sgd(period = 2)", "allreduce()")
        return devices, body, data

    def pipeline(self) -> dict[str, str]:
        schedules = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev")
        body = {"schedule": self.one(*schedules), "microbatches": self.one("2", "4", "4")}
        if self.chance(0.1):
            body["virtual_stages"] = self.one("1", "2", "3")
        if self.chance(0.1):
            body["stages"] = self.one("[1, 1]", "[2, 2]", "[1, 3]")
        return body

    def memory(self) -> dict[str, str]:
        body = {}
        if self.chance(0.3):
            body["recompute"] = self.one("full", "selective", "every(2)", "none")
        if self.chance(0.2):
            body["offload"] = self.one("[optimizer]", "[optimizer, parameters]", "activations", "[parameters]", "[]")
        if self.chance(0.02):
            body["limit"] = self.one("100 B", "4 GiB")
        return body

    # --------------------------------------------------------------------------------------------------- the training

    def train(self, samples: int) -> dict[str, str]:
        body = {"optimizer": draw_optimizer(self.rng)}
        if samples <= 64 and self.chance(0.15):
            body["epochs"] = "1"
        else:
            body["steps"] = str(self.number(3, 5))
        if self.chance(0.3):
            body["lr_schedule"] = self.one(
                "constant", "warmup_cosine(warmup = 2 steps)", "warmup_linear(warmup = 20%, floor = 0.1)",
                "warmup_constant(warmup = 1 step)", "step(every = 2 steps)", "exponential(0.9, every = 1 step)",
                "warmup_cosine(warmup = 3 steps, from = 0)", "warmup_linear(warmup = 2 steps, from = 0.3)",
                "one_cycle(rise = 40%)", "multistep([1 step, 3 steps])", "cosine_restarts(every = 2 steps)",
                "warmup_stable_decay(warmup = 1 step, decay = 2 steps, shape = sqrt)",
                "warmup_cosine(warmup = 50 steps)" if self.chance(0.2) else "constant",
            )  # fmt: skip
        if self.chance(0.1):
            body["scale_lr"] = self.one("linear(base_batch = 8)", "sqrt(base_batch = 4)")
        if self.chance(0.1):
            body["no_decay"] = self.one('["*.bias"]', '["*.weight"]', '["*bias*", "*weight*"]', '["no.*"]')
        if self.chance(0.1):
            some = ('group("*.bias", lr = 0.01)', 'group(["*.weight", "*norm*"], lr = 0.02, weight_decay = 0.1)')
            body["groups"] = self.one(f"[{some[0]}]", f"[{some[1]}, {some[0]}]", '[group("*", weight_decay = 0)]')
        if self.chance(0.1):
            body["max_time"] = self.one("1 h", "0.5d")
        if self.chance(0.15):
            body["ema"] = self.one(
                "0.9",
                "ema(0.5, every = 2 steps)",
                "ema(warmup = true)",
                "ema(0.9, after = 1 step)",
                "ema(0.9, power = 0.7, inv_gamma = 2, min_decay = 0.1)",
            )
        if self.chance(0.25):
            body["clip"] = self.one("0.05", "norm(0.5)", "10", "value(0.01)")
        if self.chance(0.25):
            body["precision"] = self.one("bf16", "bf16(level = O2)", "fp16", "fp16(level = O2)", "fp32")
        if self.chance(0.3):
            body["seed"] = str(self.number(0, 9))
        if self.chance(0.05):
            body["deterministic"] = "true"
        if self.chance(self.compile):
            body["compile"] = "true"
        return body

    def evaluate(self, task: Task) -> dict[str, str]:
        body = {}
        if self.chance(0.3):
            body["every"] = self.one("2 steps", "1 step", "1 epoch", "50 steps")
        if self.chance(0.3):
            fitting = ("accuracy", "top_k(2)", "accuracy") if task.classes else ("mse", "mse", "mse")
            body["metrics"] = f"[loss, {self.one(*fitting, *fitting, 'mse', 'perplexity')}]"
        return body

    def goals(self, blocks: Blocks) -> None:
        """Adds goals, in whose decisions rounding plays no part."""
        if self.chance(0.2):
            goal = self.one("lowest(loss, patience = 2, by = 100)", "highest(loss, patience = 1, by = 100)")
            blocks["train"]["early_stopping"] = goal if self.chance(0.9) else "highest(accuracy, by = 2)"
        if self.chance(0.1):
            blocks["train"]["lr_schedule"] = "plateau(loss, patience = 0, factor = 0.5, threshold = 0.99)"
        if self.chance(0.2):
            blocks["checkpoint"]["best"] = self.one("lowest(loss)", "highest(loss)")

    def checkpoint(self) -> dict[str, str]:
        if not self.chance(0.2):
            return {}
        return {"every": self.one("2 steps", "1 step", "1 epoch"), "asynchronous": self.one("true", "false")}
