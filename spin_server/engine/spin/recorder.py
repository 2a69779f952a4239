"""Write traces of the running engine, for `spin-server replay`.

A recorded row is scored densely beside its sparse step; the dense scores go to the file and
nowhere else. Bounded in requests, steps and bytes. Knows nothing of vLLM.
"""

import hashlib
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spin_server.engine.spin.settings import RecordSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    query_position: int
    num_slots: int
    turn_start: bool
    scores: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    blocks: dict[int, NDArray[np.int32]] = field(default_factory=dict)


@dataclass(slots=True)
class _Recording:
    key: int
    policy: int
    steps: list[_Step] = field(default_factory=list)
    full: bool = False


def file_name(request: str) -> str:
    """Make a file name of a request's id, which a client may have chosen.

    What is not a letter, digit, point, hyphen or underscore is replaced; a hash keeps names apart.
    """
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", request).lstrip(".")[:80]
    return f"{readable}-{hashlib.blake2b(request.encode(), digest_size=6).hexdigest()}"


class Recorder:
    """The recordings of one worker.

    Args:
        settings: where to write, and how much.
        layers: the model's layers that have an indexer.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, settings: RecordSettings, layers: tuple[int, ...]) -> None:
        self._settings = settings
        self._layers = tuple(x for x in layers if not settings.layers or x in settings.layers)
        self._open: dict[str, _Recording] = {}
        self._num_started = 0
        self._num_bytes = 0
        self.num_written = self.num_failed = 0
        Path(settings.folder).mkdir(parents=True, exist_ok=True)

    def wants(self, request: str, layer: int) -> bool:
        """Whether this row of this layer should be scored densely and handed to `add`."""
        if self.num_failed or layer not in self._layers:
            return False
        recording = self._open.get(request)
        if recording is None:
            return self._num_started < self._settings.requests and self._has_room
        return not recording.full

    @property
    def _has_room(self) -> bool:
        return self._num_bytes < self._settings.bytes

    def add(
        self,
        request: str,
        layer: int,
        *,
        key: int,
        policy: int,
        query_position: int,
        turn_start: bool,
        scores: Tensor,
        blocks: Tensor,
    ) -> None:
        """Take in one row of one layer; a step is whole once its last layer came.

        Args:
            request: the engine's id.
            layer: its number in the model.
            key: the request's 64-bit key, as a signed number.
            policy: its policy id.
            query_position: in slots.
            turn_start: whether the history started anew in this step.
            scores: (float32): [slots]; dense.
            blocks: (int32): [any]; what the engine scored, ascending, padded with -1.
        """
        recording = self._open.get(request)
        if recording is None:
            recording = self._open[request] = _Recording(key, policy)
            self._num_started += 1
        if layer == self._layers[0]:
            recording.steps.append(_Step(query_position, len(scores), turn_start))
        step = recording.steps[-1]
        step.scores[layer] = scores.numpy().copy()
        step.blocks[layer] = blocks[blocks >= 0].numpy().copy()
        self._num_bytes += step.scores[layer].nbytes + step.blocks[layer].nbytes
        if layer == self._layers[-1]:
            recording.full = len(recording.steps) >= self._settings.steps or not self._has_room

    def finish(self, request: str) -> None:
        """Write the request's trace, if there is one; a failed write ends the recording."""
        recording = self._open.pop(request, None)
        if recording is None:
            return
        # A step that was cut short in the middle of its layers is left out.
        steps = [s for s in recording.steps if len(s.scores) == len(self._layers)]
        if not steps:
            return
        path = Path(self._settings.folder) / f"{file_name(request)}.npz"
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, **self._arrays(recording, steps))
            partial.replace(path)
        except OSError as error:
            logger.warning("no more traces are recorded: %s could not be written: %s", path, error)
            self.num_failed += 1
            self._open.clear()
            return
        self.num_written += 1
        logger.info("recorded %d steps of %s", len(steps), path)

    def _arrays(self, recording: _Recording, steps: list[_Step]) -> dict[str, Any]:
        num_slots = max(s.num_slots for s in steps)
        width = max(len(s.blocks[x]) for s in steps for x in self._layers)
        shape = (len(self._layers), len(steps))
        scores = np.zeros((*shape, 1, num_slots), np.float32)
        blocks = np.full((*shape, width), -1, np.int32)
        for i, layer in enumerate(self._layers):
            for j, step in enumerate(steps):
                scores[i, j, 0, : step.num_slots] = step.scores[layer]
                blocks[i, j, : len(step.blocks[layer])] = step.blocks[layer]
        return {
            "scores": scores,
            "query_positions": np.array([[s.query_position] for s in steps], np.int64),
            "context_slots": np.array([[s.num_slots] for s in steps], np.int64),
            "accepted": np.zeros(len(steps), np.int64),
            "turn_starts": np.array([s.turn_start for s in steps], np.bool_),
            "request_key": np.uint64(recording.key % 2**64),
            "layers": np.array(self._layers, np.int64),
            "policy": np.int64(recording.policy),
            "scored_blocks": blocks,
        }
