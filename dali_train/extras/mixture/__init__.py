"""Training on a mixture of datasets, with exact shares on any number of ranks: `data.mix`."""
