"""Draw docs/img/readout.svg: the readout next to plain pooling.

python docs/img/make_readout.py
"""

from pathlib import Path

TOKENS, SLOTS = 8, 4
COLORS = ("#d55e00", "#009e73", "#0072b2", "#cc79a7")
# attention of each slot over the tokens
WEIGHTS = (
    (0.7, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1),
    (0.0, 0.1, 0.6, 0.3, 0.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 0.1, 0.8, 0.1, 0.0, 0.0),
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.5, 0.2),
)


def box(x: float, y: float, width: float, height: float, fill: str, text: str = "", size: int = 13) -> str:
    label = f'<text x="{x + width / 2}" y="{y + height / 2 + size / 3}" font-size="{size}" text-anchor="middle">{text}</text>'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="#555"/>{label if text else ""}'


def line(x1: float, y1: float, x2: float, y2: float, color: str, width: float, opacity: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="{width:.1f}" opacity="{opacity:.2f}"/>'


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def panel(left: float, title: str, pooled: bool) -> list[str]:
    token_x = [left + 14 + 38 * i for i in range(TOKENS)]
    parts = [
        text(left + 160, 22, title, 15, weight="bold"),
        box(left + 6, 240, 316, 40, "#eef1f4", "Transformer encoder"),
    ]
    parts += [text(left + 160, 306, "image patches, or words")]
    for x in token_x:
        parts += [line(x + 13, 240, x + 13, 222, "#555", 1, 1), box(x, 196, 26, 26, "#f7f7f7")]
    parts.append(text(left - 6, 213, "tokens", anchor="end"))
    if pooled:
        parts += [line(x + 13, 196, left + 160, 96, "#888", 1.5, 0.7) for x in token_x]
        parts += [box(left + 100, 60, 120, 36, "#d9dde2", "one vector")]
    else:
        for slot, (color, weights) in enumerate(zip(COLORS, WEIGHTS, strict=True)):
            x = left + 10 + 80 * slot
            for token, weight in zip(token_x, weights, strict=True):
                if weight:
                    parts.append(line(token + 13, 196, x + 34, 96, color, 1 + 6 * weight, 0.25 + 0.7 * weight))
            parts.append(box(x, 60, 68, 36, color + "55", f"slot {slot + 1}"))
    return parts


def main() -> None:
    parts = [*panel(70, "CLIP: pooling", True), *panel(470, "CLIP + SPARO: one attention head per slot", False)]
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 810 320" font-family="sans-serif" role="img">'
        "<title>Pooling computes one vector from all tokens; SPARO computes slots, each with its own attention head</title>"
        '<rect width="810" height="320" fill="#ffffff"/>' + "".join(parts) + "</svg>\n"
    )
    Path(__file__).with_name("readout.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
