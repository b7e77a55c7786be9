"""Special tokens and punctuation, of small tokenizers built here and of real ones where they are at hand."""

from __future__ import annotations

import base64
import functools
import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.models.tokenizer import TextBound, is_punctuation, lazy_tokenizer, read_tokenizer, text_bound, token_classes
from kvjax.models.tokenizer_files import MOST_GROWTH, growth_of
from kvjax.tiny import WEIGHTS
from tests.paths import ROOT

REAL = Path(os.environ.get("KVJAX_TOKENIZERS", ROOT.parent / "shared/data/tokenizers"))
"""A directory with one tokenizer.json in each of its folders."""


def spelled(found, tokenizer) -> set[str]:
    return {str(tokenizer.decode(list(marker))).strip() for marker in found.markers}


def sentencepiece() -> PreTrainedTokenizerFast:
    """Words with a marker for the space before them, like Llama's, and bytes as a last resort."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁a", "b", ".", "▁.", "▁,", "_.", "▁_", "...", "[", "▁[", "INST", "]", "/"]
    pieces += ["<0x2E>", "<0x41>", "<", ">>", "\n", ".\n", "»", "$", "I", "N", "S", "T", "a", "▁b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("I", "N"), ("IN", "S"), ("INS", "T"), ("▁", "["), ("▁", "a"), ("▁", "b"), ("▁", "."), ("▁", ",")]
    vocab |= {"IN": len(vocab), "INS": len(vocab) + 1, ",": len(vocab) + 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("text", ["Once upon a time", "naïve café – 東\n\n", "<|user|>\nHi, 42!<|endoftext|>", ""])
def test_ids_and_texts_need_no_transformers(text):
    tokenizer = read_tokenizer(WEIGHTS)
    ids, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    texts = tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)
    assert "transformers" not in vars(tokenizer)
    whole = PreTrainedTokenizerFast.from_pretrained(WEIGHTS)
    assert ids == whole(text)["input_ids"] == tokenizer(text).input_ids and plain == whole.encode(
        text, add_special_tokens=False
    )
    assert texts == (whole.decode(ids), whole.decode(ids, skip_special_tokens=True))
    assert len(tokenizer) == len(whole) and tokenizer.chat_template == whole.chat_template


@pytest.mark.parametrize("split", [False, True])
def test_special_tokens_of_a_text_are_split_where_the_settings_say_so(tmp_path, split):
    (tmp_path / "tokenizer.json").write_text((WEIGHTS / "tokenizer.json").read_text())
    settings = json.loads((WEIGHTS / "tokenizer_config.json").read_text()) | {"split_special_tokens": split}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, theirs = read_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = tokenizer.encode("<|user|>\nHi<|endoftext|>")
    assert "transformers" not in vars(tokenizer) and ids == theirs.encode("<|user|>\nHi<|endoftext|>")
    assert {0, 2}.isdisjoint(ids) == split and tokenizer.decode(ids) == "<|user|>\nHi<|endoftext|>"


@pytest.mark.parametrize("extra", [["<image>"], {"image_token": "<image>"}])
def test_extra_special_tokens_are_those_of_transformers(tmp_path, extra):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "once": 1}, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": extra}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = read_tokenizer(tmp_path)
    assert ours.encode("once<image>") == theirs.encode("once<image>") == [1, 2]
    assert token_classes(ours).special == token_classes(theirs).special


def test_a_special_token_that_only_the_settings_name(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "once": 1}, unk_token="<unk>"))
    words.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_tokenizer(tmp_path).encode("once<end>") == [1, 2]


def test_a_tokenizer_with_space_markers():
    tokenizer = sentencepiece()
    found = token_classes(tokenizer)
    names = tokenizer.convert_ids_to_tokens(list(found.punctuation))
    assert set(names) == {".", "▁.", "▁,", ",", "_.", "▁_", "...", "[", "▁[", "]", "/", "<0x2E>", "»"}
    assert set(tokenizer.convert_ids_to_tokens(list(found.special))) == {"<s>", "</s>", "<unk>"}
    spellings = [tokenizer.convert_ids_to_tokens(list(marker)) for marker in found.markers]
    assert ["▁[", "INST", "]"] in spellings and ["[", "INST", "]"] in spellings
    assert {"[INST]", "[/INST]"} <= spelled(found, tokenizer)


def test_the_embedded_models_byte_level_tokenizer():
    model = kvjax.load("tiny")
    found = model.token_classes
    assert found is model.token_classes
    assert set(found.special) == {
        model.tokenizer.convert_tokens_to_ids(name) for name in model.tokenizer.all_special_tokens
    }
    for text in (".", ",", "?", "!", '"', ":", ";"):
        (token,) = model.tokenizer.encode(text, add_special_tokens=False)
        assert token in found.punctuation
    for text in ("a", "\n", " ", "1", "$"):
        assert not set(model.tokenizer.encode(text, add_special_tokens=False)) & set(found.punctuation)


def test_a_marker_that_is_one_token_is_a_special_token():
    tokenizer = sentencepiece()
    tokenizer.add_tokens(["[INST]"])
    found = token_classes(tokenizer)
    assert tokenizer.convert_tokens_to_ids("[INST]") in found.special
    assert "[INST]" not in spelled(found, tokenizer)


PUNCTUATION = (".", " .", "▁?!", "_.", "\u201c")
OTHER = ("", " ", "\n", ".\n", "a.", "$", "\ufffd")


@pytest.mark.parametrize("text", PUNCTUATION + OTHER)
def test_punctuation(text):
    assert is_punctuation(text) is (text in PUNCTUATION)


@pytest.mark.parametrize("name", ["llama2", "gpt2", "falcon", "gpt_neox_mpt"])
def test_real_tokenizers(name):
    file = REAL / name / "tokenizer.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    ends = {"llama2": "</s>"}.get(name, "<|endoftext|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=ends)
    found = token_classes(tokenizer)
    assert tokenizer.eos_token_id in found.special
    assert not set(found.special) & set(found.punctuation)
    punctuation = set(found.punctuation)
    for text in (".", ":", "?", "!", ",", ";", "-", '"'):
        assert set(tokenizer.encode("word" + text, add_special_tokens=False)[-1:]) <= punctuation, text
    for text in ("word", "\n", "  ", "7", "$", "<s>"):
        assert tokenizer.encode(text, add_special_tokens=False)[-1] not in punctuation, text
    # Whatever stands before a marker, its tokens are found in the text.
    for before in ("", ends, "Hello ", "one\n", "end. "):
        ids = tokenizer.encode(before + "[INST] Hi! [/INST]", add_special_tokens=False)
        matched = [m for m in found.markers if any(tuple(ids[i : i + len(m)]) == m for i in range(len(ids)))]
        assert {str(tokenizer.decode(list(m))).strip() for m in matched} == {"[INST]", "[/INST]"}, (before, ids)


def replace(text: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: text}, "content": content}


DOUBLED = [replace("a", "aa")] * 40
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
BACKTRACKS = "(a+)+$"
SPLITS = {"type": "Split", "pattern": {"Regex": BACKTRACKS}, "behavior": "Isolated", "invert": False}


def spoiled(directory: Path, settings: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The embedded model's tokenizer with other rules and settings."""
    content = json.loads((WEIGHTS / "tokenizer.json").read_text()) | changes
    (directory / "tokenizer.json").write_text(json.dumps(content))
    given = json.loads((WEIGHTS / "tokenizer_config.json").read_text()) | (settings or {})
    (directory / "tokenizer_config.json").write_text(json.dumps(given))
    return directory


