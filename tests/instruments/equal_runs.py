"""Counts runs of equal trainings in which `dslc bisect` would name a difference: `python -m instruments.equal_runs N`.

Model: jobs of three kinds with drawn seeds, optimizers and sizes are trained in one process, by which rounding is
measured. Each is then trained under drawn plans, which compute the same. A plan whose tensors differ by more than
rounding explains is a false alarm.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from helpers.job_texts import job_text

from dslc.commands.bisect import Trainings, open_side, single_process
from dslc.verification.bisection import find_difference, tensor_text
from dslc.verification.replay_window import ReplayWindow

PLANS = 12  # of each job
NETWORKS = {
    "gpt": (
        "gpt(layers = 2, width = 32, heads = 2, context = 16, vocab = 256, tie = true, dropout = {dropout})",
        "stdlib()",
    ),
    "vit": ("vit(patch = 4, layers = 2, width = 32, heads = 2, dropout = {dropout})", "digits()"),
    "layers": ("[flatten(), linear(32), relu(), dropout({dropout}), linear(16), gelu(), linear(10)]", "digits()"),
}
OPTIMIZERS = ("sgd(lr = 0.1, momentum = 0.9)", "adamw(lr = 1e-3)", "adam(lr = 1e-2)", "rmsprop(lr = 1e-3)")
AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "gpt": (("parallelism.tensor=2",), ("parallelism.context=2",), ("parallelism.pipeline=2",)),
    "vit": (("parallelism.tensor=2",), ("parallelism.pipeline=2",)),
    "layers": (("parallelism.pipeline=2",),),
}


def drawn_job(draw: random.Random) -> tuple[str, str]:
    """Returns the kind of a job and its text."""
    kind = draw.choice(list(NETWORKS))
    network, source = NETWORKS[kind]
    text = job_text(
        model={"network": network.format(dropout=draw.choice(("0.0", "0.1")))},
        data={"source": source, "batch": draw.choice((16, 24, 48))},
        devices={"cpus": 2},
        train={
            "steps": 20,
            "seed": draw.randrange(1000),
            "optimizer": draw.choice(OPTIMIZERS),
            "clip": draw.choice(("none", "0.5")),
        },
        log=None,
    )
    return kind, text


def drawn_plans(kind: str, draw: random.Random) -> Iterator[tuple[str, ...]]:
    for _ in range(PLANS):
        axis = draw.choice(((), (), *AXES[kind]))
        pipeline = "parallelism.pipeline=2" in axis
        plan = [*axis, f"devices.cpus={draw.choice((2, 4) if axis else (1, 2, 3, 4))}"]
        plan.append(f"parallelism.microbatches={draw.choice((2, 4) if pipeline else (1, 2))}")
        plan.append(f"parallelism.zero={draw.choice((0, 1) if pipeline else (0, 0, 1, 2, 3))}")
        if draw.random() < 0.3 and kind != "layers":
            plan.append("memory.recompute=full")
        yield tuple(plan)


def main(count: int, seed: int) -> None:
    draw, runs, alarms, tensors, highest = random.Random(seed), 0, 0, 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "job.plt"
        while runs < count:
            kind, text = drawn_job(draw)
            path.write_text(text)
            window = ReplayWindow(last=3)
            trainings = Trainings(window, name)
            base = open_side(str(path), [], name)
            rounding = trainings.measure_rounding(single_process(base))
            for plan in drawn_plans(kind, draw):
                try:
                    side = open_side(str(path), plan, name)
                except Exception as error:  # a plan that the rules refuse
                    print(f"refused {kind} {' '.join(plan)} {error}", flush=True)
                    continue
                recording = trainings.record(side, rounding.plain)
                result = find_difference(rounding.plain, recording, rounding.bounds, rounding.reference)
                runs += 1
                tensors += len(result.compared)
                share = result.largest.share if result.largest is not None else 0.0
                if result.largest is not None and share > 4:
                    print(f"{share:.1f} {tensor_text(result.largest.key)} step {result.largest.key.step} {kind} {plan}")
                highest = max(highest, share)
                if result.text:
                    alarms += 1
                    print(f"ALARM {kind} {' '.join(plan)}: {result.text}, step {result.step} {result.details}\n{text}")
            print(f"{runs} runs, {alarms} named, {tensors:,} tensors, highest share {highest:.1f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
