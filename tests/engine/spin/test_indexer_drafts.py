"""The CUDA hook under speculation, on a CPU: what vLLM hands over of several rows a request.

DeepGEMM is emulated as in test_indexer_cuda.py. It takes the rows of a request together, or one by
one where vLLM flattens them.
"""

from typing import Any

import pytest
import torch
from test_indexer_cuda import (
    BLOCK,
    HOPPER,
    LAYERS,
    RATIO,
    ROWS,
    SLOTS,
    TOP_K,
    Engine,
    indexer_cuda,
    table,
)
from torch import Tensor
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.attention.backends.mla.indexer import (
    DeepSeekV32IndexerDecodeMetadata,
    DeepseekV32IndexerMetadata,
)

from spin_server.algorithm.options import SpinOptions
from spin_server.engine.spin.device_drafts import DraftedLayers
from spin_server.engine.spin.requests import RequestTracker
from spin_server.engine.spin.worker_state import worker_spin

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="its tensors are a CPU's, for Triton's interpreter; with a GPU Triton compiles",
)

DRAFTS = 2
STARTS = (4000, 2600, 3333)  # tokens


class DraftedEngine(Engine):
    """The same layers, with room for the drafts of every request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(HOPPER, monkeypatch)
        self.spin = DraftedLayers(
            LAYERS,
            SpinOptions(block_size=BLOCK, top_k=TOP_K, seed=4),
            table(),
            num_states=ROWS,
            num_rows=ROWS,
            max_slots=SLOTS,
            compress_ratio=RATIO,
            dense_slots=TOP_K,
            device=torch.device("cpu"),
            num_drafts=DRAFTS,
        )
        monkeypatch.setattr(worker_spin(), "layers", self.spin)
        self.buffer = torch.full((ROWS * (1 + DRAFTS), TOP_K), -7, dtype=torch.int32)
        for layer in self.layers:
            layer.spin, layer.topk_indices_buffer = self.spin, self.buffer
        self.weights = torch.rand(ROWS * (1 + DRAFTS), 4, generator=self.random)

    def drafted(self, num_slots: list[Tensor], *, together: bool) -> Any:
        """Metadata of requests with as many rows as each has lengths."""
        counts = torch.tensor([len(rows) for rows in num_slots], dtype=torch.int32)
        even, flat = len(counts.unique()) == 1, torch.cat(num_slots).int()
        lengths, pages = flat[:, None], self.block_table[: len(counts)]
        decode_lens = torch.ones(len(flat), dtype=torch.int32)
        if together:
            lengths, decode_lens = flat.view(len(counts), -1), counts
        else:
            pages = pages.repeat_interleave(counts, 0)
        decode = DeepSeekV32IndexerDecodeMetadata(
            block_table=pages,
            seq_lens=lengths,
            decode_lens=decode_lens,
            requires_padding=False,
            schedule_metadata=lengths.clone(),
            per_req_decode_lens=counts,
            decode_is_uniform=even,
        )
        return DeepseekV32IndexerMetadata(
            seq_lens=flat,
            max_seq_len=SLOTS * RATIO,
            slot_mapping=torch.zeros(len(flat), dtype=torch.int64),
            num_decodes=len(counts),
            num_decode_tokens=len(flat),
            num_prefills=0,
            num_prefill_tokens=0,
            decode=decode,
        )


@pytest.mark.parametrize("ahead", [False, True], ids=["in-order", "ahead"])
@pytest.mark.parametrize("how", ["together", "flattened", "uneven"])
def test_rows_of_a_request_score_one_list_and_teach_once_accepted(
    how: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DraftedEngine(monkeypatch)
    monkeypatch.setattr(indexer_cuda, "one_graph", lambda: ahead)
    spin, tracker = engine.spin, RequestTracker(ROWS, DRAFTS)
    for number, start in enumerate(STARTS):
        tracker.admit(f"r{number}", policy=number % 3, key=number * 977, num_known_tokens=start)
    positions = list(STARTS)
    expected = torch.zeros(len(LAYERS), len(STARTS), SLOTS)
    skipped = 0
    for step in range(4):
        counts = [
            1 + (step + n) % (1 + DRAFTS) if how == "uneven" else 1 + DRAFTS for n in (0, 1, 2)
        ]
        rows = tracker.step([(f"r{n}", positions[n], counts[n]) for n in range(3)])
        spin.begin(rows, torch.tensor(positions))
        num_slots = [
            (positions[n] + torch.arange(counts[n]) + 1) // RATIO for n in range(len(counts))
        ]
        metadata = engine.drafted(num_slots, together=how == "together")
        attention = {layer.k_cache.prefix: metadata for layer in engine.layers}
        context = ForwardContext(no_compile_layers={}, attn_metadata=attention, slot_mapping={})
        inputs = engine.inputs(sum(counts))
        with override_forward_context(context):
            found = engine.model(inputs)
        verdict = [min(step, count) or 1 for count in counts]
        separate = engine.drafted(num_slots, together=False)
        for index, (_, q, _, weights) in enumerate(inputs):
            # What earlier steps left, the drafts that were accepted among it, is learnt by now.
            dense = engine.dense(index, separate, q, weights)
            row = 0
            for request, lengths in enumerate(num_slots):
                count = int(spin._plan.counts[index, request])
                blocks = spin._plan.blocks[index, request, :count].long()
                listed = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
                skipped += -(-int(lengths[-1]) // BLOCK) - count
                for draft, length in enumerate(lengths.tolist()):
                    slots = listed[listed < length]
                    top = found[index][row]
                    top = top[top >= 0].long()
                    best = dense[row, slots].topk(min(TOP_K, len(slots))).values
                    assert torch.isin(top, slots).all()
                    assert torch.equal(dense[row, top].sort(descending=True).values, best)
                    learnt = expected[index, request]
                    if draft == 0:
                        learnt[slots] = 0.5 * learnt[slots] + 0.5 * dense[row, slots]
                        place = index * ROWS + int(rows.slots[request])
                        assert torch.equal(spin.histories.vertical[place], learnt)
                    elif draft < verdict[request]:
                        learnt[slots] = 0.5 * learnt[slots] + 0.5 * dense[row, slots]
                    row += 1
        spin.judge(torch.tensor(verdict, dtype=torch.int32))
        positions = [p + taken for p, taken in zip(positions, verdict, strict=True)]
    assert skipped > 20
