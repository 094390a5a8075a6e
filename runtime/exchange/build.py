"""Makes the exchange that a program asks for."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from dslc.compiler.ir.program import JobProgram
from dslc.runtime.exchange.async_average import AsyncAverage
from dslc.runtime.exchange.base import Exchange, GradientExchange, LocalExchange
from dslc.runtime.exchange.bytegrad import ByteGrad
from dslc.runtime.exchange.compressed_momentum import OnebitAdamExchange, QAdamExchange
from dslc.runtime.exchange.decentralized import Decentralized
from dslc.runtime.exchange.diloco import DiLoCo
from dslc.runtime.exchange.half_precision import Bf16, Fp16
from dslc.runtime.exchange.local_sgd import LocalSGD
from dslc.runtime.exchange.low_precision import LowPrecisionDecentralized
from dslc.runtime.exchange.powersgd import PowerSGD
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.parallel.engine import Engine

GRADIENTS: dict[str, type[GradientExchange]] = {"fp16": Fp16, "bf16": Bf16, "powersgd": PowerSGD, "bytegrad": ByteGrad}
LOCAL: dict[str, type[LocalExchange]] = {
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "decentralized": Decentralized,
    "low_precision_decentralized": LowPrecisionDecentralized,
    "async_average": AsyncAverage,
    "qadam": QAdamExchange,
    "onebit_adam": OnebitAdamExchange,
}


def exchange_of(job: JobProgram, model: nn.Module) -> Exchange | None:
    """Returns the exchange of a training of the plain `model`; None if the engine sums gradients. All ranks call it."""
    step = job.gradients.exchange
    if step is None or not job.is_training or job.gradients.kind == "fsdp":
        return None
    if step.kind in GRADIENTS:
        return GRADIENTS[step.kind](job, step, model)
    return LOCAL[step.kind](job, step, model)


def local_engine(job: JobProgram, model: nn.Module, exchange: Exchange | None) -> Engine:
    if exchange is None:  # no training
        return Engine(model=model)
    if job.model.root is None and not job.model.reset:  # a user's own model may have drawn other numbers on each rank
        for tensor in named_tensors(model).values():
            dist.broadcast(tensor.detach(), src=0)
    return Engine(model=model, scale=job.gradients.averages, complete=exchange.gradients)
