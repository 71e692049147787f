"""Starting the ranks of a host by torchrun's agent: ``python -m dali_train.extras.torchrun OPTIONS -m dali_train ...``
with the trainer's exit status.

torchrun itself ends with status 1 whatever the status of its workers, but Kubernetes and the like must know whether to
restart a run (75) or not (2). In addition, with --nnodes 1:8 a node may join while a run trains. Options, environment
and output are torchrun's.
"""

import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.run import parse_args, run

from dali_train.runtime.status import FINISHED, MISTAKE, START_AGAIN, WRONG_RESULT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's ranks and return their exit status, or 75 after a signal, which the ranks also received."""
    # With a store shared by all rounds of the rendezvous, the first node publishes its address in the first round only;
    # a node that joins later waits for it until both give up (torch 2.15, DynamicRendezvousHandler.next_rendezvous).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        run(parse_args(sys.argv[1:] if arguments is None else arguments))
    except RendezvousClosedError:
        print("the run's other nodes have ended, or are about to: there is nothing to join", file=sys.stderr)
        return 1
    except SignalException:
        return START_AGAIN
    except ChildFailedError as error:
        # torchrun may have ended one of them before it could end with the same status as the first.
        statuses = {failure.exitcode for failure in error.failures.values()} - {-signal.SIGTERM}
        if statuses == {START_AGAIN}:
            return START_AGAIN
        print(error, file=sys.stderr)
        return next((status for status in (MISTAKE, WRONG_RESULT) if status in statuses), 1)
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
