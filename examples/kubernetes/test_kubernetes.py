"""The manifests: they fit Kubernetes' schema, and their commands and exit statuses are this package's."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from dali_train.cli import command_parser
from dali_train.config import Config
from dali_train.config.command_line import config_with
from dali_train.runtime.status import MISTAKE, START_AGAIN
from tests.conftest import REPOSITORY

kubernetes_validate = pytest.importorskip("kubernetes_validate")  # requirements.txt
FOLDER = Path(__file__).parent
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
TRAIN = FOLDER / "train.yaml"
TORCHRUN_WAITS_S = 30  # between TERM and KILL to its workers, torch 2.15


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(path: Path, kind: str) -> Any:
    return next(document for document in documents(path) if document["kind"] == kind)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schema_of_kubernetes(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, "1.37", strict=True)  # unknown fields are errors


def jobs_of(path: Path) -> list[tuple[Any, Any]]:
    """The Job specifications of a manifest with their pods'."""
    specs = [document["spec"] for document in documents(path) if document["kind"] == "Job"]
    return [(spec, spec["template"]["spec"]) for spec in specs]


def test_exit_statuses_decide_what_is_restarted() -> None:
    ((job, pod),) = jobs_of(TRAIN)
    mistake, stopped, disruption = job["podFailurePolicy"]["rules"]
    assert (mistake["action"], mistake["onExitCodes"]["values"]) == ("FailJob", [MISTAKE])
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [START_AGAIN])
    assert disruption["action"] == "Ignore"
    assert pod["terminationGracePeriodSeconds"] > TORCHRUN_WAITS_S


def read_command(line: list[str]) -> tuple[Any, Config]:
    """What torchrun makes of a command line, and the config that the trainer makes of the rest."""
    assert line[:3] == ["python", "-m", "dali_train.extras.torchrun"]
    launch = parse_args(line[3:])
    assert (launch.module, launch.training_script) == (True, "dali_train")
    assert launch.max_restarts == 0, "a mistake and a stop are not tried again"
    command, settings = launch.training_script_args[:2], launch.training_script_args[2:]
    options, unknown = command_parser().parse_known_args(command)
    assert options.command == "train" and unknown == []
    return launch, config_with(REPOSITORY / options.config, settings, "train")


def test_the_job_trains_on_its_nodes() -> None:
    ((spec, pod),) = jobs_of(TRAIN)
    (container,) = pod["containers"]
    line = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"] + container["args"]]
    launch, config = read_command(line)
    assert launch.node_rank == 1 and [launch.nnodes] * 2 == [str(spec["completions"]), str(spec["parallelism"])]
    assert launch.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    service, job = of_kind(TRAIN, "Service")["metadata"]["name"], of_kind(TRAIN, "Job")["metadata"]["name"]
    assert launch.master_addr == f"{job}-0.{service}" and pod["subdomain"] == service
    sizes = {volume["name"]: volume.get("emptyDir", {}).get("sizeLimit") for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: sizes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted[str(config.data.cache)] == "220Gi" and config.data.cache_gb is not None
    assert config.data.cache_gb * 1e9 < 220 * 2**30, "Kubernetes evicts a pod whose volume exceeds its limit"
    assert f"/{Path(config.run.dir).parts[1]}" in mounted


def test_the_conversion_is_one_conversion() -> None:
    path = FOLDER / "convert.yaml"
    options = of_kind(path, "ConfigMap")["data"]
    (parts, pod), (finish, last) = jobs_of(path)
    assert str(parts["completions"]) == options["PARTS"] and parts["parallelism"] == parts["completions"]
    assert finish["suspend"]
    phases = []
    for container in (*pod["initContainers"], *pod["containers"], *last["containers"]):
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
    text = (FOLDER / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for word in line.split()[:-1]]
    assert all((REPOSITORY / name).exists() for name in copied) and "configs" in copied
    images = set(re.findall(r"registry\S+", text + "".join(path.read_text() for path in MANIFESTS)))
    assert len(images) == 1
