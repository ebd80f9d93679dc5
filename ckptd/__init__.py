"""ckptd: fault-tolerant checkpointing and resume for distributed PyTorch training.

This package holds the protocol and the service; it never imports torch. A training loop imports
`ckptd_client`. Read first: `ckptd/history.py`, `client/ckptd_client/client.py`, `trainer/ckptd_trainer/train.py`.
"""

__version__ = "0.1.0"
