"""Import this before vllm: it decides, by the driver's argument, whether the C module is used.

The module is linked against CUDA libraries of which it calls nothing; install.sh makes empty ones.
"""

import ctypes
import sys
from pathlib import Path

import torch  # noqa: F401  (the C module finds torch's libraries already loaded)

if sys.argv[2] == "native":
    for path in sorted((Path(sys.prefix) / "unpacked" / "empty").iterdir()):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
else:
    sys.modules["vllm.fs_io_C"] = None  # type: ignore[assignment]
