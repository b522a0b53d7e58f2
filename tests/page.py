"""A page as a browser or a screen reader has it."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree


class Page(HTMLParser):
    """Reads a page, and notes what a browser or a screen reader would stumble over."""

    def __init__(self, path):
        super().__init__()
        self.open, self.faults, self.words, self.tables, self.captions = [], [], [], 0, 0
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open, self.open
        assert self.tables == self.captions or "study" in path.name
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        for name in ("src", "href"):
            place = given.get(name, "")
            if place.startswith(("http", "//", "/")) or ":" in place.partition(",")[0].removeprefix("data:"):
                self.faults.append((tag, place))
        if (tag == "img" and not given.get("alt")) or (given.get("role") == "img" and not given.get("aria-label")):
            self.faults.append((tag, "no text"))
        if tag == "th" and "scope" not in given:
            self.faults.append((tag, "no scope"))
        if tag == "script":
            self.faults.append((tag, "a script"))
        self.tables += tag == "table"
        self.captions += tag == "caption"
        if tag not in ("meta", "link", "img", "line", "circle", "rect", "polyline", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"


def drawn_marks(text):
    """Return the marks of points and the outlines of bands as (x, y), and the texts with their x."""
    tree = ElementTree.fromstring(text)
    marks, outlines = [], []
    shapes = {path.get("id"): path.get("d") for path in tree.iter(f"{SVG}path") if path.get("id")}
    for use in tree.iter(f"{SVG}use"):
        x, y = float(use.get("x")), float(use.get("y"))
        if "fill-opacity" in use.get("style"):
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", shapes[use.get(HREF)[1:]])]
            outlines.append([(x + a, y + b) for a, b in zip(numbers[::2], numbers[1::2], strict=True)])
        else:
            marks.append((x, y))
    return marks, outlines, [(text, x) for text, (x, _) in written(tree)]


def written(tree):
    """Return a picture's texts with their x and y."""
    for text in tree.iter(f"{SVG}text"):
        x, y = re.findall(r"-?[\d.]+", text.get("transform"))[-2:]
        yield text.text, (float(x), float(y))
