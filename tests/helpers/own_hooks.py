"""Hooks and loggers as users write them."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import numpy as np
import torch


class Diary:
    """Writes down each event, and counts the steps over all resumes."""

    def __init__(self, name: str = "diary") -> None:
        self.name, self.steps, self.mean = name, 0, torch.zeros(2)

    def _write(self, context: Any, event: str, **more: Any) -> None:
        told = {"event": event, "step": context.step, "loss": context.loss, "lr": context.lr, **more}
        with open(os.path.join(context.folder, f"{self.name}-{context.rank}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")

    def start(self, context: Any) -> None:
        shown = [context.world_size, context.steps, type(context.optimizer).__name__, type(context.model).__name__]
        self._write(context, "start", steps=self.steps, shown=shown, mean=self.mean.tolist())

    def before_step(self, context: Any) -> None:
        self._write(context, "before_step", gradients=_gradients(context))

    def after_backward(self, context: Any) -> None:
        self._write(context, "after_backward", gradients=_gradients(context))

    def after_step(self, context: Any) -> None:
        self.steps += 1
        self.mean += context.step
        self._write(context, "after_step", gradients=_gradients(context))

    def evaluated(self, context: Any) -> None:
        self._write(context, "evaluated", metrics=context.metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "mean": self.mean, "name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.mean = state["steps"], state["mean"]

    def end(self, context: Any) -> None:
        self._write(context, "end", weights=os.path.exists(os.path.join(context.folder, "weights.safetensors")))

    def failed(self, context: Any) -> None:
        self._write(context, "failed", error=str(context.error))


def _gradients(context: Any) -> int:
    return sum(parameter.grad is not None for parameter in context.model.parameters())


class Epochs:
    """Writes down the step and the epoch at the start of each epoch."""

    def epoch(self, context: Any) -> None:
        with open(os.path.join(context.folder, f"epochs-{context.rank}.txt"), "a", encoding="utf-8") as file:
            file.write(f"{context.step} {context.epoch}\n")


class Fails:
    """Fails after a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def after_step(self, context: Any) -> None:
        if context.step == self.at:
            raise ValueError("no more")


class Freezes:
    """Freezes the first parameter, or lets it train, when the second epoch begins."""

    def __init__(self, trains: bool = False) -> None:
        self.trains = trains

    def epoch(self, context: Any) -> None:
        if context.epoch == 1:
            next(iter(context.model.parameters())).requires_grad_(self.trains)


class Sets:
    def start(self, context: Any) -> None:
        context.step = 3


