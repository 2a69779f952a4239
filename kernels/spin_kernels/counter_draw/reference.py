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
    halves = torch.stack((key, key >> 32)) & _WORD
    multipliers, key_steps = key.new_tensor(_MULTIPLIERS), key.new_tensor(_KEY_STEPS)
    zeros = key.new_zeros(len(key), num_blocks)
    blocks = torch.arange(num_blocks, device=key.device)
    # Words (0, 2), which are multiplied, and words (1, 3): [2, rows, num_blocks] each.
    even = torch.stack((zeros + blocks, zeros + (layers & _WORD)[:, None]))
    odd = zeros + (torch.stack((query_positions, query_positions >> 32)) & _WORD)[:, :, None]
    for number in range(_ROUNDS):
        round_key = (halves + number * key_steps[:, None]) & _WORD
        # int64 products wrap modulo 2**64, which leaves both 32-bit halves exact.
        product = (even * multipliers[:, None, None]).flip(0)
        even = ((product >> 32) & _WORD) ^ odd ^ round_key[:, :, None]
        odd = product & _WORD
    return even[0]
