"""Numbers that tell, without moving a tensor, whether two ranks chose and remember the same.

They are made on request, between two steps; a captured graph holds nothing of them.
"""

import torch
from torch import Tensor

# Odd, below 2**63; sums and products wrap around.
_PLACE, _VALUE, _TENSOR = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x369DEA0F31A53F85
_PART = 2**20  # values at a time, for a GPU that serves has little memory left
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(values: Tensor) -> list[int]:
    """Hash each of the first dimension's entries, bit for bit and in order.

    Every value is hashed with its place, and the hashes are added up as integers: the sum is the
    same in whatever order a device adds. Not for telling an adversary's data apart.

    Args:
        values: (any of 2, 4 or 8 bytes): [entries, ...].
    """
    bits = values.flatten(1).view(_INTEGERS[values.itemsize])
    found = torch.zeros(len(bits), dtype=torch.int64, device=bits.device)
    width = max(1, _PART // max(1, len(bits)))
    for first in range(0, bits.shape[1], width):
        part = bits[:, first : first + width].long()
        place = torch.arange(first, first + part.shape[1], device=bits.device)
        mixed = part + (place + 1) * _PLACE
        mixed = (mixed ^ (mixed >> 32)) * _VALUE
        found += (mixed ^ (mixed >> 29)).sum(1)
    return [int(one) for one in found.tolist()]


def layer_checksums(num_layers: int, *tensors: Tensor) -> list[int]:
    """Hash what several tensors hold of each layer.

    Args:
        num_layers: into which every tensor's first dimension is divided, layer by layer.
        tensors: see `checksums`.
    """
    found = [0] * num_layers
    for tensor in tensors:
        each = checksums(tensor.view(num_layers, -1))
        found = [(before * _TENSOR + one) % 2**64 for before, one in zip(found, each, strict=True)]
    return found
