"""A recorded trace: the dense indexer scores of one conversation, step by step."""

import logging
import lzma
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spin_server.errors import InputError

logger = logging.getLogger(__name__)

_REQUIRED = ("scores", "query_positions", "context_slots", "accepted", "turn_starts")
_OPTIONAL = ("request_key", "layer", "layers")
# What `spin-server serve --spin-record` notes besides: the policy's id and the engine's own choice.
_NOTES = ("policy", "scored_blocks")
# Offsets q - i are computed in int64; a position this large is a mistake anyway.
_MAX_POSITION = 2**62


@dataclass(frozen=True, slots=True)
class Trace:
    """One request's decode steps, in one or several layers.

    Args:
        scores: (float32): [layers, steps, rows, slots]; rows = 1 + draft length.
        query_positions: (int64): [steps, rows]; in slots.
        context_slots: (int64): [steps, rows]; slots visible to each row.
        accepted: (int64): [steps]; accepted drafts a: rows 0..a are valid.
        turn_starts: (bool): [steps]; histories are reset before this step.
        request_key: 64 bits, as a signed number.
        layers: (int64): [layers]; their numbers in the model.
        multi_layer: whether the file held a layer dimension.
    """

    scores: Tensor
    query_positions: Tensor
    context_slots: Tensor
    accepted: Tensor
    turn_starts: Tensor
    request_key: int
    layers: Tensor
    multi_layer: bool


def load_trace(path: Path) -> Trace:
    """Read and check a trace file (NumPy .npz; nothing in it is executed).

    Raises:
        InputError: the file, or one of its arrays, is not what a trace holds.
    """
    arrays = _read(path)
    for key in _REQUIRED:
        if key not in arrays:
            raise InputError(f"{path}: {key}", "this array", "no such key")
    for key in arrays.keys() - {*_REQUIRED, *_OPTIONAL, *_NOTES}:
        logger.warning("%s: key %r is not part of a trace and is ignored", path, key)

    def check(key: str, shape: tuple[int, ...], words: str, kind: str) -> NDArray[Any]:
        array = arrays[key]
        if array.shape != shape:
            raise InputError(f"{path}: {key}", f"{kind} {words} = {list(shape)}", list(array.shape))
        right = array.dtype == kind if kind == "bool" else np.can_cast(array.dtype, kind, "safe")
        if not right or (kind == "int64" and array.dtype == np.bool_):
            raise InputError(f"{path}: {key}", f"{kind} {words}", array.dtype)
        return array.astype(kind)

    scores = arrays["scores"]
    if scores.ndim not in (3, 4) or scores.dtype != np.float32:
        raise InputError(
            f"{path}: scores",
            "float32 [steps, rows, slots] or [layers, steps, rows, slots]",
            f"{scores.dtype} {list(scores.shape)}",
        )
    if 0 in scores.shape:
        raise InputError(
            f"{path}: scores", "at least one step, row, slot and layer", list(scores.shape)
        )
    multi_layer = scores.ndim == 4
    steps, rows, slots = scores.shape[-3:]
    positions = check("query_positions", (steps, rows), "[steps, rows]", "int64")
    context = check("context_slots", (steps, rows), "[steps, rows]", "int64")
    accepted = check("accepted", (steps,), "[steps]", "int64")
    turns = check("turn_starts", (steps,), "[steps]", "bool")
    for key, array, low, high in (
        ("query_positions", positions, -_MAX_POSITION, _MAX_POSITION),
        ("context_slots", context, 0, slots),
        ("accepted", accepted, 0, rows - 1),
    ):
        outside = array[(array < low) | (array > high)]
        if outside.size:
            raise InputError(f"{path}: {key}", f"values in {low}..{high}", outside[0])

    if "layers" in arrays and not multi_layer:
        raise InputError(
            f"{path}: layers", "no such key beside scores [steps, rows, slots]", "layers"
        )
    if multi_layer:
        if "layers" not in arrays:
            raise InputError(f"{path}: layers", "int64 [layers] beside scores of 4 axes", "no key")
        layers = check("layers", (scores.shape[0],), "[layers]", "int64")
    else:
        layers = np.array([_scalar(path, arrays, "layer")])
    request_key = _scalar(path, arrays, "request_key")
    return Trace(
        scores=torch.from_numpy(scores.reshape(-1, steps, rows, slots)),
        query_positions=torch.from_numpy(positions),
        context_slots=torch.from_numpy(context),
        accepted=torch.from_numpy(accepted),
        turn_starts=torch.from_numpy(turns),
        request_key=request_key - 2**64 if request_key >= 2**63 else request_key,
        layers=torch.from_numpy(layers.astype(np.int64)),
        multi_layer=multi_layer,
    )


# What NumPy and zipfile raise on a damaged or hostile archive.
_DAMAGE = (
    *(ValueError, EOFError, KeyError, TypeError, AttributeError, OverflowError, MemoryError),
    *(RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    expected = "a NumPy .npz archive of plain arrays"
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InputError(str(path), expected, "a single array")
            return {key: _read_array(path, archive, key) for key in archive.files}
    except InputError:
        raise
    except OSError as error:
        raise InputError(str(path), expected, error.strerror or error) from None
    except _DAMAGE as error:
        raise InputError(str(path), expected, _damage(error)) from None


def _read_array(path: Path, archive: Any, key: str) -> NDArray[Any]:
    try:
        array = archive[key]
    except _DAMAGE as error:
        raise InputError(f"{path}: {key}", "a plain array", _damage(error)) from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: {key}", "a plain array", "something else")
    return array


def _damage(error: BaseException) -> str:
    return " ".join(f"what cannot be read ({error or type(error).__name__})".split())


def _scalar(path: Path, arrays: dict[str, NDArray[Any]], key: str) -> int:
    """Read an optional integer, 0 where absent."""
    if key not in arrays:
        return 0
    array = arrays[key]
    if array.size != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{path}: {key}", "one integer", f"{array.dtype} {list(array.shape)}")
    return int(array.item())
