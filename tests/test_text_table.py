"""Plain-text tables and byte counts."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from blocktensor.text_table import collapse, human_bytes, text_table


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    table = text_table(("layer", "n"), [("a", 1), ("a.longer.name", 22), ("", "")])
    assert_expected_inline(
        table,
        """\
layer          n
-------------  --
a              1
a.longer.name  22
""",
    )


def test_a_table_without_rows() -> None:
    assert_expected_inline(
        text_table(("layer", "n"), []),
        """\
layer  n
-----  -""",
    )


def test_no_line_ends_in_blanks() -> None:
    table = text_table(("a", "a long header"), [("x", "y"), ("a long cell", "")])
    assert [line for line in table.splitlines() if line != line.rstrip()] == []


def test_rows_of_another_length_are_an_error() -> None:
    with pytest.raises((ValueError, IndexError)):
        text_table(("a", "b"), [("only one",)])


def test_rows_that_differ_in_layer_numbers_only_are_joined() -> None:
    rows = [
        ("embed", "50x64"),
        ("blocks.0.up", "192x64"),
        ("blocks.0.down", "64x192"),
        ("blocks.1.up", "192x64"),
        ("blocks.1.down", "64x64"),
        ("blocks.10.up", "192x64"),
        ("experts.3.blocks.2.up", "192x64"),
    ]
    assert_expected_inline(
        text_table(("layer", "shape"), collapse(rows)),
        """\
layer                  shape
---------------------  ------
embed                  50x64
blocks.*.up (3)        192x64
blocks.0.down          64x192
blocks.1.down          64x64
experts.3.blocks.2.up  192x64""",
    )
    assert collapse([]) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1024.0 KiB"),
        (3 * 1024**2 // 2, "1.5 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (1024**4, "1.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
