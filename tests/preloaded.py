"""What the server of ranks.py imports once for all the processes that it forks, none of whose collections looks at it:
half a million objects, whose pages each process would copy besides."""

from importlib import import_module

from dali_train.runtime.process import importing_torch

with importing_torch():
    for name in (
        "dali_train.commands.train",
        "dali_train.cli",
        "dali_train.data.convert.conversion",
        "dali_train.extras.formats.trees",
        "matplotlib.figure",
        "torch.distributed.checkpoint.state_dict",
        "tests.ranks",
        "tests.helpers",  # and conftest with pytest: what the modules of the tests import
        "tests.convert.files",
    ):
        import_module(name)
