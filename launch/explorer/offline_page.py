"""The explorer's page without a server: one HTML file that contains its modules, its data, and files that a model needs."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparo_train.core.errors import ConfigError

from ..views.html import stylesheet

PAGE = Path(__file__).parent / "page"
_IMPORT = re.compile(r'^import (?:\{[^}]*\}|\w+) from "\./(\w+)\.js";\n', re.MULTILINE)
_MAX_BYTES = 256 << 20
_ICON = '<link rel="icon" href="page/icon.svg">'
_STYLE = '<link rel="stylesheet" href="page/base.css">\n<link rel="stylesheet" href="page/page.css">'
_SCRIPT = '<script type="module" src="page/main.js"></script>'


def build_offline_page(
    page: Path, offline_bundle: Mapping[str, Any], assets: Mapping[str, bytes] | None = None, with_model: bool = False
) -> bytes:
    """Return HTML that contains the page, style, modules, and the data that they would request from a server.

    Args:
        page: folder of the page's files.
        offline_bundle: result of `Explorer.offline_bundle`.
        assets: files to contain, by name; without them, a page with a model reads them from its own folder.
        with_model: the page runs a model, so its policy allows WebAssembly.

    Raises:
        ConfigError: the file would be too large for a browser.
    """
    # No sequence in it can end the element that contains it.
    data = json.dumps(offline_bundle).replace("<", "\\u003c")
    style, script = stylesheet() + (page / "page.css").read_text(encoding="utf-8"), bundle_modules(page, "main")
    scripts, images, connect = _hash(script), "data:", "'none'"
    if with_model:
        scripts, images = f"{scripts} 'wasm-unsafe-eval' blob:", "data: blob:"
        connect = "'none'" if assets else "'self'"
    policy = (
        f"default-src 'none'; img-src {images}; style-src {_hash(style)}; script-src {scripts}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    held = "".join(
        f'<script type="text/plain" id="asset-{name}">{base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()}</script>'
        for name, content in (assets or {}).items()
    )
    html = (page / "index.html").read_text(encoding="utf-8")
    for old, new in (
        (_ICON, ""),
        (_STYLE, f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'),
        (
            _SCRIPT,
            f'<script type="application/json" id="offline-data">{data}</script>{held}<script type="module">{script}</script>',
        ),
    ):
        if old not in html:
            raise ConfigError(f"{page / 'index.html'}: does not contain {old}. Install sparo again.")
        html = html.replace(old, new)
    if len(html) > _MAX_BYTES:
        raise ConfigError(
            f"the page as a single file would take {len(html) >> 20} MB. Start with fewer --images, or a --limit."
        )
    return html.encode()


def bundle_modules(page: Path, name: str) -> str:
    """Return a module after all that it imports, as one script; their names are distinct, so concatenation suffices."""
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
