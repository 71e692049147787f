"""How many processes the launcher in front of ``train.py`` starts, as far as its words say.

A batch depends on that number, so a launcher whose number is not among its words (a variable, a file, a job's own
settings) is refused by name, and never counted as one process.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dali_train.errors import ConfigError
from dali_train.text import printable

_Find = Callable[..., int | None]
"""Returns the number behind the first of some options; None if none of them is there."""


def num_processes(words: Sequence[str]) -> int | None:
    """Return the number of processes that the words before a script start; None if there is no launcher among them.

    Raises:
        ConfigError: there is one, and its number is not among its words.
    """
    programs = {Path(word).name for word in words}
    for names, count in _LAUNCHERS.items():
        for name in names.split():
            if name not in programs:
                continue

            def number(*options: str, launcher: str = name) -> int | None:
                return _number_behind(words, options, launcher)

            found = count(number)
            if found is None:
                raise _unreadable(name, "does not say how many processes it starts")
            return found
    return None


def _torchrun(number: _Find) -> int | None:
    # Each node starts these; one process each, and one node, are torchrun's defaults.
    return (number("--nproc-per-node") or 1) * (number("--nnodes") or 1)


def _srun(number: _Find) -> int | None:
    tasks = number("--ntasks", "-n")
    nodes, per_node = number("--nodes", "-N"), number("--ntasks-per-node")
    if tasks is None and nodes is not None and per_node is not None:
        return nodes * per_node
    return tasks  # without these, the job's settings decide


def _mpirun(number: _Find) -> int | None:
    return number("-np", "-n", "--np", "--n")


def _accelerate(number: _Find) -> int | None:
    return number("--num-processes")  # of all machines together; else what `accelerate config` has written


def _deepspeed(number: _Find) -> int | None:
    per_node = number("--num-gpus")
    return None if per_node is None else per_node * (number("--num-nodes") or 1)


def _unknown(number: _Find) -> int | None:
    return None


# The first launcher that occurs counts: torchrun, started by srun on each node, starts the processes of train.py.
_LAUNCHERS: dict[str, Callable[[_Find], int | None]] = {
    "torchrun torch.distributed.run torch.distributed.launch": _torchrun,
    "accelerate accelerate.commands.launch": _accelerate,
    "deepspeed": _deepspeed,
    "mpirun mpiexec orterun horovodrun": _mpirun,
    "srun": _srun,
    "jsrun aprun ibrun flux composer colossalai fabric lightning ray": _unknown,
}
"""Programs or modules -> how their number of processes is found."""


def _number_behind(words: Sequence[str], options: Sequence[str], launcher: str) -> int | None:
    """Return the number behind one of `options`: ``-n 16``, ``-n16``, ``--ntasks 16``, ``--ntasks=16``.

    Raises:
        ConfigError: what is behind it is no number.
    """
    for position, word in enumerate(words):
        for option in options:
            is_long = option.startswith("--")
            name, equals, value = word.partition("=")
            if (name.replace("_", "-") if is_long else name) == option:
                value = value if equals else "".join(words[position + 1 : position + 2])
            elif not is_long and re.fullmatch(rf"{option}\d+", word):
                value = word.removeprefix(option)
            else:
                continue
            if not re.fullmatch("0*[1-9][0-9]{0,8}", value):
                raise _unreadable(launcher, f"has {option} {printable(value)}, which is no number here")
            return int(value)
    return None


def _unreadable(launcher: str, problem: str) -> ConfigError:
    return ConfigError(f"--from-timm: {launcher} {problem}: add --ranks N, the number of GPUs of all nodes together")
