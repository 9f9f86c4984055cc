"""Marks of a format in a text: whole ones, and what may begin one."""

from collections.abc import Sequence


def partial_length(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def split_markers(text: str, markers: Sequence[str]) -> list[str]:
    """The text in parts, where each marker in it is a part of its own."""
    parts = [text]
    for marker in markers:
        divided: list[str] = []
        for part in parts:
            before, *behind = [part] if part in markers else part.split(marker)
            divided.append(before)
            for piece in behind:
                divided += [marker, piece]
        parts = divided
    return [part for part in parts if part]
