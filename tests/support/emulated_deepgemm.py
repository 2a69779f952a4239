"""DeepGEMM's paged scoring, emulated in torch.

It stands in for hardware: it shows what SPIN hands over and takes back, not how DeepGEMM computes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK, HEADS, DIM = 64, 4, 128
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Layout:
    """How one generation of GPUs holds keys and scores.

    Args:
        fp4: MXFP4 keys: 64 bytes of two values each and 4 scales of 32 values, for each slot;
            otherwise 128 FP8 values and a float32 scale. Planar within a page.
        scores: dtype of the scores.
        indices: whether rows name the row of their block table.
    """

    fp4: bool
    scores: torch.dtype
    indices: bool

    @property
    def slot_bytes(self) -> int:
        return 68 if self.fp4 else 132

    def random_pages(self, count: int, generator: torch.Generator) -> Tensor:
        """Pages of random keys: (uint8): [count, 64, slot_bytes]."""
        if self.fp4:
            values = torch.randint(0, 256, (count, BLOCK * 64), generator=generator).to(torch.uint8)
            scales = torch.randint(125, 130, (count, BLOCK * 4), generator=generator)
            pages = torch.cat([values, scales.to(torch.uint8)], dim=1)
        else:
            values = torch.randn(count, BLOCK * DIM, generator=generator).to(torch.float8_e4m3fn)
            scales = torch.rand(count, BLOCK, generator=generator) + 0.5
            pages = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=1)
        return pages.view(count, BLOCK, self.slot_bytes)

    def keys(self, pages: Tensor) -> Tensor:
        """Decode pages: (float64): [pages * 64, DIM]."""
        flat = pages.reshape(len(pages), -1)
        if self.fp4:
            return self.decode_fp4(flat[:, : BLOCK * 64], flat[:, BLOCK * 64 :])
        values = flat[:, : BLOCK * DIM].contiguous().view(torch.float8_e4m3fn).double()
        scales = flat[:, BLOCK * DIM :].contiguous().view(torch.float32).double()
        return values.view(-1, DIM) * scales.view(-1, 1)

    @staticmethod
    def decode_fp4(values: Tensor, scales: Tensor) -> Tensor:
        """Decode E2M1 pairs and UE8M0 scales: (float64): [slots, DIM]."""
        packed = values.reshape(-1, DIM // 2).int() & 0xFF
        pairs = torch.stack([E2M1[packed & 15], E2M1[packed >> 4]], dim=-1).double()
        weights = torch.exp2(scales.reshape(-1, DIM // 32, 1).double() - 127)
        return (pairs.reshape(-1, DIM // 32, 32) * weights).reshape(-1, DIM)

    def queries(self, rows: int, generator: torch.Generator) -> Any:
        """Random queries, as vLLM quantises them."""
        if self.fp4:
            shape = (rows, HEADS, DIM // 2)
            values = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
            scales = torch.randint(126, 129, (rows, HEADS, DIM // 32), generator=generator)
            return values, scales.to(torch.uint8)
        return torch.randn(rows, HEADS, DIM, generator=generator).to(torch.float8_e4m3fn)


HOPPER = Layout(fp4=False, scores=torch.float32, indices=False)
BLACKWELL = Layout(fp4=True, scores=torch.bfloat16, indices=True)


class DeepGemm:
    """Emulates the two functions of DeepGEMM that the decode path calls."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.spoiled: Tensor | None = None  # pages whose slots score NaN

    def schedule(
        self, lengths: Tensor, page_slots: int, num_sms: int, indices: Tensor | None = None
    ) -> Tensor:
        assert lengths.dtype == torch.int32
        assert lengths.is_contiguous()
        assert lengths.ndim == 2
        assert int(lengths.min()) >= 0
        assert (page_slots, num_sms) == (BLOCK, 132)
        assert (indices is not None) == self.layout.indices
        return lengths.clone()  # a schedule is good for these lengths only

    def score(
        self,
        q: tuple[Tensor, Tensor | None],
        pages: Tensor,
        weights: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        schedule: Tensor,
        *,
        max_model_len: int,
        clean_logits: bool,
        indices: Tensor | None = None,
    ) -> Tensor:
        values, scales = q
        each = values.shape[1]  # rows that share a list of pages
        num_rows = len(values) * each
        assert not clean_logits
        assert lengths.shape == values.shape[:2]
        assert block_table.stride(-1) == 1
        assert torch.equal(schedule, lengths)
        if self.layout.indices:
            assert indices is not None
            assert indices.tolist() == list(range(num_rows))
        # Past a row's length a score is anything at all.
        scores = torch.full((num_rows, max_model_len), 9e9).to(self.layout.scores)
        for row, length in enumerate(lengths.flatten().tolist()):
            place = (row // each, row % each)
            if scales is None:
                query = values[place].double()
            else:
                query = self.layout.decode_fp4(values[place], scales[place])
            if not length:
                continue
            listed = block_table[place[0], : -(-length // BLOCK)].long()
            keys = self.layout.keys(pages[listed].reshape(len(listed), BLOCK, -1))
            products = (keys[:, None] * query).sum(-1).relu() * weights[row].double()
            found = products.sum(-1)[:length]
            if self.spoiled is not None:
                hit = torch.isin(listed, self.spoiled).repeat_interleave(BLOCK)[:length]
                found[hit] = torch.nan
            scores[row, :length] = found.to(self.layout.scores)
        return scores
