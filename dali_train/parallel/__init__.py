"""Who computes what: the layout of ranks, and how a model is spread over them."""
