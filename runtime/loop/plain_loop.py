"""A training written by hand with torch, with which `dslc verify` compares the runtime's own.

Model: the optimizer is torch's, as a plain loop over the tensors (neither fused nor `foreach`), the schedule is made of
`torch.optim.lr_scheduler`, and the norm is what `clip_grad_norm_` returns.

Contract: nothing here uses the code of a training's step (step/stepper.py, parallel/optimizers.py, learning_rate.py,
model/losses.py, technique/precision.py, technique/frozen.py), so that a fault in any of these shows. It writes the
files of measure/observe.py.

Limits: the model, its initial values, its random numbers and the samples of each batch are the runtime's own; other
checks cover them. No
O2, which keeps a 16-bit copy of the parameters.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from dslc.compiler.ir.program import (
    JobProgram,
    LearningRateStep,
    LossStep,
    ModelStep,
    OptimizerStep,
    RankPlace,
    WeightsStep,
)
from dslc.compiler.trace.structures import Structure, call
from dslc.runtime.data.batches import StepBatch, batches
from dslc.runtime.data.samples import DerivedSamples, Samples, Splits
from dslc.runtime.data.sources.chat_samples import PairSamples
from dslc.runtime.measure.observe import Observer
from dslc.runtime.model import adapters, documents, initial_weights
from dslc.runtime.model.experts.expert_modules import Router
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.parallel.custom_optimizer import ParamGroup
from dslc.runtime.process import random_numbers
from dslc.runtime.process.user_code import load_function
from dslc.runtime.step.stepper import StepResult
from dslc.runtime.technique import float8, sample_draws
from dslc.runtime.technique.precision import widen_model

MeanLoss = Callable[[Structure, Structure], Tensor]


def train(job: JobProgram, place: RankPlace, splits: Splits, device: torch.device, run_dir: str) -> int:
    """Trains for `job.steps` steps in this process, observed, and returns their number."""
    assert job.world_size == 1 and job.microbatches == 1 and job.precision.level == "O1"
    model = build_model(job.model, device)
    initial_weights.load(job.model, model)
    freeze_parameters(job.model, model)
    float8.apply(job.precision, model, device)
    documents.apply(job.model.documents, model, masks=job.model.documents_masked)
    sample_draws.apply(job.draws, model, place.coordinates, job.axes, device)
    model.train()
    if job.observation is not None and job.observation.exact:
        widen_model(model)  # before an optimizer makes its state
    if job.loss.reference is not None:
        _add_reference(job, model, splits, device)
    optimizer = plain_optimizer(job.optimizer, model)
    scheduler = plain_scheduler(job.learning_rate, optimizer)
    work = _step(job, place, model, optimizer, device)
    random_numbers.begin(job.seed, 0)
    observer = Observer(job, place, model, optimizer, device, run_dir, 0)
    watched = observer.wrap(work)
    for step, batch in enumerate(batches(job.data, splits, place, 1, 0, job.steps, device)):
        if splits.train.by_process:
            random_numbers.begin_step(job.seed, 0, step)
        watched(batch)
        scheduler.step()
    observer.leave()
    return job.steps


def _step(
    job: JobProgram, place: RankPlace, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Callable[[StepBatch], StepResult]:
    mean, draws = mean_loss(job.loss), sample_draws.SampleDraws(job, place)
    scaler = torch.amp.GradScaler(device.type, enabled=job.precision.dtype == "float16")
    limit = float("inf") if job.clip is None else job.clip
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    routers = [module for module in model.modules() if isinstance(module, Router)]
    balance_losses: list[Tensor] = []
    for router in routers:
        if router.factor is not None:
            router.register_forward_hook(
                lambda router, input, output: balance_losses.append(balance_loss(router, input[0], output[0]))
            )

    def evaluate(batch: StepBatch) -> tuple[Tensor, Tensor]:
        ((input, target),) = batch.micro
        draws.begin(batch)
        draws.enter(0)
        for router in routers:
            router.load.zero_()
        low = job.precision.dtype != "float32"
        with torch.autocast(device.type, getattr(torch, job.precision.dtype)) if low else contextlib.nullcontext():
            output = call(model, model.forward, input) if job.data.structured else model(input)
            with draws.in_loss():
                loss = sum(balance_losses, mean(output, target))
        balance_losses.clear()
        draws.leave()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(trained, limit, foreach=False)
        if job.clip_value is not None:
            nn.utils.clip_grad_value_(trained, job.clip_value)
        return loss, norm

    def step(batch: StepBatch) -> StepResult:
        _, target = batch.micro[0]
        if job.optimizer.closure:
            evaluations = []

            @torch.enable_grad()
            def closure() -> Tensor:
                evaluations.append(evaluate(batch))
                return evaluations[-1][0]

            optimizer.step(closure)  # type: ignore[arg-type]
            loss, norm = evaluations[0]
        else:
            loss, norm = evaluate(batch)
            scaler.step(optimizer)
            scaler.update()
        balance_experts(model)
        number = _number(job.loss, target) if job.loss.counts != "own" else batch.samples
        return StepResult(loss.detach() * number, number, norm)

    return step


@torch.no_grad()
def _add_reference(job: JobProgram, model: nn.Module, splits: Splits, device: torch.device) -> None:
    """Gives each pair the log-probabilities of its answers at the start, by other weights, or without the adapters, one
    pair after another.
    """
    assert job.loss.reference is not None
    if files := job.loss.reference.files:
        model = build_model(job.model, device)
        initial_weights.load(replace(job.model, weights=WeightsStep(files=files)), model)
    off = job.loss.reference.kind == "adapter_off"
    pairs: Samples = splits.train
    while isinstance(pairs, DerivedSamples):
        pairs = pairs.samples
    assert isinstance(pairs, PairSamples)
    model.eval()
    rows = []
    with adapters.switched_off(model) if off else contextlib.nullcontext():
        for n in range(len(pairs)):
            input, target = (part.to(device) for part in pairs.batch(torch.tensor([n])))
            rows.append(_log_probabilities(model(input), target))
    model.train()
    pairs.reference = torch.stack(rows).float().cpu()


def _log_probabilities(output: Tensor, targets: Tensor) -> Tensor:
    shares = output.double().log_softmax(-1) if output.dtype == torch.float64 else output.float().log_softmax(-1)
    chosen = shares.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets == -100, 0, chosen).sum(1)


def _mean_of_pairs(step: LossStep, output: Tensor, target: Structure) -> Tensor:
    """Returns the mean over the pairs of the loss as its paper states it."""
    targets, reference = target if isinstance(target, tuple) else (target, 0)
    beta, sums = step.arguments["beta"], _log_probabilities(output, targets) - reference
    means = sums / (targets != -100).sum(1)
    (chosen, rejected), (chosen_mean, rejected_mean) = ((part[::2], part[1::2]) for part in (sums, means))
    match step.kind:
        case "dpo":
            losses = -torch.log(torch.sigmoid(beta * (chosen - rejected)))
        case "ipo":
            losses = (chosen_mean - rejected_mean - 1 / (2 * beta)) ** 2
        case "simpo":
            losses = -torch.log(torch.sigmoid(beta * (chosen_mean - rejected_mean) - step.arguments["gamma"]))
        case _:
            odds = [p.exp() / (1 - p.exp()) for p in (chosen_mean, rejected_mean)]
            losses = -chosen_mean - beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
    return losses.mean()


def balance_loss(router: Router, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Returns the balance loss of one layer, as `transformers` states it; only sigmoid scores differ."""
    logits, experts = F.linear(tokens, router.weight), router.weight.shape[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
    probabilities = (scores / scores.sum(-1, keepdim=True)).mean(0)
    shares = F.one_hot(chosen, experts).to(logits.dtype).sum(1).mean(0)
    assert router.factor is not None
    return router.factor * experts * (shares * probabilities).sum()


@torch.no_grad()
def balance_experts(model: nn.Module) -> None:
    """Moves each bias of a router up where its expert got fewer tokens than the mean, and down where it got more."""
    for router in model.modules():
        if isinstance(router, Router) and router.rate and router.e_score_correction_bias is not None:
            share = router.load.double() / router.load.sum()
            router.e_score_correction_bias += router.rate * torch.sign(1 / len(share) - share)


def freeze_parameters(step: ModelStep, model: nn.Module) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in step.frozen):
            parameter.requires_grad = False


