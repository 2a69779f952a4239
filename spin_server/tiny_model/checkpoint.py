"""Write the tiny model to a folder, once."""

import fcntl
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from spin_server.errors import InputError

# Names what made the folder; without it a folder is somebody else's and is left alone.
_RECIPE = "tiny_model.json"
_RECIPE_VERSION = 1
_WEIGHTS = "model.safetensors"


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int) -> bool:
    """Write config, tokenizer and weights; all of them, or none.

    Args:
        folder: where; an earlier tiny model there is replaced if its recipe differs.
        config: from `tiny_config`.
        seed: of the weights.

    Returns:
        False if the folder already held this very model.

    Raises:
        InputError: the folder holds something else, or cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Two that start together must not replace each other's model.
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _write_locked(folder, config, seed)
    except OSError as error:
        raise InputError(str(folder), "a folder that can be written", error.strerror) from None


def _is_whole(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether the folder holds this recipe's model, with all its weights."""
    try:
        found = json.loads((folder / _RECIPE).read_text())
        return bool(
            found == {**recipe, "weights_bytes": (folder / _WEIGHTS).stat().st_size}
            and (folder / "tokenizer.json").is_file()
            and (folder / "config.json").is_file()
        )
    except (OSError, ValueError):
        return False


def _write_locked(folder: Path, config: dict[str, Any], seed: int) -> bool:
    recipe = {"version": _RECIPE_VERSION, "seed": seed, "config": config}
    if (folder / _RECIPE).is_file():
        if _is_whole(folder, recipe):
            return False
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            str(folder), "a new or empty folder, or an earlier tiny model", "others' files"
        )

    from safetensors.torch import save_file

    from spin_server.tiny_model.tokenizer import write_tokenizer
    from spin_server.tiny_model.weights import tiny_weights

    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        (fresh / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_tokenizer(fresh)
        weights = fresh / _WEIGHTS
        save_file(tiny_weights(config, seed), weights, metadata={"format": "pt"})
        weights.chmod(0o644)
        recipe["weights_bytes"] = weights.stat().st_size
        (fresh / _RECIPE).write_text(json.dumps(recipe) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True
