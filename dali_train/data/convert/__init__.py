"""Turning a published image dataset into verified, shuffled, indexed TFRecords.

A *source* lists images, each a range of bytes in a file, and reads them where they are (`sources`): here those in a
folder per class (`trees`), in extras/formats those of other layouts. `image` makes the bytes to store, `shards` writes
them, `conversion` gives each image its shard and position, resumes, and hands the result to
`dali_train.data.dataset.write_index`; `datasets` is the table of all that can be converted.

The invariant: the bytes of a dataset are a function of the source, the options and the seed. Neither the number of
workers, nor being killed and started again, changes a bit of it.
"""
