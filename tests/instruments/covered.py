"""`python -m instruments.covered PART REST…`: the share of the lines that all of these runs executed which PART did.

Each argument is a file of `instruments/coverage`. Exits with 1 if the share is below the bound, and lists the files
where most lines are missing.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from instruments.coverage.sitecustomize import ROOT, offsets

BOUND = 0.97
LISTED = 20


def executed(file: Path) -> set[int]:
    content = file.read_bytes()
    return {place for place in range(len(content)) if content[place]}


def main(part: Path, *others: Path) -> int:
    covered = executed(part)
    lines = covered.union(*map(executed, others))
    share = len(covered & lines) / len(lines)
    print(f"make test runs {share:.2%} of the {len(lines)} statements that all tests run (at least {BOUND:.0%})")
    table, _ = offsets()
    starts = sorted((start, path) for path, start in table.items())
    missing: Counter[str] = Counter()
    for place in lines - covered:
        _, path = max(start for start in starts if start[0] <= place)
        missing[path] += 1
    for path, count in missing.most_common(LISTED):
        print(f"{count:5} of {Path(path).relative_to(ROOT)} run in the others alone")
    return share < BOUND


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
