"""Translate the arguments of timm's train.py into a config: `dali-train init --from-timm`."""
