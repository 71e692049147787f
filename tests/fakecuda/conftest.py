"""Tests on a CUDA runtime that needs no GPU: `make test-fakecuda`. Other runs of the tests leave them out.

The runtime takes the place of CUDA's in a process that is started with it. The tests' own process is not: their jobs
run in those of tests/ranks.py, whose server starts with the environment that this file sets.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_CONFIG
from tests.fakecuda import jobs
from tests.fakecuda.build import environment, reason_to_skip
from tests.helpers import words
from tests.ranks import POOL, command

HERE = Path(__file__).parent


def _is_chosen(config: pytest.Config) -> bool:
    """Return whether all arguments of this run of pytest are in this folder: other tests must not see its GPUs."""
    paths = [Path(config.invocation_params.dir, argument.split("::")[0]) for argument in config.args]
    return bool(paths) and all(path.resolve().is_relative_to(HERE) for path in paths)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if _is_chosen(config) else True


@pytest.fixture(scope="session", autouse=True)
def fake_device(tmp_path_factory: pytest.TempPathFactory) -> None:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    os.environ.update(environment(tmp_path_factory.mktemp("collectives")))


@dataclass(frozen=True)
class FakeRun:
    """A run on the fake device, and what its ranks reported."""

    directory: Path
    statuses: list[int | None]
    output: str
    reports: list[dict[str, Any]]

    @property
    def faults(self) -> list[str]:
        return [fault for report in self.reports for fault in report["faults"]]

    def waits(self, *phases: str) -> Counter[str]:
        """Return how often the host of any rank waited, by function, in these phases; without any, in the steps after
        the first one of the process."""
        found: Counter[str] = Counter()
        for report in self.reports:
            chosen = phases or [f"step {number}" for number in sorted(report["steps"])[1:]]
            found.update(wait["where"] or wait["what"] for wait in report["waits"] if wait["phase"] in chosen)
        return found


RunOnFake = Callable[..., FakeRun]
ON_FAKE = words(
    "--data.device cpu --model.compile none"
)  # the device is the fake GPU, unless the options say otherwise


@pytest.fixture(scope="session")
def config_file(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny-config.py"
    path.write_text(TINY_CONFIG.format(root=str(dataset)))
    return path


@pytest.fixture
def on_fake(config_file: Path, tmp_path: Path) -> RunOnFake:
    """``on_fake("name", "--section.field", "value", ranks=2)`` trains on fake devices, one for each rank."""

    def run(
        name: str,
        *options: str,
        ranks: int = 1,
        config: Path = config_file,
        values: bool = True,
        patch: Callable[[], Any] = nullcontext,
        succeeds: bool = True,
    ) -> FakeRun:
        report, log = tmp_path / f"{name}-report", tmp_path / f"{name}.log"
        words = ["train", "--config", str(config), "--run.dir", str(tmp_path / name), *ON_FAKE, *options]
        job = partial(jobs.watched, values=values, patch=patch)
        statuses = POOL.run(ranks, job, words, report, log=log)
        output = log.read_text()
        assert not succeeds or set(statuses) == {0}, f"{statuses}\n{output}"
        reports = [json.loads(path.read_text()) for path in sorted(report.glob("rank*.json"))]
        return FakeRun(tmp_path / name, statuses, output, reports)

    return run


@pytest.fixture(scope="session")
def on_cpu(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``on_cpu("--section.field", "value")`` is the directory of such a run on the CPU, of which there is one for all
    tests. It is only read."""
    runs: dict[tuple[str, ...], Path] = {}

    def run(*options: str, config: Path = config_file, ranks: int = 1) -> Path:
        if options not in runs:
            directory = tmp_path_factory.mktemp("cpu")
            words = [
                "train",
                "--config",
                str(config),
                "--run.dir",
                str(directory / "run"),
                "--run.device",
                "cpu",
                *options,
            ]
            statuses = POOL.run(ranks, command, words, log=directory / "log")
            assert set(statuses) == {0}, (directory / "log").read_text()
            runs[options] = directory / "run"
        return runs[options]

    return run
