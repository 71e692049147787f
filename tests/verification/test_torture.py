"""A few of the thousands of kills of tests/verification/torture_resume.py."""

import json
import multiprocessing
from collections import Counter
from dataclasses import asdict, replace
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.verification import torture_resume
from tests.verification.torture_resume import (
    KINDS,
    STOPPED,
    FaultError,
    Settings,
    Torture,
    committed,
    describe,
    draw,
    final_weights,
)


@pytest.mark.thorough
def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    forkserver.ensure_running()  # with what tests/ranks.py has it import; the tool's list is for a server of its own
    settings = Settings(kills=4, layouts=["data:2", "tensor:2", "shard:2"], shuffle="full", stores=False, seed=8)
    begun = Torture(tmp_path, settings)
    begun.stopping.set()
    begun.run()  # to the first comparison
    assert [attempt.kind for attempt in begun.attempts] == [STOPPED] and begun.attempts[0].step == 1

    # As if the tool had been killed during its second start.
    unfinished = replace(begun.attempts[0], number=1, kind="")
    (tmp_path / "attempt.json").write_text(json.dumps(asdict(unfinished)))
    torture = Torture(tmp_path, settings)
    torture.run()  # raises an error if weights, losses or samples are not those of the undisturbed run
    assert final_weights(tmp_path / "killed") == final_weights(tmp_path / "undisturbed")
    lines = (tmp_path / "attempts.jsonl").read_text().splitlines()
    kinds = Counter(json.loads(line)["kind"] for line in lines)
    assert kinds["with the tool"] == 1 and sum(kinds[kind] for kind in KINDS) == 4, kinds
    assert torture.attempts[-1].step == torture.total_steps == 25
    assert len({layout for attempt in torture.attempts for _, layout in attempt.starts}) > 1
    assert describe(torture.attempts, 25).startswith("4 kills in 25 of 25 steps")
    draw(torture.attempts, tmp_path, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_ranks_end_with_a_tool_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forkserver.ensure_running()
    before = {*multiprocessing.active_children()}
    monkeypatch.setattr(torture_resume, "HANG_S", 0.01)
    torture = Torture(tmp_path, Settings(kills=1, layouts=["data:2"], shuffle="full", stores=False, seed=0))
    with pytest.raises(FaultError, match=r"the ranks were to stop at step 1 and ended with \[None, None\]"):
        torture._compare()
    assert {*multiprocessing.active_children()} <= before


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([(0, "a")], [(9, "a")]),
        ([(0, "a"), (4, "a"), (6, "b")], [(6, "a"), (9, "b")]),
        ([(0, "a"), (4, "b"), (4, "c")], [(4, "a"), (9, "c")]),
        # A directory was lost, and the mirror was at step 2: what was done after that does not count.
        ([(0, "a"), (4, "b"), (6, "a"), (2, "c")], [(2, "a"), (9, "c")]),
        ([(0, "a"), (4, "b"), (6, "c"), (4, "a")], [(9, "a")]),
        ([(0, "a"), (9, "b")], [(9, "a")]),
    ],
)
def test_steps_that_count(starts: list[tuple[int, str]], expected: list[tuple[int, str]]) -> None:
    assert committed(starts, 9) == expected
