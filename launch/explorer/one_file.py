"""The page with all that it needs in it, as it opens from a disk without a server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError

_IMPORT = re.compile(r'^import (?:\{[^}]*\}|\w+) from "\./(\w+)\.js";\n', re.MULTILINE)
_MAX_BYTES = 256 << 20
_ICON = '<link rel="icon" href="page/icon.svg">'
_STYLE = '<link rel="stylesheet" href="page/page.css">'
_SCRIPT = '<script type="module" src="page/main.js"></script>'


def build_offline_page(page: Path, offline_bundle: Mapping[str, Any]) -> bytes:
    """HTML: page, style, modules, and what they would ask a server for.

    Args:
        page: folder of the page's files.  offline_bundle: `Explorer.held`.

    Raises:
        ConfigError: more than a browser takes as one file.
    """
    # No sequence in it can end the element that it stands in.
    data = json.dumps(offline_bundle).replace("<", "\\u003c")
    style, script = (page / "page.css").read_text(encoding="utf-8"), bundle_modules(page, "main")
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    html = (page / "index.html").read_text(encoding="utf-8")
    for old, new in (
        (_ICON, ""),
        (_STYLE, f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'),
        (_SCRIPT, f'<script type="application/json" id="held">{data}</script><script type="module">{script}</script>'),
    ):
        if old not in html:
            raise ConfigError(f"{page / 'index.html'}: does not hold {old}; install sparo again")
        html = html.replace(old, new)
    if len(html) > _MAX_BYTES:
        raise ConfigError(f"one file would take {len(html) >> 20} MB; start with fewer --images, or a --limit")
    return html.encode()


def bundle_modules(page: Path, name: str) -> str:
    """A module behind all that it imports, as one script: their names are different, so nothing else has to be done."""
    order: list[str] = []

    def visit(module: str) -> None:
        if module in order:
            return
        for dependency in _IMPORT.findall((page / f"{module}.js").read_text(encoding="utf-8")):
            visit(dependency)
        order.append(module)

    visit(name)
    texts = (_IMPORT.sub("", (page / f"{module}.js").read_text(encoding="utf-8")) for module in order)
    return "".join(re.sub(r"^export ", "", text, flags=re.MULTILINE) for text in texts)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