def plain_optimizer(step: OptimizerStep, model: nn.Module) -> torch.optim.Optimizer:
    spared = [
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if any(fnmatchcase(name, pattern) for pattern in step.no_decay)
    ]
    spared_ids = {id(parameter) for parameter in spared}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if id(parameter) not in spared_ids]
    undecayed = [parameter for parameter in trained if id(parameter) in spared_ids]
    if step.python is not None:
        return _own_optimizer(step, model, decayed, undecayed)
    groups = [{"params": decayed}] * bool(decayed) + [{"params": undecayed, "weight_decay": 0.0}] * bool(undecayed)
    groups = _named_groups(step, model, groups) if step.groups else groups
    if step.codes:
        return _TorchaoAdam(groups, step)
    if step.split:
        return _MuonAndAdamW(groups, step, model)
    if step.kind == "Lion":
        return _PlainLion(groups, lr=step.lr, **step.arguments)
    if not hasattr(torch.optim, step.kind):
        return _AdamFrozenLater(groups, lr=step.lr, **step.arguments)
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, step.kind)
    return kind(groups, lr=step.lr, foreach=False, **step.arguments)  # type: ignore[call-arg]


class _TorchaoAdam(torch.optim.Optimizer):
    """torchao's own class, whose rates are tensors, without the compiler."""

    def __init__(self, groups: list[ParamGroup], step: OptimizerStep) -> None:
        import torchao.optim

        super().__init__(groups, {"lr": step.lr})
        inner = [dict(group) for group in self.param_groups]
        self._inner: torch.optim.Optimizer = getattr(torchao.optim, step.kind)(inner, lr=step.lr, **step.arguments)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        with torch.compiler.set_stance("force_eager"):
            self._inner.step()