@pytest.mark.parametrize(
    ("changes", "much"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": DOUBLED}}, r"up to 2\.2e\+12 times"),
        ({"normalizer": {"normalizers": DOUBLED}}, r"up to 2\.2e\+12 times"),  # which is read, too
        ({"normalizer": replace("", "x")}, "without bounds"),
        ({"normalizer": replace(".", "x" * 1000, "Regex")}, r"up to 2e\+03 times"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 1000}}, r"up to 2e\+03 times"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAA"}}, "without bounds"),
        ({"decoder": {"type": "Sequence", "decoders": DOUBLED}}, r"up to 1\.1e\+12 times"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 12}}, r"up to 4\.1e\+03 times"),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
                    "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
                    "special_tokens": {},
                }
            },
            r"up to 2e\+03 times",
        ),
    ],
)
def test_rules_that_could_take_all_memory_are_refused(tmp_path: Path, changes: dict[str, Any], much: str) -> None:
    with pytest.raises(ValueError, match=rf"tokenizer\.json lengthens texts {much}, more than {MOST_GROWTH} times"):
        read_tokenizer(spoiled(tmp_path, **changes))


def test_rules_of_real_tokenizers_lengthen_texts_little() -> None:
    assert growth_of(json.loads((WEIGHTS / "tokenizer.json").read_text())) == 2
    llama = [{"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")]
    assert growth_of({"normalizer": {"type": "Sequence", "normalizers": llama}}) == 2
    content = (3).to_bytes(4, "little") + b"abc" + b"longest\0a\0"
    charsmap = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}
    assert growth_of({"normalizer": charsmap}) == len("longest")


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre_tokenizer": SPLITS}, "Regex search error: retry-limit"),
        ({"normalizer": replace(BACKTRACKS, "x", "Regex")}, "Regex search error: retry-limit"),
        ({"normalizer": replace("", "x", "Regex")}, "index out of bounds"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAA"}}, "index out of bounds"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}}, "Missing .*UNK.* token"),
    ],
)
def test_a_tokenizer_that_fails_on_a_text_is_named(
    tmp_path: Path, changes: dict[str, Any], reason: str, eager: bool
) -> None:
    settings = {"bos_token": None, "eos_token": None} | ({"clean_up_tokenization_spaces": True} if eager else {})
    tokenizer = read_tokenizer(spoiled(tmp_path, settings, added_tokens=[], post_processor=None, **changes))
    for encode in (tokenizer.encode, tokenizer):
        with pytest.raises(ValueError, match=rf"the tokenizer in {tmp_path} fails on a text \(.*{reason}"):
            encode("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!")


