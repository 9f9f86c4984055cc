"""The order in which files of tests begin."""

from pathlib import Path

from tests.conftest import LONGEST_FILES


def test_the_longest_files_are_there() -> None:
    """One that was renamed would begin like all others."""
    root = Path(__file__).parents[1]
    assert [name for name in LONGEST_FILES if not (root / name).is_file()] == []
