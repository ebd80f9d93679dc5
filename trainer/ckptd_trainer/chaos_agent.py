"""torchrun for `make chaos`: the same program, but for what it does to name a method in its own log.

It walks the stack for that, and looks through all imported modules at each frame, several times in each second: with
all of a rank's modules imported, which is so in a process forked to be fast, that takes a core.
"""

from __future__ import annotations

from torch.distributed import run
from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def method_name(depth: int = 2) -> str:
    return "an-agents-method"


if __name__ == "__main__":
    dynamic_rendezvous.get_method_name = method_name
    run.main()
