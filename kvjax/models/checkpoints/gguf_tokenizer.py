"""Tokenizers in the metadata of GGUF files: byte-level BPE, and SentencePiece's BPE with scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_KEY = "tokenizer.ggml."
_CONTROL, _UNKNOWN, _USER_DEFINED = 3, 2, 4
"""Kinds of tokens in the format that are matched in a text before it is split."""
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
"""Names of special tokens in transformers, and in GGUF (including its misspelling)."""

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cased(digits: str, after_marks: str = r"[\r\n]*") -> str:
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+{after_marks}|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(ending: str, digits: str) -> str:
    # A word ends where a capital follows a small letter.
    begins = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{begins}{_UPPER}*{_LOWER}+{ending}|{begins}{_UPPER}+{_LOWER}*{ending}|{digits}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


class _Split(NamedTuple):
    """Rules for splitting a text before BPE.

    Args:
        patterns: patterns whose matches are split off, applied one after the other.
        composed: True if characters are composed (NFC) first.
        ignores_merges: True if a word that is a token skips the merges.
        begins: True if texts begin with the bos token by default.
    """

    patterns: tuple[str, ...]
    composed: bool = False
    ignores_merges: bool = False
    begins: bool = False


_GPT4 = _Split((_cased(r"\p{N}{1,3}"),))
_LLAMA3 = _GPT4._replace(ignores_merges=True, begins=True)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_MARKED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[str, _Split] = {
    "default": _Split((r"[\p{P}$+<=>^~|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4"), _Split((_WORDS,))),
    **dict.fromkeys(("mpt", "olmo"), _Split((_WORDS,), composed=True)),
    "falcon": _Split((r"[\p{P}$+<=>^~|`]+", _WORDS, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _GPT4),
    "command-r": _Split((r"\p{N}", _WORDS), composed=True),
    "seed-coder": _Split((_cased(r"\p{N}", after_marks=""),)),
    "hunyuan-dense": _Split((r"\p{N}{1,3}", _CJK, _MARKED)),
    "gpt-4o": _Split((_by_case("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),)),
    "tekken": _Split((_by_case("", r"\p{N}"),), ignores_merges=True, begins=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split((_cased(r"\p{N}"),), composed=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Split((r"\p{N}", _WORDS))),
}
"""Splits by their names in `tokenizer.ggml.pre`."""


def check_split(metadata: Mapping[str, Any]) -> None:
    """Refuse a file with byte-level BPE whose rules for splitting a text are unknown."""
    name = metadata.get(_KEY + "pre", "default")
    if metadata.get(_KEY + "model") == "gpt2" and name not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(_SPLITS)}")


def gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Make the tokenizer of a GGUF file.

    Returns:
        The tokenizer, and arguments for transformers' PreTrainedTokenizerFast: special tokens and the chat template.
    """
    kind, tokens = str(metadata.get(_KEY + "model")), metadata.get(_KEY + "tokens")
    if kind not in _MODELS or not isinstance(tokens, list):
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; supported are {', '.join(_MODELS)}, with a list of tokens")
    tokenizer, begins = _MODELS[kind](metadata, tokens)
    roles = {role: _token(metadata, tokens, f"{key}_token_id") for role, key in _ROLES.items()}
    special, user_defined = _added(metadata, tokens, {content for content in roles.values() if content is not None})
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(user_defined)
    _add_ends(tokenizer, metadata, roles, begins)
    settings: dict[str, Any] = {f"{role}_token": content for role, content in roles.items() if content is not None}
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    return tokenizer, settings


def _token(metadata: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    token = metadata.get(_KEY + key)
    if token is None:
        return None
    if not 0 <= token < len(tokens):
        if key not in (
            "bos_token_id",
            "eos_token_id",
        ):  # models with fewer tokens than their tokenizer's library expects
            return None
        raise ValueError(f"{_KEY}{key} is {token}, and there are {len(tokens)} tokens")
    return tokens[token]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Make a byte-level BPE tokenizer as in GPT-2 (Radford et al., 2019) that splits texts by the file's rules."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    check_split(metadata)
    split = _SPLITS[metadata.get(_KEY + "pre", "default")]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(_KEY + "merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.ignores_merges))
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    pieces = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    words = pre_tokenizers.Sequence([*pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.pre_tokenizer = words  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer, split.begins


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Make a SentencePiece BPE tokenizer, which merges to the piece of the highest score and falls back to bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get(_KEY + "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores must have a score for each of the {len(tokens)} tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [
        (-scores[i], vocabulary[head], vocabulary[tail], head, tail)
        for token, i in vocabulary.items()
        for head, tail in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if head in vocabulary and tail in vocabulary
    ]
    pairs = [(head, tail) for *_, head, tail in sorted(merges)]
    unknown = _token(metadata, tokens, "unknown_token_id")
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get(_KEY + "add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    tokenizer.normalizer = normalizer  # type: ignore[assignment]
    read: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(read + [decoders.Strip(" ", 1, 0)] * prefix)  # type: ignore[assignment]
    return tokenizer, True


_MODELS: Mapping[str, Callable[[Mapping[str, Any], list[str]], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _added(
    metadata: Mapping[str, Any], tokens: list[str], role_tokens: set[str]
) -> tuple[list[AddedToken], list[AddedToken]]:
    """Return the tokens that are matched in a text before it is split: special ones, and others."""
    from tokenizers import AddedToken

    kinds = metadata.get(_KEY + "token_type") or [1] * len(tokens)
    phi3 = _is_phi3(metadata)
    special, user_defined = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        strips = phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
        if kind in (_CONTROL, _UNKNOWN) or token in role_tokens:
            special.append(AddedToken(token, rstrip=strips, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            user_defined.append(AddedToken(token, rstrip=strips, normalized=False))
    return special, user_defined


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer is that of Phi-3, whose special tokens include the whitespace after them.

    No metadata says so. As in llama.cpp, a name counts, since some files of Phi-3 have the architecture of Llama, and
    byte-level BPE does not: the architecture also includes Phi-4, whose tokens llama.cpp leaves as they are.
    """
    name = str(metadata.get("general.name")).lower()
    phi3 = metadata.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name
    return phi3 and metadata[_KEY + "model"] == "llama"


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], roles: Mapping[str, str | None], begins: bool) -> None:
    """Add the bos and eos tokens that the model expects at the ends of a text."""
    from tokenizers import processors

    ends = {
        "bos": metadata.get(_KEY + "add_bos_token", begins),
        "eos": metadata.get(_KEY + "add_eos_token", False),
    }
    added = {role: token for role, adds in ends.items() if adds and (token := roles[role]) is not None}
    if added:
        parts = [added.get("bos"), "$A", added.get("eos")]
        template = processors.TemplateProcessing(
            single=[part for part in parts if part is not None],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in added.values()],
        )
        tokenizer.post_processor = template  # type: ignore[assignment]
