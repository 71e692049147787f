"""The copy of a run in an object store: `run.mirror`, and runs by URL."""

from dataclasses import dataclass
from typing import Annotated

from dali_train.config.check import NotInRecipe, Rule, refuse_credentials, require


@dataclass(frozen=True, kw_only=True)
class MirrorSettings:
    """Where the section run has its mirror."""

    mirror: NotInRecipe[Annotated[str, Rule("the URL of a bucket, such as s3://BUCKET/PREFIX")] | None] = None
    """URL (s3://, gs://, az://) to which checkpoints, metrics, status, accuracies and report are copied in the
    background. An empty run.dir resumes from there, so nodes need not share run.dir."""

    def __post_init__(self) -> None:
        if self.mirror is None:
            return
        refuse_credentials("run.mirror", self.mirror)
        scheme, separator, path = self.mirror.partition("://")
        require(
            scheme in ("s3", "gs", "az") and separator != "" and path != "",
            f"run.mirror is {self.mirror}: use the URL of a writable bucket, such as s3://BUCKET/PREFIX, "
            "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX",
        )
