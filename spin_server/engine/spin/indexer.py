"""vLLM's sparse-attention indexer with SPIN in front: what the devices share.

Source: vllm/model_executor/layers/sparse_attn_indexer.py (SparseAttnIndexer).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.utils import extract_layer_index

from spin_server.algorithm.options import SpinOptions
from spin_server.engine.model_support import indexer_geometry
from spin_server.engine.spin.settings import SpinSettings, num_places, read_settings
from spin_server.engine.spin.worker_state import AnyLayers, worker_spin

PAGE_SLOTS = 64


class SpinIndexer(SparseAttnIndexer):  # type: ignore[misc]
    """The indexer of one layer; a device's subclass makes the histories and scores with them."""

    default_min_slots = 0  # contexts of no more are scored densely

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        vllm_config = get_current_vllm_config()
        settings = read_settings(vllm_config)
        self.spin: AnyLayers | None = None
        if not settings.enabled:
            return
        worker = worker_spin()
        if worker.layers is None:
            geometry = indexer_geometry(vllm_config.model_config.hf_config.to_dict())
            ratio, num_requests = geometry.compress_ratio, vllm_config.scheduler_config.max_num_seqs
            worker.layers = self.make_layers(
                settings,
                geometry.layers,
                SpinOptions(
                    block_size=PAGE_SLOTS,
                    top_k=self.topk_tokens,
                    seed=settings.seed,
                    history=settings.history,
                    mask_sharing=settings.mask,
                    update_rule=settings.update,
                ),
                num_requests,
                vllm_config.num_speculative_tokens,
                {
                    "num_states": num_places(settings, num_requests),
                    "max_slots": vllm_config.model_config.max_model_len // ratio,
                    "compress_ratio": ratio,
                    "dense_slots": self.dense_slots(settings, self.topk_tokens, ratio),
                },
            )
        self.layer_number = extract_layer_index(self.k_cache.prefix)
        # Draft layers may have an indexer of their own, which stays vLLM's.
        if self.layer_number in worker.layers.numbers:
            self.spin = worker.layers

    @classmethod
    def dense_slots(cls, settings: SpinSettings, top_k: int, ratio: int) -> int:
        """Slots of the longest context that is scored densely."""
        tokens = settings.min_context
        return max(top_k, cls.default_min_slots if tokens is None else tokens // ratio)

    def make_layers(
        self,
        settings: SpinSettings,
        numbers: tuple[int, ...],
        options: SpinOptions,
        num_requests: int,
        num_drafts: int,
        sizes: dict[str, int],
    ) -> AnyLayers:
        """Make the worker's histories; called for the first layer that is built.

        Args:
            settings, options: SPIN's, and SPIN's for this model.
            numbers: of the layers with an indexer.
            num_requests: requests that may run at once.
            num_drafts: of each, at most.
            sizes: the keyword arguments of `SpinLayers`; the same on every device.
        """
        raise NotImplementedError

    def decode_metadata(self) -> Any | None:
        """Get vLLM's metadata of this layer if the step has decode rows, and SPIN is on."""
        attn_metadata = get_forward_context().attn_metadata
        if self.spin is None or not isinstance(attn_metadata, dict):  # off, or a profiling run
            return None
        metadata = attn_metadata[self.k_cache.prefix]
        return metadata if metadata.num_decodes else None

    @contextmanager
    def seeing(self, metadata: Any) -> Iterator[None]:
        """Show vLLM's indexer other metadata for this layer."""
        context = get_forward_context()
        original = context.attn_metadata
        context.attn_metadata = {**original, self.k_cache.prefix: metadata}
        try:
            yield
        finally:
            context.attn_metadata = original
