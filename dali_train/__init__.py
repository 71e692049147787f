"""dali_train: large-batch ImageNet training whose samples do not depend on the number of ranks."""
