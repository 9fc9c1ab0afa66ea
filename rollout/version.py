"""What an engine says about its weights: `run/epoch/version/incarnation`.

The driver gives this string to an engine after each push and reads it back from every answer. A respawned engine is recognised
because it no longer says it, so the text is parsed strictly: anything that this module did not write is refused.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Version:
    """One set of weights on one life of an engine. `str()` gives the text the engine carries.

    `incarnation` counts the lives of all engines of a run, so that a text names one engine too (whichever a router has chosen).
    """

    run: str
    epoch: int
    version: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.run}/{self.epoch}/{self.version}/{self.incarnation}"


def parse_version(text: str) -> Version:
    """Read `run/epoch/version/incarnation`; ValueError for anything that `str(Version)` would not have written."""
    parts = text.split("/")
    if len(parts) == 4 and parts[0] and all(_is_plain_number(part) for part in parts[1:]):
        return Version(parts[0], *(int(part) for part in parts[1:]))
    raise ValueError(
        f"weight version {text!r} is not of the form run/epoch/version/incarnation: it was not set by this service; push the weights again"
    )


def _is_plain_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and (text == "0" or not text.startswith("0"))
