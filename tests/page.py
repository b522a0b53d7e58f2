"""A page as a browser or a screen reader has it."""

from html.parser import HTMLParser


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
