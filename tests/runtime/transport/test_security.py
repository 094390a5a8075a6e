"""Other users of the machine, and folders that they may have written, cannot run code with the rights of a training."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.launcher import Command, Launcher, write_program
from helpers.made_programs import conv_model, images, places, program, python
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from dslc.compiler.ir import program as p
from dslc.runtime.checkpoint import files
from dslc.runtime.checkpoint.state import CheckpointError, load_model
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.transport.unpickling import loads

NOBODY = 65534


class Intrusion:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self._mark), "w")


# ------------------------------------------------------------------------------------------------------- the network


def listening(processes: list[int]) -> list[tuple[str, int]]:
    """Returns address and port of each TCP socket on which one of these processes listens (Linux)."""
    sockets = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor))
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                host, _, port = fields[1].partition(":")
                words = [int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8)]
                found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_whoever_connects_to_a_run_has_nothing_run_by_it(tmp_path: Path) -> None:
    """The attack: a pickle under every key of every store that the run keeps, and garbage on every port."""
    mark = tmp_path / "intrusion"
    job = program(2, images(tmp_path, train=32), steps=1000)
    with Command(write_program(job, places(2), tmp_path / "run")) as command:
        command.wait_for("step    1/1000")
        heard = listening([int(line.split()[0]) for line in command.left()])
        assert {host for host, _ in heard} <= {"127.0.0.1", "::1"}, "listens on loopback alone"
        for _, port in heard:
            _attack_store(port, pickle.dumps(Intrusion(mark), protocol=0).decode())
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(bytes(range(256)) * 16)
        status, output = command.end()
        assert status == 0, output
        assert not mark.exists()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="gives the machine another name")
def test_ranks_listen_on_loopback_alone_whatever_the_machine_is_called(tmp_path: Path) -> None:
    """Also if the host's name resolves to an address of the network, on which gloo would listen."""
    shown = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    if not shown:
        pytest.skip("this machine has no address but loopback")
    job = program(2, images(tmp_path, train=32), steps=10**6, backend="gloo")
    folder = write_program(job, places(2), tmp_path / "run")
    launched = [sys.executable, "-m", "dslc.runtime.launch", str(folder)]
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', shown[0], *launched]
    with Command(folder, renamed) as command:
        command.wait_for("step       1/1000000")
        heard = listening([int(line.split()[0]) for line in command.left()])
        assert heard and {host for host, _ in heard} <= {"127.0.0.1", "::1"}


def _attack_store(port: int, harm: str) -> None:
    with contextlib.suppress(RuntimeError):
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=1))
        for key in store.list_keys():
            store.set(key.removeprefix("/"), harm)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="becomes another user")
def test_another_user_cannot_open_what_the_ranks_meet_in(tmp_path: Path) -> None:
    """Neither the store of a run nor any other socket of its processes is open to others."""
    job = program(2, images(tmp_path, train=32), steps=10**6)
    script = (
        "import os, sys\n"
        f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "for process in sys.argv[1:]:\n"
        "    try:\n"
        "        print(os.listdir(f'/proc/{process}/fd'))\n"
        "    except PermissionError:\n"
        "        print('no')\n"
        "for path in {paths!r}:\n"
        "    for how in (os.O_RDONLY, os.O_WRONLY):\n"
        "        try:\n"
        "            print(os.open(path, how))\n"
        "        except OSError:\n"
        "            print('no')\n"
    )
    with Command(write_program(job, places(2), tmp_path / "run")) as command:
        command.wait_for("step       1/1000000")
        processes = [line.split()[0] for line in command.left()]
        opened = [os.readlink(path) for path in Path(f"/proc/{processes[0]}/fd").iterdir() if path.exists()]
        stores = [path for path in opened if "dslc-store" in path]
        assert stores, "the store is there"
        script = script.replace("{paths!r}", repr(stores))
        # Python is below a folder of root's own in some machines: the interpreter is opened by root, and leaves it.
        told = subprocess.run([sys.executable, "-c", script, *processes], capture_output=True, text=True, check=True)
        assert told.stdout.split() == ["no"] * (3 + 2 * len(stores)), "nor by the name that the file has"


