"""Parts of a page: one HTML file that loads nothing from a network."""

from collections.abc import Iterable, Sequence
from string import Template


def section(title: str, body: str) -> str:
    """Returns a section with a heading, or "" without a body."""
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """Returns a table of cells that are HTML already. The first cell of a row is its heading."""
    top = f"<thead><tr>{''.join(f'<th scope=col>{cell}</th>' for cell in head)}</tr></thead>" if any(head) else ""
    body = "".join(
        f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for first, *cells in rows
    )
    return f'<div class=scroll><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<main>
<header><h1>$heading</h1><div class="runs">$runs</div>$gaps</header>
$sections
</main>
</body>
</html>
""")
"""A whole page. Every value is HTML already."""
