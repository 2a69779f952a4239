"""Methods that the launcher calls on every worker.

vLLM adds this class to its worker's bases (`--worker-extension-cls`) and fails to start if it
cannot be imported.
"""

import os
from typing import Any

from spin_server.engine.presence import active_plugins


class SpinWorkerExtension:
    """Our methods of a vLLM worker; none of them raises, for one failing rank would leave the
    other ranks' answers in the queue.
    """

    rank: int
    parallel_config: Any
    model_runner: Any

    def spin_presence(self) -> dict[str, Any]:
        """Report this worker: `rank`, `pid`, `plugins` (active ones), `missing_kernels` (metadata
        kernels that have no replacement in place, on a CPU) and `spin_bytes` (of histories),
        `spin_layers` (how many it serves), `spin_min_context` (tokens), `spin_follows` (whether
        it hears of requests) and `page_slots` (sizes of the indexers' KV pages).
        """
        from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

        from spin_server.engine.spin.worker_state import worker_spin

        layers = worker_spin().layers
        report: dict[str, Any] = {
            "rank": self.rank,
            "pid": os.getpid(),
            "plugins": active_plugins(),
            "missing_kernels": [],
            "spin_bytes": 0 if layers is None else layers.num_bytes,
            "spin_layers": 0 if layers is None else len(layers.numbers),
            "spin_min_context": worker_spin().min_context,
            "spin_follows": worker_spin().follows,
            "page_slots": sorted(
                {
                    module.k_cache.kv_cache.shape[1]
                    for module in self.model_runner.model.modules()
                    if isinstance(module, SparseAttnIndexer)
                }
            ),
        }
        if "spin_cpu" in report["plugins"]:
            from spin_server.engine.cpu.plugin import missing_kernels

            report["missing_kernels"] = missing_kernels()
        return report

    def spin_apply(self, revision: int, rows: dict[str, list[Any]]) -> dict[str, Any]:
        """Write rows of the policy table in place, and report it: see `spin_policies`.

        Args:
            revision: what the table holds then.
            rows: packed policies, by row.
        """
        from spin_server.engine.spin.worker_state import worker_spin
        from spin_server.policy.policy import Policy

        table = worker_spin().table
        try:
            policies = {int(row): Policy.unpack(given) for row, given in rows.items()}
            if table is not None:
                table.write_all(policies, revision)
        except ValueError as error:
            return {"rank": self.rank, "error": str(error)}
        return self.spin_policies()

    def spin_policies(self) -> dict[str, Any]:
        """Report the policy table: `rank`, and its `revision` and `digest`, or an `error`."""
        from spin_server.engine.spin.worker_state import worker_spin

        table = worker_spin().table
        if table is None:
            return {"rank": self.rank, "error": "this worker has no policy table"}
        return {"rank": self.rank, "revision": table.revision, "digest": table.digest()}

    def spin_snapshot(self) -> dict[str, Any]:
        """Report this worker's counters, to be compared with the other ranks'.

        Returns:
            `rank`, what `WorkerSpin.snapshot` gives, and where there are other ranks `choices`: a
            hash of each layer's in the last step.
        """
        from spin_server.engine.spin.worker_state import worker_spin

        found = {"rank": self.rank, **worker_spin().snapshot()}
        layers = worker_spin().layers
        if layers is not None and self.parallel_config.world_size > 1:
            found["choices"] = layers.digest(histories=False)["choices"]
        return found

    def spin_digest(self) -> dict[str, Any]:
        """Hash what this worker chose in the last step, and what it remembers.

        Returns:
            `rank`, and `layers` (numbers), `choices` and `histories` (see `SpinLayers.digest`) and
            `table` (of the policies), or an `error`.
        """
        from spin_server.engine.spin.worker_state import worker_spin

        layers, table = worker_spin().layers, worker_spin().table
        if layers is None or table is None:
            return {"rank": self.rank, "error": "this worker has no histories"}
        try:
            found = layers.digest()
        except RuntimeError as error:  # a GPU's memory
            return {"rank": self.rank, "error": str(error)}
        return {
            "rank": self.rank,
            "layers": list(layers.numbers),
            "table": table.digest(),
            **found,
        }
