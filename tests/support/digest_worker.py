"""Worker methods of the tests of tensor parallelism."""

import hashlib

from spin_server.engine.spin.layers import SpinLayers
from spin_server.engine.spin.worker_state import worker_spin
from spin_server.engine.worker import SpinWorkerExtension


class DigestWorker(SpinWorkerExtension):
    """`spin_server`'s worker methods, and one more."""

    def digest(self) -> str:
        """Hash what the last step scored, and all that the histories hold."""
        layers, digest = worker_spin().layers, hashlib.sha256()
        assert isinstance(layers, SpinLayers)
        state = layers.state
        for tensor in (state.vertical, state.diagonal, state.last_observed, state.steps):
            digest.update(tensor.numpy().tobytes())
        digest.update(layers.outcomes.numpy().tobytes())
        return digest.hexdigest()
