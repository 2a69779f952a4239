"""Counter-based random words (Philox4x32-10), in plain torch."""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def seed_key(seed: int) -> int:
    """Spread a seed over 64 bits (splitmix64), as the signed value of an int64 tensor.

    Seeds that differ in one bit must not give keys that do: the key is combined with the
    request's by exclusive or.
    """
    x = (seed + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def counter_draw(
    request_keys: Tensor, query_positions: Tensor, layers: Tensor, *, num_blocks: int, seed: int
) -> Tensor:
    """Draw one 32-bit word per row and block.

    The word depends on (seed, request key, query position, layer, block) and on nothing else:
    not on the rank, the batch row, or what was drawn before.

    Args:
        request_keys: (int64): [rows]; the request's 64-bit key, its bits as a signed number.
        query_positions: (int64): [rows], in slots.
        layers: (int64): [rows].
        num_blocks: width of the result.
        seed: any integer.

    Returns:
        (int64): [rows, num_blocks], each 0..2**32-1.

    Source: Philox4x32-10 (Salmon et al., 2011). Key = splitmix64(seed) xor request key; counter
    = (block, position's low word, layer, position's high word); the result is output word 0.
    """
    key = request_keys ^ seed_key(seed)
    k0, k1 = (key & _WORD)[:, None], ((key >> 32) & _WORD)[:, None]
    blocks = torch.arange(num_blocks, device=key.device).expand(len(key), num_blocks)
    c0, c1 = blocks, (query_positions & _WORD)[:, None].expand_as(blocks)
    c2 = (layers & _WORD)[:, None].expand_as(blocks)
    c3 = ((query_positions >> 32) & _WORD)[:, None].expand_as(blocks)
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2**64, which leaves both 32-bit halves exact.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0
