"""The README's table of models is the registry's, and every row of it is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from rimuru.arch.registry import architectures, can_run
from tools.supported_models import BEGIN, END, table, with_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_is_current() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_table(text) == text, "run: python tools/supported_models.py --write README.md"


def test_every_architecture_has_one_row() -> None:
    rows = table().splitlines()[2:]
    assert sorted(row.split("`")[1] for row in rows) == sorted(architectures())
    for row in rows:
        name, cells = row.split("`")[1], [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4 and cells[1]
        assert [cell == "yes" for cell in cells[2:]] == [can_run(name, "cpu"), can_run(name, "cuda")]


def test_only_what_lies_between_the_markers_changes() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = with_table(text)
    assert new.startswith(f"before\n{BEGIN}\n\n| arch") and new.endswith(f"\n\n{END}\nafter\n") and "old" not in new
    assert with_table(new) == new
    with pytest.raises(ValueError, match="needs the lines"):
        with_table(f"{END}\n{BEGIN}")
