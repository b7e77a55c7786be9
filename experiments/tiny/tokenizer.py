"""A byte-level BPE with single digits as tokens, and texts as arrays of its ids."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.tiny.planted_facts import ASSISTANT, END, PAD, SPECIAL, USER

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\\n' + message['content'] + '<|endoftext|>' }}"
    "{% else %}{{ '<|user|>\\n' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_SAMPLE = 8_000_000  # characters of each file for learning the merges


def _sample(texts: Sequence[str], piece: int = 20_000) -> Iterator[str]:
    """Yield pieces spread over each text, so a long text does not dominate a short one."""
    for text in texts:
        stride = max(1, len(text) // _SAMPLE) * piece
        for start in range(0, len(text), stride):
            yield text[start : start + piece].replace(END, "\n")


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE whose digits are separate tokens.

    Args:
        texts: texts for learning the merges.
        vocab_size: number of tokens, special tokens and the 256 bytes included.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 256 + len(SPECIAL):
        raise ValueError(f"A byte-level vocabulary of {vocab_size} is too small: use at least {256 + len(SPECIAL)}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,  # type: ignore[call-arg]
        special_tokens=list(SPECIAL),  # type: ignore[call-arg]
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # type: ignore[call-arg]
        show_progress=False,  # type: ignore[call-arg]
    )
    tokenizer.train_from_iterator(_sample(texts), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template included, as transformers reads them."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return ids of a long text, encoded line by line in parallel: no token crosses the end of a line's first break."""
    lines, start = [], 0
    while start < len(text):  # split at line breaks before a letter, as the pre-tokenizer does
        stop = start + 20_000
        while 0 < (stop := text.find("\n", stop)) < len(text) - 1 and text[stop + 1].isspace():
            stop += 1
        stop = len(text) if stop < 0 else stop + 1
        lines.append(text[start:stop])
        start = stop
    encoded = tokenizer.encode_batch(lines, add_special_tokens=False)
    return np.concatenate([np.asarray(e.ids, np.uint16) for e in encoded])


def prepare(texts: Sequence[Path], valid: Sequence[Path], directory: Path, vocab_size: int) -> dict[str, Any]:
    """Train the tokenizer and write every text as ids; training then needs no text.

    Args:
        texts: UTF-8 files to train on, documents separated by `<|endoftext|>`.
        valid: UTF-8 files to report losses on.
        directory: receives tokenizer.json, tokens.npz and data.json.
        vocab_size: number of tokens, 260 to 65535.
    """
    directory.mkdir(parents=True, exist_ok=True)
    contents = {path: path.read_text("utf-8").strip() for path in (*texts, *valid)}
    for path, content in contents.items():
        if not content:
            raise ValueError(f"{path} holds no text: give files with text in them.")
    tokenizer = train_tokenizer([contents[path] for path in texts], vocab_size)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    arrays = {path.stem: _encode(tokenizer, content) for path, content in contents.items()}
    np.savez_compressed(directory / "tokens.npz", **arrays)  # type: ignore[arg-type]
    described = {
        "vocab_size": tokenizer.get_vocab_size(),
        "train": [path.stem for path in texts],
        "valid": [path.stem for path in valid],
        "bytes": {path.stem: len(content.encode()) for path, content in contents.items()},
        "tokens": {name: len(ids) for name, ids in arrays.items()},
    }
    (directory / "data.json").write_text(json.dumps(described, indent=2) + "\n")
    return described


def read_prepared(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the output of `prepare`: its description and the ids by name."""
    file = directory / "data.json"
    if not file.is_file():
        raise ValueError(f"{file} is missing: prepare the data first with `--text FILES --prepare {directory}`.")
    try:
        with np.load(directory / "tokens.npz") as stored:
            return json.loads(file.read_text()), {name: stored[name] for name in stored.files}
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{directory / 'tokens.npz'} cannot be read ({error}): prepare the data again.") from error
