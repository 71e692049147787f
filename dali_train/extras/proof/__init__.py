"""Check what a run says of itself: `dali-train prove`, and `--replay`, which trains one step again."""
