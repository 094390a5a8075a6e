"""Trainings on several hosts, by hand: the same command on each, on real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.hosts import TOOL, free_port, local_command, logged, namespaces, ranks_of, reach, started, tool, why_none
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.segments import holders, segments_of
from helpers.trained import Trained, agree, train_job
from instruments.strangers import stranger

JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 48, "validation": "10%"},
    devices={"nodes": 2, "cpus": 1},
    train={"steps": 12, "optimizer": "sgd(lr = 0.1, momentum = 0.9)"},
)
ALONE = ("devices.nodes=1", "devices.cpus=1")
SHARED = ("--set", "devices.cpus=2", "--set", "devices.backend=shared_memory")
ENDLESS = ("--set", "train.steps=100000")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.plt"
    path.write_text(JOB)
    return path


def both(job: Path, *words: str, out: Path) -> list[list[str]]:
    """Returns the command of two launchers on this machine, which meet at a port of it."""
    command = local_command(["run", str(job), "--out", str(out), "--rendezvous", f"localhost:{free_port()}", *words])
    return [command, [*command]]


@pytest.mark.parametrize("settings", [("parallelism.zero=3", "checkpoint.every=6 steps")], ids=["zero 3"])
def test_two_hosts_train_as_one_process(launcher: Launcher, job: Path, settings: tuple[str, ...]) -> None:
    out = job.parent / "run"
    words = [word for setting in settings for word in ("--set", setting)]
    with started(job.parent, both(job, *words, out=out)) as commands:
        ends = [each.end() for each in commands]
        assert [status for status, _ in ends] == [0, 0], ends
        assert not [left for each in commands for left in each.left()]
    told = sorted(said for _, said in ends)
    assert any("metrics and weights are on" in said for said in told) and any("validation: " in said for said in told)
    assert (out / ".dslc-secret").exists() and not any("W0828" in said for said in told)
    agree(train_job(launcher, job, *ALONE, "checkpoint.every=6 steps"), Trained(out))


@pytest.mark.slow
def test_the_plan_of_a_training_that_was_stopped_is_resumed_by_its_job(job: Path) -> None:
    """A plan takes no `--set`, and so no `checkpoint.resume`."""
    out, plan = job.parent / "run", job.with_name("plan.json")
    plan.write_text(dslc("plan", job, "--json", *ENDLESS, "--set", "checkpoint.every=2 steps").stdout)
    with started(job.parent, both(plan, out=out)) as commands:
        reach(out, 4, commands)
        for each in commands:
            os.kill(each.process.pid, signal.SIGINT)
        ends = [each.end() for each in commands]
    assert [status for status, _ in ends] == [130, 130], ends
    command = (
        f"to resume:  dslc run {os.path.relpath(out)}/job.plt --out {os.path.relpath(out)} --rendezvous localhost:"
    )
    assert all(command in said for _, said in ends), ends


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        ("parallelism.zero=1",),
        ("parallelism.zero=2", "parallelism.microbatches=2"),
        ("devices.cpus=2", "parallelism.zero=3", "parallelism.replicas=2"),
        ("parallelism.pipeline=2", "parallelism.microbatches=2"),
        ("devices.cpus=2", "parallelism.tensor=2"),
        ("parallelism.tensor=2",),
        ("devices.cpus=2", "devices.backend=shared_memory", "parallelism.zero=3"),
        ("devices.cpus=2", "devices.backend=shared_memory", "parallelism.zero=1"),
    ],
    ids=" ".join,
)
def test_every_axis_crosses_hosts(launcher: Launcher, job: Path, settings: tuple[str, ...]) -> None:
    test_two_hosts_train_as_one_process(launcher, job, (*settings, "checkpoint.every=6 steps"))


@pytest.mark.slow
def test_ctrl_c_on_any_host_ends_all_after_one_step(job: Path) -> None:
    """Also when strangers are at the rendezvous, who do not read and do not leave."""
    out = job.parent / "run"
    both_commands = both(job, *ENDLESS, out=out)
    port = int(next(word for word in both_commands[0] if word.startswith("localhost:")).partition(":")[2])
    with ExitStack() as around, started(job.parent, both_commands) as commands:
        reach(out, 3, commands)
        for seed in range(100):
            around.enter_context(stranger(random.Random(seed), port))
        reach(out, logged(out)[-1] + 3, commands)
        os.kill(commands[1].process.pid, signal.SIGINT)
        ends = [each.end() for each in commands]
        assert [status for status, _ in ends] == [130, 130], ends
        assert not [left for each in commands for left in each.left()]
    assert (out / "weights.safetensors").exists()
    steps = logged(out)
    assert steps == list(range(1, len(steps) + 1))
    assert all(f"stopped after {len(steps)} steps" in said for _, said in ends), ends


@pytest.mark.slow
def test_a_killed_rank_is_named_on_every_host(job: Path) -> None:
    out = job.parent / "run"
    with started(job.parent, both(job, *ENDLESS, out=out)) as commands:
        reach(out, 3, commands)
        (rank,) = ranks_of(commands[0])
        os.kill(rank, signal.SIGKILL)
        ends = [each.end() for each in commands]
        assert [status for status, _ in ends] == [3, 3], ends
        assert not [left for each in commands for left in each.left()]
    for _, said in ends:
        assert "training failed on rank " in said and "the process was ended by SIGKILL" in said, said
        assert "(node " in said


@pytest.mark.slow
def test_a_rank_that_shares_memory_is_named_on_every_host_when_it_is_killed(job: Path) -> None:
    """Nothing is left, of memory either."""
    out = job.parent / "run"
    with started(job.parent, both(job, *SHARED, *ENDLESS, out=out)) as commands:
        reach(out, 3, commands)
        ranks = [rank for command in commands for rank in ranks_of(command)]
        of_each = [segments_of(rank) for rank in ranks]
        assert [len(segments) for segments in of_each] == [2] * 4 and len(set().union(*of_each)) == 4
        os.kill(ranks[-1], signal.SIGKILL)
        ends = [each.end() for each in commands]
        assert [status for status, _ in ends] == [3, 3], ends
        assert not [left for each in commands for left in each.left()]
    assert not holders(set().union(*of_each))
    assert all("the process was ended by SIGKILL" in said for _, said in ends), ends


def test_hosts_with_other_files_do_not_start(job: Path) -> None:
    out, other = job.parent / "run", job.parent / "other" / "job.plt"
    other.parent.mkdir()
    other.write_text(JOB.replace("lr = 0.1", "lr = 0.2"))
    one, two = both(job, out=out)
    two[two.index(str(job))] = str(other)
    with started(job.parent, [one, two]) as commands:
        ends = [each.end() for each in commands]
    assert [status for status, _ in ends] == [2, 2], ends
    assert all("the hosts differ in the file job.plt" in said for _, said in ends), ends
    assert not out.exists()


def test_hosts_choose_one_plan_or_say_why_not(job: Path) -> None:
    """Catalogues with the same choice train; other memory, or speeds that lead to another plan, are named."""
    catalogue = '[cpu]\nfp32 = "0.05TFLOPS"\nlink = "1GBps"\nnetwork = "1GBps"\nmemory = "1GiB"\n'
    cases = {
        catalogue.replace("0.05", "0.06"): ("zero = auto", 0, "chosen: data 2"),
        catalogue.replace("1GiB", "2GiB"): ("zero = auto", 2, "the hosts differ in the memory of a device"),
        catalogue.replace("1GBps", "0.0001GBps"): (
            "data = auto, pipeline = auto, microbatches = auto",
            2,
            "the hosts differ in the plan that `auto` chose",
        ),
    }
    for number, (other, (fields, status, text)) in enumerate(cases.items()):
        folder = job.parent / f"{number}"
        one, two = both(job, out=folder / "run")
        for name, figures, command in (("one", catalogue, one), ("two", other, two)):
            path = folder / name / "job.plt"
            path.parent.mkdir(parents=True)
            written = JOB.replace("devices {", 'devices {\n  catalogue = "cards.toml"')
            path.write_text(f"{written}parallelism {{ {fields} }}\n")
            (path.parent / "cards.toml").write_text(figures)
            command[command.index(str(job))] = str(path)
        with started(folder, [one, two]) as commands:
            ends = [each.end() for each in commands]
        assert [code for code, _ in ends] == [status, status], ends
        assert all(text in output for _, output in ends), ends
        assert (folder / "run").exists() == (status == 0)


def test_two_hosts_train_a_plan(job: Path) -> None:
    plan = job.with_name("plan.json")
    with started(job.parent, [local_command(["plan", str(job), "--trace", "--json"])]) as (command,):
        status, text = command.end()
        assert status == 0
        plan.write_text(text)
    out = job.parent / "run"
    with started(job.parent, both(plan, out=out)) as commands:
        ends = [each.end() for each in commands]
    assert [status for status, _ in ends] == [0, 0], ends
    assert all("warning[W0828]: whoever reaches the port" in said for _, said in ends), "it has no checkpoints"
    assert logged(out)[-1] == 12


def test_the_number_of_hosts_is_that_of_the_job(job: Path) -> None:
    alone = local_command(["run", str(job)])
    lonely = [*local_command(["run", str(job), "--rendezvous", "localhost"]), "--set", "devices.nodes=1"]
    with started(job.parent, [alone, lonely]) as commands:
        ends = [each.end() for each in commands]
    assert [status for status, _ in ends] == [1, 1]
    assert "error[E0807]: the job takes 2 nodes" in ends[0][1] and "--rendezvous HOST" in ends[0][1]
    assert "error[E0807]: hosts are to meet, and the job takes one node" in ends[1][1]


# ---------------------------------------------------------------------------------- hosts with addresses of their own


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    if why := why_none():
        pytest.skip(why)
    with namespaces(3) as names:
        yield names


def on_hosts(job: Path, *words: str, out: Path) -> list[list[str]]:
    run = local_command(["run", str(job), "--out", str(out), "--rendezvous", "host1", *words])
    return [[str(TOOL), "run", str(n), *run] for n in (1, 2, 3)]


@pytest.mark.parametrize("more", [(), pytest.param(SHARED, id="shared memory", marks=pytest.mark.long)])
def test_a_host_that_is_cut_off_is_named_on_the_others(job: Path, hosts: list[str], more: tuple[str, ...]) -> None:
    out = job.parent / "run"
    words = ("--set", "devices.nodes=3", *more, *ENDLESS)
    with started(job.parent, on_hosts(job, *words, out=out)) as commands:
        reach(out, 3, commands)
        tool("cut", "2")
        try:
            ends = [each.end() for each in commands]
        finally:
            tool("mend", "2")
        assert [status for status, _ in ends] == [3, 3, 3], ends
        assert not [left for each in commands for left in each.left()]
    assert "host2 is gone: it did not answer for 10 s" in ends[0][1]
    assert "host2 is gone: it did not answer for 10 s" in ends[2][1]
    assert "host1 is gone: it did not answer for 10 s" in ends[1][1]


@pytest.mark.long
def test_three_hosts_train_as_one_process(launcher: Launcher, job: Path, hosts: list[str]) -> None:
    out = job.parent / "run"
    words = ("--set", "devices.nodes=3", "--set", "parallelism.zero=1")
    with started(job.parent, on_hosts(job, *words, out=out)) as commands:
        ends = [each.end() for each in commands]
        assert [status for status, _ in ends] == [0, 0, 0], ends
    agree(train_job(launcher, job, *ALONE), Trained(out))


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_pods_of_a_manifest_train_as_one_process(
    launcher: Launcher, job: Path, hosts: list[str], count: int
) -> None:
    """Hosts run what the manifest says, with its variables and the name that its Service would give."""
    out = job.parent / "run"
    chosen = ('launch.with=kubernetes(image = "dslc")', f"devices.nodes={count}", "checkpoint.every=6 steps")
    words = [word for setting in chosen for word in ("--set", setting)]
    told = dslc("submit", job, "--dry-run", "--out", out, *words)
    config, secret, service, made = json.loads(told.stdout)["items"]
    assert secret["stringData"] == {"token": "see submit"}, "what is only shown has no secret"
    submitted = job.parent / "etc" / "job.plt"
    submitted.parent.mkdir()
    submitted.write_text(config["data"]["job.plt"])
    assert service["metadata"]["name"] == made["spec"]["template"]["spec"]["subdomain"]
    container = made["spec"]["template"]["spec"]["containers"][0]
    words = [word.replace("/etc/dslc/job.plt", str(submitted)) for word in container["command"]]
    variables = [f"{each['name']}={each.get('value', 'the token of the Secret')}" for each in container["env"]]
    pods = [f"{made['metadata']['name']}-{n}.{service['metadata']['name']}" for n in range(made["spec"]["completions"])]
    known = "".join(f"10.77.0.{n} {pod}\n" for n, pod in enumerate(pods, 1))
    for name in hosts:
        names = Path("/etc/netns", name, "hosts")
        names.write_text(names.read_text() + known)
    commands = [
        [str(TOOL), "run", str(n + 1), "env", f"JOB_COMPLETION_INDEX={n}", *variables, sys.executable, *words[1:]]
        for n in range(len(pods))
    ]
    with started(job.parent, commands) as running:
        ends = [each.end() for each in running]
    assert [status for status, _ in ends] == [0] * count, ends
    agree(train_job(launcher, job, *ALONE), Trained(out))
    told_last = json.loads((out / "status.json").read_text())
    (out / "status.json").write_text(json.dumps({**told_last, "state": "stopped", "asked": "dslc stop"}))
    with started(job.parent, [commands[0]]) as (again,):  # as a pod that is made anew after `dslc stop`
        status, said = again.end()
    assert status == 1 and "it was stopped by `dslc stop`" in said
