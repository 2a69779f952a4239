"""The oracle's random draws, counter-based, in whole numbers and as they were published."""

from collections.abc import Sequence

MASK_32 = 0xFFFFFFFF
MASK_64 = 0xFFFFFFFFFFFFFFFF


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds (Salmon et al., Random123): four 32-bit words out."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = 0xD2511F53 * c0
        product2 = 0xCD9E8D57 * c2
        high0, low0 = product0 >> 32, product0 & MASK_32
        high2, low2 = product2 >> 32, product2 & MASK_32
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = (k0 + 0x9E3779B9) & MASK_32
        k1 = (k1 + 0xBB67AE85) & MASK_32
    return c0, c1, c2, c3


def splitmix64(x: int) -> int:
    """One output of SplitMix64 for the state `x` (taken modulo 2^64)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def exploration_draw(
    block: int, *, query_position: int, layer: int, seed: int, request_key: int
) -> int:
    """The 32-bit draw that orders `block` among the exploration candidates of one row."""
    key = splitmix64(seed) ^ (request_key & MASK_64)
    counter = (
        block & MASK_32,
        query_position & MASK_32,
        layer & MASK_32,
        (query_position >> 32) & MASK_32,  # Python's >> and & give two's complement
    )
    return philox4x32_10(counter, (key & MASK_32, key >> 32))[0]
