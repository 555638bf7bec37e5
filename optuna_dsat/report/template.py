"""Pages from templates: all values are escaped, and control characters are written out."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from optuna_dsat.escape.terminal import plain
from optuna_dsat.report import figures
from optuna_dsat.version import __version__

FILE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy of a self-contained page: nothing is loaded."""

PLOTLY = "plotly-basic.min.js"
"""plotly.js with scatter and bar charts: ``npm pack plotly.js-basic-dist-min``. The Python package has the whole only,
which is four times as large."""


@cache
def _environment() -> Any:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("optuna_dsat.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        auto_reload=False,  # the package may be upgraded while a dashboard runs
        finalize=lambda value: plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters["prose"] = _prose
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


_QUOTED = re.compile(r"`([^`\n]+)`")


def _prose(text: str) -> Any:
    """Return escaped text, text in backticks as code, option names unbroken: browsers break after hyphens."""
    from markupsafe import Markup, escape

    whole, code = Markup('<span class="word">{}</span>'), Markup("<code>{}</code>")
    shown = []
    for at, part in enumerate(_QUOTED.split(plain(text))):
        words = [whole.format(word) if word.startswith("--") else escape(word) for word in part.split(" ")]
        joined = Markup(" ").join(words)
        shown.append(code.format(joined) if at % 2 else joined)
    return Markup("").join(shown)


def asset(name: str) -> str:
    """Return a template file unchanged."""
    environment = _environment()
    text: str = environment.loader.get_source(environment, name)[0]
    return text


def page_text(template: str, *, title: str, has_figures: bool, policy: str = FILE_POLICY, **values: Any) -> str:
    """Return a page or a part of it as text; ``policy`` is empty if the server sends it."""
    from markupsafe import Markup

    return str(
        _environment()
        .get_template(template)
        .render(
            title=title,
            policy=Markup(policy),
            version=__version__,
            ink=figures.INK,
            styles=Markup(asset("report.css")),
            script=Markup(asset("report.js")),
            plotly=Markup(asset(PLOTLY)) if has_figures else "",
            **values,
        )
    )
