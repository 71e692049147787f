"""A program of its own: ImageNet's ``meta.mat`` from stdin to JSON on stdout, rows of (ILSVRC id, synset, children).

scipy's native parser crashes on some damaged files; here it takes nobody along. Imports nothing of this package.
"""

import io
import json
import resource
import sys

_MAX_MEMORY_BYTES = 4 << 30  # a forged length must not fill the machine


def main() -> None:
    import numpy as np
    from scipy.io import loadmat

    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    table = loadmat(io.BytesIO(sys.stdin.buffer.read()), squeeze_me=True, variable_names=["synsets"])["synsets"]
    rows = [(int(row["ILSVRC2012_ID"]), str(row["WNID"]), int(row["num_children"])) for row in np.atleast_1d(table)]
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
