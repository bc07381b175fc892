"""CLIP's tokenizer as `tokenizer.json`, the format of Hugging Face's tokenizers and of transformers.js."""

from __future__ import annotations

import unicodedata
from typing import Any

from sparo_train.data.examples.image_text import EOT, SOT, byte_pairs

# Repairs of ftfy and of html.unescape that are common in captions.
_QUOTES = ((r"[\u02bc\u2018-\u201b]", "'"), (r"[\u201c-\u201f]", '"'))
_LIGATURES = "\u0132\u0133\u0149\u01c4\u01c5\u01c6\u01c7\u01c8\u01c9\u01ca\u01cb\u01cc\u01f1\u01f2\u01f3\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06"
_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&apos;": "'", "&nbsp;": " "}


def _repairs() -> list[dict[str, Any]]:
    """Return normalizers that replace curly quotes, ligatures and the usual HTML entities."""
    letters = {letter: unicodedata.normalize("NFKC", letter) for letter in _LIGATURES}
    return [
        *(
            {"type": "Replace", "pattern": {"String": old}, "content": new}
            for old, new in (_ENTITIES | letters).items()
        ),
        *({"type": "Replace", "pattern": {"Regex": old}, "content": new} for old, new in _QUOTES),
    ]


def tokenizer_json(context_length: int) -> dict[str, Any]:
    """Return the tokenizer, which adds SOT and EOT and cuts captions to `context_length` ids.

    Unlike ours, it repairs curly quotes, ligatures and the usual HTML entities only (not broken characters, as ftfy does).
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
                *_repairs(),
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
