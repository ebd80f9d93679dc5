"""For all tests: no test depends on how fast this machine is, and what Hypothesis finds can be run again."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("ckptd", deadline=None, print_blob=True)
settings.load_profile("ckptd")
torch.set_num_threads(1)
