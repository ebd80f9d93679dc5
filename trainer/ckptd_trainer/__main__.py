"""`python -m ckptd_trainer`, alone or under torchrun."""

from __future__ import annotations

import sys

from ckptd_trainer.train import main

if __name__ == "__main__":
    sys.exit(main())
