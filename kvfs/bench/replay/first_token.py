"""How long a user waits for the first token: a stated model of what a GPU has to do. Pure.

A prompt of ``n`` tokens, of which ``c`` were loaded, takes

    waiting + missing bytes / drive + (2 P (n - c) + 2 L H (n^2 - c^2)) / F   seconds

- *waiting* is measured: the lookups and loads of its prefix, one after the other.
- *missing bytes* are what the blocks of the replay lack, because they are smaller than the model's.
- ``2 P`` multiply-adds a token are the matrices of P parameters (Kaplan et al. 2020, 2.1), and
  ``4 L H`` for each earlier token the attention of L layers of width H (the same, without causal
  mask), summed over the tokens that are computed.
- ``F`` is what the GPU sustains. Nothing overlaps and nobody queues: both would be the same for
  all sides. One token is always computed, even if all were loaded.
"""

from typing import NamedTuple


class Model(NamedTuple):
    """The parameters; docs/performance.md says where the defaults come from."""

    block_tokens: int = 512
    token_bytes: int = 131_072
    parameters: float = 8.03e9
    layers: int = 32
    width: int = 4096
    flops: float = 4e14
    drive_bytes_s: float = 7e9

    def prefill_s(self, tokens: int, cached: int = 0) -> float:
        """Return the seconds to compute a prompt of *tokens* of which *cached* are loaded."""
        cached = max(0, min(cached, tokens - 1))
        linear = 2 * self.parameters * (tokens - cached)
        attention = 2 * self.layers * self.width * (tokens**2 - cached**2)
        return (linear + attention) / self.flops

    def first_token_s(self, tokens: int, hits: int, waited_s: float, block_bytes: int) -> float:
        """Return the seconds to the first token of one prompt.

        *hits* blocks were loaded in *waited_s*, lookups included; a block of the replay has
        *block_bytes*, which stand for ``block_tokens * token_bytes``.
        """
        lacking_bytes = max(0, self.block_tokens * self.token_bytes - block_bytes) * hits
        loading_s = waited_s + lacking_bytes / self.drive_bytes_s
        return loading_s + self.prefill_s(tokens, hits * self.block_tokens)
