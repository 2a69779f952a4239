"""The tiny model: reproducible, loadable elsewhere, and careful with folders."""

import concurrent.futures
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spin_server.cli.main import main
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config


def test_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert write_checkpoint(tmp_path / name, tiny_config({}), seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b
    assert a != c


def test_written_model_is_kept_and_another_recipe_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    assert write_checkpoint(folder, tiny_config({}), 0)
    assert not write_checkpoint(folder, tiny_config({}), 0)
    assert write_checkpoint(folder, tiny_config({"index_n_heads": 8}), 0)
    weights = load_file(folder / "model.safetensors")
    assert weights["layers.1.attn.indexer.wq_b.weight"].shape == (8 * 128, 64)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tiny.lock", "tiny"]


def test_damaged_model_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    for damage in ("model.safetensors", "tokenizer.json"):
        write_checkpoint(folder, tiny_config({}), 0)
        (folder / damage).unlink()
        assert write_checkpoint(folder, tiny_config({}), 0)
        assert (folder / damage).is_file()
    (folder / "model.safetensors").write_bytes(b"short")
    assert write_checkpoint(folder, tiny_config({}), 0)
    assert not write_checkpoint(folder, tiny_config({}), 0)


def test_two_at_once_write_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda _: write_checkpoint(folder, tiny_config({}), 0), range(4)))
    assert written.count(True) == 1


def test_someone_elses_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["tiny-model", str(tmp_path)]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "index_heads=8"], "--set index_heads: expected an entry"),
        (["--set", "index_n_heads"], "--set: expected KEY=JSON"),
        (["--set", "index_n_heads=many"], "--set: expected KEY=JSON"),
        (["--set", "num_hidden_layers=5"], "compress_ratios: expected 6 entries"),
        (["--seed", "-1"], "--seed: expected 0 to 2**63 - 1"),
        (["--seed", "9" * 23], "--seed: expected 0 to 2**63 - 1"),
        (["--set", "hidden_size=-1"], "--set hidden_size: expected a whole number, 0 or more"),
        (["--set", 'vocab_size="x"'], "--set vocab_size: expected a whole number"),
        (["--set", "num_hidden_layers=null"], "--set num_hidden_layers: expected a whole"),
        (["--set", "num_hidden_layers=true"], "--set num_hidden_layers: expected a whole"),
    ],
)
def test_bad_option_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["tiny-model", str(tmp_path / "tiny"), *options]) == 2
    assert capsys.readouterr().err.startswith(f"spin-server: {message}")
    assert not list(tmp_path.iterdir())


def test_transformers_loads_every_weight(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM

    folder = tmp_path / "tiny"
    write_checkpoint(folder, tiny_config({}), 0)
    model, report = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert model.config.index_topk == 512
    text = 'naïve — "日本"\n\t'
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(tokenizer)