class Unkept:
    """Has a state that cannot be read back."""

    def start(self, context: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Nothing:
    def on_epoch_end(self) -> None:
        pass


class TakesNothing:
    def start(self) -> None:
        pass


class HalfAState:
    def start(self, context: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}


class File:
    """A logger."""

    def __init__(self, path: str) -> None:
        self.path, self.records = path, []  # type: ignore[var-annotated]

    def log(self, record: dict[str, Any]) -> None:
        if record.get("step") == 4 and self.path.endswith("fails"):
            raise ValueError("a bug")
        if record.get("step") == 2 and self.path.endswith("away"):
            try:
                raise ConnectionRefusedError("the server is away")
            except ConnectionRefusedError:
                raise RuntimeError("no answer")  # noqa: B904 - as libraries do
        self.records.append(record)

    def close(self) -> None:
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump(self.records, file)


class Absent(File):
    """A logger that cannot be made where its folder is not there."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        open(path, "x").close()


class Remote:
    """A logger of a service at a port, by grpc."""

    def __init__(self, port: int) -> None:
        self.port = port

    def log(self, record: dict[str, Any]) -> None:
        import grpc  # type: ignore[import-untyped]

        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            channel.unary_unary("/service/log")(json.dumps(record).encode(), timeout=5)

    def close(self) -> None:
        self.log({})


class Web:
    """A logger of a service that answers each record with a status of HTTP."""

    def __init__(self, status: int) -> None:
        self.status = status

    def log(self, record: dict[str, Any]) -> None:
        error = RuntimeError(f"the server answers {self.status}")
        error.status_code = self.status  # type: ignore[attr-defined]  # as libraries do
        raise error


class Events:
    """A logger that writes for TensorBoard into a folder."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder)

    def log(self, record: dict[str, Any]) -> None:
        self._writer.add_scalar("step", record["step"], record["step"])


class Occupies:
    """Puts a file where the run's folder for TensorBoard would be."""

    def start(self, context: Any) -> None:
        with open(os.path.join(context.folder, "tensorboard"), "x", encoding="utf-8"):
            pass


class Forges:
    """Writes lines that no training writes into the records of a run, as another process could."""

    def after_step(self, context: Any) -> None:
        odd: tuple[Any, ...] = ("x", [[]], {"a": "x"}, None, True, -1, 1 << 70)
        lines = [b'{"step": 1, "split": "train", "loss": 1.0}', b'{"step": 1, "split": "other"}']
        lines += [b'{"a":' * 100_000, b"\xff", b"[]", b"9" * 5000, b"x" * (3 << 20)]
        for value in odd:
            for name in ("step", "split", "seconds", "loss", "\x1b[31m"):
                line = {"step": 1, "split": "train", "seconds": 1.0, "samples": 1, "loss": 1.0, name: value}
                lines.append(json.dumps(line).encode())
        with open(os.path.join(context.folder, "metrics.jsonl"), "ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))


class Weights:
    """Leaves the weights and statistics of a rank before the first step and after each."""

    def start(self, context: Any) -> None:
        self.after_step(context)

    def after_step(self, context: Any) -> None:
        self._leave(context, f"weights-{context.rank}-{context.step}")

    def _leave(self, context: Any, name: str) -> None:
        named = [*context.model.named_parameters(), *context.model.named_buffers()]
        found = {name: each.detach().cpu().numpy().copy() for name, each in named if each.is_floating_point()}
        np.savez(os.path.join(context.folder, f"{name}.npz"), **found)


class Course(Weights):
    """Leaves also the weights with which a rank computes a step, and those in the end."""

    def after_backward(self, context: Any) -> None:
        self._leave(context, f"begun-{context.rank}-{context.step}")

    def end(self, context: Any) -> None:
        self._leave(context, f"end-{context.rank}")


class NeverWaits:
    """Fails where the host waits for its GPU within a step."""

    def __init__(self, first: int, last: int) -> None:
        self._steps = range(first, last + 1)

    def before_step(self, context: Any) -> None:
        if context.step in self._steps:
            torch.cuda.set_sync_debug_mode("error")

    def after_step(self, context: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


class HeldBack:
    """Holds a rank back at the beginning of a step until rank 0 has done another, by a named pipe."""

    def __init__(self, pipe: str, rank: int, at: int, until: int) -> None:
        self.pipe, self.rank, self.at, self.until = pipe, rank, at, until

    def before_step(self, context: Any) -> None:
        if (context.rank, context.step) == (self.rank, self.at):
            with open(self.pipe, "rb") as pipe:
                pipe.read()

    def after_step(self, context: Any) -> None:
        if (context.rank, context.step) == (0, self.until):
            with open(self.pipe, "wb"):
                pass


class Paced:
    """Does each step from one on when a byte has come through a pipe; through a plain file without bytes, at once."""

    def __init__(self, pipe: str, first: int) -> None:
        self.pipe, self.first = pipe, first

    def before_step(self, context: Any) -> None:
        if context.step >= self.first:
            with open(self.pipe, "rb", buffering=0) as pipe:
                pipe.read(1)


class Asks:
    """Asks the launcher to stop, as Ctrl-C does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def after_step(self, context: Any) -> None:
        if context.step == self.at:
            os.kill(os.getppid(), signal.SIGINT)


class Broken:
    """Makes a gradient of one rank a number that is not finite, in one step."""

    def __init__(self, number: str, rank: int, step: int) -> None:
        self._number, self._rank, self._step = float(number), rank, step

    def after_backward(self, context: Any) -> None:
        if (context.rank, context.step) == (self._rank, self._step):
            dict(context.model.named_parameters())["2.bias"].grad[1] = self._number
