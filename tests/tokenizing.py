"""Small tokenizers of each kind, for tests of texts."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
LETTERS = "Onceupatim,o!"


def _pretrained(tokenizer: Tokenizer, **settings: Any) -> Any:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **settings
    )


def sentencepiece(strips: bool = True, metaspace: bool = False, begins: bool = True, **settings: Any) -> Any:
    """Llama's form, or without the space that decoding strips Gemma's; or with the decoder Metaspace."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    merges = [(word[:end], word[end]) for word in ("▁time", "time", "▁upon", "▁a") for end in range(1, len(word))]
    merges = list(dict.fromkeys(merges))
    vocabulary = {name: i for i, name in enumerate([*names, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if strips else spaces  # type: ignore
    read: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Metaspace() if metaspace else decoders.Sequence(read + [decoders.Strip(" ", 1, 0)] * strips)
    made.decoder = decoder  # type: ignore[assignment]
    if begins:
        made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return _pretrained(made, **settings)


def byte_level(**settings: Any) -> Any:
    """GPT-2's form, with tokens that are parts of characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("i", "m"), ("Ġt", "im"), ("Ġtim", "e"), ("ð", "Ł")]
    names = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return _pretrained(made, **settings)


def words(size: int = 64, special: tuple[int, ...] = (), letter: str = "w", **settings: Any) -> Any:
    """Tokens w0, w1, ... with spaces between, of which some are special."""
    made = Tokenizer(models.WordLevel({f"{letter}{i}": i for i in range(size)}, unk_token=f"{letter}1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    made.add_special_tokens(
        [AddedToken(f"{letter}{i}", special=True, normalized=False, single_word=True) for i in special]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=f"{letter}1", **settings)
