"""The protocols in simulated histories, by fixed seeds, and faults of earlier versions that the simulation must find.

`python -m tools.simulate` runs more of them.
"""

import os

import pytest

from dali_train.runtime import lock
from dali_train.runtime.lock import RunLock
from tools.simulate import explain, first_failure
from tools.simulation.protocols import PROTOCOLS


@pytest.mark.parametrize(("name", "num_histories"), [("lock", 500), ("checkpoint", 200), ("ranks", 50)])
def test_no_invariant_is_violated(name: str, num_histories: int) -> None:
    failure = first_failure(PROTOCOLS[name], range(num_histories))
    assert failure is None, f"seed {failure[0]}: {failure[1]}\n{explain(PROTOCOLS[name], failure[0])}"


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
    failure = first_failure(PROTOCOLS["lock"], range(5_000))
    assert failure is not None and "trains on without the lock" in str(failure[1])
    print(f"found after {failure[0] + 1} histories")
