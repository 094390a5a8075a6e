"""`dslc submit`: the script that follows from a plan, and what is refused before anything is handed over."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import dslc
from helpers.job_texts import job_text

from dslc.launching import slurm_requeue
from dslc.runtime.process.run_status import RunStatus, write_status

JOB = job_text(
    data={"source": "synthetic(samples = 320, shape = [4], classes = 10)", "batch": 48, "workers": 2},
    devices={"nodes": 2, "gpus": 8, "kind": "h100"},
    train={"steps": 100},
    checkpoint={"every": "20 steps"},
    launch={"with": 'slurm(partition = "gpu", time = 26h, options = ["--exclusive", "--mem=0"])', "restarts": 3},
    log=None,
)


def submit(folder: Path, text: str, *more: str) -> tuple[int, str, str]:
    (folder / "job.plt").write_text(text)
    told = dslc("submit", "job.plt", "--dry-run", *more, cwd=folder)
    assert [path.name for path in folder.iterdir()] == ["job.plt"]  # it leaves nothing
    return told.returncode, told.stdout, told.stderr


def test_an_elastic_job_takes_the_nodes_that_the_cluster_has(tmp_path: Path) -> None:
    status, script, said = submit(tmp_path, JOB.replace("nodes = 2", "nodes = 1..4"), "--out", "run")
    assert status == 0, said
    assert "#SBATCH --nodes=1-3\n" in script and "#SBATCH --ntasks-per-node" not in script
    assert "for count in 1 2 3; do\n" in script and 'srun --nodes "$nodes" --ntasks-per-node=1 ' in script
    assert "W0808" in said, "48 samples are not shared out over 32 ranks"


def test_the_script_follows_from_the_plan(tmp_path: Path) -> None:
    status, script, said = submit(tmp_path, JOB, "--out", "run")
    assert status == 0, said
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {
        "--job-name=job",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=24",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--time=1-02:00:00",
        "--open-mode=append",
        "--requeue",
        "--exclusive",
        "--mem=0",
        f"--output={tmp_path}/run/slurm.out",
    } <= set(options)
    assert sum(option.startswith("--mem") for option in options) == 1  # the job's own counts
    assert any(option.startswith("--signal=USR1@") for option in options)
    assert 'dslc run "$run/job.plt" --out "$run"' in script and "--restarts 3 --requeue" in script


def test_a_sweep_is_an_array_with_a_folder_for_each_value(tmp_path: Path) -> None:
    sweep = "sweep {\n  train.optimizer.lr = [0.1, 0.2, 0.3]\n}\n"
    status, script, said = submit(tmp_path, JOB + sweep, "--out", "run")
    assert status == 0, said
    assert "#SBATCH --array=0-2\n" in script and f"  {tmp_path}/run/lr=0.2\n" in script
    assert f"#SBATCH --output={tmp_path}/run/slurm-%a.out\n" in script


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, code",
    [
        ("launch.with=local()", "E0817"),
        ("checkpoint.resume=here", "E0818"),
        ("launch.with.time=2min", "E0819"),
        ("data.batch=47", "E0301"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_handed_over(tmp_path: Path, setting: str, code: str) -> None:
    (tmp_path / "here" / "step-00000050").mkdir(parents=True)
    (tmp_path / "job.plt").write_text(JOB)
    told = dslc("submit", "job.plt", "--set", setting, "--set", "launch.restarts=0", cwd=tmp_path)
    assert told.returncode == 1 and f"error[{code}]" in told.stderr, told.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name, out", [("a\ntouch stranger\n", "run"), ("job", "run\ntouch stranger\n")])
@pytest.mark.parametrize("cluster", ["slurm()", 'kubernetes(image = "a", volumes = ["a:/runs"])'])
def test_a_name_of_two_lines_reaches_no_script(tmp_path: Path, name: str, out: str, cluster: str) -> None:
    (tmp_path / f"{name}.plt").write_text(JOB)
    words = ["submit", f"{name}.plt", "--set", f"launch.with={cluster}", "--dry-run", "--out", out]
    told = dslc(*words, cwd=tmp_path)
    assert told.returncode == 1 and "error[E0836]" in told.stderr and not told.stdout, told.stderr


def test_options_of_any_form_are_lines_of_the_script(tmp_path: Path) -> None:
    options = ["--mem 0", "--gpus-per-node = 4", "=x", ""]
    status, script, said = submit(
        tmp_path, JOB.replace('["--exclusive", "--mem=0"]', json.dumps(options)), "--out", "run"
    )
    assert status == 0, said
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert lines[-len(options) :] == options and sum(line.startswith(("--mem", "--gpus")) for line in lines) == 2


@pytest.mark.parametrize(
    "text",
    [
        r'slurm(options = ["--exclusive\ntouch stranger"])',
        r'slurm(account = "a\nb")',
        r'kubernetes(image = "a\n", volumes = ["a:/runs"])',
        r'ssh(hosts = ["a", "b"], options = ["-o\tX"])',
    ],
)
def test_a_text_of_two_lines_reaches_no_launcher(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.plt").write_text(JOB.replace(JOB[JOB.index("slurm(") : JOB.index("\n  restarts")], text))
    told = dslc("check", "job.plt", cwd=tmp_path)
    assert told.returncode == 1 and "error[E0835]" in told.stderr, told.stderr


@pytest.mark.parametrize(
    "option, said",
    [
        ("spec.completions.first=1", "`spec.completions.first` is a field within another that is a value"),
        ("spec.suspend=" + "[" * 20_000, "the value of `spec.suspend` is nested too deeply"),
        ("metadata.name.x.y={}", "`metadata.name.x.y` is a field within"),
    ],
    ids=["below a number", "deep", "below a text"],
)
def test_an_option_that_no_resource_can_have_is_refused(tmp_path: Path, option: str, said: str) -> None:
    pods = f'kubernetes(image = "a", volumes = ["a:/runs"], options = ["{option}"])'
    (tmp_path / "job.plt").write_text(JOB.replace(JOB[JOB.index("slurm(") : JOB.index("\n  restarts")], pods))
    told = dslc("submit", "job.plt", "--out", "run", cwd=tmp_path)
    assert told.returncode == 1 and "error[E0837]" in told.stderr and said in told.stderr, told.stderr
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_is_not_here_leaves_a_script_to_hand_over(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(JOB)
    told = dslc("submit", "job.plt", "--out", "run", cwd=tmp_path, env={"PATH": ""})
    assert told.returncode == 2 and f"there is no `sbatch` here: type `sbatch {tmp_path}/run/submit.sh`" in told.stderr
    assert (tmp_path / "run" / "submit.sh").exists() and "waiting" in dslc("status", tmp_path / "run").stdout


PODS = JOB.replace(
    'slurm(partition = "gpu", time = 26h, options = ["--exclusive", "--mem=0"])',
    'kubernetes(image = "registry/dslc:1", namespace = "ml", volumes = ["training:/runs"], OPTIONS)',
)


def manifest(folder: Path, options: str, nodes: str = "2") -> list[dict[str, Any]]:
    job = PODS.replace("OPTIONS", options).replace("nodes = 2", f"nodes = {nodes}")
    status, text, said = submit(folder, job, "--out", "first")
    assert status == 0, said
    items: list[dict[str, Any]] = json.loads(text)["items"]
    return items


def test_a_manifest_is_what_kubernetes_takes(tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="the published schemas are not installed")
    options = 'options = ["spec.suspend=true", "spec.template.spec.nodeSelector.gpu=h100"]'
    config, secret, service, job = manifest(tmp_path, options)
    for each in (config, secret, service, job):
        validate.validate(each, "1.31", strict=True)
        assert each["metadata"]["namespace"] == "ml"
    with pytest.raises(validate.ValidationError):
        validate.validate({**job, "spec": {**job["spec"], "completions": "two"}}, "1.31", strict=True)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["suspend"] is True and spec["backoffLimit"] == 6 and pod["nodeSelector"] == {"gpu": "h100"}
    (container,) = pod["containers"]
    name = job["metadata"]["name"]
    assert {"name": "DSLC_FIRST_HOST", "value": f"{name}-0.{name}"} in container["env"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["command"][-1].startswith("/runs/") and container["command"][-1].endswith("/first")
    assert re.search(r"resume += auto", config["data"]["job.plt"])


def test_a_volume_may_be_mounted_at_a_path_that_ends_in_a_slash(tmp_path: Path) -> None:
    pods = PODS.replace('"training:/runs"', f'"training:{tmp_path}/"').replace(", OPTIONS", "")
    status, text, said = submit(tmp_path, pods, "--out", "run")
    assert status == 0, said
    (container,) = json.loads(text)["items"][-1]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-2:] == ["--out", f"{tmp_path}/run"], "the volume has the run directory, as it is here"


def test_a_jobset_makes_its_service_itself(tmp_path: Path) -> None:
    config, secret, made = manifest(tmp_path, 'options = ["jobset"]')
    assert (config["kind"], made["kind"], made["apiVersion"]) == ("ConfigMap", "JobSet", "jobset.x-k8s.io/v1alpha2")
    assert secret["kind"] == "Secret"
    name, (ranks,) = made["metadata"]["name"], made["spec"]["replicatedJobs"]
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 3} and made["spec"]["network"]["subdomain"] == name
    env = ranks["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "DSLC_FIRST_HOST", "value": f"{name}-ranks-0-0.{name}"} in env


def test_the_pods_of_an_elastic_job_come_and_go(tmp_path: Path) -> None:
    """48 samples are not shared out over 4 nodes of 8 ranks: it trains on 1 to 3."""
    validate = pytest.importorskip("kubernetes_validate", reason="the published schemas are not installed")
    jobs = [
        manifest(tmp_path, f'options = ["{option}"]', nodes="1..4")
        for option in ("spec.ttlSecondsAfterFinished=60", "jobset")
    ]
    job, (ranks,) = jobs[0][-1], jobs[1][-1]["spec"]["replicatedJobs"]
    for each in (*jobs[0], {**job, **ranks["template"]}):
        validate.validate(each, "1.31", strict=True)
    (secret,) = [each for each in jobs[0] if each["kind"] == "Secret"]
    assert secret["stringData"]["token"] == "see submit", "a manifest that is only shown has none"
    assert jobs[1][-1]["spec"]["failurePolicy"] == {"maxRestarts": 0}
    name = job["metadata"]["name"]
    for spec, of in ((job["spec"], ""), (ranks["template"]["spec"], "ranks-0-")):
        assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
        assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 2) and "backoffLimit" not in spec
        assert spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}
        rules = spec["podFailurePolicy"]["rules"]
        assert all(rule["onExitCodes"]["values"] == sorted(rule["onExitCodes"]["values"]) for rule in rules[1:])
        actions = {status: rule["action"] for rule in rules[1:] for status in rule["onExitCodes"]["values"]}
        assert actions == {1: "FailJob", 2: "FailIndex", 3: "FailJob", 130: "Ignore", 143: "Ignore"}
        (container,) = spec["template"]["spec"]["containers"]
        assert container["command"][-2:] == ["--rendezvous", ",".join(f"{name}-{of}{n}.{name}" for n in range(3))]
        reference = {"secretKeyRef": {"name": name, "key": "token"}}
        assert container["env"] == [{"name": "DSLC_RUN_TOKEN", "valueFrom": reference}]
    assert "nodes = 1..4" in re.sub(" +", " ", jobs[0][0]["data"]["job.plt"])


def test_without_kubectl_the_manifest_is_left_to_hand_over(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(PODS.replace('volumes = ["training:/runs"], OPTIONS', ""))
    told = dslc("submit", "job.plt", "--out", "run", cwd=tmp_path, env={"PATH": ""})
    assert told.returncode == 2 and "warning[W0817]" in told.stderr
    assert f"type `kubectl apply --filename {tmp_path}/run/submit.json` where it is" in told.stderr
    path = tmp_path / "run" / "submit.json"
    (secret,) = [each for each in json.loads(path.read_text())["items"] if each["kind"] == "Secret"]
    assert len(secret["stringData"]["token"]) == 64, "it is made when the job is handed over"
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret["stringData"]["token"] not in told.stdout + told.stderr


def test_what_another_start_would_meet_again_ends_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lasting, follows in ((False, slurm_requeue.AGAIN), (True, slurm_requeue.THE_END)):
        write_status(str(tmp_path), RunStatus(state="failed", raised=True, lasting=lasting, message="no space"))
        assert slurm_requeue.main([str(tmp_path), "3", "--restarts", "2"]) == follows
    assert capsys.readouterr().err == "dslc: restart 1 of 2\ndslc: not restarted: that would not mend it\n"
