"""Special tokens and punctuation, of small tokenizers built here and of real ones where they are at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.models.tokenizer import is_punctuation, read_tokenizer, token_classes
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
    assert "whole" not in vars(tokenizer)
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
    assert "whole" not in vars(tokenizer) and ids == theirs.encode("<|user|>\nHi<|endoftext|>")
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
