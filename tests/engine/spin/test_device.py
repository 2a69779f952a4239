"""The GPU's layers choose and remember what the CPU's do."""

import random

import pytest
import torch

from spin_server.algorithm.options import HistoryType, SpinOptions
from spin_server.engine.spin.device import DeviceLayers, device_bytes
from spin_server.engine.spin.layers import SpinLayers
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.requests import RequestTracker, StepRows
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, BLOCK, TOP_K, DENSE, SLOTS, STATES = (1, 4), 8, 24, 30, 120, 5
POLICIES = [
    Policy(sparsity=Ratio.parse("s", "0.5"), exploration=Ratio.parse("e", "0.3")),
    Policy(sparsity=Ratio.parse("s", "0.65"), exploration_policy="block_age", probe_period=3),
]


def table(device: torch.device | str) -> PolicyTable:
    policies = PolicyTable(4, Policy(), device)
    for index, policy in enumerate(POLICIES, start=1):
        policies.write(index, policy)
    return policies


def device_layers() -> DeviceLayers:
    return DeviceLayers(
        LAYERS,
        SpinOptions(block_size=BLOCK, top_k=TOP_K),
        table(DEVICE),
        num_states=STATES,
        num_rows=STATES,
        max_slots=SLOTS,
        compress_ratio=4,
        dense_slots=DENSE,
        device=DEVICE,
    )


