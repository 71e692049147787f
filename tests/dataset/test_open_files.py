"""Open files of all splits and sets share one budget, however low the limit is."""

import subprocess
import sys

import pytest

from dali_train.cli import main
from tests.conftest import REPOSITORY
from tests.convert.files import small_photograph, write_tar
from tests.ranks import patience

SCRIPT = """
import os, resource, sys, threading
import numpy as np
soft, hard, *roots = sys.argv[1:]
from dali_train.data.dataset.index import Split
from dali_train.data.dataset.storage import RangedImages
resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
splits = [Split(root, "train") for root in roots]
images = [RangedImages(split) for split in splits]
failed = []

def read(seed):
    try:
        rng = np.random.default_rng(seed)
        for _ in range(3):
            for split, one in zip(splits, images):
                for part in np.array_split(rng.permutation(len(split)), 40):
                    one.read(part)  # each image is compared with its checksum
    except Exception as error:
        failed.append(repr(error))

threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
num_open = len(os.listdir("/proc/self/fd"))
print(failed, num_open)
"""


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two indexes in place, of 300 tars with two images each."""
    root = tmp_path_factory.mktemp("sets")
    for name in ("a", "b"):
        for number in range(300):
            images = [(f"{number}-{image}", small_photograph(2 * number + image)) for image in range(2)]
            members = [[(f"{key}.cls", b"0"), (f"{key}.jpg", image)] for key, image in images]
            write_tar(root / name / f"{number:03d}.tar", [*members[0], *members[1]])
        assert main(["data", "index", str(root / name), "--out", str(root / f"{name}.index"), "--no-decode-check"]) == 0
    return [str(root / f"{name}.index") for name in ("a", "b")]


@pytest.mark.parametrize(("soft", "hard", "most"), [(64, 64, 64), (100, 500, 500), (200, 2000, 2000)])
def test_two_sets_of_more_files_than_may_be_open(roots: list[str], soft: int, hard: int, most: int) -> None:
    words = [sys.executable, "-c", SCRIPT, str(soft), str(hard), *roots]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, timeout=patience(120), check=False)
    assert done.returncode == 0, done.stderr
    failed, num_open = done.stdout.rsplit(" ", 1)
    assert failed == "[]"
    assert int(num_open) <= most
