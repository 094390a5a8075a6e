"""What is said of a host on which nothing starts, by the end of its `ssh`; and the part on the host itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dslc.launching.ssh_agent import NO_FOLDER, READY
from dslc.launching.ssh_hosts import Host
from dslc.launching.ssh_launch import _fault


@pytest.mark.parametrize(
    "status, errors, said",
    [
        (127, "bash: /venv/python: No such file", f"host1 has no {sys.executable}, with which dslc runs here: install"),
        (
            1,
            "/venv/python: No module named dslc.launching.ssh_agent",
            f"host1 has no dslc for {sys.executable}: install it there",
        ),
        (
            NO_FOLDER,
            "/jobs: No such file or directory",
            "host1 has no folder /jobs: No such file or directory: the job",
        ),
        (
            255,
            "ssh: connect to host host1 port 22: Connection timed out",
            "host1 cannot be reached by ssh (ssh: connect",
        ),
        (255, "root@host1: Permission denied (publickey).", "host1 refuses the key (root@host1: Permission denied"),
        (255, "Host key verification failed.", "the key of host1 is not known here, or has changed: `ssh host1` once"),
        (9, "", "host1 could not start dslc (exit status 9): it says nothing"),
    ],
)
def test_the_end_of_ssh_is_one_message_with_a_remedy(status: int, errors: str, said: str) -> None:
    process = subprocess.Popen(["sh", "-c", f"exit {status}"], stdin=subprocess.DEVNULL)
    process.wait()
    assert _fault(Host(name="host1", process=process, errors=[errors])).startswith(said)


@pytest.mark.parametrize(
    "lines, status", [("", 130), ("end\n", 130), ("alive\nstop\n", 130), ("go\nstop\n", 130), ("go\n", 0)]
)
def test_a_host_waits_for_the_word_to_go(tmp_path: Path, lines: str, status: int) -> None:
    command = [sys.executable, "-P", "-m", "dslc.launching.ssh_agent", "0", str(tmp_path), "--version"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == f"{READY}\n"
        process.stdin.write(lines)
        process.stdin.flush()
        if lines != "go\n":
            process.stdin.close()
        said = process.stdout.read()
        assert process.wait() == status and said.startswith("dslc ") == (lines == "go\n")


def test_the_secret_of_a_run_comes_by_the_input_and_is_in_no_command_line(tmp_path: Path) -> None:
    shows = "import os, sys; print(os.environ['DSLC_RUN_TOKEN'], open('/proc/self/cmdline').read(), flush=True)"
    (tmp_path / "ssh_agent.py").write_text(
        f"from dslc.launching import ssh_agent\nssh_agent._keep_secret(['secret 1234', 'go'])\n{shows}\n"
    )
    run = subprocess.run([sys.executable, str(tmp_path / "ssh_agent.py")], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("1234 ") and "1234" not in run.stdout[5:]
    script = f'echo \'{READY}\'; while read line; do echo "$line"; [ "$line" = go ] && exit; done'
    pipe = subprocess.PIPE
    process = subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
    host = Host(name="host1", process=process, secret="0123")
    host.go()
    assert process.communicate()[0].decode().splitlines() == [READY, "secret 0123", "go"]
    assert "0123" not in repr(host)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "dslc.launching.ssh_agent", "0", str(tmp_path / "none"), "--version"]
    run = subprocess.run(command, input="go\n", capture_output=True, text=True, check=False)
    assert run.returncode == NO_FOLDER and run.stderr == f"{tmp_path}/none: No such file or directory\n"
