"""Open every page of the built book in Chromium, with every other host blocked.

    python book/check.py                        all pages of book/_build/html
    python book/check.py --only 07 --only index the pages whose address holds one of these
    python book/check.py --screenshots DIR      and a PNG of each: two widths, light and dark

A page must ask no other host for anything, miss no file, raise no error, and not scroll sideways
at 1280 or 390 pixels. Chromium comes from the system; without it nothing is checked, which is said
and is no failure. It is driven through its DevTools protocol over a WebSocket.
"""

import argparse
import base64
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import websocket

SITE = Path(__file__).resolve().parent / "_build/html"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1280, 390)  # CSS pixels: a laptop, a phone
SCHEMES = ("light", "dark")
HOST = "127.0.0.1"
PATIENCE_S = 60
PICTURE = 8000  # CSS pixels of height
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    f"--remote-allow-origins=http://{HOST}",
    f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {HOST}",
)
# The pictures without words for whoever does not see them.
WORDLESS = """[...document.querySelectorAll("img:not([alt]), img[alt='']")]
  .filter(e => e.getAttribute("aria-hidden") !== "true" && !e.closest(".navbar-brand"))
  .map(e => e.getAttribute("src")).join(" ")"""
# How wide the page is if it scrolls sideways, and what sticks out that no box of its own scrolls.
SIDEWAYS = """(() => {
  const page = document.scrollingElement, width = document.documentElement.clientWidth;
  if (page.scrollWidth <= width) return "";
  const boxed = e => e !== page && e !== document.body
    && (getComputedStyle(e).overflowX !== "visible" || (e.parentElement && boxed(e.parentElement)));
  const wide = [...document.body.querySelectorAll("*")]
    .filter(e => e.getBoundingClientRect().right > width + 1 && !boxed(e.parentElement))
    .map(e => `${e.tagName.toLowerCase()}.${e.className} ${e.textContent.trim().slice(0, 60)}`);
  return `${page.scrollWidth} pixels wide of ${width}: ${wide.slice(-3).join(" | ")}`;
})()"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and keeps no log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the browser has left the page
            self.close_connection = True


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of `site`, served on a free port for as long as the block lasts."""
    with ThreadingHTTPServer((HOST, 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{HOST}:{server.server_port}"
        finally:
            server.shutdown()


def chromium() -> str | None:
    """The path of the system's Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser(path: str) -> Iterator["Tab"]:
    """A tab of a fresh headless Chromium, which ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [path, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            with Tab(devtools(Path(profile), process)) as tab:
                yield tab
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def devtools(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """The WebSocket address that the browser has written into its profile."""
    file, until = profile / "DevToolsActivePort", time.monotonic() + PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return f"ws://{HOST}:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise RuntimeError(f"Chromium gave no DevTools address within {PATIENCE_S} s")


class Tab:
    """One tab: commands in order, and what happened while their answers were awaited."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(
            address, timeout=PATIENCE_S, origin=f"http://{HOST}", suppress_origin=False
        )
        self._count, self._session = 0, ""
        self.events: list[tuple[str, dict[str, Any]]] = []  # (method, its parameters)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Tab":
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command; RuntimeError with the browser's words if it fails."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while (answer := self._receive()).get("id") != self._count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv())
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        said = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"]["exception"]["description"])
        return said["result"].get("value")

    def open(self, url: str) -> None:
        """Go to a page, and wait until it and everything that it asked for is there."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        for times in itertools.count(1):
            while sum(method == "Page.loadEventFired" for method, _ in self.events) < times:
                self._receive()
            if not self._goes_on():
                break
        self.settle()

    def _goes_on(self) -> bool:
        """Whether this page only sends the reader to another one."""
        try:
            return bool(self.run("document.querySelector('meta[http-equiv=refresh]') !== null"))
        except RuntimeError:  # it was gone before it could answer
            return True

    def settle(self) -> None:
        """Wait for fonts, pictures that were put off, what moves, and two frames."""
        self.run("""(async () => {
          for (const img of document.images) img.loading = "eager";
          await Promise.all([document.fonts.ready,
            ...[...document.images].map(img => img.decode().catch(() => 0))]);
          const moves = document.getAnimations().map(move => move.finished.catch(() => 0));
          await Promise.race([Promise.all(moves), new Promise(done => setTimeout(done, 1000))]);
          for (const _ of [1, 2]) await new Promise(requestAnimationFrame);
        })()""")

    def look(self, width: int, scheme: str) -> None:
        """Show the page at a width in CSS pixels, to a reader who prefers light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.resize(width, 844 if width < 600 else 800)
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """A window of so many CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def pictures(self, width: int) -> Iterator[bytes]:
        """PNGs of the whole page, from its top down, in a window that is as high as can be."""
        height = self.run("document.scrollingElement.scrollHeight")
        self.resize(width, min(height, PICTURE))
        for top in range(0, height, PICTURE):
            self.run(f"window.scrollTo({{top: {top}, behavior: 'instant'}})")
            self.settle()
            yield base64.b64decode(self.call("Page.captureScreenshot")["data"])
        self.run("window.scrollTo({top: 0, behavior: 'instant'})")


def faults(events: Sequence[tuple[str, dict[str, Any]]], home: str) -> Iterator[str]:
    """What a page did that it must not, in words: outside requests, missing files, errors."""
    asked: dict[str, str] = {}
    for method, said in events:
        if method == "Network.requestWillBeSent":
            url = asked[said["requestId"]] = said["request"]["url"]
            if not url.startswith((home, "data:", "blob:", "about:")):
                yield f"asked another host: {url}"
        elif method == "Network.responseReceived" and said["response"]["status"] >= 400:
            yield f"{said['response']['status']}: {said['response']['url']}"
        elif method == "Network.loadingFailed":
            yield f"{said['errorText']}: {asked.get(said['requestId'], '')}"
        elif method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            yield details.get("exception", {}).get("description", details["text"])
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
            yield "console: " + " ".join(str(arg.get("value", "")) for arg in said["args"])
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            if said["entry"]["source"] != "network":  # named above
                yield f"log: {said['entry']['text']} {said['entry'].get('url', '')}".rstrip()


def check_page(
    tab: Tab, home: str, page: str, keep: Callable[[str, bytes], None] | None
) -> list[str]:
    """Every fault of one page; `keep` is given a name and a PNG of each of its looks."""
    tab.look(WIDTHS[0], SCHEMES[0])
    tab.open(f"{home}/{page}")
    found = [f"without words: {names}"] if (names := tab.run(WORDLESS)) else []
    for width in WIDTHS:
        for scheme in SCHEMES:
            tab.look(width, scheme)
            if (seen := tab.run("document.documentElement.dataset.theme")) not in (scheme, None):
                found.append(f"{scheme}: the page is {seen}")
            if wide := tab.run(SIDEWAYS):
                found.append(f"scrolls sideways at {width}, {scheme}: {wide}")
            if keep is not None:
                name = page.removesuffix(".html").replace("/", "-")
                for part, png in enumerate(tab.pictures(width), 1):
                    keep(f"{name}-{width}-{scheme}-{part:02}.png", png)
    return [*dict.fromkeys([*faults(tab.events, home), *found])]


def pages(site: Path, only: Sequence[str]) -> list[str]:
    """The addresses of the pages below `site`, or of those that hold one of `only`, in order."""
    files = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    names = sorted(name for name in files if not name.startswith("_static/"))
    return [name for name in names if not only or any(part in name for part in only)]


def check(site: Path, only: Sequence[str] = (), screenshots: Path | None = None) -> int:
    """Print the faults of each page, and return how many pages have some."""
    path = chromium()
    if path is None:
        print(f"NOT CHECKED: no Chromium here (looked for {', '.join(NAMES)})", flush=True)
        return 0
    if not (names := pages(site, only)):
        raise SystemExit(f"no page in {site}: build it first, with make book")
    keep = None
    if screenshots is not None:
        screenshots.mkdir(parents=True, exist_ok=True)
        keep = lambda name, png: (screenshots / name).write_bytes(png) and None  # noqa: E731
    bad = 0
    with served(site) as home, browser(path) as tab:
        for name in names:
            found = check_page(tab, home, name, keep)
            bad += bool(found)
            print(
                *[f"{name}: {fault}" for fault in found] or [f"{name}: well"], sep="\n", flush=True
            )
    print(f"{len(names)} pages, {bad} with faults")
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    """0 if no page has a fault, or without Chromium; else 1."""
    parser = argparse.ArgumentParser(description="Open every page of the book in Chromium.")
    parser.add_argument("--site", type=Path, default=SITE, metavar="DIR")
    parser.add_argument("--only", action="append", default=[], metavar="PART")
    parser.add_argument("--screenshots", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    return int(check(args.site, args.only, args.screenshots) > 0)


if __name__ == "__main__":
    sys.exit(main())
