"""Wrong surroundings, each on real processes and hosts: one message on each host that is concerned, which names the
host, the variable, file or address, and the remedy; then no process is left, and nothing listens.

Others are tried for real where their launchers are: a job file that differs and a number of hosts that does not fit the
job (test_hosts.py), wrong numbers of processes of torchrun and mpirun, mpirun of a local job and ranks of one node on
two hosts (test_launchers.py), of srun (test_slurm.py), a port, name, key and known host of ssh (test_ssh.py). All
variables of launchers that contradict a job, without processes: tests/cli/test_launcher_environment.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.hosts import TOOL, logged, namespaces, reach, why_none
from helpers.job_texts import job_text
from helpers.launcher import Command
from helpers.paths import ROOT

JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 48},
    devices={"nodes": 2, "cpus": 1},
    train={"steps": 6},
)
ALONE = "{run} --set devices.nodes=1 --set devices.cpus=2"
MEET = "{run} --rendezvous host1"
TOKEN = "DSLC_RUN_TOKEN=0123456789abcdef "
SHARED = f"{MEET} --set 'checkpoint.every=3 steps'"
IN_VAIN = "{run} --set launch.timeout=2s --rendezvous"  # hosts that wait for others who do not come
TEXT = (
    f"{MEET} --set 'model.network=gpt(layers = 1, heads = 1, width = 16, context = 8, vocab = 256)' "
    "--set 'data.source=text(\"{tmp}/data/corpus.txt\", context = 8)'"
)
# PORT, how many come, what it says to each, and a command that it runs meanwhile
AT_PORT = "{python} {tmp}/server.py"
SERVER = """import contextlib, socket, subprocess, sys

listening = socket.create_server(("10.77.0.1", int(sys.argv[1])))
running, met = subprocess.Popen(sys.argv[4:]), []
for _ in range(int(sys.argv[2])):
    met.append(listening.accept()[0])
    met[-1].sendall(sys.argv[3].encode())
