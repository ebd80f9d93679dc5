"""Storage: a few methods over a shared folder, and the URLs that name one."""

from ckptd.storage.base import Reader, Storage
from ckptd.storage.root import init_root, open_storage

__all__ = ["Reader", "Storage", "init_root", "open_storage"]
