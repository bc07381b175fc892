"""Find phrases that a reader has to translate, in documentation, docstrings, comments and messages.

python tests/house/phrases.py [FILE …]     exits with 1 if there are any; without files, looks at the whole project

The style: whole sentences with a subject and a verb, the field's words, and no literal idioms of other languages.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    "sparo/",
    "sparo_train/",
    "sparo_data/",
    "evals/",
    "object_centric/",
    "launch/",
    "docs/",
    "configs/",
)
# phrase -> what to write
PHRASES = {
    r"\bleaves? (it|them|this|that|\S+) away\b": "omit, remove",
    r"\b(is|are|was|were|be) told\b": "is passed, is given",
    r"\bmend(s|ed|ing)?\b": "fix, correct",
    r"\bbehind (a|an|the|every|each|its) (step|run|save|checkpoint|readout|block|start|end|command|line)\b": "after",
    r"\bby whose\b": "whose, that",
    r"\banew\b": "again",
    r"\bgoe?s? on\b": "continues",
    r"\band the like\b": "and similar",
    r"\bsays? so\b": "reports it",
    r"\b(is|are) of (a|an|the|no|its|their|one|other)\b": "belongs to, applies to",
    r"\bso many\b(?! that)": "that many",
    r"\b(can|could|may) (not )?be had\b": "is available",
    r"\b(no|some)body\b(?! else)": "no one, the user",
    r"\bbreaks? off\b": "is truncated",
    r"\bto the bit\b": "bit-identically",
    r"\bread-outs?\b": "readout",
    r"\bstands? (in|behind|beside|for itself)\b": "is in",
    r"\bbeside\b": "next to, in addition to",
    r"(?<!there )\b(is|are) no (?!longer\b|more\b|less\b|one\b|worse\b|better\b)[a-z]+\b": "is not a",
    r"\ban? ([a-z]+ ){1,2}of (their|its|his) own\b": "a separate",
    r"\bin one stroke\b": "at once",
    r"\bin its place\b": "instead",
    r"\bnot met\b": "(no internal targets)",
    r"\bhad not? a\b": "did not have",
}
_ANY = re.compile("|".join(f"(?P<p{i}>{phrase})" for i, phrase in enumerate(PHRASES)), re.IGNORECASE)
_START = re.compile(r"^(Of|What|Where|Whose|As|How|Than|That|So that|By whose|In which|With what)\b")


def tracked() -> list[Path]:
    """Return the files of the product and its documentation, including new ones."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in dict.fromkeys(names) if _applies(name) and (ROOT / name).is_file()]


def _applies(name: str) -> bool:
    return name.startswith((*PRODUCT, ".github/")) or ("/" not in name and name.endswith(".md"))


def findings(path: Path) -> Iterator[str]:
    """Yield `file:line: phrase: instead`."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    prose = {".py": _python, ".md": _markdown, ".yaml": _comments, ".yml": _comments}.get(path.suffix)
    for line, sentence in prose(text) if prose else ():
        for hit in _ANY.finditer(sentence):
            instead = list(PHRASES.values())[int(str(hit.lastgroup)[1:])] if hit.lastgroup else ""
            yield f"{path.relative_to(ROOT)}:{line}: {hit[0]!r}; write: {instead}"


def _python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, _plain(node.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _plain(token.string)


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate(text.split("\n"), 1):
        yield number, _plain(line)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if "#" in line:
            yield number, _plain(line.partition("#")[2])


def _plain(text: str) -> str:
    """Remove code, whose words are not prose."""
    return re.sub(r"`[^`]*`|\{[^}]*\}", "", text)


def bad_starts(path: Path) -> Iterator[str]:
    """Yield docstrings that begin with a fragment instead of a verb or noun."""
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if _START.match(first):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: docstring begins with {first[:40]!r}"


def main(names: Sequence[str]) -> int:
    files = [ROOT / name for name in names if _applies(name)] if names else tracked()
    lines = [line for path in files for line in (*findings(path), *bad_starts(path))]
    print("\n".join(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