class _MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW, each over its own groups, whose rates a scheduler sets."""

    def __init__(self, groups: list[ParamGroup], step: OptimizerStep, model: nn.Module) -> None:
        adamw_names = {name for name, _ in step.adamw or ()}
        adamw_ids = {id(q) for name, q in model.named_parameters(remove_duplicate=False) if name in adamw_names}
        arguments: dict[str, Any] = dict(step.arguments)
        adamw_lr, betas, eps = (arguments.pop(f"adamw_{name}") for name in ("lr", "betas", "eps"))
        decay, muon, adamw = arguments.pop("weight_decay"), list[ParamGroup](), list[ParamGroup]()
        for group in groups:
            for members, rate, into in ((True, step.lr, muon), (False, adamw_lr, adamw)):
                chosen = [q for q in group["params"] if (q.dim() == 2 and id(q) not in adamw_ids) is members]
                into += [{"lr": rate, "weight_decay": decay} | group | {"params": chosen}] * bool(chosen)
        self._optimizers: list[torch.optim.Optimizer] = []
        if muon:
            self._optimizers.append(torch.optim.Muon(muon, **arguments))
        if adamw:
            self._optimizers.append(torch.optim.AdamW(adamw, betas=betas, eps=eps, foreach=False))
        super().__init__(muon + adamw, {"lr": step.lr})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for optimizer in self._optimizers:
            optimizer.step()


class _PlainLion(torch.optim.Optimizer):
    """The update of Lion as its paper states it, one parameter after another."""

    def __init__(self, groups: list[ParamGroup], *, lr: float, **arguments: Any) -> None:
        super().__init__(groups, {"lr": lr, **arguments})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in (candidate for candidate in group["params"] if candidate.grad is not None):
                state = self.state[parameter]
                momentum, gradient = state.get("momentum", torch.zeros_like(parameter)), parameter.grad
                update = (first * momentum + (1 - first) * gradient).sign()
                parameter -= group["lr"] * (update + group["weight_decay"] * parameter)
                state["momentum"] = second * momentum + (1 - second) * gradient


class _AdamFrozenLater(torch.optim.Optimizer):
    """Adam on one rank whose second moment no longer changes after `alone` updates (runtime/exchange/)."""

    def __init__(self, groups: list[ParamGroup], *, lr: float, alone: int, **arguments: Any) -> None:
        super().__init__(groups, {"lr": lr, **arguments})
        self._alone = alone

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta, second = group["betas"]
            for parameter in (candidate for candidate in group["params"] if candidate.grad is not None):
                state = self.state[parameter]
                gradient = parameter.grad + group["weight_decay"] * parameter
                n = state["updates"] = state.get("updates", 0) + 1
                state["mean"] = beta * state.get("mean", 0) + (1 - beta) * gradient
                if n <= self._alone:
                    state["square"] = second * state.get("square", 0) + (1 - second) * gradient**2
                state["mean"] = torch.where(state["square"] > 0, state["mean"], 0.0)
                root = (state["square"] / (1 - second ** min(n, self._alone))).sqrt()
                parameter -= group["lr"] * state["mean"] / (1 - beta**n) / (root + group["eps"])


def _named_groups(step: OptimizerStep, model: nn.Module, other_groups: list[ParamGroup]) -> list[ParamGroup]:
    """Returns the groups with the parameters of the job's own taken out of the others, behind them."""
    group_of: dict[int, int] = {}
    for number, group in reversed(list(enumerate(step.groups))):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if any(fnmatchcase(name, pattern) for pattern in group.parameters):
                group_of[id(parameter)] = number
    groups = []
    for rest in other_groups:
        ungrouped = [parameter for parameter in rest["params"] if id(parameter) not in group_of]
        groups += [rest | {"params": ungrouped}] * bool(ungrouped)
    for number, group in enumerate(step.groups):
        for rest in other_groups:
            members = [parameter for parameter in rest["params"] if group_of.get(id(parameter)) == number]
            param_group = rest | {"params": members} | ({} if group.lr is None else {"lr": group.lr})
            param_group |= {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
            groups += [param_group] * bool(members)
    return groups


def _own_optimizer(
    step: OptimizerStep, model: nn.Module, decayed: list[nn.Parameter], undecayed: list[nn.Parameter]
) -> torch.optim.Optimizer:
    assert step.python is not None
    function = load_function(step.python)
    parameter_lists: list[list[object]] = [list(decayed), list(undecayed)]
    if next(iter(inspect.signature(function).parameters), "") == "named_parameters":
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parameter_lists = [
            [(names[id(parameter)], parameter) for parameter in parameters] for parameters in parameter_lists
        ]
    groups: list[ParamGroup] = [{"params": parameter_lists[0]}, {"params": parameter_lists[1], "weight_decay": 0.0}]
    filled = [group for group in groups if group["params"]]
    optimizer: torch.optim.Optimizer = function(filled if step.no_decay else parameter_lists[0], lr=step.lr)
    if hasattr(optimizer, "train"):  # schedule-free
        optimizer.train()
    return optimizer


def plain_scheduler(step: LearningRateStep, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    decay_steps = max(1, step.steps - step.warmup)
    rate = optimizer.param_groups[0]["lr"]
    if any(group["lr"] != rate for group in optimizer.param_groups):
        return _per_group_schedule(step, optimizer)
    then: lr_scheduler.LRScheduler
    match step.kind:
        case "constant" | "plateau":  # an observed training has no evaluations
            then = _flat(optimizer)
        case "cosine":
            then = lr_scheduler.CosineAnnealingLR(optimizer, decay_steps, eta_min=rate * step.floor)
        case "linear":
            then = lr_scheduler.LinearLR(optimizer, 1.0, step.floor, decay_steps)
        case "step":
            then = lr_scheduler.StepLR(optimizer, step.every, step.factor)
        case "exponential":
            then = lr_scheduler.ExponentialLR(optimizer, step.factor ** (1 / step.every))
        case "multistep":
            then = lr_scheduler.MultiStepLR(optimizer, list(step.milestones), step.factor)
        case "restarts":
            then = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, step.every, step.growth, rate * step.floor)
        case "one_cycle":
            return lr_scheduler.LambdaLR(optimizer, lambda s: _one_cycle(step, s))
        case "stable":
            then = lr_scheduler.LambdaLR(optimizer, lambda s: _fall(step, max(0, s - (decay_steps - step.decay))))
        case "python":
            assert step.python is not None
            user_schedule = load_function(step.python)
            last_step = step.steps - 1  # torch asks for one step more than there are
            return lr_scheduler.LambdaLR(optimizer, lambda s: float(user_schedule(min(s, last_step), step.steps)))
    if step.warmup and step.begin is not None:
        begin = step.begin
        rise = lr_scheduler.LambdaLR(optimizer, lambda s: begin + (1 - begin) * s / step.warmup)
        return lr_scheduler.SequentialLR(optimizer, [rise, then], [step.warmup])
    if step.warmup < 2:  # a warm-up of one step changes nothing
        return lr_scheduler.SequentialLR(optimizer, [_flat(optimizer), then], [1]) if step.warmup else then
    warmup = lr_scheduler.LinearLR(optimizer, 1 / step.warmup, 1.0, step.warmup - 1)
    return lr_scheduler.SequentialLR(optimizer, [warmup, then], [step.warmup])


def _per_group_schedule(step: LearningRateStep, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Returns the schedule for groups of several rates: torch's ends at one rate for all, not at a share of each."""
    placeholder = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = plain_scheduler(step, placeholder)
    factors = []
    for _ in range(step.steps + 1):
        factors.append(placeholder.param_groups[0]["lr"])
        placeholder.step()
        schedule.step()
    return lr_scheduler.LambdaLR(optimizer, lambda s: factors[s])


def _one_cycle(step: LearningRateStep, s: int) -> float:
    """Returns the factor of torch's OneCycleLR, which takes neither a rate of 0 nor a rise of one step."""
    last_rise = step.rise - 1
    if s <= last_rise:
        return step.start + (1 - step.start) * math.sin(math.pi * s / last_rise / 2) ** 2 if last_rise else 1.0
    return (
        step.floor
        + (1 - step.floor) * math.cos(math.pi * (s - last_rise) / max(1, step.steps - 1 - last_rise) / 2) ** 2
    )


def _fall(step: LearningRateStep, s: int) -> float:
    """Returns the factor after `s` steps of the fall at the end."""
    share = s / step.decay
    lost = {"linear": share, "cosine": math.sin(math.pi * share / 2) ** 2, "sqrt": math.sqrt(share)}[step.shape]
    return 1 - (1 - step.floor) * lost


def _flat(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def mean_loss(step: LossStep) -> MeanLoss:
    """Returns the mean over the samples, or over the tokens that are not ignored, as torch defines it."""
    arguments = step.arguments
    match step.kind:
        case "cross_entropy":
            ignored = -100 if step.ignore is None else step.ignore
            smoothing = float(arguments.get("label_smoothing", 0.0))
            return lambda output, target: F.cross_entropy(
                output.flatten(0, -2), target.flatten(), ignore_index=ignored, label_smoothing=smoothing
            )
        case "mse":
            return lambda output, target: F.mse_loss(output, target.reshape(output.shape).to(output.dtype))
        case "l1":
            return lambda output, target: F.l1_loss(output, target.reshape(output.shape).to(output.dtype))
        case "bce":
            return lambda output, target: F.binary_cross_entropy_with_logits(
                output, target.reshape(output.shape).to(output.dtype)
            )
        case "dpo" | "ipo" | "orpo" | "simpo":
            return lambda output, target: _mean_of_pairs(step, output, target)
        case "contrastive":
            return lambda output, target: _contrastive(output, target, float(arguments["temperature"]))
        case "own":
            return lambda output, target: _mean_of_own(step, output, target)
        case "python" if step.counts == "own":
            assert step.python is not None
            function = load_function(step.python)
            return lambda output, target: _mean_of_own(step, function(output, target), target)
        case "python":
            assert step.python is not None
            function = load_function(step.python)

            def user_loss(output: Tensor, target: Tensor) -> Tensor:
                losses: Tensor = function(output, target)
                if step.together:
                    return losses.mean()
                if step.counts == "kept" and losses.shape == target.shape:
                    losses = losses[target.ne(-100 if step.ignore is None else step.ignore)]
                return losses.sum() / _number(step, target)

            return user_loss


def _contrastive(output: Structure, target: Tensor, temperature: float) -> Tensor:
    """Returns the mean of the losses of all embeddings, one after another."""
    views = torch.stack(list(output), dim=1) if not isinstance(output, Tensor) else output
    views = views if views.dim() == 3 else views.unsqueeze(1)
    count = views.shape[1]
    groups = (target if count == 1 else torch.arange(len(views), device=views.device)).repeat_interleave(count)
    losses = []
    with torch.autocast(views.device.type, enabled=False):
        embeddings = F.normalize(views.flatten(0, 1).to(torch.promote_types(views.dtype, torch.float32)), dim=1)
        for n, anchor in enumerate(embeddings):
            is_different = torch.arange(len(embeddings), device=embeddings.device) != n
            shares = (embeddings[is_different] @ anchor / temperature).log_softmax(0)
            positive = groups[is_different] == groups[n]
            losses.append(-shares[positive].mean() if positive.any() else 0 * anchor.sum())
        return torch.stack(losses).mean()


def _mean_of_own(step: LossStep, value: Structure, target: Structure) -> Tensor:
    """Returns the mean of a loss that counts by itself, or that the model returns."""
    if step.kind == "own" and not isinstance(value, Tensor | tuple | list):
        value = value["loss"] if isinstance(value, dict) else value.loss
    elif step.kind == "own" and not isinstance(value, Tensor) and any(map(_has_dims, value)):
        losses = [part for part in value if isinstance(part, Tensor) and not part.dim() and part.is_floating_point()]
        value = (*losses, *(part for part in value if isinstance(part, dict))) if losses else value
        value = value[0] if len(value) == 1 else value
    if isinstance(value, tuple | list) and isinstance(value[-1], dict):
        value = value[0] if len(value) == 2 else value[:2]
    if not isinstance(value, Tensor):
        mean: Tensor = value[0] / value[1]
        return mean
    labels, ignore = target, step.ignore
    if step.kind == "own" and (name := step.arguments["mean_of"]) is not None:
        parts = {str(n): part for n, part in enumerate(target)} if isinstance(target, tuple | list) else target
        labels = (parts[name] if isinstance(parts, dict) else getattr(parts, name))[:, step.arguments["shift"] :]
        ignore = step.arguments["ignore"]
    is_labels = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.numel() == value.numel()
    if value.numel() > 1 and is_labels and ignore is not None:
        return value.flatten()[labels.flatten() != ignore].mean()
    return value.mean()


def _has_dims(part: object) -> bool:
    return isinstance(part, Tensor) and part.dim() > 0


def _number(step: LossStep, target: Tensor) -> int:
    match step.counts:
        case "samples":
            return len(target[0] if isinstance(target, tuple) else target) // step.rows
        case "tokens":
            return target.numel()
        case "own":
            raise AssertionError("it counts by itself")
        case "kept":
            return int(target.ne(-100 if step.ignore is None else step.ignore).sum())