status = running.wait()
for connection in met:  # stays until all have left
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
sys.exit(status)
"""
MOUNTED = "unshare --mount bash -c 'mount -t tmpfs %s none %s && exec \"$@\"' sh "


NUMBERS = " ".join(map(str, range(400)))


@dataclass(frozen=True)
class Wrong:
    """`lines` are commands of a shell, one for each host, and `says` words of the one message of each of them: `{host}`
    is that host. An empty one says nothing of its own.
    """

    lines: tuple[str, ...]
    says: tuple[tuple[str, ...], ...]
    before: str = ""  # what is done before
    statuses: tuple[int, ...] = (1, 2, 3)


def alike(lines: Sequence[str], *words: str, before: str = "") -> Wrong:
    """Returns a case in which all hosts have the same message."""
    return Wrong(tuple(lines), (words,) * len(lines), before)


def differing(lines: Sequence[str], fact: str, values: tuple[str, str], *words: str, before: str = "") -> Wrong:
    """Returns a case of two hosts that differ in a fact, of which each is told what it may know of the values."""
    return Wrong(tuple(lines), tuple((fact, value, *words) for value in values), before)


# ------------------------------------------------------------------------------------------------------- one process

ON_ONE = {
    "a stale RANK": alike([f"RANK=3 {ALONE}"], "E0809", "RANK is 3", "`unset RANK`"),
    "a stale WORLD_SIZE": alike([f"WORLD_SIZE=8 {ALONE}"], "E0809", "WORLD_SIZE is 8", "`unset WORLD_SIZE`"),
    "mpi() without mpirun": alike(
        [f'{ALONE} --set "launch.with=mpi()"'], "E0809", "OMPI_COMM_WORLD_SIZE or PMI_SIZE", "`mpirun -np 2 dslc run "
    ),
    "slurm() without srun": alike(
        [f'{ALONE} --set "launch.with=slurm()"'], "E0809", "SLURM_STEP_NUM_TASKS is not set", "`srun --nodes 1 "
    ),
    "torchrun() without torchrun": alike(
        [f'{ALONE} --set "launch.with=torchrun()"'], "E0809", "TORCHELASTIC_RUN_ID is not set", "`torchrun --nnodes 1 "
    ),
    "DSLC_RENDEZVOUS without a number": alike(
        ["DSLC_RENDEZVOUS=host1:port {run}"], "DSLC_RENDEZVOUS is `host1:port`", "help: the name or address of one"
    ),
    "DSLC_RENDEZVOUS with two ports": alike(["DSLC_RENDEZVOUS=a:b:c {run}"], "DSLC_RENDEZVOUS is `a:b:c`", "help: "),
    "--rendezvous with a port that is none": alike(
        ["{run} --rendezvous host1:99999"], "--rendezvous is `host1:99999`", "help: the name or address of one"
    ),
    "OMP_NUM_THREADS is no number": alike(
        [f"OMP_NUM_THREADS=all {ALONE}"], "E0825", "OMP_NUM_THREADS is `all`", "on {host}", "`unset OMP_NUM_THREADS`"
    ),
    "MKL_NUM_THREADS is negative": alike(
        [f"MKL_NUM_THREADS=-4 {ALONE}"], "E0825", "MKL_NUM_THREADS is `-4`", "on {host}", "`unset MKL_NUM_THREADS`"
    ),
    "an interface that is not there": alike(
        [f"GLOO_SOCKET_IFNAME=eth7 {ALONE}"], "E0825", "GLOO_SOCKET_IFNAME is `eth7`", "(but lo", "on {host}", "`unset "
    ),
    "a debug level that is none": alike(
        [f"TORCH_DISTRIBUTED_DEBUG=yes {ALONE}"], "E0825", "TORCH_DISTRIBUTED_DEBUG is `yes`", "OFF, INFO", "`unset "
    ),
    "another torch in PYTHONPATH": alike(
        ["mkdir -p {tmp}/mine/torch; touch {tmp}/mine/torch/__init__.py; PYTHONPATH={tmp}/mine " + ALONE],
        "E0825",
        "PYTHONPATH names {tmp}/mine, where is a `torch` that is not PyTorch",
        "on {host}",
        "`unset PYTHONPATH`",
    ),
    "too few open files": alike([f"ulimit -n 64; {ALONE}"], "E0826", "64 files open", "on {host}", "`ulimit -n 4096`"),
    "a limit of the size of files": alike([f"ulimit -f 1; {ALONE}"], "file too large", "help: `ulimit -f unlimited`"),
    "no folder for temporary files": alike(
        [f"ulimit -f 0; {ALONE}"], "o usable temporary directory", "help: ", "TMPDIR"
    ),
    "a current folder that is gone": alike(
        ["mkdir {tmp}/gone; cd {tmp}/gone; rmdir {tmp}/gone; {run}"], "the current folder is gone", "`cd` to one that"
    ),
    "a file in place of the folder of runs": alike(
        ["cd {tmp} && touch runs && {python} -m dslc run job.plt --set devices.nodes=1"],
        "{tmp}/runs",
        "help: ",
        "--out",
    ),
}
NEED_ROOT = {
    "/dev/shm is full": alike([MOUNTED % ("-o size=4k", "/dev/shm") + ALONE], "E0826", "/dev/shm", "--shm-size=1g"),
    "/dev/shm is read-only": alike([MOUNTED % ("-o ro", "/dev/shm") + ALONE], "E0826", "/dev/shm", "remount,rw"),
    "a run directory that is read-only": alike(
        [MOUNTED % ("-o ro", "{tmp}/run") + ALONE], "{tmp}/run/", "read-only file system", "help: name a folder that"
    ),
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER)
    path = tmp_path / "job.plt"
    path.write_text(JOB)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_ONE)
def test_one_process_is_told(job: Path, name: str) -> None:
    run_case(job, ON_ONE[name], on_hosts=False)


@pytest.mark.parametrize("name", NEED_ROOT)
def test_what_is_mounted_is_told(job: Path, name: str) -> None:
    if why := why_none():
        pytest.skip(why)
    run_case(job, NEED_ROOT[name], on_hosts=False)


@pytest.mark.slow
def test_torchrun_of_a_local_job_is_told(job: Path) -> None:
    """Once; then torchrun says that its processes have failed."""
    line = "{python} -m torch.distributed.run --nproc-per-node 2 -m dslc run {job} --set devices.nodes=1"
    with started_here(job, line) as running:
        status, said = running.end()
        assert status == 1 and said.count("error[") == 1, said
        assert not running.left()
    assert "torchrun has started 2 processes (WORLD_SIZE is 2)" in said and "`--set launch.with=torchrun()`" in said


# ------------------------------------------------------------------------------------------------------ several hosts

ON_HOSTS = {
    "another version of dslc": differing(
        [MEET, f"PYTHONPATH={{newer}} {MEET}"],
        "the version of dslc: ",
        ("host1 has 0.2.0, and host2 has 9.9.9", "host2 has not the same as host1; host2 has 9.9.9"),
        "help: install the same dslc on all hosts",
        before="mkdir {newer}; cp -r {cli} {newer}/dslc; ln -s {root}/grammar {root}/dsl {root}/compiler {root}/runtime"
        " {newer}/dslc; echo '__version__ = \"9.9.9\"' >{newer}/dslc/terminal/version.py",
    ),
    "another version of torch, by what pip has left": differing(
        [MEET, f"PYTHONPATH={{newer}} {MEET}"],
        "the version of torch: ",
        ("host1 has ", "host2 has 9.9.9"),
        "help: install the same torch on all hosts",
        before="mkdir -p {newer}/torch-9.9.9.dist-info; printf 'Metadata-Version: 2.1\\nName: torch\\n"
        "Version: 9.9.9\\n' >{newer}/torch-9.9.9.dist-info/METADATA",
    ),
    "another data file": differing(
        [
            TEXT,
            MOUNTED % ("", "{tmp}/data")
            + f"bash -c 'echo {{numbers}}, >{{tmp}}/data/corpus.txt; exec \"$@\"' sh {TEXT}",
        ],
        "the file {tmp}/data/corpus.txt: ",
        (", and host2 has ", "; host2 has "),
        "help: copy {tmp}/data/corpus.txt",
        before="mkdir {tmp}/data; echo {numbers}. >{tmp}/data/corpus.txt",
    ),
    "another --set": differing(
        [MEET, f"{MEET} --set train.optimizer.lr=0.2"],
        "differ in --set: ",
        ("host1 has nothing, and host2 has train.optimizer.lr=0.2", "; host2 has train.optimizer.lr=0.2"),
        "help: type the same command on all hosts",
    ),
    "a folder that is not shared": alike(
        [TOKEN + SHARED, TOKEN + MOUNTED % ("", "{tmp}/run") + SHARED],
        "host2 does not see {tmp}/run/checkpoints of host1",
        "`checkpoint.dir` or --out names",
        before="mkdir -p {tmp}/run",
    ),
    "a run directory that the first host cannot write": Wrong(
        (MOUNTED % ("-o ro", "{tmp}/run") + MEET, MEET),
        (
            ("{tmp}/run/", "read-only file system", "help: name a folder that can be written with --out"),
            ("host1 left: {tmp}/run/", "read-only file system"),
        ),
        "mkdir -p {tmp}/run",
    ),
    "a run directory that holds a run": Wrong(
        (MEET, MEET),
        (("run holds a run already", "with --out"), ("host1 left: ", "run holds a run already", "--out")),
        "mkdir -p {tmp}/run; touch {tmp}/run/plan.json {tmp}/run/.dslc-lock",
    ),
    "a run directory of other things": Wrong(
        (MEET, MEET),
        (("{tmp}/run is not a run directory", "thesis.tex", "--out"), ("host1 left: ", "thesis.tex")),
        "mkdir -p {tmp}/run; touch {tmp}/run/thesis.tex",
    ),
    "a program at the port that says something else": alike(
        [f"{AT_PORT} 29400 1 SSH-2.0-OpenSSH_9.2 {MEET}"],
        "host1:29400, where the hosts are to meet, does not answer host1",
        "another program listens there",
        "help: on all hosts another port, as `--rendezvous host1:29401`",
    ),
    "a name that does not resolve": alike(
        ["{run} --rendezvous host1.nowhere"] * 2, "`host1.nowhere`, does not resolve on {host}", "give the first host's"
    ),
    "a name that is the loopback's": alike(
        ["{run} --rendezvous here"] * 2, "`here` is 127.0.1.1 on {host}", "see /etc/hosts", "give its address on the"
    ),
}
# Hosts that wait in vain, until `launch.timeout` is over.
WAITING = {
    "a program at the port that says nothing": alike(
        [f"{AT_PORT} {{port}} 2 '' {MEET}:{{port}}", f"{MEET}:{{port}}"],
        "host1:{port}, where the hosts are to meet, does not answer {host}",
        "another program listens there",
        "--rendezvous host1:29401`",
    ),
    "a host that never comes": alike(
        [f"{IN_VAIN} host1:{{port}}"], "host1 waited 2 s (`launch.timeout`) for the hosts at host1", "each started with"
    ),
    "another run directory": differing(
        [f"{MEET}:{{port}}", f"{MEET}:{{port}} --out {{tmp}}/other"],
        "the hosts differ in --out: ",
        (", and host2 has {tmp}/other", "; host2 has {tmp}/other"),
        "help: type the same command on all hosts",
    ),
    "a rendezvous that is another machine": alike(
        [f"{IN_VAIN} host3:{{port}}"] * 2,
        "{host} waited",
        "host3:{port}",
        "connection refused",
        "help: nothing listens",
    ),
    "an address that nobody has": alike(
        [f"{IN_VAIN} 10.77.0.99:{{port}}"] * 2, "{host} waited", "10.77.0.99", "no route to host", "help: no way leads"
    ),
    "a host without a way to the others": Wrong(
        (
            f"{IN_VAIN} host1:{{port}}",
            f"unshare --net bash -c 'ip link set lo up; exec {IN_VAIN} host1:{{port}}'",
        ),
        (
            ("host1 waited 2 s", "for the hosts at host1", "the job takes 2"),
            ("host2 waited 2 s", "host1:{port}", "network is unreachable", "help: no way leads there from here"),
        ),
    ),
    "a host with a fault of its own": Wrong(
        (f"{IN_VAIN} host1:{{port}}", f"GLOO_SOCKET_IFNAME=eth7 {IN_VAIN} host1:{{port}}"),
        (
            ("host1 waited 2 s", "for the hosts at host1"),
            ("E0825", "GLOO_SOCKET_IFNAME is `eth7`", "(but lo, eth0)", "on host2", "`unset GLOO_SOCKET_IFNAME`"),
        ),
    ),
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    if why := why_none():
        pytest.skip(why)
    with namespaces(3) as names:
        for name in names:
            known = Path("/etc/netns", name, "hosts")
            known.write_text(f"{known.read_text()}127.0.1.1 here\n")
        yield names


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_HOSTS)
def test_hosts_are_told(job: Path, hosts: list[str], name: str) -> None:
    run_case(job, ON_HOSTS[name], on_hosts=True)


@pytest.mark.slow
def test_hosts_that_wait_in_vain_are_told(job: Path, hosts: list[str]) -> None:
    """All at once, at ports of their own."""
    with ExitStack() as around:
        begun = {
            name: begin(around, job, case, port, on_hosts=True)
            for port, (name, case) in enumerate(WAITING.items(), 31_000)
        }
        wrong = {name: found for name, running in begun.items() if (found := faults(running))}
    assert not wrong, wrong
    assert not listening()


def test_mpirun_with_another_hosts_address_is_told(job: Path, hosts: list[str]) -> None:
    if shutil.which("mpirun.mpich") is None:
        pytest.skip("there is no mpirun.mpich: Debian's mpich brings it")
    run = f"mpirun.mpich -np 2 {ALONE} --set 'launch.with=mpi()' --rendezvous host2"
    run_case(
        job, alike([run], "host1 cannot listen at host2:29400", "help: ", "leave `--rendezvous` out"), on_hosts=True
    )


@pytest.mark.long
@pytest.mark.slow
def test_hosts_that_are_too_many_are_told(job: Path, hosts: list[str]) -> None:
    """While two of them train."""
    out, endless = job.parent / "run", f"{MEET} --set train.steps=1000000 --set log.every='1 step'"
    with ExitStack() as around:
        one, two = (begin(around, job, Wrong((endless,), ((),)), 0, on_hosts=True, first=n)[0][0] for n in (1, 2))
        reach(out, 1, [one, two])
        third = alike(
            [endless], "host3 comes too late", "the job takes 2", "host1 and host2", "help: the same command once"
        )
        other = alike(
            [MEET], "another training meets at host1", "host3 has another job", "help: on all hosts of this job"
        )
        for case in (third, other):
            assert not faults(begin(around, job, case, 0, on_hosts=True, first=3))
        step = logged(out)[-1]
        reach(out, step + 1, [one, two])
        os.kill(one.process.pid, signal.SIGINT)
        assert [each.end()[0] for each in (one, two)] == [130, 130]
    assert not listening()


@pytest.mark.long
def test_the_same_command_twice_on_one_host_is_told(job: Path, hosts: list[str]) -> None:
    out, endless = job.parent / "run", f"{MEET} --set train.steps=1000000"
    with ExitStack() as around:
        twice = [begin(around, job, Wrong((endless,), ((),)), 0, on_hosts=True, first=1, tag=n)[0][0] for n in "ab"]
        reach(out, 1, twice)
        case = alike([endless], "host2 comes too late", "host1 (node 0) and host1 (node 1)", "the same command once on")
        assert not faults(begin(around, job, case, 0, on_hosts=True, first=2))
        os.kill(twice[0].process.pid, signal.SIGINT)
        assert [each.end()[0] for each in twice] == [130, 130]


@pytest.mark.long
def test_another_file_of_the_users_own_is_told(job: Path, hosts: list[str]) -> None:
    own = "import torch\n\n\ndef make():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    for folder in (job.parent, job.parent / "other"):
        folder.mkdir(exist_ok=True)
        text = job.read_text().replace("[flatten(), linear(16), relu(), linear(10)]", 'python("net:make")')
        (folder / "own.plt").write_text(text)
        (folder / "net.py").write_text(own if folder == job.parent else own.replace("64, 10", "64, 10 "))
    lines = [
        MEET.replace("{run}", f"{{python}} -m dslc run {{tmp}}/{each}own.plt --out {{tmp}}/run")
        for each in ("", "other/")
    ]
    run_case(
        job,
        differing(lines, "the file net.py: ", (", and host2 has ", "; host2 has "), "help: copy net.py"),
        on_hosts=True,
    )


# ------------------------------------------------------------------------------------------------- what does not matter

HARMLESS = (
    "HOME=/proc/1/nowhere TMPDIR=/nowhere LANG=C LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii MASTER_ADDR=10.1.2.3 "
    "MASTER_PORT=1 CUDA_VISIBLE_DEVICES=9,x RANK=0 WORLD_SIZE=1 OMP_NUM_THREADS=1 taskset -c 0"
)


@pytest.mark.slow
def test_what_does_not_matter_lets_a_job_train(job: Path) -> None:
    """A home and a folder for temporary files that are not there, no letters but ASCII, no standard input, one core."""
    with started_here(job, f"ulimit -S -n 32; {HARMLESS} {ALONE} <&-") as running:
        status, said = running.end()
        assert status == 0 and "Traceback" not in said, said
        assert not running.left()
    assert logged(job.parent / "run")[-1] == 6


@pytest.mark.slow
def test_a_reader_who_leaves_lets_a_job_train(job: Path) -> None:
    line = f"{ALONE} --set train.steps=200 | head -1; exit ${{PIPESTATUS[0]}}"
    with started_here(job, line) as running:
        status, said = running.end()
        assert status == 0 and len(said.splitlines()) == 1, said
        assert not running.left()
    assert logged(job.parent / "run")[-1] == 200


@pytest.mark.long
@pytest.mark.skipif(shutil.which("faketime") is None, reason="there is no faketime: Debian's faketime brings it")
def test_a_clock_that_is_off_lets_hosts_train(job: Path, hosts: list[str]) -> None:
    """By an hour, of which the files that it shares know nothing. Nothing compares the clocks of hosts."""
    run = f"{MEET} --set 'checkpoint.every=3 steps' --set train.steps=200"
    late = f"NO_FAKE_STAT=1 faketime -f +1h {run}"
    with ExitStack() as around:
        ((one, _), (two, _)) = begin(around, job, Wrong((run, late), ((), ())), 0, on_hosts=True)
        ends = [each.end() for each in (one, two)]
        assert [status for status, _ in ends] == [0, 0], ends
        assert not one.left() and not two.left()
    line = f"NO_FAKE_STAT=1 faketime -f +1h {{python}} -m dslc status {job.parent / 'run'}"
    with started_here(job, line) as asked:
        assert asked.end()[0] == 0


# -------------------------------------------------------------------------------------------------------- how it is run


def run_case(job: Path, case: Wrong, *, on_hosts: bool) -> None:
    with ExitStack() as around:
        wrong = faults(begin(around, job, case, 29_400, on_hosts=on_hosts))
        assert not wrong, "\n".join(wrong)
    assert not on_hosts or not listening()


Begun = list[tuple[Command, Wrong]]


def begin(
    around: ExitStack, job: Path, case: Wrong, port: int, *, on_hosts: bool, first: int = 1, tag: str = ""
) -> Begun:
    """Starts the lines of a case; each comes with a case of its own words."""
    tmp = job.parent
    (tmp / "run").mkdir(exist_ok=True) if "{tmp}/run" in "".join(case.lines) else None
    words = {
        "tmp": tmp,
        "job": job,
        "python": sys.executable,
        "newer": tmp / "newer",
        "port": port,
        "root": ROOT,
        "numbers": NUMBERS,
    }
    words["cli"], words["run"] = ROOT / "cli", f"{sys.executable} -m dslc run {job} --out {tmp}/run"

    def filled(text: str, host: str = "") -> str:
        for name, value in {**words, "host": host}.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

    if case.before:
        subprocess.run(["bash", "-ec", filled(case.before)], check=True)
    found = []
    for n, (line, says) in enumerate(zip(case.lines, case.says, strict=True), first):
        there = [str(TOOL), "run", str(n)] if on_hosts else []
        command = Command(tmp / f"host{n}{tag}-{port}", [*there, "bash", "-c", filled(line)])
        around.enter_context(command)
        host = f"host{n}" if on_hosts else os.uname().nodename
        found.append((command, Wrong((line,), (tuple(filled(each, host) for each in says),))))
    return found


@contextmanager
def started_here(job: Path, line: str) -> Iterator[Command]:
    """Starts one line, on this machine."""
    with ExitStack() as around:
        yield begin(around, job, Wrong((line,), ((),)), 0, on_hosts=False)[0][0]


def faults(begun: Begun) -> list[str]:
    """Returns what is wrong with the end of each command."""
    found = []
    for command, case in begun:
        status, said = command.end()
        (says,) = case.says
        flat = re.sub(r"\s+", " ", said)
        messages = re.findall(r"^(?:dslc: |error\[|training failed|Traceback)", said, re.MULTILINE)
        missing = [each for each in says if each not in flat]
        if status not in case.statuses or len(messages) != 1 or missing or "Traceback" in said or command.left():
            found.append(f"status {status}, missing {missing}, left {command.left()}: {said}")
    return found


def listening() -> list[str]:
    """Returns what listens on the hosts: addresses in hexadecimal digits."""
    found = []
    for n in (1, 2, 3):
        told = subprocess.check_output([TOOL, "run", str(n), "cat", "/proc/net/tcp", "/proc/net/tcp6"], text=True)
        found += [f"host{n} {fields[1]}" for fields in map(str.split, told.splitlines()) if fields[3] == "0A"]
    return found
