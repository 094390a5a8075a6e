"""The arithmetic of batches: the global batch is the micro-batch times accumulation times data ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dslc.dsl.words import plural

RANKS = "data_ranks"  # the param of a job whose configuration does not know the ranks


@dataclass(frozen=True)
class BatchSize:
    """The batch that a configuration states, and what follows from it; None where neither says it."""

    micro: int | None = None
    accumulation: int | None = None
    total: int | None = None
    ranks: int | None = None  # of the data axis

    def resolved(self) -> BatchSize:
        """Returns the sizes that follow, as DeepSpeed works them out. Raises ValueError with the contradiction."""
        result = self
        if result.ranks is None and None not in (result.total, result.micro, result.accumulation):
            result = replace(result, ranks=_share(result.total, result.micro, result.accumulation))
        if result.accumulation is None and (result.total is None or result.micro is None):
            result = replace(result, accumulation=1)
        if result.total is None and result.micro and result.accumulation and result.ranks:
            result = replace(result, total=result.micro * result.accumulation * result.ranks)
        elif result.total is not None and result.ranks is not None:
            if result.accumulation is None:
                result = replace(result, accumulation=_share(result.total, result.micro, result.ranks))
            if result.micro is None:
                result = replace(result, micro=_share(result.total, result.accumulation, result.ranks))
        elif result.total is not None:
            _share(result.total, result.micro, result.accumulation)
        result._check()
        return result

    def _check(self) -> None:
        if self.total and self.micro and self.accumulation and self.ranks:
            product = self.micro * self.accumulation * self.ranks
            if product != self.total:
                raise ValueError(
                    f"a global batch of {self.total:,} is not {self.micro} x {self.accumulation} x {self.ranks} = "
                    f"{product:,}: micro-batch x accumulation x data ranks"
                )

    @property
    def batch_text(self) -> str | None:
        """Returns `data.batch` as text of the language; None if nothing states it."""
        if self.total is not None:
            return str(self.total)
        if self.micro is None:
            return None
        return " * ".join([*(str(size) for size in (self.micro, self.accumulation) if size not in (None, 1)), RANKS])

    @property
    def microbatches_text(self) -> str | None:
        """Returns `parallelism.microbatches` as text of the language; None for 1."""
        if self.accumulation is not None:
            return str(self.accumulation) if self.accumulation > 1 else None
        assert self.total and self.micro
        return f"{self.total} // ({self.micro} * {RANKS})"

    def describe(self) -> str:
        """Returns the resolved batch in words: `64 = 4 x 2 x 8 (micro-batch x accumulation x data ranks)`."""
        parts = {
            "micro-batch": self.micro,
            "accumulation": self.accumulation,
            "data ranks": self.ranks,
        }
        known = {name: size for name, size in parts.items() if size is not None}
        if self.total is not None:
            product = f" = {' x '.join(map(str, known.values()))} ({' x '.join(known)})" if len(known) == 3 else ""
            micro = f", in micro-batches of {self.micro}" if self.micro and not product else ""
            return f"{self.total:,}{product}{micro}"
        if self.micro is None:
            return "not stated"
        share = self.micro * (self.accumulation or 1)
        product = f" = {self.micro} x {self.accumulation} (micro-batch x accumulation)" if self.accumulation else ""
        return f"{plural(share, 'sample')} for each data rank{product}"


def _share(total: int | None, *factors: int | None) -> int:
    """Divides a global batch by what is known of its factors. Raises ValueError if it does not divide."""
    assert total is not None
    product = 1
    for factor in factors:
        product *= factor or 1
    if total % product or total < product:
        shown = " x ".join(str(factor) for factor in factors if factor)
        result = f" = {product:,}" if " " in shown else ""
        raise ValueError(f"a global batch of {total:,} is no multiple of {shown}{result}")
    return total // product
