"""What limits the speed of a run, in one sentence with its remedy."""

from dali_train.report.runs import ReportedRun
from dali_train.text import plural

DATA_SHARE, ALL_REDUCE_SHARE, OPTIMIZER_SHARE, LOGGING_SHARE = 0.10, 0.15, 0.15, 0.03
"""A phase other than computation with at least this fraction of a step is reported as the bottleneck."""


def what_bounds(run: ReportedRun) -> str:
    """Return a sentence on the bottleneck, from the medians of the logged phases."""
    step = run.median("step_s")
    if not step or run.median("forward_s") is None:
        return "The run has logged no phases yet."
    if all(event.get("first_step_s") == event["step_s"] for event in run.train):
        return "Only the process's first step is logged, in which caches fill: later steps will show the bottleneck."

    def share(phase: str) -> float:
        return (run.median(phase) or 0.0) / step

    data, all_reduce, optimizer, logging = (
        share(f"{name}_s") for name in ("data_wait", "exchange", "optimizer", "logging")
    )
    excess = {
        "data": data / DATA_SHARE,
        "all-reduce": all_reduce / ALL_REDUCE_SHARE,
        "optimizer": optimizer / OPTIMIZER_SHARE,
        "logging": logging / LOGGING_SHARE,
    }
    worst = max(excess, key=lambda name: excess[name])
    if excess[worst] < 1:
        computing = share("forward_s") + share("backward_s")
        return (
            f"Computing bounds the run: forward and backward take {computing:.0%} of the step, waiting for data "
            f"{data:.0%}."
        )
    if worst == "data":
        return f"Waiting for data takes {data:.0%} of the step: {_decoding(run)}"
    if worst == "all-reduce":
        return (
            f"The all-reduce of gradients takes {all_reduce:.0%} of the step that the backward pass does not hide: "
            "accumulate more (larger batch.global_batch), or look for a rank that is slower than the others in "
            "logs/rank*.log."
        )
    if worst == "optimizer":
        return f"The optimizer takes {optimizer:.0%} of the step: a larger batch.global_batch makes it rarer."
    return (
        f"Logging takes {logging:.0%} of the step: raise hooks.log_every_steps, or turn off hooks that are not needed."
    )


def _decoding(run: ReportedRun) -> str:
    smaller = "store the images smaller (dali-train data convert)"
    if run.is_small():  # decoding such images costs little
        smaller = "read from faster storage"
    threads, cores = run.environment.get("decoding_threads"), run.environment.get("host_cores")
    if threads is None or cores is None:
        return f"raise data.num_threads, or {smaller}."
    ranks = run.environment.get("ranks_on_host", 1)
    here = f"{plural(threads, 'decoding thread')} {'per rank ' if ranks > 1 else ''}on {plural(cores, 'core')}"
    if threads * ranks < cores:
        return f"{here}; raise data.num_threads to {cores // ranks}, or {smaller}."
    return f"{here}, all in use; {smaller}, or give each rank more cores."
