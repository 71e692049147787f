"""What limits the speed of a run, in one sentence with its remedy."""

from dali_train.report.runs import ReportedRun
from dali_train.text import plural

LIMITS = {"data_wait_s": 0.10, "exchange_s": 0.15, "optimizer_s": 0.15, "logging_s": 0.03}
"""A phase other than computation with at least this fraction of a step is reported as the bottleneck."""


def what_bounds(run: ReportedRun) -> str:
    """Return a sentence on the bottleneck, from the medians of the logged phases."""
    step = run.median("step_s")
    if not step or run.median("forward_s") is None:
        return "The run has logged no phases yet."
    if all(event.get("first_step_s") == event["step_s"] for event in run.train):
        return "Only the process's first step is logged, in which caches fill: later steps will show the bottleneck."

    share = {phase: (run.median(phase) or 0.0) / step for phase in (*LIMITS, "forward_s", "backward_s")}
    worst = max(LIMITS, key=lambda phase: share[phase] / LIMITS[phase])
    if share[worst] < LIMITS[worst]:
        return (
            f"Computing bounds the run: forward and backward take {share['forward_s'] + share['backward_s']:.0%} of "
            f"the step, waiting for data {share['data_wait_s']:.0%}."
        )
    takes = f"takes {share[worst]:.0%} of the step"
    sentences = {
        "data_wait_s": f"Waiting for data {takes}: {_decoding(run)}",
        "exchange_s": f"The all-reduce of gradients {takes} that the backward pass does not hide: accumulate more "
        "(larger batch.global_batch), or look for a rank that is slower than the others in logs/rank*.log.",
        "optimizer_s": f"The optimizer {takes}: a larger batch.global_batch makes it rarer.",
        "logging_s": f"Logging {takes}: raise hooks.log_every_steps, or turn off hooks that are not needed.",
    }
    return sentences[worst]


def _decoding(run: ReportedRun) -> str:
    smaller = "store the images smaller (dali-train data convert)"
    if run.is_small():  # decoding such images costs little
        smaller = "read from faster storage"
    threads, cores = run.environment.get("decoding_threads"), run.environment.get("host_cores")
    if threads is None or cores is None:
        return f"raise data.num_threads, or {smaller}."
    ranks = max(1, run.environment.get("ranks_on_host", 1))
    here = f"{plural(threads, 'decoding thread')} {'per rank ' if ranks > 1 else ''}on {plural(cores, 'core')}"
    if threads * ranks < cores:
        return f"{here}; raise data.num_threads to {cores // ranks}, or {smaller}."
    return f"{here}, all in use; {smaller}, or give each rank more cores."
