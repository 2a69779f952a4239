"""A tokenizer of one token per byte."""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = ("<bos>", "<eos>")
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PRINTABLE_IDS = [
    len(_SPECIAL) + _ALPHABET.index(c) for c in string.ascii_letters + string.digits + ".,;:-!?"
] + [len(_SPECIAL) + _ALPHABET.index("Ġ")]  # how a byte-level alphabet writes a space


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: 256 bytes, a beginning and an end."""
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *_ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
