"""The page of `dslc ui`: HTML without data, which its scripts ask the server for.

The scripts are parts of one script, like the plan's page (compiler/show/page), whose charts they use.
"""

from __future__ import annotations

import html

from dslc.compiler.show.page.assets import PAGE, read_assets
from dslc.dsl.plain import plain

UI = "dslc.ui"
SHARED_SCRIPTS = ("plan_model.js", "movable_view.js", "curves.js")  # of the plan's page
SCRIPTS = ("runs_model.js", "parallel_axes.js", "runs_table.js", "runs_page.js")


def runs_page(title: str, nonce: str) -> str:
    """Returns the page. The browser runs no script and takes no style without its `nonce`."""
    name = html.escape(plain(title))
    style = read_assets(PAGE, ("base.css",)) + read_assets(UI, ("runs_page.css",))
    script = read_assets(PAGE, SHARED_SCRIPTS) + read_assets(UI, SCRIPTS)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n'
        f'<title>{name}</title>\n<style nonce="{nonce}">\n{style}</style>\n</head>\n<body>\n'
        f'<header><h1>{name}</h1><p id="status" role="status">This page needs JavaScript.</p></header>\n'
        '<aside id="filters" aria-label="filters"></aside>\n<main>\n'
        '<section aria-labelledby="title-runs"><h2 id="title-runs">runs</h2>'
        '<div class="wide" id="runs" tabindex="0" role="region" aria-labelledby="title-runs"></div></section>\n'
        '<section aria-labelledby="title-axes" id="axes" hidden><h2 id="title-axes">what differs</h2>'
        '<label class="outcome">outcome <select id="outcome"></select></label><div id="parallel"></div>'
        '<p id="readout" class="note"></p></section>\n'
        '<section aria-labelledby="title-curves"><h2 id="title-curves">curves</h2><div id="curves"></div>'
        '<details id="phases"><summary>phases of a step</summary><div></div></details></section>\n'
        f'</main>\n<script nonce="{nonce}">\n{script}</script>\n</body>\n</html>\n'
    )
