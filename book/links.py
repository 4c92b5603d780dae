"""Every link inside the built book leads to a page that is there, and to a place on it.

    python book/links.py [DIR]     book/_build/html by default

Looked at are the links, pictures, scripts and styles of every page. What leads to another host is
not followed.
"""

import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parent / "_build/html"
LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "srcset"}


class Page(HTMLParser):
    """The places of one page, which links may name, and the addresses that it leads to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places, self.addresses = {""}, set[str]()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if address := given.get(LINKS.get(tag, "")):
            self.addresses.add(address)


def read(site: Path) -> dict[Path, Page]:
    """Every page below `site`; the theme's own parts of pages are none."""
    files = (path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts)
    return {path.resolve(): Page(path) for path in files}


def dead(site: Path) -> Iterator[str]:
    """The links that lead nowhere, in words."""
    pages = read(site)
    for path, page in pages.items():
        for address in sorted(page.addresses):
            url = urlsplit(address)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            place = unquote(url.fragment)
            if not target.is_file():
                yield f"{path.relative_to(site.resolve())}: {address}: no such file"
            elif target in pages and place not in pages[target].places:
                yield f"{path.relative_to(site.resolve())}: {address}: no such place on the page"


def main(argv: Sequence[str]) -> int:
    """0 if no link is dead and there are pages, else 1."""
    site = Path(argv[0]) if argv else SITE
    found, count = list(dead(site)), len(read(site))
    print(*found, f"{count} pages, {len(found)} dead links", sep="\n")
    return int(bool(found) or count == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
