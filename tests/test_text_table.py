"""Plain-text tables and byte counts."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from expecttest import assert_expected_inline

from blocktensor import text_table
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
        ("h.*.{q, o, mlp.gate}, head, tail (8)", "64x64"),
        ("h.*.k (2)", "32x64"),
        ("alone1", "1x1"),
    ]
    assert collapse([], across=True) == []


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        ("a.q.w a.k.w b", "a.{q, k}.w, b (3)"),
        ("m.0.attn.q.lora m.0.attn.k.lora m.0.mlp.up.lora", "m.0.{attn.{q, k}, mlp.up}.lora (3)"),
        ("m.0.q.lora m.1.q.lora m.0.k.lora", "m.{*.q, 0.k}.lora (3)"),
        ("a a.b", "a, a.b (2)"),
        ("a.b a.b.c a.b.c.d", "a.{b, b.c, b.c.d} (3)"),
        ("a.x.b b", "a.x.b, b (2)"),
        ("x.w y.w", "{x, y}.w (2)"),
        ("a.a a.b.a", "a.{a, b.a} (2)"),
    ],
)
def test_common_parts_of_names_are_said_once(names: str, joined: str) -> None:
    ((name, _),) = collapse([(name, "") for name in names.split()], across=True)
    assert name == joined


def test_human_bytes() -> None:
    sizes = {
        **{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB"},
        **{1024**2 - 1: "1024.0 KiB", 3 * 1024**2 // 2: "1.5 MiB", 5 * 1024**3: "5.0 GiB"},
        **{1024**4: "1.0 TiB", 5000 * 1024**4: "5000.0 TiB"},
    }
    assert {count: human_bytes(count) for count in sizes} == sizes


LAYERS = Table(
    ("parameter", "in high precision", "why"),
    [
        ("model.layers.*.self_attn.{q_proj, k_proj} (64)", "0.00%", "trainable"),
        ("lm_head", "6.5%", "lm head: 128256 outputs, the entries of 'model.embed_tokens'"),
        ("router", "2.4e-11 to 0.00051", ""),
    ],
)


def test_cells_break_where_the_terminal_is_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_table, "terminal_width", lambda: 60)
    assert_expected_inline(
        str(LAYERS),
        """\
parameter            in high precision   why
-------------------  ------------------  -------------------
model.layers.*.      0.00%               trainable
self_attn.{q_proj,
k_proj} (64)
lm_head              6.5%                lm head: 128256
                                         outputs, the
                                         entries of 'model.
                                         embed_tokens'
router               2.4e-11 to 0.00051""",
    )


def test_headers_break_before_cells_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_table, "terminal_width", lambda: 30)
    table = Table(("a long header", "module"), [("1", "model.layers.0.mlp")])
    assert_expected_inline(
        str(table),
        """\
a long      module
header
----------  ------------------
1           model.layers.0.mlp""",
    )
    assert str(Table(("a long header", "and another one"), [])).splitlines()[0].endswith("one")
    monkeypatch.setattr(text_table, "terminal_width", lambda: 10)
    assert str(Table(("a long header", "n"), [])) == "a long   n\nheader\n-------  -"


@pytest.mark.parametrize("width", [1, 20, 40, 80, 110, 400])
def test_no_word_is_lost_or_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = str(LAYERS)
    monkeypatch.setattr(text_table, "terminal_width", lambda: width)
    narrow = str(LAYERS)
    assert max(map(len, narrow.splitlines())) <= max(width, 59)  # the longest words
    assert sorted("".join(narrow.replace("-", "").split())) == sorted(
        "".join(whole.replace("-", "").split())
    )
    if width == 400:
        assert narrow == whole


PRINTS = """
from blocktensor.text_table import Report, Table
class Long(Report):
    def _parts(self):
        return [Table(("name", "why"), [("a", "word" + " word" * 29)]), "line" + " line" * 29]
print(Long())
"""


@pytest.mark.parametrize("columns", [None, 50])
def test_reports_fit_in_terminals_and_files_get_whole_lines(columns: int | None) -> None:
    """None: a pipe. The width is the real one of a terminal."""
    command = [sys.executable, "-c", PRINTS]
    if columns is None:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    else:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            subprocess.run(command, stdout=theirs, check=True)
            os.close(theirs)
            shown = terminal.read(1 << 16).decode()
    widest = max(len(line.rstrip()) for line in shown.splitlines())
    assert widest == (155 if columns is None else 50)
    assert shown.count("word") == shown.count("line") == 30
