"""The first tier stays quick because `make test` names the files that take much processor time, and fails if one takes
far too much: that of its tests, their fixtures, and all processes that they start."""

from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks import FORK

USUAL_S = 15.0  # the most that a file takes
# A worker's first file that starts ranks pays for what each of them imports: test_loader.py was seen with 10 to 24.
LIMIT_S = 30.0
TIER_S = 400.0  # of all files, rounded up; where they take more, the machine is slower or busier, and all may take more

_ROOT = Path(__file__).parents[1]
_seconds: dict[str, float] = {}  # of each file
_began: dict[Path, float] = {}  # the file that runs


def _processor_time() -> float:
    """Return the seconds of this process, of those below it, and of those that have ended."""
    total = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended
            total += sum(process.cpu_times()[:4])
    return total


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server of ranks.py import what it imports, which would count as the first file's."""
    if session.items:
        process = FORK.Process(target=int)
        process.start()
        process.join()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    path = item.path
    if path not in _began:
        _began[path] = _processor_time()
    result = yield
    if nextitem is None or nextitem.path != path:  # the fixtures of the module are gone too
        name = str(path.relative_to(_ROOT))
        _seconds[name] = _seconds.get(name, 0.0) + _processor_time() - _began.pop(path)
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["processor_time"] = _seconds
    elif session.exitstatus == pytest.ExitCode.OK and _over(LIMIT_S):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _seconds.update(getattr(node, "workeroutput", {}).get("processor_time", {}))


def _over(seconds: float) -> list[tuple[str, float]]:
    allowed = seconds * max(1.0, sum(_seconds.values()) / TIER_S)
    return sorted((name, taken) for name, taken in _seconds.items() if taken > allowed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{sum(_seconds.values()):.0f} s of processor time")
    for name, taken in _over(USUAL_S):
        terminalreporter.write_line(
            f"{name} took {taken:.0f} s, and the run fails at {LIMIT_S:.0f}: shorten its runs, or mark a test thorough "
            "(CONTRIBUTING.md has the rule)"
        )
