"""Turning a published image dataset into verified, shuffled, indexed TFRecords.

A *source* lists images and reads them where they are (`sources`, `archive`, `imagenet`, `small`, `trees`; where
there are many files `listing`, `webdataset`, `parquet`, `mds` and `packed`); `plan` says which image goes to which
place of which shard; `image` makes the bytes to store; `shards` writes them; `run` does all of them, resumes, and hands
the result to `dali_train.data.dataset.build_index`.

The invariant: the bytes of a dataset are a function of the source, the options and the seed. Neither the number of
workers, nor being killed and started again, changes a bit of it.
"""
