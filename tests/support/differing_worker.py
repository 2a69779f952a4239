"""A rank that comes to differ from the others."""

from typing import Any

from spin_server.engine.spin.layers import SpinLayers
from spin_server.engine.spin.worker_state import worker_spin
from spin_server.engine.worker import SpinWorkerExtension

STEP, LAYER = 20, 3


class DifferingWorker(SpinWorkerExtension):
    """`spin_server`'s worker methods; rank 1 loses a bit of one history after some step."""

    spin_num_digests = 0

    def spin_digest(self) -> dict[str, Any]:
        self.spin_num_digests += 1
        if (self.rank, self.spin_num_digests) == (1, STEP):
            layers = worker_spin().layers
            assert isinstance(layers, SpinLayers)
            history = layers.numbers.index(LAYER) * layers.num_states
            observed = layers.state.vertical[history].nonzero()[-1]
            layers.state.vertical[history, observed] *= 1 + 2**-20
        return super().spin_digest()
