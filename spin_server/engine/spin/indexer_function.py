"""The other way into vLLM's indexer: DeepSeek-V3.2 and GLM-5 call its function, past the layer.

Their attention builds the layer, ours once it is registered, and uses it for its settings alone. So
the function's name in the attention's module is replaced, and a call that belongs to a layer of
SPIN's goes the way of that layer. Layers that reuse an earlier layer's top-K make no call: they
read the buffer that is remapped in place, in the order of vLLM's stream. Source, of vLLM 0.32.0:
vllm/models/deepseek_v32/attention.py (DeepseekV32Attention._sparse_indexer_and_attn), which
vllm/models/deepseek_v32/__init__.py gives both models on CUDA.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from spin_server.engine.spin.indexer_cuda import SpinSparseAttnIndexer

# It imports the function by name, so this is the name that its calls look up.
_MODULE, _NAME = "vllm.models.deepseek_v32.attention", "sparse_attn_indexer"


class IndexerFunction:
    """Stands in for vLLM's function.

    It needs no break of its own where vLLM captures a graph in pieces: the attention around it is
    outside the pieces already (eager_break_during_capture), and looks the name up at each replay.

    Args:
        function: vLLM's own.
        indexers: SPIN's layers, by the name of their cache.
    """

    def __init__(
        self, function: Callable[..., Tensor], indexers: Mapping[str, SpinSparseAttnIndexer]
    ) -> None:
        self.function, self._indexers = function, indexers

    def __call__(
        self,
        hidden_states: Tensor,
        k_cache_prefix: str,
        kv_cache: Tensor,
        q_quant: Tensor,
        q_scale: Tensor | None,
        k: Tensor | None,
        weights: Tensor,
        *sizes: Any,
        **keywords: Any,
    ) -> Tensor:
        """Score and select; a draft's layer as vLLM does, one of SPIN's over its blocks."""

        def score(hidden_states: Tensor, q_quant: Any, k: Tensor | None, weights: Tensor) -> Tensor:
            return self.function(
                hidden_states,
                k_cache_prefix,
                kv_cache,
                q_quant,
                q_scale,
                k,
                weights,
                *sizes,
                **keywords,
            )

        indexer = self._indexers.get(k_cache_prefix)
        if indexer is None:
            return score(hidden_states, q_quant, k, weights)
        return indexer.narrow(score, hidden_states, q_quant, k, weights)


def install(model: Any) -> None:
    """Put SPIN in front of the function, if the model is one that calls it."""
    ours = (module for module in model.modules() if isinstance(module, SpinSparseAttnIndexer))
    put_in_front([indexer for indexer in ours if indexer.spin])


def put_in_front(indexers: Iterable[SpinSparseAttnIndexer]) -> None:
    """Let these layers, if there are any, decide what vLLM's function does for them."""
    by_cache = {indexer.k_cache.prefix: indexer for indexer in indexers}
    # The model's own import brings it; no other model pays for it.
    module: Any = sys.modules.get(_MODULE)
    if module is None or not by_cache:
        return
    function = getattr(module, _NAME)
    if isinstance(function, IndexerFunction):
        function = function.function
    setattr(module, _NAME, IndexerFunction(function, by_cache))
