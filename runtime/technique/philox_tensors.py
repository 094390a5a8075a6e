"""The numbers of philox.py by tensor operations, for any device.

Model: Philox of four words of 64 bits and ten rounds (Salmon et al. 2011, doi:10.1145/2063384.2063405), in int64
arithmetic, which wraps. A product of 64 bits by 64 bits is four products of halves. That is 400 operations: where
Triton makes kernels, one makes the masks of dropout instead (philox_triton.py).

Contract: `words`, `bernoulli`, `uniform`, `integers` and `permutation` equal those of philox.py to the bit, by either
way. `normal` and `exponential` equal them up to the device's rounding of a logarithm and a cosine in 64 bits. No call
waits for the device. Tensor operations take at most `WORKSPACE` bytes beside the result.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from dslc.compiler.trace.private_torch import has_triton
from dslc.runtime.technique.philox import even_numbers

_BLOCK = 8  # words of 32 bits that one count of the generator makes
_CHUNK = 1 << 20  # words made at once
WORKSPACE = 16 * _CHUNK + 1024  # bytes: of each word an int64 and a number of 64 bits; and single numbers
_WORDS = 2.0**32
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10
_MASK = 0xFFFF_FFFF


def words(key: int, first: int, count: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Yields the words `first` to `first + count` of a key in chunks as int64, each with its place among them."""
    block, skipped = divmod(first, _BLOCK)
    start = 0
    while start < count:
        size = min(_CHUNK - skipped, count - start)
        blocks = -(-(skipped + size) // _BLOCK)
        yield slice(start, start + size), _words(key, block, blocks, device)[skipped : skipped + size]
        start, block, skipped = start + size, block + blocks, 0


def bernoulli(out: Tensor, key: int, first: int, probability: float) -> None:
    """Fills a tensor of one dim with 1 where a word is below the probability, and 0 elsewhere."""
    limit = round(probability * _WORDS)
    if limit >= _WORDS or limit <= 0:
        out.fill_(limit > 0)
    elif _has_kernel(out.device):
        from dslc.runtime.technique.philox_triton import fill_where_below

        mask = out if out.dtype == torch.bool else torch.empty_like(out, dtype=torch.bool)
        fill_where_below(mask, key, first, limit)
        if mask is not out:
            out.copy_(mask)
    else:
        for place, chunk in words(key, first, len(out), out.device):
            out[place] = chunk < limit
            del chunk  # before the next is made


def uniform(out: Tensor, key: int, first: int, low: float, high: float) -> None:
    """Fills a tensor of one dim with numbers in [low, high), of at most 24 random bits each. Complex numbers have such
    numbers as both parts.
    """
    if out.is_complex():
        uniform(torch.view_as_real(out).view(-1), key, 2 * first, low, high)
        return
    shift, scale, last = even_numbers(low, high, digits_of(out.dtype))
    for place, chunk in words(key, first, len(out), out.device):
        numbers = chunk.bitwise_right_shift_(shift).double()
        del chunk
        numbers.mul_(scale)
        if out.dtype == torch.float32:  # as philox.py, which adds in the dtype of the result
            numbers = numbers.float()
        out[place] = numbers.add_(low).clamp_(max=last)
        del numbers


def digits_of(dtype: torch.dtype) -> int:
    """Returns how many binary digits the numbers of a dtype have, or their parts."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def normal(out: Tensor, key: int, first: int, mean: float, deviation: float) -> None:
    """Fills a tensor of one dim with normal numbers, each of two words (Box and Muller 1958). The deviation of complex
    numbers is that of both parts together, as torch has it.
    """
    if out.is_complex():
        normal(torch.view_as_real(out).view(-1), key, 2 * first, mean, deviation / math.sqrt(2))
        return
    for place, chunk in words(key, 2 * first, 2 * len(out), out.device):
        radius, angle = (chunk[half::2].double().add_(0.5) for half in (0, 1))
        del chunk
        radius.div_(_WORDS).log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi / _WORDS).cos_())
        out[place.start // 2 : place.stop // 2] = radius.mul_(deviation).add_(mean)
        del radius, angle


def exponential(out: Tensor, key: int, first: int, rate: float) -> None:
    """Fills a tensor of one dim with exponentially distributed numbers."""
    for place, chunk in words(key, first, len(out), out.device):
        numbers = chunk.double()
        del chunk
        out[place] = numbers.add_(0.5).div_(_WORDS).log_().div_(-rate)
        del numbers


def integers(out: Tensor, key: int, first: int, low: int, high: int) -> None:
    """Fills a tensor of one dim with integers from `low` to `high - 1`, each of two words."""
    for place, chunk in words(key, 2 * first, 2 * len(out), out.device):
        out[place.start // 2 : place.stop // 2] = _positive(chunk).remainder_(high - low).add_(low)
        del chunk


def permutation(out: Tensor, key: int) -> None:
    """Fills a tensor of one dim with a random order of 0, 1 and so on."""
    ranks = [_positive(chunk) for _, chunk in words(key, 0, 2 * len(out), out.device)]
    out.copy_(torch.cat(ranks).argsort(stable=True) if ranks else out)


def _positive(chunk: Tensor) -> Tensor:
    """Returns numbers of 62 bits, of two words each. The words are changed."""
    high, low = chunk[::2] >> 1, chunk[1::2].bitwise_right_shift_(1)
    return high.bitwise_left_shift_(31).bitwise_or_(low)


def _signed(bits: int) -> int:
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


# ---------------------------------------------------------------------------------------------------- the generator


def _words(key: int, block: int, blocks: int, device: torch.device) -> Tensor:
    """Returns the words of a number of blocks from one on, each from 0 to 2**32 - 1."""
    counter = torch.arange(block + 1, block + 1 + blocks, device=device)  # the generator counts before it makes a block
    zero = torch.zeros((), dtype=torch.int64, device=device)
    state = (counter, zero, zero, zero)
    for number in range(_ROUNDS):
        low_key, high_key = (_signed((key >> 64 * n) + number * step) for n, step in enumerate(_KEY_STEPS))
        state = _mix(state, low_key, high_key)
    made = torch.empty(blocks, _BLOCK, dtype=torch.int64, device=device)
    for place, word in enumerate(state):
        made[:, 2 * place] = word & _MASK
        made[:, 2 * place + 1] = _high_half(word)
    return made.view(-1)


State = tuple[Tensor, Tensor, Tensor, Tensor]


def _mix(state: State, low_key: int, high_key: int) -> State:
    """Does one round."""
    (high, low), (other_high, other_low) = _product(state[0], _MULTIPLIERS[0]), _product(state[2], _MULTIPLIERS[1])
    return other_high ^ state[1] ^ low_key, other_low, high ^ state[3] ^ high_key, low


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Returns the high and the low 64 bits of a product of unsigned numbers of 64 bits."""
    low, high = multiplier & _MASK, multiplier >> 32
    x_low, x_high = x & _MASK, _high_half(x)
    middle = x_low * high + _high_half(x_low * low)  # below 2**64, as the next one
    other = x_high * low + (middle & _MASK)
    return x_high * high + _high_half(middle) + _high_half(other), x * _signed(multiplier)


def _high_half(x: Tensor) -> Tensor:
    return (x >> 32) & _MASK


# --------------------------------------------------------------------------------------------- the kernel of Triton

_LAUNCHED: dict[torch.device, bool] = {}  # by device: whether the kernel runs there


def _has_kernel(device: torch.device) -> bool:
    """True if Triton makes a kernel for the device here. Tried once, and not while a graph of a GPU is recorded."""
    if device.type != "cuda":
        return False
    if device not in _LAUNCHED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _LAUNCHED[device] = has_triton() and _is_launched(device)
    return _LAUNCHED[device]


def _is_launched(device: torch.device) -> bool:
    """Runs the kernel on a few numbers: Triton wants a C compiler, Python's headers, the driver's library and a folder
    to write to, and says what is missing once a kernel is launched.
    """
    try:
        from dslc.runtime.technique.philox_triton import fill_where_below

        fill_where_below(torch.empty(_BLOCK, dtype=torch.bool, device=device), 0, 0, 1)
    except Exception as error:  # whatever a compiler, a linker or a driver raises
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"Triton makes no kernel for the masks of dropout ({type(error).__name__}: {reason}); torch's operations "
            "make the same masks, more slowly",
            stacklevel=2,
        )
        return False
    return True
