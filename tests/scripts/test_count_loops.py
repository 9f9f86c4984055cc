"""The tables of documents have the kernels that the script counts, and what it makes of counts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from compiler_output.sass import Loop, MachineCode

from scripts import count_loops
from scripts.count_loops import TABLES, Counts, Layout, count
from tests.readme import ROOT

PAGES = {"loops": "hopper.md", "windows": "hopper.md", "mma": "mma.md"}
FULL = Loop(100, 500, {"HGMMA": 12, "SYNCS": 4, "MUFU": 34, "FFMA": 1300}, 1245, 200)
MASKED = Loop(600, 900, {"HGMMA": 12, "BAR": 3}, 1345)
COPYING = Loop(0, 96, {"UTMALDG": 8}, 71)


@pytest.mark.parametrize("name", TABLES)
def test_the_table_in_the_documents_is_the_scripts(name: str) -> None:
    """Its columns, and its kernels in their order. What they are is counted by the script only: it takes minutes."""
    table = TABLES[name]
    text = (ROOT / "docs" / "kernels" / PAGES[name]).read_text(encoding="utf-8")
    assert f"scripts/count_loops.py {name}" in text
    header = "| " + " | ".join(["kernel", *table.columns]) + " |"
    rows = text.partition(header + "\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [str(layout) for layout in table.layouts]
    assert all(len(re.findall(r" \|", row)) == len(table.columns) + 1 for row in rows)


def test_a_kernel_is_counted_by_its_loops_that_multiply() -> None:
    code = MachineCode("attend_unit_0", 168, 72, 182272, (COPYING, MASKED, FULL))
    assert count(code) == Counts(FULL, MASKED, 72)


def test_lines_of_counts() -> None:
    counts = Counts(FULL, MASKED, 1880)
    assert count_loops.loops_line([counts]) == ("1,245", "200", "1,345", "4", "1,880")
    assert count_loops.windows_line([counts, counts]) == ("1,245, 1,345", "1,245, 1,345", "1,880; 1,880")
    assert count_loops.mma_line([counts]) == ("1,245, 34", "1,880")


def test_layouts_are_named_by_what_is_not_usual() -> None:
    assert str(Layout("bfloat16", 128, 64)) == "bfloat16, head dim 128, 64 rows"
    assert str(Layout("int8", 256, 256, 16, 2)) == "int8, head dim 256, 256 rows, pages of 16, groups of 2"


def test_a_table_that_is_not_there_is_refused() -> None:
    run = [sys.executable, ROOT / "scripts" / "count_loops.py", "hopper"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no table hopper: there are loops, windows, mma" in done.stderr
