"""The learning rate as a pure function of the optimizer step."""

from dali_train.config import Config


def learning_rate(config: Config, step: int, num_images: int) -> float:
    """The rate of optimizer step number `step` (from 0): linear warmup, then linear decay to 0.

    With t the step (or the epoch in which the step begins, where the rate moves once an epoch), W the warmup and T
    the whole run: (t + 1) / (W + 1) of the peak while t < W, then (T - t) / (T - W). This is how ColossalAI's
    LinearWarmupLR counts, once an epoch, in its ViT example (recipe A of the configs).
    """
    if config.schedule.step_every == "epoch":
        now = float(step * config.batch.global_batch // num_images)
        warmup, total = config.schedule.warmup_epochs, config.run.epochs
    else:
        now = float(step)
        warmup, total = (float(config.steps(epochs, num_images)) for epochs in (config.schedule.warmup_epochs, config.run.epochs))
    if now < warmup:
        return config.optimizer.lr * (now + 1) / (warmup + 1)
    if now >= total:
        return 0.0
    return config.optimizer.lr * (total - now) / (total - warmup)
