"""The files under deploy/: each is what its platform expects, and its commands and statuses are this package's."""

import copy
import json
import os
import re
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args

from dali_train.commands.arguments import command_parser
from dali_train.config import Config
from dali_train.config.override import config_with
from dali_train.runtime import torchrun
from dali_train.runtime.status import MISTAKE, START_AGAIN

from .conftest import REPOSITORY
from .ranks import FORK, POOL

DEPLOY = REPOSITORY / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").iterdir())
TORCHRUN_WAITS_S = 30  # between TERM and KILL to its workers, torch 2.15
# The fields of sky.yaml, as SkyPilot 0.14 names them: its package brings a hundred others.
SKY = {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run"}
SKY_RESOURCES = {"accelerators", "use_spot", "disk_size", "job_recovery"}


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(path: Path, kind: str) -> Any:
    return next(document for document in documents(path) if document["kind"] == kind)


def check(document: Any) -> None:
    """Raise what is wrong with an object of Kubernetes, an unknown field included."""
    if document["kind"] in ("TrainJob", "TrainingRuntime"):
        import kubeflow_trainer_api.models as kubeflow  # takes a second

        read = getattr(kubeflow, f"TrainerV1alpha1{document['kind']}").from_dict(document)
        assert read is not None and read.to_dict() == document, set(words(document)) - set(words(read.to_dict()))
    else:
        kubernetes_validate.validate(document, "1.37", strict=True)


def words(value: Any) -> list[str]:
    return re.findall(r"\w+", json.dumps(value))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_what_kubernetes_expects(path: Path) -> None:
    for document in documents(path):
        check(document)
    # Which is strict: a misspelled field of a Job, wherever that is, is found.
    wrong = copy.deepcopy(documents(path))
    (job, _), *_ = jobs_of(wrong)
    job["backofLimit"] = job.pop("backoffLimit")
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError), match="backofLimit"):
        for document in wrong:
            check(document)


def jobs_of(documents: list[Any]) -> list[tuple[Any, Any]]:
    """The Job specifications of a manifest with their pods', wherever they are."""
    specs = [document["spec"] for document in documents if document["kind"] == "Job"]
    for document in documents:
        if document["kind"] == "TrainingRuntime":
            specs += [job["template"]["spec"] for job in document["spec"]["template"]["spec"]["replicatedJobs"]]
    return [(spec, spec["template"]["spec"]) for spec in specs]


