"""The overrides do what vLLM's Triton kernels do, launched by vLLM's own code.

A subprocess (this file, run as a script) launches every kernel twice on the same batches: as vLLM
has it, under Triton's interpreter, and as vLLM has it after register_kernels(OVERRIDES). It needs a
process of its own because vLLM decides at import whether there is a Triton. The tests compare what
the two left in poisoned buffers.
"""

import inspect
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spin_server.engine.cpu.metadata_kernels import OVERRIDES
from spin_server.errors import UnsupportedError

POISON = -77_777
SPARE = 3  # rows that a buffer has beyond what a kernel should write
KINDS = ("decode", "chunked", "prefix-hit", "mixed", "zero-length", "padded")
BATCHES = [f"{kind}-{seed}" for kind in KINDS for seed in range(5)] + ["long-0"]
LAUNCHES = (
    "token_request_mapping",
    "compressed_slot_mapping",
    "prefill_chunk_metadata",
    "prefill_gather_lens",
    "swa_decode",
    "swa_prefill",
)


@dataclass(frozen=True)
class Batch:
    """What vLLM's runner would hand to the metadata builders: decodes first, then prefills."""

    query_lens: list[int]
    seq_lens: list[int]
    num_decodes: int
    padding_tokens: int
    compress_ratio: int
    block_size: int
    swa_block_size: int
    window_size: int
    query_slice: tuple[int, int]  # of the prefill tokens
    slot_mapping: Tensor
    block_table: Tensor
    swa_block_table: Tensor
    replay_start: Tensor

    @property
    def query_start_loc(self) -> Tensor:
        return torch.tensor([0, *self.query_lens]).cumsum(0).int()

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_decode_tokens(self) -> int:
        return sum(self.query_lens[: self.num_decodes])


def lengths(kind: str, rng: random.Random) -> tuple[list[int], list[int], int]:
    """Draw query lengths, sequence lengths and the number of decodes."""
    decodes = [(1, rng.randint(1, 300)) for _ in range(rng.randint(1, 8))]
    prefills = [(n := rng.randint(2, 30), n + rng.choice((0, 16, 128, 131))) for _ in range(4)]
    if kind == "decode":
        prefills = []
    elif kind == "long":  # past one Triton block (1,024), and a first chunk's 256 tokens
        prefills = [(1_300, 1_300), (5, 1_111)]
    elif kind == "prefix-hit":
        decodes = []
        prefills = [(n, n + 16 * rng.randint(1, 16)) for n, _ in prefills]
    elif kind == "chunked":
        decodes = []
    elif kind == "zero-length":
        decodes = [(rng.randint(0, 1), length) for _, length in decodes]
        prefills += [(0, 0), (0, rng.randint(1, 200)), (rng.randint(2, 9), rng.randint(9, 90))]
        rng.shuffle(prefills)
    requests = decodes + prefills
    return [n for n, _ in requests], [length for _, length in requests], len(decodes)


def make_batch(name: str) -> Batch:
    kind, seed = name.rsplit("-", 1)
    rng = random.Random(name)
    generator = torch.Generator().manual_seed(int(seed))

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    query_lens, seq_lens, num_decodes = lengths(kind, rng)
    padding_tokens = 0
    if kind == "padded":
        query_lens += [0, 0]
        seq_lens += [0, 0]
        padding_tokens = rng.randint(1, 20)
    compress_ratio, block_size = rng.choice([(4, 64), (128, 2), (4, 3), (2, 5)])
    swa_block_size = rng.choice((5, 8, 64))
    slot_mapping = draw(0, 10_000, sum(query_lens) + padding_tokens)
    slot_mapping[sum(query_lens) :] = -1
    slot_mapping[draw(0, 10, len(slot_mapping)) == 0] = -1  # replayed tokens
    num_reqs, longest = len(query_lens), max(seq_lens)
    num_prefill_tokens = sum(query_lens[num_decodes:])
    start = rng.choice((0, rng.randint(0, num_prefill_tokens)))
    stop = rng.choice((num_prefill_tokens, rng.randint(start, num_prefill_tokens)))
    return Batch(
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_decodes=num_decodes,
        padding_tokens=padding_tokens,
        compress_ratio=compress_ratio,
        block_size=block_size,
        swa_block_size=swa_block_size,
        window_size=rng.choice((1, 8, 33, 128)),
        query_slice=(start, stop),
        slot_mapping=slot_mapping,
        # No column more than needed, or several: a stride of its own.
        block_table=draw(
            0, 5_000, num_reqs, longest // compress_ratio // block_size + rng.randint(1, 4)
        ).int(),
        swa_block_table=draw(0, 5_000, num_reqs, longest // swa_block_size + 1).int(),
        # Mostly nothing replays; a start past a token's own position is the edge.
        replay_start=(draw(0, 2, num_reqs + 1) * draw(0, 150, num_reqs + 1)).int(),
    )


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, POISON, dtype=dtype)


