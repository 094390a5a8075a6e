"""Prints a proof: what was changed for this machine, both curves beside one another, and what differs."""

from __future__ import annotations

from dslc.dsl.plain import plain
from dslc.proof.compare_curves import largest_difference
from dslc.proof.prove import Proof
from dslc.terminal.tables import console


def show_proof(proof: Proof) -> None:
    from rich.table import Table

    sizes, tool = proof.sizes, proof.tool
    shown = console()
    batch = f"batch {sizes.batch} = {sizes.micro} x {sizes.accumulation} x {sizes.ranks}"
    shown.print(plain(f"{tool.name} against the job, {len(tool.losses)} steps on CPUs in fp32, {batch}"), markup=False)
    for change in proof.changes:
        shown.print(plain(f"  changed for this machine: {change}"), markup=False)
    steps = Table(box=None, pad_edge=False)
    columns = ["step", "loss", "the job", "apart", "rate", "the job", "norm", "the job"]
    columns += ["at its rates"] if proof.at_tool_rates else []
    for column in columns:
        steps.add_column(column, justify="right", no_wrap=True)
    for number, (loss, norm, rate) in enumerate(zip(tool.losses, tool.norms, tool.rates, strict=True)):
        job = proof.job
        row = [str(number + 1), f"{loss:.6f}", f"{job.losses[number]:.6f}", _difference_text(loss, job.losses[number])]
        row += [f"{rate:.4g}", f"{job.rates[number]:.4g}", _norm_text(norm), _norm_text(job.norms[number])]
        row += [f"{proof.at_tool_rates.losses[number]:.6f}"] if proof.at_tool_rates else []
        steps.add_row(*row)
    shown.print(steps)
    for finding in proof.findings:
        shown.print(plain(finding), markup=False)


def _difference_text(a: float, b: float) -> str:
    return f"{largest_difference([a], [b]):.0e}" if a != b else "0"


def _norm_text(norm: float | None) -> str:
    return "-" if norm is None else f"{norm:.5g}"
