"""The protocols in simulated histories, by fixed seeds, and faults of earlier versions that the simulation must find.

`python -m tests.verification.simulate` runs more of them.
"""

import os
from collections.abc import Callable

import pytest

from dali_train.runtime import lock
from dali_train.runtime.lock import RunLock
from tests.verification.simulate import PROTOCOLS, crash_everywhere, explain, first_failure


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("lock", range(300)),
        ("checkpoint", range(80)),
        ("ranks", range(25)),
        ("mirror", range(15)),
        ("cache", range(10)),
        ("conversion", range(15)),
        # Histories that once broke an invariant.
        ("mirror", range(1_712, 1_713)),
        ("conversion", range(1_705, 1_706)),
        ("cache", range(193, 194)),
        ("cache", range(212_046, 212_047)),
    ],
)
def test_no_invariant_is_violated(name: str, seeds: range) -> None:
    failure = first_failure(PROTOCOLS[name], seeds)
    assert failure is None, f"seed {failure[0]}: {failure[1]}\n{explain(PROTOCOLS[name], failure[0])}"


def test_a_run_survives_a_crash_at_every_call() -> None:
    failure = crash_everywhere(PROTOCOLS["checkpoint"], seed=0, stride=31)
    assert failure is None, failure


def test_a_frozen_holder_that_makes_its_lock_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 557ba19: a holder that wakes after the next run has ended makes its lock again, and trains on."""

    def beat(self: RunLock) -> None:
        while not self._closing.wait(lock.BEAT_S):
            try:
                found = lock._read(self._path)
                if found is None:
                    lock._create(self._path, self.holder)
                elif found[0] is not None and found[0] != self.holder:
                    os._exit(1)
                else:
                    os.utime(self._path)
            except OSError:
                continue

    monkeypatch.setattr(RunLock, "_beat", beat)
    failure = first_failure(PROTOCOLS["lock"], range(200, 5_000))
    assert failure is not None and "trains on without the lock" in str(failure[1])
    print(f"found after {failure[0] - 199} histories")


def test_threads_that_meet_the_interpreters_end_are_found() -> None:
    """As before e2dc1c9 and 97ac84f: nobody stops a daemon thread that is outside Python when the interpreter ends, and
    the process aborts."""

    class Unregistered:
        @staticmethod
        def register(function: Callable[[], object]) -> None:
            pass

    class Without(PROTOCOLS["mirror"]):  # type: ignore[misc]
        replaced = PROTOCOLS["mirror"].replaced | {"atexit": Unregistered}

    failure = first_failure(Without, range(6_200, 8_200))
    assert failure is not None and "aborted at its end" in str(failure[1])
    print(f"found after {failure[0] - 6_199} histories")
