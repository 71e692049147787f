"""The accuracies of a run, wherever it wrote them: they must be those of its evaluations' lines.

A line of metrics.jsonl has all numbers of an evaluation. A digest of it is in every later checkpoint, and one of all of
them in status.json; the top-1 alone is in epoch_accuracies.json, status.json, and beside the checkpoint.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dali_train.checkpoint.fingerprint import evaluation_digest, evaluations_digest
from dali_train.checkpoint.run_directory import SCORE, saved_score, saved_top1, step_of
from dali_train.extras.proof.evidence import Evidence
from dali_train.files import read_limited
from dali_train.runtime.status import METRICS, Event, decisive, score

ACCURACIES = "epoch_accuracies.json"
_LARGEST_FILE = 10_000_000  # bytes


def check_accuracies(evidence: Evidence) -> tuple[int, list[str]]:
    """Compare all places that have an accuracy with the lines of the evaluations.

    Returns:
        The number of evaluations, and what differs.
    """
    lines = {event["step"]: event for event in evidence.run.events if event["event"] == "eval"}  # the last of a step
    lines = dict(sorted(lines.items()))
    checks = (_check_list, _check_checkpoints, _check_status)
    return len(lines), [fault for check in checks for fault in check(evidence, lines)]


def _is_unfinished(evidence: Evidence) -> bool:
    """Return whether the run may have been killed between writing two of these files."""
    return evidence.status is None or evidence.status.state not in ("finished", "stopped")


def _check_list(evidence: Evidence, lines: dict[int, Event]) -> Iterator[str]:
    top1s = [decisive(line, "top1") for line in lines.values()]
    path = evidence.run.directory / ACCURACIES
    try:
        written = json.loads(read_limited(path, _LARGEST_FILE))
    except (OSError, ValueError, RecursionError) as error:
        yield f"{ACCURACIES} cannot be read ({error})"
        return
    if written != top1s and not (_is_unfinished(evidence) and written == top1s[:-1]):
        yield f"{ACCURACIES} has other accuracies than the lines in {METRICS}: {_first_difference(written, top1s)}"


def _first_difference(written: Any, right: list[float]) -> str:
    if not isinstance(written, list) or len(written) != len(right):
        return f"there are {len(right)} evaluations"
    number = next(i for i, (one, other) in enumerate(zip(written, right, strict=True)) if one != other)
    return f"number {number + 1} is {written[number]} instead of {right[number]}"


def _check_checkpoints(evidence: Evidence, lines: dict[int, Event]) -> Iterator[str]:
    best_by = evidence.run.config.run.best_by
    newest = max(evidence.checkpoints, key=step_of, default=None)
    with_digest = {int(at) for values in evidence.checkpoints.values() for at in values.evaluations}
    for path, values in evidence.checkpoints.items():
        step = step_of(path)
        may_lack = path == newest and _is_unfinished(evidence)
        yield from _check_score(path, lines.get(step), best_by, may_lack=may_lack)
        before = {at: line for at, line in lines.items() if at < step}
        if list(values.epoch_accuracies) != [decisive(line, "top1") for line in before.values()]:
            yield f"{path.name} has other accuracies of the evaluations before it than {METRICS}"
        for at, digest in values.evaluations.items():
            if int(at) not in lines or evaluation_digest(lines[int(at)]) != digest:
                yield f"{METRICS}: the evaluation of step {at} is not the one that {path.name} has the digest of"
        if missing := sorted((with_digest & before.keys()) - set(map(int, values.evaluations))):
            yield f"{path.name} has no digest of the evaluation of step {missing[0]}"


def _check_score(path: Path, line: Event | None, best_by: str, *, may_lack: bool) -> Iterator[str]:
    try:
        top1, ranked_by = saved_top1(path), saved_score(path)
    except OSError as error:
        yield f"{path.name}: {SCORE} cannot be read ({error.strerror})"
        return
    if line is None:
        if top1 is not None:
            yield f"{path.name}: {SCORE} has an accuracy, but {METRICS} has no evaluation of step {step_of(path)}"
        return
    if top1 is None and may_lack:
        return
    for name, written, right in (("top1", top1, decisive(line, "top1")), ("score", ranked_by, score(line, best_by))):
        if written != right:
            yield f"{path.name}: {name} in {SCORE} is {written} instead of {right}"
            return


def _check_status(evidence: Evidence, lines: dict[int, Event]) -> Iterator[str]:
    status = evidence.status
    if status is None:
        return
    whole = [*lines.values()]
    possible = [whole, whole[:-1]] if _is_unfinished(evidence) else [whole]
    bests = [max((decisive(line, "top1") for line in part), default=None) for part in possible]
    if status.best_top1 not in bests:
        yield f"status.json: best_top1 is {status.best_top1} instead of {bests[0]}"
    digests = [{str(line["step"]): evaluation_digest(line) for line in part} for part in possible]
    if status.evaluations not in map(evaluations_digest, digests):
        yield f"status.json has the digest of other evaluations than those in {METRICS}"
