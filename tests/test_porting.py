"""The page on porting names only what is there."""

import re

import pytest

from kernelbook.backends.source import KERNELS

PAGE = (KERNELS / "PORTING.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "](portable/" in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| "))
def test_what_handles_a_difference_is_where_the_page_says(row):
    files = re.findall(r"\]\((portable/\w+\.h)\)", row[-1])
    text = "".join((KERNELS / file).read_text(encoding="utf-8") for file in files)
    for name in re.findall(r"`(\w+)`", row[-1].partition("tests/")[0]):
        assert re.search(rf"\b{name}\b", text) or name == "mma", f"{name} is in none of {files}"


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (KERNELS / target).is_file(), target


def test_there_are_rows():
    assert len(ROWS) >= 8
