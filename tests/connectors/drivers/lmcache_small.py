"""A pytest plug-in for LMCache's own tests: their engines take less memory than LMCache's default.

That is 5 GiB of host memory for each engine, touched as a whole: on a small machine under load the
kernel ends the process for it, without a word (SIGKILL). The tests' own blocks have 4 MiB.
"""

import lmcache.v1.config

POOL_GIB = 0.25

from_file = lmcache.v1.config.LMCacheEngineConfig.from_file


def small(path: object) -> object:
    """Read a settings file as LMCache does, and give its engine POOL_GIB of host memory."""
    settings = from_file(path)
    settings.max_local_cpu_size = POOL_GIB
    return settings


lmcache.v1.config.LMCacheEngineConfig.from_file = staticmethod(small)
