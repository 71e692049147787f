"""Parallelism: the layout of ranks, and how a model is replicated, sharded and split over them."""
