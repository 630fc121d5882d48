"""The mounted tree and the callers of tests/fuse/conftest.py, for tests of the whole system."""

from tests.fuse.conftest import kv, kvfs_only, mount, mounted, nobody, other, shared_mounts

__all__ = ["kv", "kvfs_only", "mount", "mounted", "nobody", "other", "shared_mounts"]
