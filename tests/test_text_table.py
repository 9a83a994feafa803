"""Plain-text tables and byte counts."""

from __future__ import annotations

from expecttest import assert_expected_inline

from blocktensor.text_table import Table, collapse, human_bytes


def test_columns_are_as_wide_as_their_widest_cell_and_no_line_ends_in_blanks() -> None:
    table = Table(("layer", "a number"), [("a", 1), ("a.longer.name", 22), ("b", "")])
    assert_expected_inline(
        str(table),
        """\
layer          a number
-------------  --------
a              1
a.longer.name  22
b""",
    )
    assert str(Table(("layer", "n"), [])) == "layer  n\n-----  -"


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
        str(Table(("layer", "shape"), collapse(rows))),
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
    assert collapse([("", "64x64")]) == [("(model)", "64x64")]


def test_numbers_that_differ_become_a_star_and_a_column_is_summed() -> None:
    rows = [("h.0.fc1", "a"), ("h.1.fc1", "a"), ("h.0.fc2", "b"), ("h.1.fc2", "b"), ("h.3.x2", "b")]
    assert collapse(rows) == [("h.*.fc1 (2)", "a"), ("h.*.fc2 (2)", "b"), ("h.3.x2", "b")]
    summed = [("h.0.up", "a", 1, "x"), ("h.1.up", "a", 2, "x"), ("h.2.up", "a", 4, "y")]
    assert collapse(summed, add=2) == [("h.*.up (2)", "a", 3, "x"), ("h.2.up", "a", 4, "y")]
    assert len(collapse(summed)) == 3


def test_rows_that_differ_in_names_only_are_joined() -> None:
    rows = [(f"h.{i}.{x}", "64x64") for i in range(2) for x in ("q", "o", "mlp.gate")]
    rows += [("h.0.k", "32x64"), ("head", "64x64"), ("h.1.k", "32x64"), ("tail", "64x64")]
    rows += [("alone1", "1x1")]
    assert collapse(rows, across=True) == [
        ("h.*.{q, o}, h.*.mlp.gate, head, tail (8)", "64x64"),
        ("h.*.k (2)", "32x64"),
        ("alone1", "1x1"),
    ]
    assert collapse([], across=True) == []


def test_human_bytes() -> None:
    sizes = {
        **{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB"},
        **{1024**2 - 1: "1024.0 KiB", 3 * 1024**2 // 2: "1.5 MiB", 5 * 1024**3: "5.0 GiB"},
        **{1024**4: "1.0 TiB", 5000 * 1024**4: "5000.0 TiB"},
    }
    assert {count: human_bytes(count) for count in sizes} == sizes
