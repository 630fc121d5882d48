"""Which model a block belongs to, and whose it is, as names of files and folders tell. Pure.

docs/connectors/README.md says how each program names its blocks.
"""

import re
from typing import Final

#: Digits of the hash that a name of SGLang's begins with.
_SGLANG_HASH: Final = 64
_UNDERSCORE: Final = ord("_")
#: vLLM's tier ``fs``: ``MODEL_CONFIG_rRANK``, where CONFIG is a hash of dtype, layout and versions.
_VLLM_FOLDER: Final = re.compile(rb"(.+_[0-9a-f]{12})_r[0-9]+", re.DOTALL)
#: Directories that may tell a model, from that of a block upwards: vLLM makes two below its folder.
FOLDERS: Final = 3


def model_of(name: bytes) -> bytes:
    """Return the model in a block's *name*; b"" if the connector does not put it there.

    LMCache: ``MODEL@WORLD@RANK@HASH@DTYPE.pt`` and ``MODEL@RANK@GROUP@HASH.data``. SGLang:
    ``HASH_MODEL_RANK_RANKS.bin``, and of models that all ranks share ``HASH_MODEL.bin``.
    """
    parts = name.split(b"@", 3)
    if len(parts) == 4:
        return parts[0]
    if len(name) <= _SGLANG_HASH or name[_SGLANG_HASH] != _UNDERSCORE or name[-4:] != b".bin":
        return b""
    model, *ranks = name[_SGLANG_HASH + 1 : -4].rsplit(b"_", 2)
    return (
        model if len(ranks) == 2 and all(map(bytes.isdigit, ranks)) else b"_".join([model, *ranks])
    )


def model_of_folder(name: bytes) -> bytes:
    """Return the model, with its configuration, that a directory's *name* tells; b"" if none."""
    found = _VLLM_FOLDER.fullmatch(name)
    return found[1] if found is not None else b""


def holder_of(name: bytes, folder_model: bytes) -> str:
    """Return program and model of the block *name*; "" if nothing tells them.

    *folder_model* is what the nearest of its directories tells.
    """
    model = model_of(name)
    if model:
        program = "lmcache" if name.count(b"@") > 2 else "sglang"
    else:
        program, model = "vllm", folder_model
    return f"{program} {model.decode(errors='backslashreplace')}" if model else ""
