"""More datasets that can be converted: WebDataset, Parquet, MDS, and small published sets."""