@pytest.mark.parametrize("name", ["train.yaml", "trainjob.yaml"])
def test_exit_statuses_decide_what_is_started_again(name: str) -> None:
    ((job, pod),) = jobs_of(documents(DEPLOY / "kubernetes" / name))
    (container,) = pod["containers"]
    mistake, stopped, disruption = job["podFailurePolicy"]["rules"]
    codes = {"containerName": container["name"], "operator": "In"}
    assert mistake == {"action": "FailJob", "onExitCodes": {**codes, "values": [MISTAKE]}}
    assert stopped == {"action": "Ignore", "onExitCodes": {**codes, "values": [START_AGAIN]}}
    assert disruption["action"] == "Ignore" and disruption["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert pod["restartPolicy"] == "Never", "a podFailurePolicy needs it"
    assert pod["terminationGracePeriodSeconds"] > TORCHRUN_WAITS_S
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert "/dev/shm" in mounted.values()


def read_command(line: list[str]) -> tuple[Any, Config]:
    """What torchrun makes of a command line, and the config that the trainer makes of the rest."""
    assert line[:3] == ["python", "-m", "dali_train.runtime.torchrun"]
    launch = parse_args(line[3:])
    assert (launch.module, launch.training_script) == (True, "dali_train")
    assert launch.max_restarts == 0, "a mistake and a stop are not tried again"
    command, settings = launch.training_script_args[:2], launch.training_script_args[2:]
    options, unknown = command_parser().parse_known_args(command)
    assert options.command == "train" and unknown == []
    return launch, config_with(REPOSITORY / options.config, settings, "train")


def test_the_job_trains_on_its_nodes() -> None:
    job, service = (of_kind(DEPLOY / "kubernetes" / "train.yaml", kind) for kind in ("Job", "Service"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    text = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"] + container["args"]]
    launch, config = read_command(text)
    assert spec["completionMode"] == "Indexed" and launch.node_rank == 1
    assert [launch.nnodes] * 2 == [str(spec["completions"]), str(spec["parallelism"])]
    assert launch.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    name = service["metadata"]["name"]
    assert name == pod["subdomain"] and service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert launch.master_addr == f"{job['metadata']['name']}-0.{name}"
    assert_volumes_fit(config, pod, container)


def assert_volumes_fit(config: Config, pod: Any, container: Any) -> None:
    sizes = {volume["name"]: volume.get("emptyDir", {}).get("sizeLimit") for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: sizes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted[str(config.data.cache)] == "220Gi" and config.data.cache_gb is not None
    assert config.data.cache_gb * 1e9 < 220 * 2**30, "Kubernetes evicts a pod whose volume grows beyond its limit"
    assert f"/{Path(config.run.dir).parts[1]}" in mounted


def test_the_trainjob_trains_on_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    path = DEPLOY / "kubernetes" / "trainjob.yaml"
    ((_, pod),) = jobs_of(documents(path))
    runtime, job = of_kind(path, "TrainingRuntime"), of_kind(path, "TrainJob")
    trainer = job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    given = {"NNODES": str(trainer["numNodes"]), "NODE_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29400"}
    for name, value in given.items():  # by the controller, for torchrun
        monkeypatch.setenv(f"PET_{name}", value)
    launch, config = read_command([*trainer["command"], *trainer["args"]])
    assert (launch.nnodes, launch.node_rank, launch.master_addr, launch.master_port) == ("2", 1, "host", 29400)
    assert launch.nproc_per_node == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert_volumes_fit(config, pod, pod["containers"][0])
    # Both files describe the same run.
    other = of_kind(DEPLOY / "kubernetes" / "train.yaml", "Job")["spec"]["template"]["spec"]
    assert other["volumes"] == pod["volumes"] and trainer["args"][2:] == other["containers"][0]["args"][6:]


def test_skypilot_trains_on_its_nodes() -> None:
    (task,) = documents(DEPLOY / "sky.yaml")
    assert task.keys() == SKY and task["resources"].keys() == SKY_RESOURCES
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [START_AGAIN]}
    assert list(task["envs"]) == ["BUCKET"]
    gpus = task["resources"]["accelerators"].partition(":")[2]
    given = {
        "HOME": "/root",
        "BUCKET": "s3://bucket",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        "SKYPILOT_NODE_RANK": "0",
    }
    line = task["run"].replace('$(head -n1 <<<"$SKYPILOT_NODE_IPS")', "10.0.0.1")
    line = re.sub(r"\$(\w+)", lambda name: given[name[1]], line).replace("~/dali_train/bin/", "").replace("\\\n", " ")
    launch, config = read_command(shlex.split(line))
    assert (launch.nnodes, launch.node_rank, launch.nproc_per_node) == ("1", 0, gpus)
    assert config.data.root == "s3://bucket/imagenet" and config.run.mirror == "s3://bucket/runs/vit-b16"


def test_the_conversion_is_one_conversion() -> None:
    path = DEPLOY / "kubernetes" / "convert.yaml"
    options = of_kind(path, "ConfigMap")["data"]
    (parts, pod), (finish, last) = jobs_of(documents(path))
    assert str(parts["completions"]) == options["PARTS"] and parts["parallelism"] == parts["completions"]
    assert finish["suspend"]
    phases = []
    for container in (*pod["initContainers"], *pod["containers"], *last["containers"]):
        assert container["command"] == ["bash", "-c"] and container["envFrom"] == [
            {"configMapRef": {"name": "convert"}}
        ]
        (line,) = container["args"]
        line = line.replace("$CONVERT", options["CONVERT"]).replace("$PARTS", options["PARTS"])
        words = shlex.split(line.replace("$((JOB_COMPLETION_INDEX + 1))", "3"))
        assert words[:3] == ["exec", "dali-train", "data"]
        parsed = command_parser().parse_args(words[2:])
        assert str(parsed.out).startswith(container["volumeMounts"][0]["mountPath"])
        assert "resources" not in container or str(parsed.workers) == container["resources"]["requests"]["cpu"]
        phases.append(parsed.phase)
    assert phases == ["plan", "3/16", "finish"]


def test_the_image_has_what_the_manifests_use() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for word in line.split()[:-1]]
    assert all((REPOSITORY / name).exists() for name in copied) and "configs" in copied
    images = set(re.findall(r"registry\S+", text + "".join(path.read_text() for path in MANIFESTS)))
    assert len(images) == 1
    assert sorted(path.name for path in DEPLOY.iterdir()) == ["Containerfile", "kubernetes", "sky.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize(("action", "status"), [("os._exit(75)", 75), ("1 / 0", 2), ("os.kill(os.getpid(), 9)", 1)])
def test_torchrun_with_the_trainers_status(action: str, status: int, tmp_path: Path) -> None:
    config, log = tmp_path / "config.py", tmp_path / "log"
    config.write_text(f"import os\n{action}\n")
    words = ["--nproc-per-node=1", "-m", "dali_train", "train", f"--config={config}"]
    assert POOL.run(1, torchrun.main, words, log=log) == [status]
    said = log.read_text()
    assert ("ZeroDivisionError: division by zero" in said) == (status == MISTAKE)
    assert ("dali_train FAILED" in said) == (status != START_AGAIN)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [((2, -15), 2), ((-15, 75), 75), ((1, 75), 1), ((1, 2), 2), ((-9, 1), 1), ((-15,), 1)],
)
def test_ranks_that_end_differently(statuses: tuple[int, ...], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends the others with TERM once it sees that one has ended."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file="<N/A>")
        for rank, code in enumerate(statuses)
    }

    def fail(_: object) -> None:
        raise ChildFailedError("dali_train", failures)

    monkeypatch.setattr(torchrun, "run", fail)
    assert torchrun.main(["-m", "dali_train", "train"]) == status


@pytest.mark.slow
def test_term_reaches_the_ranks_and_starts_them_again(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(
        f"""
import os, signal
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (Path({str(tmp_path)!r}, "saved").touch(), os._exit(75)))
Path({str(tmp_path)!r}, "begun").touch()
signal.pause()
"""
    )
    words = ["--nproc-per-node=1", "-m", "dali_train", "train", f"--config={config}"]
    agent = FORK.Process(target=end_with_torchrun, args=(words,))
    agent.start()
    while not (tmp_path / "begun").exists():
        assert agent.is_alive()
        time.sleep(0.05)
    os.kill(agent.pid or 0, signal.SIGTERM)
    agent.join(60)
    assert agent.exitcode == START_AGAIN and (tmp_path / "saved").exists()


def end_with_torchrun(words: list[str]) -> None:
    os._exit(torchrun.main(words))
