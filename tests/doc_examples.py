"""The Python examples of a docs page, with their output."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```\n```text\n(.*?)^```$", re.M | re.S)


class Examples:
    """The examples of one page in order; later ones use names of earlier ones."""

    def __init__(self, page: str) -> None:
        blocks = _BLOCK.findall((_DOCS / page).read_text())
        self._codes = [code for code, _ in blocks]
        self.shown = [shown for _, shown in blocks]

    def run(self, url: str) -> list[str]:
        """Runs the examples with a gateway; returns the output of each."""
        names: dict[str, Any] = {}
        printed = []
        for code in self._codes:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code.replace("http://127.0.0.1:8000", url), names)
            printed.append(out.getvalue())
        names["client"].close()
        return printed
