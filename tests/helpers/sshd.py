"""A sshd on each of several hosts, with keys, configuration and known hosts of its own; ~/.ssh is left alone."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from helpers import hosts

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
PORT = 2222
_CONFIG = """
Port 2222
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
_CLIENT = """
Host {name}
  HostName {address}
  Port 2222
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
"""


def why_none() -> str:
    """Returns why there can be no sshd on hosts of their own; "" if there can."""
    missing = [name for name, found in (("sshd", SSHD), ("ssh", shutil.which("ssh"))) if not found]
    return hosts.why_none() or (f"there is no {' and no '.join(missing)}" if missing else "")


@contextmanager
def served(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Runs a sshd on each host, and yields the file that `ssh -F` takes."""
    folder.mkdir()
    os.makedirs("/run/sshd", exist_ok=True)  # where sshd locks its unprivileged part in
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "sshd_config").write_text(_CONFIG.format(folder=folder))
    key, client = (folder / "host_key.pub").read_text(), "GlobalKnownHostsFile none\n"
    known = ""
    for number, name in enumerate(names, 1):
        address = f"10.77.0.{number}"
        known += f"[{address}]:{PORT} {key}"
        client += _CLIENT.format(name=name, address=address, folder=folder)
    (folder / "known_hosts").write_text(known)
    (folder / "config").write_text(client)
    with ExitStack() as around:
        for number in range(1, len(names) + 1):
            command = [hosts.TOOL, "run", str(number), SSHD, "-D", "-e", "-f", folder / "sshd_config"]
            log = around.enter_context(open(folder / f"sshd-{number}.log", "wb"))
            process = subprocess.Popen([str(word) for word in command], stderr=log)
            around.callback(process.wait)
            around.callback(process.terminate)
            _await(f"10.77.0.{number}", process)
        yield folder / "config"


def _await(address: str, process: subprocess.Popen[bytes]) -> None:
    """Waits until the sshd listens."""
    while True:
        assert process.poll() is None, "sshd has ended: see its log"
        try:
            socket.create_connection((address, PORT), 1).close()
            return
        except OSError:
            continue
