"""Which slots are displayed, how their pictures are arranged, and tables that fit the terminal."""

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from evals.slots.attend import Attended, informative_slots, word_profiles
from evals.slots.overlay import ImageCrop, overlay
from evals.tasks.result import Result
from launch.views.results_table import heading, results_table
from launch.views.terminal import out

WORDS = ["[start]", "a", "red", "cube", "[end]"]


def _attended(weights: list[list[float]], cosine: list[float]) -> Attended:
    maps = torch.full((len(weights), 2, 2), 0.1)
    maps[:, 0, 0] = 0.7
    return Attended(
        maps, torch.zeros(len(weights)), WORDS, torch.tensor(weights), torch.tensor(cosine), torch.ones(len(weights))
    )


def test_informative_slots_attend_to_different_content_words():
    one = _attended(
        [
            [0.0, 0.9, 0.05, 0.05, 0.0],  # at an article
            [0.0, 0.0, 0.9, 0.1, 0.0],  # at red
            [0.0, 0.0, 0.85, 0.15, 0.0],  # at red, too, a little less
            [0.0, 0.0, 0.1, 0.7, 0.2],  # at cube
            [0.9, 0.0, 0.1, 0.0, 0.0],  # at the start
        ],
        [0.9, 0.8, 0.8, 0.8, 0.9],
    )
    profiles = word_profiles([one] * 6)
    assert profiles.words == ["cube", "red"] and profiles.content.tolist()[1] == 1.0
    assert informative_slots([one] * 6, profiles, 2) == [1, 3]
    assert sorted(informative_slots([one] * 6, profiles, 9)) == [0, 1, 2, 3, 4]
    assert [word for word, _ in profiles.top_words(3, 1)] == ["cube"]


def test_overlays_outline_half_of_the_attention():
    image = Image.new("RGB", (64, 64), (200, 20, 20))
    heat = torch.zeros(4, 4)
    heat[0, 0] = 1.0
    drawn = np.asarray(overlay(ImageCrop(image, (0, 0, 64, 64)), heat, 1.0, 64)).astype(int)
    assert abs(drawn[2, 2] - [200, 20, 20]).max() < 12
    assert len(set(drawn[60, 60])) == 1 and drawn[60, 60, 0] < 70  # grey and dark
    assert (drawn[:24, :24] == 255).all(-1).any() and not (drawn[32:] == 255).all(-1).any()
    even = np.asarray(overlay(ImageCrop(image, (16, 16, 48, 48)), torch.ones(4, 4), 1.0, 64)).astype(int)
    assert (
        not (even == 255).all(-1).any() and even[2, 2].max() < 40
    )  # no border; dark where the model attends to nothing


def test_tables_fit_eighty_columns_and_split_no_word(monkeypatch):
    result = Result("zeroshot", 1477, "acc1", {"acc1": 0.5, "acc5": 0.6, "mean_per_class_recall": 0.4}, 0.01)
    names = ["emoji_small", "set_sa_sinkhorn-seed0", "emoji_clip_s0", "x" * 14, "step-00000800"]
    monkeypatch.setattr(out, "_width", 80)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(results_table({name: {"vendor": result, "concepts": result} for name in names}, "per cent"))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and text.count("mean_per_class_recall") >= 4
    for piece in ("emoji_small", "sinkhorn-", "x" * 14, "00000800", "mean_per_class_recall"):
        assert piece in text
    assert heading("set_sa_sinkhorn-seed0") == "set_sa_\nsinkhorn-seed0"
    assert heading("averyveryverylongword") == "averyveryverylongword"
