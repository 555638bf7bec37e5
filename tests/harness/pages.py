"""Parser for pages, as seen by their readers."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Content of a page: ids, links, loads, classes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.cards: dict[str, tuple[str, str]] = {}
        """Heading of a card -> its value and remark."""
        self._inside: list[str] = []
        self._cell: list[str] | None = None
        self._card: list[str] = []
        self._goes_on = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        result = dict(attrs)
        if "id" in result:
            assert result["id"] not in self.ids, f"two elements have the id {result['id']}"
            self.ids.add(result["id"] or "")
        if tag == "a":
            self.targets.append(result["href"] or "")
        self.loads += [value for name in ("src", "srcset", "data") if (value := result.get(name))]
        if tag == "link":
            self.loads.append(result.get("href") or "")
        if tag in ("script", "style", "del"):
            self._inside.append(tag)
        if tag == "wbr":
            self._goes_on = True
        if tag in ("dt", "dd"):
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()
        if tag in ("dt", "dd") and self._cell is not None:
            self._card.append(" ".join("".join(self._cell).split()))
            self._cell = None
            if len(self._card) == 3:
                self.cards[self._card[0]] = (self._card[1], self._card[2])
                self._card = []

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)
        if self._inside:
            return
        if self._goes_on:
            self._goes_on = False
            self.words[-1] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