SENDS = """
import os, torch
import torch.distributed as dist

class Harm:
    def __reduce__(self):
        return open, ({mark!r}, "w")

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        dist.all_gather_object([None, None], Harm() if os.environ["RANK"] == "1" else "plain")
        return super().forward(x.flatten(1))
"""


def test_what_ranks_send_each_other_runs_nothing(launcher: Launcher, tmp_path: Path) -> None:
    """As an intruder on one of their connections might send it."""
    mark = tmp_path / "intrusion"
    (tmp_path / "sends.py").write_text(SENDS.format(mark=str(mark)))
    model = p.ModelStep(python=python("sends:Net", tmp_path))
    job = program(2, images(tmp_path), model=model, sync_batch_norm=False, steps=1)
    outcome, shown = launcher.launch(job, places(2), tmp_path / "run")
    assert outcome.failure is not None, shown
    assert "which could run code" in outcome.failure.message and not mark.exists()


def test_compiled_code_is_kept_where_others_cannot_write(tmp_path: Path) -> None:
    """So are precompiled headers, which torch keeps in the temporary folder whatever is set."""
    script = (
        "from dslc.runtime.technique.compiling import default_compile_cache, keep_to_oneself\n"
        "keep_to_oneself()\n"
        "from torch._inductor.codecache import _HEADER_DIR\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print(cache_dir(), default_compile_cache(), _HEADER_DIR)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)

    kept, default, headers = map(Path, run().stdout.split())
    assert kept == tmp_path / "dslc" / "inductor" and headers.parent == default and default.parent == tmp_path
    default.chmod(0o777)
    assert run().returncode == 0 and kept.stat().st_mode & 0o077 == default.stat().st_mode & 0o022 == 0
    default.rename(tmp_path / "elsewhere")
    default.symlink_to(tmp_path / "elsewhere")
    assert f"CompileError: `train.compile` has torch keep compiled code in {default}, which is not" in run().stderr


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def trained(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two ranks that ended after step 4, with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    outcome = _train(launcher, folder / "run", images(folder), steps=4)
    assert outcome.is_complete, outcome
    return folder


def _train(launcher: Launcher, run: Path, data: p.DataStep, steps: int, resume: str = "none") -> Any:
    job = program(2, data, steps=steps, checkpoint=p.CheckpointStep(every=4, resume=resume))
    outcome, _ = launcher.launch(job, places(2), run)
    return outcome


def _forge(checkpoint: Path, changed: Callable[[Any], Any]) -> None:
    """Writes other metadata, with a manifest that has its checksum."""
    metadata = checkpoint / ".metadata"
    metadata.write_bytes(pickle.dumps(changed(pickle.loads(metadata.read_bytes()))))
    manifest = files.read_manifest(str(checkpoint))
    described = {name: files.describe_file(str(checkpoint / name)) for name in manifest.files}
    _sign(checkpoint, lambda content: content["files"].update({n: vars(f) for n, f in described.items()}))


def _sign(checkpoint: Path, change: Callable[[Any], None]) -> None:
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())["manifest"]
    change(content)
    path.write_text(json.dumps({"manifest": content, "checksum": files._checksum_of(content)}))


def _harmful(mark: Path) -> dict[str, Callable[[Any], Any]]:
    def bytes_for_a_tensor(metadata: Any) -> Any:
        """Torch's planner would load what is not a tensor as a pickle of any kind."""
        content = io.BytesIO()
        torch.save(Intrusion(mark), content)
        harm = mark.parent / "run" / "checkpoints" / "step-00000004" / "__9_0.distcp"
        harm.write_bytes(content.getvalue())
        name = "model.0.weight"
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        stored = _StorageInfo(relative_path=harm.name, offset=0, length=harm.stat().st_size)
        metadata.storage_data[MetadataIndex(name)] = stored
        return metadata

    def beside_the_folder(metadata: Any) -> Any:
        """A path that exists, and could be read."""
        for stored in metadata.storage_data.values():
            other = mark.parent / stored.relative_path
            shutil.copy(mark.parent / "run" / "checkpoints" / "step-00000004" / stored.relative_path, other)
            stored.relative_path = str(other)
        return metadata

    return {
        "a pickle that calls": lambda metadata: Intrusion(mark),
        "a pickle that calls, within": lambda metadata: dataclasses.replace(metadata, planner_data=Intrusion(mark)),
        "bytes for a tensor": bytes_for_a_tensor,
        "a file beside the folder": beside_the_folder,
    }


@pytest.mark.parametrize("what", _harmful(Path()))
def test_a_forged_checkpoint_runs_nothing(launcher: Launcher, trained: Path, tmp_path: Path, what: str) -> None:
    mark, run = tmp_path / "intrusion", tmp_path / "run"
    shutil.copytree(trained / "run", run)
    checkpoint = run / "checkpoints" / "step-00000004"
    _forge(checkpoint, _harmful(mark)[what])
    outcome = _train(launcher, run, images(trained), steps=6, resume="auto")
    assert outcome.failure is not None and "step-00000004 cannot be read: " in outcome.failure.message
    with pytest.raises(CheckpointError, match="cannot be read: "):
        load_model(str(checkpoint), files.read_manifest(str(checkpoint)), build_model(conv_model(), "cpu"))
    assert not mark.exists()


def test_a_manifest_names_files_of_its_folder_alone(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    _sign(checkpoint, lambda content: content["files"].update({"../../other": {"size": 1, "checksum": ""}}))
    with pytest.raises(
        files.CorruptCheckpointError, match=r"it names \.\./\.\./other, which is not a file of its folder"
    ):
        files.read_manifest(str(checkpoint))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(step="4"), "Manifest.step: expected a whole number, found '4'"),
        (lambda content: content.update(files=[]), r"Manifest.files: expected an object, found \[\]"),
        (lambda content: content.update(__class__="os"), "Manifest has no field '__class__'"),
        (lambda content: content["fit"].pop("seed"), "Manifest.fit.seed is missing"),
        (lambda content: content["fit"]["tensors"].update(a="12"), r"Manifest.fit.tensors\['a'\]: expected a list"),
        (lambda content: content.update(format=[2]), r"it is of format \[2\]"),
        (lambda content: content.update(step=-5), "Manifest.step is -5"),
        (lambda content: content.update(step=True), "Manifest.step: expected a whole number, found True"),
        (lambda content: content.update(step=2**60), "Manifest.step is 1152921504606846976"),
        (lambda content: content.update(samples=-1), "Manifest.samples is -1"),
        (lambda content: content.update(seconds=float("nan")), "Manifest.seconds is nan"),
        (lambda content: content["fit"]["tensors"].update(a=[-2]), r"Manifest.fit.tensors.a is -2"),
    ],
    ids=[
        "text for a number",
        "a list for an object",
        "more",
        "less",
        "text for a shape",
        "a list for the format",
        "a step before the first",
        "a truth value",
        "a huge step",
        "too few samples",
        "no number",
        "a shape",
    ],
)
def test_a_manifest_of_another_make_is_refused(
    trained: Path, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    _sign(checkpoint, change)
    with pytest.raises(files.CorruptCheckpointError, match=message):
        files.read_manifest(str(checkpoint))


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("other", ["fifo", "/dev/zero"])
def test_a_file_of_a_checkpoint_that_is_no_file_keeps_nobody_waiting(
    trained: Path, tmp_path: Path, name: str, other: str
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    (checkpoint / name).unlink()
    if other == "fifo":
        os.mkfifo(checkpoint / name)
    else:
        os.symlink(other, checkpoint / name)
    if name != "manifest.json":
        _sign(checkpoint, lambda content: content["files"][name].update(size=0))
    found = files.look(str(checkpoint))
    reasons = [found.reason] if found.manifest is None else files.damage(found.path, found.manifest)
    assert len(reasons) == 1 and "a device or a pipe, not a file" in reasons[0]


@pytest.mark.parametrize(
    "text",
    ["[" * 10**5, '{"manifest": ' + "[" * 900 + "]" * 900 + ', "checksum": ""}', "[]", '{"manifest": 3}', "9" * 5000],
    ids=["deep", "less deep", "a list", "a number within", "a huge number"],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(files.CorruptCheckpointError, match=r"manifest\.json cannot be read"):
        files.read_manifest(str(tmp_path))


def test_a_manifest_from_before_is_read(tmp_path: Path) -> None:
    """As it was written by the first version, on one line."""
    content = (
        '{"manifest": {"format": 2, "step": 4, "samples": 32, "seconds": 0.5, "job": "digits", "plan_hash": "0f", '
        '"world_size": 2, "fit": {"tensors": {"0.weight": [4, 1], "0.steps": []}, "optimizer": "sgd", "states": [], '
        '"seed": 0, "shuffle": true, "batch": 8, "train_samples": 32, "steps_per_epoch": 4}, "files": {".metadata": '
        '{"size": 3, "checksum": "aa"}}}, "checksum": "eb1cf2350a6706184de033c552373790"}'
    )
    (tmp_path / "manifest.json").write_text(content)
    manifest = files.read_manifest(str(tmp_path))
    assert manifest.fit.tensors == {"0.weight": (4, 1), "0.steps": ()}
    assert manifest.files == {".metadata": files.File(size=3, checksum="aa")}


def test_random_states_are_kept_as_tensors(trained: Path) -> None:
    """No state is bytes that other code could read as a pickle."""
    metadata = loads((trained / "run" / "checkpoints" / "step-00000004" / ".metadata").read_bytes())
    kept = {
        key: (tuple(value.size), value.properties.dtype)
        for key, value in metadata.state_dict_metadata.items()
        if key.startswith("rng.1.")
    }
    assert kept == {
        "rng.1.torch": ((5056,), torch.uint8),
        "rng.1.python": ((627,), torch.float64),
        "rng.1.numpy": ((627,), torch.float64),
    }


# -------------------------------------------------------------------------------------------- what may be unpickled


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, "text"], (1, 2): {3}, "e": OSError(28, "no space")},
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.arange(6.0).reshape(2, 3),
        [torch.ones(2, dtype=torch.bfloat16)],
    ],
    ids=["plain values", "a size", "a dtype", "a tensor", "a list of tensors"],
)
def test_plain_values_and_tensors_are_unpickled(value: object) -> None:
    assert repr(loads(pickle.dumps(value))) == repr(value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_that_calls_is_unpickled(tmp_path: Path, protocol: int) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"names \w+\.open, which could run code"):
        loads(pickle.dumps([Intrusion(tmp_path / "mark")], protocol))
    with pytest.raises(
        pickle.UnpicklingError, match="could run code"
    ):  # a dotted name reaches through an allowed module
        loads(b"\x80\x04\x8c\x08builtins\x8c\x11OSError.__class__\x93.")
    assert not (tmp_path / "mark").exists()


class Stored(Intrusion):
    """The same inside the pickle of a tensor's memory."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        content = io.BytesIO()
        torch.save(Intrusion(self._mark), content)
        return torch.storage._load_from_bytes, (content.getvalue(),)


def test_nor_within_the_memory_of_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError):
        loads(pickle.dumps([Stored(tmp_path / "mark")]))
    assert not (tmp_path / "mark").exists()
