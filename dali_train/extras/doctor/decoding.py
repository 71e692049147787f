"""What nvImageCodec says of itself."""

import re

LOG_VARIABLE = "DALI_NVIMGCODEC_LOG_LEVEL"
"""Set to 4 before the first decoder is created, it makes nvImageCodec print the lines that `decoder_in_log` reads."""


def decoder_in_log(log: str) -> dict[str, str | int]:
    """Parse nvImageCodec's log (`LOG_VARIABLE`) for a GPU's "nvJPEG" (version) and "hardware engines".

    Empty if the CPU decodes.
    """
    found: dict[str, str | int] = {}
    if version := re.search(r"nvJPEG version:? *(\d[\d.]*)", log):
        found["nvJPEG"] = version[1]
    if engines := re.search(r"num_hw_engines *= *(\d+)", log):
        found["hardware engines"] = int(engines[1])
    return found
