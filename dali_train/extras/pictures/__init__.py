"""Pictures of images: contact sheets of a dataset, and of a run's samples and predictions."""
