"""More that can be converted: ImageNet's archives, WebDataset, Parquet, MDS, tables, and small published sets."""
