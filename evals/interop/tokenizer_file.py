"""CLIP's tokenizer as `tokenizer.json`, the format of Hugging Face's tokenizers and of transformers.js."""

from __future__ import annotations

from typing import Any

from sparo_train.data.examples.image_text import EOT, SOT, byte_pairs


def tokenizer_json(context_length: int) -> dict[str, Any]:
    """Return the tokenizer, which adds SOT and EOT and cuts captions to `context_length` ids.

    Unlike ours, it repairs neither broken characters (ftfy) nor HTML entities.
    """
    bpe = byte_pairs()
    special = ["<start_of_text>", "<end_of_text>"]
    ends = {"sep": [special[1], EOT], "cls": [special[0], SOT]}
    # Our pattern also matches the names of the special tokens, which tokenizers find by themselves.
    words = bpe.pat.pattern.split("|", 2)[2]
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": context_length, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [
            {
                "id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True,
            }
            for number, name in zip((SOT, EOT), special, strict=True)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFC"},
                {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
                {"type": "Lowercase"},
            ],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": words}, "behavior": "Removed", "invert": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": {"type": "RobertaProcessing", **ends, "trim_offsets": False, "add_prefix_space": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": special[1],
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "</w>",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(bpe.encoder),
            "merges": [" ".join(pair) for pair in bpe.bpe_ranks],
        },
    }  # fmt: skip
