"""The frame of a page that shows something about mail.

It has no scripts and no links to anything: the words on it come from hostile mail. The policy makes browsers
refuse both, in case something was not escaped.
"""

from __future__ import annotations

import html

from macbook_optimization.output_files import FileKind, page_of


def page(title: str, body: str, style: str) -> str:
    """Return a page. `title` is escaped here; `body` and `style` must be valid already."""
    return _PAGE.format(title=html.escape(title), body=body, style=style.strip())


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="generator" content="trm email">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 46rem; padding: 0 1rem; }}
{style}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd; }} }}
</style>
{body}
</html>
"""
# Of pages of earlier versions, which do not name their generator.
_EARLIER_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>"""
MAIL_PAGE = FileKind("a page about mail", page_of("trm email", _EARLIER_HEAD))
