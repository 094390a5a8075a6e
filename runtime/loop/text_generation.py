"""Continues prompts with the network during a training, on any plan.

Model: rank 0 makes the prompts tokens and sends them to all ranks. The ranks of the data axis share the prompts out,
equally many each; a rank with fewer repeats its last. For each further token the ranks run the forward pass of an
evaluation over the last `context` tokens of each text. They are on the left of a batch of one shape, so that every axis
works. Where the plan has a cache of keys and values (step/key_value_cache.py), it runs over the last token alone.
The rank that has the logits of the place chooses the token. One sum over the ranks of the other axes gives it to all.

Contract: greedy texts equal one process's, up to the rounding of the logits. A token that is drawn follows from
the logits and a number that seed, step, prompt and place give (technique/philox.py). No generator of random numbers
moves, and the module modes are restored: a training is the same with and without its texts.

Limits: without a cache, and for texts that are longer than `context`, a token costs a pass over `context` positions.
Whole logits exist, also where the loss is computed in chunks; a pass then has one text.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import GenerateStep, JobProgram, RankPlace
from dslc.runtime.data.sources.text_codecs import CodecError, TextCodec, open_codec
from dslc.runtime.loop.evaluate import batch_size, evaluating, forward
from dslc.runtime.parallel.context_parallel import input_piece_of
from dslc.runtime.parallel.engine import do_nothing
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.records import TextRecords
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.key_value_cache import KeyValueCache
from dslc.runtime.technique import philox

_AXES = ("tensor", "context", "pipeline")  # over which a token is told


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """A prompt and what the network wrote after it. `ended`: a token ended the text before `max_tokens`."""

    prompt: str
    text: str
    tokens: int
    ended: bool


class TextGenerator:
    """Continues the prompts of a job. All ranks make it, in an open process group, and call it after the same steps."""

    def __init__(self, job: JobProgram, place: RankPlace, parts: TrainingComponents, step: GenerateStep) -> None:
        self._job, self._place, self._parts, self._step = job, place, parts, step
        self._codec: TextCodec | None = None
        prompts: list[list[int]] = []
        if place.rank == 0:
            with mark_errors(step.line):
                self._codec = open_codec(step)
                prompts = [self._encode(prompt) for prompt in step.prompts]
        limits = torch.tensor(
            [
                max(map(len, prompts), default=0),
                self._codec.size if self._codec is not None else 0,
                *(_pad(self._codec.ends if self._codec is not None else (), 4)),
            ],
            device=parts.device,
        )
        self._broadcast(limits)
        longest, self._size, *ends = limits.tolist()
        self._ends = {end for end in (*ends, -1 if step.end is None else step.end) if end >= 0}
        table = torch.zeros((len(step.prompts), longest + 1), dtype=torch.int64, device=parts.device)
        for row, tokens in zip(table, prompts, strict=False):
            row[0] = len(tokens)
            row[1 : len(tokens) + 1] = torch.tensor(tokens)
        self._broadcast(table)
        self._prompts = [row[1 : row[0] + 1] for row in table.tolist()]
        self.overlong = sum(len(prompt) > step.context for prompt in self._prompts)  # prompts that lose their beginning

    def _encode(self, prompt: str) -> list[int]:
        assert self._codec is not None
        tokens, known = self._codec.encode(prompt), self._job.data.arguments.get("model_vocab")
        if not tokens:
            raise CodecError(f"the tokenizer makes no tokens of the prompt {prompt!r}")
        if known is not None and max(tokens) >= known:
            raise CodecError(f"the prompt {prompt!r} has token {max(tokens)}, and the network knows {known:,} tokens")
        return tokens

    def _broadcast(self, tensor: Tensor) -> None:
        if self._job.world_size > 1:
            dist.broadcast(tensor, 0)

    @torch.no_grad()
    def generate(self, step: int, after_token: Callable[[], object] = do_nothing) -> list[GeneratedText]:
        """Returns the texts on rank 0, in the order of the prompts; [] elsewhere."""
        ranks, rank = self._place.data_ranks, self._place.data_rank
        share = -(-len(self._prompts) // ranks)
        numbers = [min(n, len(self._prompts) - 1) for n in range(rank * share, (rank + 1) * share)]
        size = 1 if self._job.loss.chunks > 1 else min(share, batch_size(self._job, self._place))
        texts: list[list[int]] = []
        with evaluating(self._parts):
            for start in range(0, share, size):
                chunk = numbers[start : start + size]
                filled = chunk + chunk[-1:] * (size - len(chunk))
                texts += self._continue(step, filled, after_token)[: len(chunk)]
        return self._collect(numbers, texts)

    def _continue(self, step: int, numbers: Sequence[int], after_token: Callable[[], object]) -> list[list[int]]:
        """Returns what follows the prompts `numbers`, with the token that ends it."""
        texts = [list(self._prompts[number]) for number in numbers]
        begins = [len(text) for text in texts]
        ended = [False] * len(texts)
        cache = KeyValueCache(self._parts.plain) if self._step.caches else None
        for place in range(self._step.max_tokens):
            tokens = self._next_tokens(texts, [self._draw(step, number, place) for number in numbers], cache, place)
            for n, token in enumerate(tokens):
                if not ended[n]:
                    texts[n].append(token)
                    ended[n] = token in self._ends
            after_token()
            if self._ends and self._all_ended(all(ended)):
                break
        if cache is not None:
            cache.remove()
        return [text[begin:] for text, begin in zip(texts, begins, strict=True)]

    def _next_tokens(
        self, texts: Sequence[Sequence[int]], draws: Sequence[float], cache: KeyValueCache | None, place: int
    ) -> list[int]:
        """Returns the next token of each text, the same on all ranks with the same texts."""
        length, device = self._step.context, self._parts.device
        windows = [text[-length:] for text in texts]
        is_kept = cache is not None and place > 0 and all(len(text) <= length for text in texts)
        if cache is not None:
            last = torch.tensor([len(text) - 1 for text in texts], device=device)
            cache.enter(last if is_kept else None)
        if is_kept:
            windows = [window[-1:] for window in windows]
            length = 1
        batch = torch.tensor(
            [[*window, *[self._step.filler] * (length - len(window))] for window in windows], device=device
        )
        output = forward(self._job, self._parts, input_piece_of(self._job, self._parts.plain)(batch))
        mesh = mesh_of(self._job)
        tokens = torch.zeros(len(texts), dtype=torch.int64, device=device)
        if output is not None and mesh.leads:
            own = output.shape[1]
            first = mesh.coordinates["context"] * own
            for n, window in enumerate(windows):
                at = len(window) - 1 - first
                if 0 <= at < own:
                    tokens[n] = self._choose(output[n, at, : self._size], draws[n])
        for axis in _AXES:
            if (group := mesh.group(axis)) is not None:
                dist.all_reduce(tokens, group=group)
        chosen: list[int] = tokens.tolist()
        return chosen

    def _choose(self, logits: Tensor, draw: float) -> int | Tensor:
        if not self._step.temperature:
            return logits.argmax()
        wide = (logits.double() / self._step.temperature).softmax(0).cumsum(0)
        return torch.searchsorted(wide, wide[-1] * draw, right=True).clamp(max=len(wide) - 1)

    def _draw(self, step: int, number: int, place: int) -> float:
        if not self._step.temperature:
            return 0.0
        named = f"generate {self._job.seed} {step} {number}".encode()
        key = int.from_bytes(hashlib.blake2b(named, digest_size=16).digest(), "little")
        numbers = np.empty(1, np.float64)
        philox.uniform(numbers, key, place, 0.0, 1.0)
        return float(numbers[0])

    def _all_ended(self, ended: bool) -> bool:
        """True if all ranks' texts have ended: ranks of a data axis may need each other's forward passes."""
        if self._job.world_size == 1 or not self._parts.engine.lockstep:
            return ended
        going = torch.tensor(int(not ended), device=self._parts.device)
        dist.all_reduce(going)
        return not going.item()

    def _collect(self, numbers: Sequence[int], texts: Sequence[Sequence[int]]) -> list[GeneratedText]:
        """Brings the texts of all ranks to rank 0."""
        table = torch.zeros(
            (len(self._prompts), self._step.max_tokens + 1), dtype=torch.int64, device=self._parts.device
        )
        first = not any(self._place.coordinates[axis] for axis in _AXES)
        for n, (number, text) in enumerate(zip(numbers, texts, strict=True)):
            if first and number not in numbers[:n] and number // len(numbers) == self._place.data_rank:
                table[number, 0] = len(text)
                table[number, 1 : len(text) + 1] = torch.tensor(text)
        if self._job.world_size > 1:
            dist.all_reduce(table)
        if self._codec is None:
            return []
        found = []
        for prompt, row in zip(self._step.prompts, table.tolist(), strict=True):
            tokens = row[1 : row[0] + 1]
            ended = bool(tokens) and tokens[-1] in self._ends
            decoded = self._codec.decode(tokens[:-1] if ended else tokens)
            found.append(GeneratedText(prompt=prompt, text=decoded, tokens=len(tokens), ended=ended))
        return found


class TextWriter:
    """Writes the texts of a training to samples.jsonl. `times` are the seconds of each generation on this rank."""

    def __init__(
        self,
        job: JobProgram,
        place: RankPlace,
        parts: TrainingComponents,
        step: GenerateStep,
        run_dir: str,
        first: int,
        tell: Callable[[str], object],
    ) -> None:
        self._job, self._step = job, step
        self._generator = TextGenerator(job, place, parts, step)
        self._records = TextRecords(run_dir, first, tell) if place.rank == 0 else None
        if place.rank == 0 and (count := self._generator.overlong):
            tell(
                f"generate: {count} of {len(step.prompts)} prompts with more tokens than the context, "
                f"continued from the last {step.context}"
            )
        self.times: list[float] = []

    def is_due(self, step: int) -> bool:
        """True if the plan has texts after this step, counted from 1."""
        return step == self._job.steps or (self._step.every > 0 and step % self._step.every == 0)

    def write(self, step: int, seconds: float, after_token: Callable[[], object]) -> None:
        """Generates the texts after a step; `seconds` have passed since the first step began."""
        begin = time.perf_counter()
        texts = self._generator.generate(step, after_token)
        self.times.append(time.perf_counter() - begin)
        if self._records is not None:
            more = {"chat": True} if self._step.chat else {}
            took = {"seconds": seconds, "took": self.times[-1]}
            self._records.write(
                {"step": step, "number": n, **asdict(text), **more, **took} for n, text in enumerate(texts)
            )


def _pad(ends: Sequence[int], size: int) -> list[int]:
    return [*ends, *[-1] * size][:size]
