"""From a Vega-Lite specification to a file: rendered by vl-convert without a browser or a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

SUFFIXES = (".png", ".svg", ".html", ".pdf", ".json")
_PNG_SCALE = 2.0
_LESS_THAN = "\ue000"


def render(spec: dict[str, Any], suffix: str, *, png_scale: float = _PNG_SCALE) -> bytes:
    """The chart as a file of the kind that `suffix` (one of SUFFIXES) names."""
    import vl_convert

    text = json.dumps(spec, ensure_ascii=False)
    renderers: dict[str, Callable[[], bytes | str]] = {
        ".png": lambda: vl_convert.vegalite_to_png(text, scale=png_scale),
        ".svg": lambda: vl_convert.vegalite_to_svg(text),
        ".pdf": lambda: vl_convert.vegalite_to_pdf(text),
        ".html": lambda: _html(text),
        ".json": lambda: json.dumps(spec, indent=1, ensure_ascii=False) + "\n",
    }
    data = renderers[suffix]()
    return data.encode() if isinstance(data, str) else data


def _html(text: str) -> str:
    """A page with everything inside. A model called "</script>…" must stay text in the page's script.

    vl-convert writes strings into the script as they are: "<" travels through it as a private-use character
    and becomes JavaScript's own escape.
    """
    import vl_convert

    page: str = vl_convert.vegalite_to_html(text.replace("<", _LESS_THAN), bundle=True)
    return page.replace(_LESS_THAN, "\\u003c")
