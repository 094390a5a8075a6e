"""The place of a process among those that a launcher has started, as the launcher's variables say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dslc.runtime.hosts.rendezvous_address import Endpoint


@dataclass(frozen=True, kw_only=True)
class World:
    """`rank` of `size` processes, from 0, and `local_rank` of the `local_size` on this host (None where nobody says).
    `names` are the variables that say so, by field. `speaks`: this process talks to the user where all processes find
    the same. `of_nodes`: one process for each node is right as well, which forks the ranks of the node. `host` is the
    launcher's name of this host. `attempt` counts the restarts by the launcher, and `run` names what it starts again;
    else this process starts failed ranks again itself (`again`). `fault` says which variable cannot be read; the
    numbers then mean nothing.
    """

    word: str  # of the job: "torchrun"
    command: str  # what the user has typed: "torchrun"
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    nodes: int | None = None
    names: Mapping[str, str]
    speaks: bool = True
    of_nodes: bool = False
    host: str = ""
    attempt: int = 0
    run: str = ""
    again: bool = False
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher of processes: how its processes are known, and where they meet. `read` returns the place of this
    process, or None if the launcher has not started it. `join` returns where the processes meet, or raises
    RendezvousError; it is given the beginning of a path that all processes have alike. `start` stands before `dslc
    run`, with numbers by their names in braces. One that `ends_others` does so as soon as one of its processes has left
    with an error.
    """

    word: str  # of the job: "torchrun"
    sign: str  # the variable that it always sets
    start: str
    read: Callable[[Mapping[str, str]], World | None]
    join: Callable[[World, Mapping[str, str], str], Endpoint]
    ends_others: bool = False


def read_world(
    environ: Mapping[str, str], word: str, command: str, names: Mapping[str, str], *, everywhere: bool = False
) -> World:
    """Returns the place that the variables `names` give, by field. `everywhere`: the output of each host goes to a
    terminal of its own, so that one process on each speaks.
    """
    found: dict[str, int | None] = {}
    for field, name in names.items():
        told = environ.get(name)
        if told is None and field in ("rank", "size"):
            return World(word=word, command=command, names=names, fault=f"{name} is not set")
        if told is not None and not told.isdecimal():
            return World(word=word, command=command, names=names, fault=f"{name} is `{told}`, which is no number")
        found[field] = int(told) if told is not None else None
    rank, size, local = found["rank"], found["size"], found.get("local_rank")
    assert rank is not None and size is not None
    fault = "" if rank < size else f"{names['rank']} is {rank}, and {names['size']} is {size}: ranks count from 0"
    return World(
        word=word,
        command=command,
        rank=rank,
        size=size,
        local_rank=local,
        local_size=found.get("local_size"),
        nodes=found.get("nodes"),
        names=names,
        speaks=local == 0 if everywhere and local is not None else rank == 0,
        attempt=found.get("attempt") or 0,
        fault=fault,
    )
