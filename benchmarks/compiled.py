"""`train.compile = blocks` beside the same by hand: a GPT of six blocks in one process on one thread.

By hand each block is compiled, and so is the loss, as a job does it. What is measured is the time from the command to
the end of the first step, with an empty cache of torch's compiler and with that of the run before, and the time of a
step, without the first ones, in which a job also times passes that are not compiled; and how a step compares with one
that is not compiled.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure import Ratio, compare

HERE = os.path.dirname(os.path.abspath(__file__))
CACHE = "TORCHINDUCTOR_CACHE_DIR"
FIRST = "first step done"
STEPS, WARM_UP = 40, 15


def bench_compile(
    pairs: int,
    until: Callable[..., float],
    train_dslc: Callable[..., list[dict[str, Any]]],
    finish: Callable[..., str],
    dslc: Callable[..., list[str]],
) -> Sequence[Ratio]:
    """`until` times a command to the line that it prints, `finish` runs one; both take variables of the environment."""
    job = os.path.join(HERE, "jobs", "compiled.plt")
    with tempfile.TemporaryDirectory() as folder:

        def ours(cache: str) -> float:
            out = tempfile.mkdtemp(dir=folder)
            run = ("run", job, "--out", os.path.join(out, "run"), "--set", "train.steps=1")
            return until(dslc(*run), "step 1", **{CACHE: cache})

        def by_hand(cache: str) -> float:
            return until(_command("--steps", "1"), FIRST, **{CACHE: cache})

        def empty() -> str:
            return tempfile.mkdtemp(dir=folder)

        def step_by_hand() -> float:
            return float(finish(_command("--steps", str(STEPS)), **{CACHE: caches[1]}).split()[-1])

        caches = empty(), empty()
        name = "compiled gpt, command to the end of the first step"
        cold = compare(f"{name}, empty cache", lambda: ours(empty()), lambda: by_hand(empty()), pairs=pairs, target=1)
        for run, cache in zip((ours, by_hand), caches, strict=True):
            run(cache)
        warm = compare(f"{name}, next run", lambda: ours(caches[0]), lambda: by_hand(caches[1]), pairs=pairs, target=1)

        def step(*settings: str) -> float:
            lines = train_dslc(job, f"log.every={WARM_UP} steps", *settings, **{CACHE: caches[0]})
            first, last = (line for line in lines if line["step"] in (WARM_UP, STEPS))
            return float(1000 * (last["seconds"] - first["seconds"]) / (STEPS - WARM_UP))

        steps = compare("step, compiled gpt", step, step_by_hand, pairs=pairs, unit="ms", target=1)
        name = "step, compiled gpt over the same without `compile`"
        plain = compare(name, step, lambda: step("train.compile=false"), pairs=pairs, unit="ms")
    return cold, warm, steps, plain


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.compiled", *arguments]


def main() -> None:
    """Trains by hand, and prints the milliseconds of a later step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    import torch

    from benchmarks.handwritten import GPT, mean_loss

    torch.set_num_threads(1)
    torch.manual_seed(1)
    batch, context = 16, 128
    text = torch.randint(256, (steps * batch, context + 1), generator=torch.Generator().manual_seed(1))
    model, loss_of = GPT(layers=6), torch.compile(mean_loss)
    for block in model.blocks:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    start = 0.0
    for step in range(steps):
        rows = text[step * batch : (step + 1) * batch]
        loss = loss_of(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            print(f"{FIRST}, loss {loss.item():.3f}", flush=True)
        if step == WARM_UP - 1:
            start = time.perf_counter()
    if steps > WARM_UP:
        print(1000 * (time.perf_counter() - start) / (steps - WARM_UP), flush=True)


if __name__ == "__main__":
    main()
