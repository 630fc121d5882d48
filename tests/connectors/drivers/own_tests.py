"""A pytest plug-in for the projects' own tests: vLLM's C module loads, as its driver lets it.

The module is linked against CUDA libraries of which it calls nothing; install.sh makes empty ones.
"""

import ctypes
import sys
from pathlib import Path

import torch  # noqa: F401  (the C module finds torch's libraries already loaded)

for path in sorted((Path(sys.prefix) / "unpacked" / "empty").iterdir()):
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