def device_step(
    layers: DeviceLayers, rows: StepRows, num_slots: torch.Tensor, scores: torch.Tensor
) -> list[list[list[int]]]:
    """Run a step of [layers, rows, slots] dense scores; the blocks that each row scored."""
    layers.begin(rows)
    # A row's pages are its blocks' numbers, so that the table shows what was chosen.
    pages = torch.arange(SLOTS // BLOCK, dtype=torch.int32, device=DEVICE)
    pages = pages.expand(len(num_slots), -1)
    lengths = num_slots.int().to(DEVICE)[:, None]
    layers.plan(lengths.flatten(), pages)
    lengths = layers.lengths(LAYERS[0], lengths.shape)
    chosen = []
    for index, layer in enumerate(LAYERS):
        # The second layer's pages lie elsewhere, as in another group of vLLM's KV caches.
        found = layers.table(layer, pages if index == 0 else pages + 100) - 100 * index
        longest = max(1, int(lengths.max()))
        compact = torch.full((len(num_slots), longest), 7.0, device=DEVICE)
        blocks, best = [], torch.full((len(num_slots), TOP_K), -1, dtype=torch.int32, device=DEVICE)
        for row, length in enumerate(lengths[:, 0].tolist()):
            listed = found[row, : -(-length // BLOCK)].tolist()
            slots = [b * BLOCK + i for b in listed for i in range(BLOCK)][:length]
            compact[row, :length] = scores[index, row, slots].to(DEVICE)
            count = min(length, TOP_K)
            best[row, :count] = torch.arange(count, dtype=torch.int32)
            blocks.append((listed, slots[:count]))
        layers.remap(layer, best)
        for row, (_, slots) in enumerate(blocks):
            assert best[row][best[row] >= 0].tolist() == slots
        layers.learn(layer, compact)
        chosen.append([listed for listed, _ in blocks])
    return chosen


@pytest.mark.parametrize(("history", "ratio"), [("float32", 4), ("bfloat16", 4), ("float32", 1)])
def test_device_layers_equal_the_cpus_through_joins_preemptions_and_leaves(
    history: HistoryType, ratio: int
) -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    options = SpinOptions(block_size=BLOCK, top_k=TOP_K, seed=9, history=history)
    sizes = {"num_states": STATES, "max_slots": SLOTS, "dense_slots": DENSE}
    sizes["compress_ratio"] = ratio
    host = SpinLayers(LAYERS, options, table("cpu"), **sizes)
    device = DeviceLayers(LAYERS, options, table(DEVICE), num_rows=STATES, device=DEVICE, **sizes)
    tracker, live = RequestTracker(STATES), {}
    for step in range(24):
        if len(live) < STATES and rng.random() < 0.4:
            live[f"r{step}"] = start = rng.randrange(60, 300) * ratio // 4
            tracker.admit(
                f"r{step}", policy=rng.randrange(3), key=rng.getrandbits(60), num_known_tokens=start
            )
        if live and rng.random() < 0.1:
            gone = rng.choice(list(live))
            tracker.finish(gone)
            del live[gone]
        if not live:
            continue
        order = rng.sample(list(live), len(live))
        rows = tracker.step([(name, live[name], 1) for name in order])
        live = {name: position + 1 for name, position in live.items()}
        num_slots = (rows.positions + 1) // ratio
        scores = torch.randn(len(LAYERS), len(order), SLOTS, generator=generator)
        chosen = device_step(device, rows, num_slots, scores)
        host.begin(rows)
        for index, layer in enumerate(LAYERS):
            plan = host.plan(layer, rows, num_slots)
            wanted = [b[b >= 0].tolist() for b in plan.blocks]
            assert chosen[index] == wanted, step
            compact = torch.full((len(order), plan.blocks.shape[1] * BLOCK), torch.nan)
            for row, blocks in enumerate(wanted):
                slots = [b * BLOCK + i for b in blocks for i in range(BLOCK)]
                slots = [s for s in slots if s < num_slots[row]]
                compact[row, : len(slots)] = scores[index, row, slots]
            host.learn(layer, compact)
    assert device.outcomes.tolist() == host.outcomes.tolist()
    assert device.fallbacks.tolist() == host.fallbacks.tolist()
    assert host.outcomes[:, :4].min() > 0
    assert torch.equal(device.histories.vertical[:, :SLOTS].cpu(), host.state.vertical)
    assert torch.equal(device.histories.diagonal[:, : SLOTS + 1].cpu(), host.state.diagonal)


@pytest.mark.parametrize("seed", [0, 1])
def test_digest_tells_layers_that_chose_or_remember_otherwise(seed: int) -> None:
    def one(seed: int) -> DeviceLayers:
        sizes = {"num_states": 2, "num_rows": 3, "max_slots": SLOTS, "compress_ratio": 4}
        options = SpinOptions(block_size=BLOCK, top_k=TOP_K, seed=seed)
        return DeviceLayers(
            LAYERS, options, table(DEVICE), dense_slots=DENSE, device=DEVICE, **sizes
        )

    generator = torch.Generator().manual_seed(0)
    first, second = one(0), one(seed)
    tracker = RequestTracker(2)
    for name in "ab":
        tracker.admit(name, policy=1, key=5, num_known_tokens=400)
    chosen, found = [], []
    for position in range(400, 404):
        rows = tracker.step([(name, position, 1) for name in "ab"])
        scores = torch.randn(len(LAYERS), 2, SLOTS, generator=generator)
        num_slots = (rows.positions + 1) // 4
        chosen.append([device_step(x, rows, num_slots, scores) for x in (first, second)])
        found.append([layers.digest() for layers in (first, second)])
    assert len({tuple(one["choices"]) for one, _ in found}) > 2
    for (blocks, other_blocks), (digest, other) in zip(chosen, found, strict=True):
        same = [a == b for a, b in zip(blocks, other_blocks, strict=True)]
        pairs = zip(digest["choices"], other["choices"], strict=True)
        assert [a == b for a, b in pairs] == same
    assert (found[-1][0] == found[-1][1]) == (seed == 0)
    # A row of padding, and blocks past the listed ones, hold what an earlier step left there.
    before = first.digest()
    first._plan.blocks[:, 2] = 99
    first._plan.blocks[:, 0, -1] = 99
    assert first.digest() == before
    first.histories.diagonal[-1, 3] += 1.0
    after = first.digest()
    assert after["choices"] == before["choices"]
    assert [a == b for a, b in zip(after["histories"], before["histories"], strict=True)] == [
        True,
        False,
    ]
    assert first.digest(histories=False) == {"choices": before["choices"]}


@pytest.mark.parametrize(("history", "size"), [("float32", 4), ("bfloat16", 2)])
def test_size_is_known_before_anything_is_made_and_grows_with_the_places(
    history: HistoryType, size: int
) -> None:
    options = SpinOptions(history=history)
    layers = DeviceLayers(
        LAYERS,
        options,
        table(DEVICE),
        num_states=3,
        num_rows=5,
        max_slots=1000,
        compress_ratio=4,
        dense_slots=options.top_k,
        device=DEVICE,
    )
    sizes = {"num_rows": 5, "max_slots": 1000, "num_policies": table(DEVICE).capacity}
    taken = [device_bytes(len(LAYERS), num_states=n, history=history, **sizes) for n in (3, 4, 5)]
    assert layers.num_bytes == taken[0]
    # V by 16 blocks of 64 slots, D by one offset more, 12 bytes a block, where D's maxima were
    # taken, and the steps.
    state = size * (1024 + 1025) + 12 * 16 + 8 + 4
    assert taken[1] - taken[0] == taken[2] - taken[1] == len(LAYERS) * state


def test_every_layers_block_table_is_aligned_for_reads_of_several_pages() -> None:
    sizes = {"num_states": 1, "num_rows": 3, "max_slots": 13 * BLOCK, "compress_ratio": 4}
    options = SpinOptions(block_size=BLOCK, top_k=TOP_K)
    device = DeviceLayers(LAYERS, options, table(DEVICE), dense_slots=TOP_K, device=DEVICE, **sizes)
    pages = torch.zeros(3, 13, dtype=torch.int32, device=DEVICE)
    for layer in LAYERS:
        assert device.table(layer, pages).data_ptr() % 16 == 0
        assert device.table(layer, pages).stride(0) % 4 == 0


def test_step_of_nobody_changes_no_history() -> None:
    device = device_layers()
    device.warm_up()
    device.begin(None)  # a capture: slots of state that others use, lengths of nothing real
    scores = torch.randn(len(LAYERS), STATES, SLOTS)
    chosen = device_step_without_rows(device, torch.tensor([120, 90, 0, 7, 64]), scores)
    assert [len(blocks) for blocks in chosen[0]] == [15, 12, 0, 1, 8]
    assert not device.histories.vertical.any()
    assert not device.histories.steps.any()
    assert not device.outcomes.any()


def test_padding_after_a_larger_step_touches_no_history() -> None:
    """A replayed graph has rows for the largest batch, and lengths that an earlier step left."""
    device = device_layers()
    tracker, names = RequestTracker(STATES), [f"r{n}" for n in range(STATES)]
    for number, name in enumerate(names):
        tracker.admit(name, policy=0, key=number, num_known_tokens=400)
    lengths, scores = torch.full((STATES,), 100), torch.ones(len(LAYERS), STATES, SLOTS)
    device_step(device, tracker.step([(name, 400, 1) for name in names]), lengths, scores)
    for name in names[1:]:
        tracker.finish(name)
    before = device.histories.vertical.clone()
    device_step(device, tracker.step([("r0", 401, 1)]), lengths, scores)
    changed = (device.histories.vertical != before).any(1).nonzero()[:, 0].tolist()
    assert changed == [index * STATES for index in range(len(LAYERS))]


def device_step_without_rows(
    layers: DeviceLayers, num_slots: torch.Tensor, scores: torch.Tensor
) -> list[list[list[int]]]:
    begin = layers.begin
    layers.begin = lambda _: begin(None)  # type: ignore[method-assign]
    rows = RequestTracker(1).step([])
    return device_step(layers, rows, num_slots, scores)
