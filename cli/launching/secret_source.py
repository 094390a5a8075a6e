"""The secret by which the launchers of a training know each other, and the warning where there is none.

Model: `DSLC_RUN_TOKEN` is the secret, if it is set: `launch.with = ssh(…)` and the manifest of `dslc submit` set it for
all launchers. Else it stands in a file of a folder that all hosts share for sure, as they write their checkpoints
there. torchrun's store and the file beside an mpirun hand over a secret of their own.

Limits: a run without checkpoints may have a folder on each host, and one without `--out` is named by the time: neither
holds a secret.
"""

from __future__ import annotations

import os

from dslc.dsl.diagnostics import Report
from dslc.jobs.check_job import show
from dslc.jobs.prepare_run import Ready
from dslc.runs.run_folder import refuse_others
from dslc.runtime.hosts.rendezvous import Rendezvous
from dslc.runtime.hosts.rendezvous_address import FixedEndpoint
from dslc.runtime.hosts.run_secret import SECRET_FILE, TOKEN, RunSecret, token_in
from dslc.runtime.launchers.slurm import SUBMITTED

_token = ""  # of the environment, once it was asked for


def secret_of(ready: Ready, out: str | None) -> RunSecret:
    given = given_secret(out)
    if not given.is_empty:
        return given
    program, folder = ready.program, os.path.abspath(os.path.expanduser(out)) if out is not None else ""
    shared = folder if ready.counts else (program.checkpoint.folder or folder) if program.checkpoint.is_enabled else ""
    if not shared:
        return RunSecret()

    def prepare() -> None:
        if out is not None:
            refuse_others(folder, out, goes_on=program.checkpoint.resume == "auto")
        os.makedirs(shared, exist_ok=True)

    return RunSecret(path=os.path.join(os.path.abspath(shared), SECRET_FILE), prepare=prepare)


def given_secret(out: str | None) -> RunSecret:
    """Returns the secret that who has started this process gave it; an empty one without. Raises RendezvousError.
    The variable leaves the environment, which the user's code sees, and is kept, as a calibration meets several times.
    """
    global _token
    _token = os.environ.pop(TOKEN, _token)
    token = token_in(_token)
    if not token and out is not None and SUBMITTED in os.environ:
        return RunSecret(path=os.path.join(out, SECRET_FILE))
    return RunSecret(token=token)


def warn_of_strangers(ready: Ready, rendezvous: Rendezvous) -> None:
    hands_over = rendezvous.endpoint is not None and not isinstance(rendezvous.endpoint, FixedEndpoint)
    if hands_over or not rendezvous.secret.is_empty or (ready.world is not None and not ready.world.speaks):
        return
    report, job = Report(), ready.compiled.analysis.job
    report.add(
        "W0828",
        "whoever reaches the port of the rendezvous can take the place of a host, or end the training, as the run has "
        "no secret",
        job.devices.value_span("nodes"),
        help=f"`export {TOKEN}=$(openssl rand -hex 32)`, the same on all hosts; a run with checkpoints and --out makes "
        "a secret of its own in that folder",
    )
    show(report)