def test_a_decoder_that_fails_is_named(tmp_path: Path) -> None:
    strip = {"type": "Strip", "content": "a", "start": 10**12, "stop": 10**12}
    tokenizer = read_tokenizer(spoiled(tmp_path, decoder=strip))
    for decode in (tokenizer.decode, lambda ids: tokenizer.batch_decode([ids])):
        with pytest.raises(ValueError, match=r"fails on a text .*index out of bounds"):
            decode(tokenizer.encode("a"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", [{"name": "default"}]),
        ("chat_template", ["{{ a }}"]),
        ("chat_template", 3),
        ("eos_token", 3),
        ("eos_token", {"content": None}),
        ("additional_special_tokens", 3),
        ("extra_special_tokens", "<a>"),
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("added_tokens_decoder", []),
        ("tokenizer_class", []),
        ("model_max_length", "x"),
    ],
)
def test_settings_of_another_kind_are_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {name} is .*, not "):
        read_tokenizer(spoiled(tmp_path, {name: value}))


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json"])
def test_other_files_of_a_tokenizer_are_named(tmp_path: Path, name: str) -> None:
    (spoiled(tmp_path) / name).write_text("[]")
    with pytest.raises(ValueError, match=rf"{name} must hold a JSON object, not list"):
        read_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 text"):
        read_tokenizer(tmp_path)


def of_bytes(normalizer: Any = None, **added: Any) -> Tokenizer:
    """Like SentencePiece's: bytes as a last resort."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "a": 257, "\u2581a": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "a")], byte_fallback=True, fuse_unk=True))
    rules = [normalizers.Replace(" ", "\u2581"), *([normalizer] if normalizer else [])]
    tokenizer.normalizer = normalizers.Sequence(rules)  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken("<end>", **added)])
    return tokenizer


LETTERS = st.sampled_from("a e\u0301\u1100\u1161\u11a8\x04\n\U0001f600\uffff\U00050000")


@given(st.text(LETTERS | st.characters(exclude_categories=["Cs"])))
@hypothesis.settings(max_examples=60)
def test_no_text_has_fewer_tokens_than_its_bound(text: str) -> None:
    for tokenizer, bound in bounds():
        assert bound is not None
        assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


BOUNDED = (of_bytes(), of_bytes(normalizers.NFC()), of_bytes(normalizers.Strip()), of_bytes(rstrip=True))


@functools.cache
def bounds() -> list[tuple[Any, TextBound | None]]:
    tokenizers = kvjax.load("tiny").tokenizer, *(lazy_tokenizer(each, {}) for each in BOUNDED)
    return [(tokenizer, text_bound(tokenizer)) for tokenizer in tokenizers]


def test_bounds_come_from_the_longest_token() -> None:
    assert [bound for _, bound in bounds()[1:]] == [
        TextBound(6, True),
        TextBound(24, True),
        TextBound(6, False),
        TextBound(6, False),
    ]
    assert text_bound(lazy_tokenizer(of_bytes(normalizers.StripAccents()), {})) is None
    assert text_bound(lazy_tokenizer(of_bytes(normalizers.Replace("b", "")), {})) is None
    assert text_bound(lazy_tokenizer(of_bytes(normalizers.Replace(Regex("b+"), "b")), {})) is None
    assert text_bound(sentencepiece()) is None  # a word of any length may be one unknown token
    assert kvjax.load("tiny").least_tokens("a" * 1300) == 100
