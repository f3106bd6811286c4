"""Writes the table of all state types into docs/models.md: ``python -m tools.state_table``."""

from __future__ import annotations

from pathlib import Path

from statelink.state import Coverage, IndexSpace, state_types

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- types: begin -->\n", "<!-- types: end -->\n"


def render() -> str:
    """One row for each state type, in the order of their names."""
    rows = ["| type | an index is | what must arrive | what it is |", "|---|---|---|---|"]
    for each in state_types():
        names = " or ".join(f"`{name}`" for name in (each.name, *each.aliases))
        rows.append(f"| {names} | {_word(each.index)} | {_word(each.coverage)} | {each.doc} |")
    return "\n".join(rows) + "\n"


def _word(value: IndexSpace | Coverage) -> str:
    return f"*{value.value}*"


def parts(text: str) -> tuple[str, str, str]:
    """The page before the table, the table, and the page after it."""
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    return before + BEGIN, table.strip("\n") + "\n", END + after


if __name__ == "__main__":
    before, _, after = parts(PAGE.read_text())
    PAGE.write_text(f"{before}\n{render()}\n{after}")