def launch_all(batch: Batch) -> Iterator[tuple[str, list[Tensor]]]:
    """Launch each kernel as vLLM does, and yield the buffers that it may have written."""
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    bounds, seq_lens = batch.query_start_loc, torch.tensor(batch.seq_lens, dtype=torch.int32)
    num_mapped, num_tokens = batch.num_tokens, batch.num_tokens + batch.padding_tokens
    num_decodes, num_decode_tokens = batch.num_decodes, batch.num_decode_tokens

    requests = poisoned(num_tokens + SPARE)
    metadata.compute_token_to_req_indices(bounds, requests, num_mapped, num_tokens)
    yield "token_request_mapping", [requests]

    slots = poisoned(num_tokens + SPARE, dtype=torch.int64)
    # The launcher itself: get_compressed_slot_mapping would overwrite the poison.
    compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL(
        slots,
        batch.slot_mapping,
        bounds,
        seq_lens,
        batch.block_table,
        batch.block_size,
        batch.compress_ratio,
        1,
        1,
    )
    yield "compressed_slot_mapping", [slots]

    chunk_lens = seq_lens[num_decodes:]
    keys = torch.cat([poisoned(1) * 0, chunk_lens // batch.compress_ratio]).cumsum(0).int()
    start, stop = batch.query_slice
    chunk = [poisoned(n + SPARE) for n in (int(keys[-1]), stop - start, stop - start)]
    if len(chunk_lens):
        indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL(
            bounds[num_decodes:] - bounds[num_decodes],
            chunk_lens,
            keys,
            keys + 1_000,  # told from the argument before it, which it usually equals
            *chunk,
            start,
            stop,
            0,
            1,
            1,
            num_reqs=len(chunk_lens),
            COMPRESS_RATIO=batch.compress_ratio,
        )
    yield "prefill_chunk_metadata", chunk

    gather_lens = poisoned(len(chunk_lens) + SPARE)
    if len(chunk_lens):
        sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL(
            gather_lens,
            seq_lens,
            bounds,
            batch.replay_start,
            len(chunk_lens),
            num_decodes,
            batch.window_size,
        )
    yield "prefill_gather_lens", [gather_lens]

    def windows(rows: int, launched: int, token_offset: int, width: int) -> list[Tensor]:
        indices, lens = poisoned(rows, 1, width + SPARE)[..., :width], poisoned(rows)
        sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL(
            indices,
            lens,
            batch.window_size,
            width,
            lens,
            lens,
            bounds,
            seq_lens,
            owner,
            batch.slot_mapping >= 0,
            batch.swa_block_table,
            batch.swa_block_size,
            batch.replay_start,
            num_tokens=launched,
            token_offset=token_offset,
        )
        return [indices, lens]

    owner = torch.repeat_interleave(
        torch.arange(len(bounds) - 1), bounds.diff(), output_size=num_mapped
    ).int()
    owner = torch.cat([owner, owner.new_zeros(batch.padding_tokens)])
    written = windows(num_tokens + SPARE, num_decode_tokens, 0, batch.window_size)
    for buffer in written:
        # The override cannot know where the launch ends: vLLM cuts these rows off.
        buffer[num_decode_tokens:num_tokens] = 0
    yield "swa_decode", written
    # The newest tokens do: the interpreter takes milliseconds for each.
    token_offset = max(num_decode_tokens, num_tokens - 24)
    rows = num_tokens - token_offset
    yield "swa_prefill", windows(rows, rows, token_offset, batch.window_size + 5)


def write_results(path: Path) -> None:
    """Launch vLLM's kernels, then the overrides, and save what both wrote."""
    from triton.backends import Backend, backends
    from triton.backends.driver import DriverBase

    # vLLM's CPU build takes a Triton that lists a CPU backend for usable. The interpreter needs no
    # driver, so none of the entry is ever called.
    backends["cpu"] = Backend(compiler=None, driver=DriverBase)  # type: ignore[arg-type]
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.triton_utils.dispatcher import _registry, register_kernels

    batches = {name: make_batch(name) for name in BATCHES}

    def launch_every_batch() -> dict[str, dict[str, list[Tensor]]]:
        return {name: dict(launch_all(batch)) for name, batch in batches.items()}

    expected = launch_every_batch()
    register_kernels(OVERRIDES)
    originals = {name: original for name, (original, _) in _registry.items()}
    assert all(isinstance(original, InterpretedFunction) for original in originals.values())
    names = {name: list(original.arg_names) for name, original in originals.items()}
    torch.save({"expected": expected, "got": launch_every_batch(), "names": names}, path)


Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = tmp_path_factory.mktemp("metadata_kernels") / "results.pt"
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loaded: Results = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("batch", BATCHES)
def test_override_equals_interpreted_kernel(results: Results, batch: str, launch: str) -> None:
    expected, got = results["expected"][batch][launch], results["got"][batch][launch]
    for buffer, (want, have) in enumerate(zip(expected, got, strict=True)):
        torch.testing.assert_close(have, want, rtol=0, atol=0, msg=lambda m, b=buffer: f"{b}: {m}")


@pytest.mark.parametrize("launch", LAUNCHES)
def test_batches_make_every_kernel_write_and_leave_poison(results: Results, launch: str) -> None:
    # Guards the comparison above: neither side may be vacuous.
    buffers = [buffer for batch in results["expected"].values() for buffer in batch[launch]]
    assert any((buffer != POISON).any() for buffer in buffers)
    if launch != "swa_prefill":  # its buffers are cut to the rows that are written
        assert all((buffer[-SPARE:] == POISON).all() for buffer in buffers)


def override(name: str) -> Callable[..., None]:
    (found,) = (function for key, function in OVERRIDES.items() if name in key)
    return found


@pytest.mark.parametrize("name", OVERRIDES)
def test_parameters_are_named_as_the_kernels(results: Results, name: str) -> None:
    parameters = [*inspect.signature(OVERRIDES[name]).parameters]
    # A launch with positional arguments passes the launch options on, beyond the kernel's own.
    assert [n for n in parameters if n != "num_warps"] == results["names"][name]


@pytest.mark.parametrize(
    ("name", "unsupported"),
    [
        ("CompressedSlotMappingKernel", {"dcp_world_size": 2}),
        ("BuildPrefillChunkMetadataKernel", {"DCP_WORLD": 2}),
        ("ComputeSWAIndicesAndLensKernel", {"HAS_IMAGE": True}),
    ],
)
def test_unsupported_launch_is_refused(name: str, unsupported: dict[str, Any]) -> None:
    function = override(name)
    arguments = dict.fromkeys(inspect.signature(function).parameters, torch.zeros(1))
    with pytest.raises(UnsupportedError, match="got"):
        function(**{**arguments, **unsupported})


if __name__ == "__main__":
    write_results(Path(sys.argv[1]))
