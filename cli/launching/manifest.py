"""The manifest of `dslc submit` for Kubernetes: what a job asks of the cluster, from its plan.

Model: each training has a ConfigMap with the resolved job, a Secret by which several pods know each other, a headless
Service, and an indexed Job. The Job has a pod for each node, whose agent forks the ranks. With `jobset` among the
options it is a JobSet, which makes the Service itself. A pod that fails is made again, and so are the others, which
lose it: the training goes on from its newest checkpoint. A pod that Kubernetes takes away does not count.

An elastic job has a pod for each node that it can use at most. Their command names all of them as the rendezvous. Pods
that run train; the other pods wait for room in the cluster, and come later. A pod that fails is made again while the
rest goes on, and given up after `restarts` times. The first that ends well ends the Job, also for pods that wait for
room.

Limits: an elastic job needs Kubernetes 1.31, the first whose Jobs have `successPolicy` by default. The memory of a pod
with GPUs, and the speed of the disk, are supposed as for SLURM (slurm_script.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dslc.compiler.compile import Compiled
from dslc.dsl.language.calls import Kubernetes
from dslc.dsl.language.registry import Range
from dslc.jobs.prepare_run import Ready, job_text
from dslc.launching.slurm_script import cores, host_memory, warning_seconds
from dslc.runtime.hosts.run_secret import TOKEN
from dslc.runtime.launchers.kubernetes import FIRST, NODES
from dslc.terminal.exit_codes import INTERRUPTED, JOB_AT_FAULT, TRAINING_FAILED, WRONG_USAGE

JOBSET = "jobset"
_WHERE = "/etc/dslc"  # of the job in a pod
_TOKEN_KEY = "token"  # of the Secret
_LONGEST = 40  # characters of a name, which Kubernetes adds to
_ENDED = 143  # the status of a pod that was asked to end before it listened: 128 + SIGTERM


class OptionError(Exception):
    """An option that cannot be set in a resource; the text says why."""


def manifest(
    runs: Sequence[Ready], folders: Sequence[str], name: str, new_token: Callable[[], str]
) -> dict[str, object]:
    """Returns a list of resources for trainings, each with its folder, that differ only in the values of a sweep.
    `new_token` makes the secret of one. Raises OptionError.
    """
    items: list[dict[str, object]] = []
    for ready, folder in zip(runs, folders, strict=True):
        items += _resources(ready, folder, name_of(name, folder), new_token())
    return {"apiVersion": "v1", "kind": "List", "items": items}


def text_of(made: Mapping[str, object]) -> str:
    return json.dumps(made, indent=2) + "\n"


def name_of(job: str, folder: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:_LONGEST].strip("-") or "job"
    return f"{plain if plain[0].isalpha() else f'j-{plain}'}-{hashlib.sha256(folder.encode()).hexdigest()[:6]}"


def folder_in_pod(call: Kubernetes, folder: str) -> str:
    """Returns the run directory in a pod: as here if a volume is mounted above it, else in the first volume."""
    mounts = [os.path.normpath(volume.partition(":")[2]) for volume in call.volumes]
    if not mounts or any(os.path.commonpath([folder, mount]) == mount for mount in mounts):
        return folder
    return os.path.join(mounts[0], "runs", os.path.basename(os.path.dirname(folder)), os.path.basename(folder))


def is_elastic(ready: Ready) -> bool:
    return ready.loaded.job is not None and isinstance(ready.loaded.job.devices.nodes, Range)


def _resources(ready: Ready, folder: str, name: str, token: str) -> list[dict[str, object]]:
    compiled = ready.compiled
    call = compiled.analysis.job.launch.with_
    assert isinstance(call, Kubernetes)
    labels = {"app.kubernetes.io/managed-by": "dslc", "dslc-run": name}

    def head(version: str, kind: str) -> dict[str, object]:
        space = {"namespace": call.namespace} if call.namespace else {}
        return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels, **space}}

    config = head("v1", "ConfigMap") | {"data": {"job.plt": job_text(ready)}}
    configs = [config]
    if _pods(ready) > 1:
        configs.append(head("v1", "Secret") | {"type": "Opaque", "stringData": {_TOKEN_KEY: token}})
    service = head("v1", "Service") | {
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"dslc-run": name}}
    }
    spec = _job_spec(ready, call, name, folder, labels)
    if JOBSET not in call.options:
        job = head("batch/v1", "Job") | {"spec": spec}
        return [*configs, service, _changed(job, call.options)]
    jobs = [{"name": "ranks", "replicas": 1, "template": {"spec": spec}}]
    # Of an elastic job failed pods are made again inside of its Job, which fails when that is of no use.
    restarts = 0 if is_elastic(ready) else compiled.analysis.job.launch.restarts
    network = {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True}
    made = head("jobset.x-k8s.io/v1alpha2", "JobSet") | {
        "spec": {"network": network, "failurePolicy": {"maxRestarts": restarts}, "replicatedJobs": jobs}
    }
    return [*configs, _changed(made, call.options)]


def _pods(ready: Ready) -> int:
    counts = ready.compiled.analysis.layout.node_counts
    return counts[-1] if is_elastic(ready) else ready.compiled.plan.topology.nodes


def _job_spec(ready: Ready, call: Kubernetes, name: str, folder: str, labels: dict[str, str]) -> dict[str, object]:
    compiled, elastic, jobset = ready.compiled, is_elastic(ready), JOBSET in call.options
    nodes = _pods(ready)
    hosts = [f"{name}-ranks-0-{n}.{name}" if jobset else f"{name}-{n}.{name}" for n in range(nodes)]
    meeting = ["--rendezvous", ",".join(hosts)] if elastic else []
    world = {} if elastic else {NODES: str(nodes), FIRST: hosts[0]}
    variables: list[dict[str, object]] = [{"name": variable, "value": value} for variable, value in world.items()]
    if nodes > 1:
        variables.append({"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": name, "key": _TOKEN_KEY}}})
    pod = {
        "restartPolicy": "Never",
        **({} if jobset else {"subdomain": name}),
        "terminationGracePeriodSeconds": warning_seconds([ready]),
        "containers": [_container(compiled, call, folder, meeting, variables)],
        "volumes": [
            {"name": "job", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *(
                {"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": volume.partition(":")[0]}}
                for n, volume in enumerate(call.volumes)
            ),
        ],
    }
    restarts = compiled.analysis.job.launch.restarts
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        **(_of_each_pod(compiled) if elastic else _of_all_pods(0 if jobset else nodes * restarts)),
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }


def _of_all_pods(restarts: int) -> dict[str, object]:
    """Returns what follows when pods of a fixed number end: all of them begin again, up to `restarts` times."""
    rules = [_TAKEN_AWAY, _on_status("FailJob", JOB_AT_FAULT, WRONG_USAGE)]
    return {"backoffLimit": restarts, "podFailurePolicy": {"rules": rules}}


def _of_each_pod(compiled: Compiled) -> dict[str, object]:
    """Returns what follows when a pod of an elastic job ends. A pod that was asked to stop has stopped all pods; they
    are made again and go on. After `dslc stop` they end with the status of a job at fault instead.
    """
    counts = compiled.analysis.layout.node_counts
    rules = [
        _TAKEN_AWAY,
        _on_status("FailJob", JOB_AT_FAULT, TRAINING_FAILED),
        _on_status("FailIndex", WRONG_USAGE),
        _on_status("Ignore", INTERRUPTED, _ENDED),
    ]
    return {
        "backoffLimitPerIndex": compiled.analysis.job.launch.restarts,
        "maxFailedIndexes": counts[-1] - counts[0],
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }


_TAKEN_AWAY = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _on_status(action: str, *statuses: int) -> dict[str, object]:
    return {"action": action, "onExitCodes": {"operator": "In", "values": list(statuses)}}


def _container(
    compiled: Compiled, call: Kubernetes, folder: str, more: Sequence[str], variables: Sequence[dict[str, object]]
) -> dict[str, object]:
    topology = compiled.plan.topology
    needs = {"cpu": str(cores(compiled)), "memory": f"{host_memory(compiled)}Mi"}
    gpus = {"nvidia.com/gpu": str(topology.processes)} if topology.device == "cuda" else {}
    where = folder_in_pod(call, folder)
    return {
        "name": "dslc",
        "image": call.image,
        "command": ["python", "-P", "-m", "dslc", "run", f"{_WHERE}/job.plt", "--out", where, *more],
        "env": list(variables),
        "resources": {"requests": {**needs, **gpus}, **({"limits": gpus} if gpus else {})},
        "volumeMounts": [
            {"name": "job", "mountPath": _WHERE, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": f"volume-{n}", "mountPath": volume.partition(":")[2]} for n, volume in enumerate(call.volumes)),
        ],
    }


def _changed(made: dict[str, object], options: Sequence[str]) -> dict[str, object]:
    """Returns a resource with the fields that the options name, such as `spec.suspend=true`. Raises OptionError."""
    for option in options:
        path, equals, text = option.partition("=")
        if not equals:
            continue
        *steps, last = path.split(".")
        at: Any = made
        for step in steps:
            at = at.setdefault(step, {}) if isinstance(at, dict) else None
        if not isinstance(at, dict):
            raise OptionError(f"`{path}` is a field within another that is a value, and has none")
        try:
            at[last] = json.loads(text)
        except ValueError:
            at[last] = text
        except RecursionError:
            raise OptionError(f"the value of `{path}` is nested too deeply") from None
    return made
