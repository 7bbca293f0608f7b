"""The map of the core in docs/architecture.md and in the sources is what the code does: both are read here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from blockyard_testing.places import PACKAGE_DIR, ROOT

CORE = PACKAGE_DIR / "core"
FILES = sorted(path for path in CORE.rglob("*.py") if path.name != "__init__.py")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
TABLE = CORE / "sequences" / "table.py"


def room_of(parts: tuple[str, ...]) -> str:
    """`calls` for calls/free.py, `manager` for manager.py."""
    return parts[0].removesuffix(".py")


def layers() -> list[set[str]]:
    """The picture: the lines of the first block of code that follows its heading, from the top down."""
    picture = re.search(r"## The layers of the core\n.*?```text\n(.*?)```", ARCHITECTURE, re.DOTALL)
    assert picture is not None
    return [set(re.findall(r"[a-z_]+", line)) for line in picture[1].splitlines()]


def imported_rooms(path: Path) -> set[str]:
    """Rooms of the core that a file imports from, its own aside."""
    here = path.relative_to(PACKAGE_DIR).parts[:-1]
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            target = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
            names = [alias.name for alias in node.names] if target[-1] in ("", "core") else []
            for name in names or [""]:
                parts = [part for part in [*target, name] if part]
                if parts[0] == "core":
                    rooms.add(room_of(tuple(parts[1:])))
    return rooms - {room_of(path.relative_to(CORE).parts)}


def test_the_picture_has_every_room_once() -> None:
    drawn = [room for layer in layers() for room in layer]
    assert sorted(drawn) == sorted({room_of(path.relative_to(CORE).parts) for path in FILES})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CORE).as_posix())
def test_imports_go_down_the_picture(path: Path) -> None:
    height = {room: number for number, layer in enumerate(reversed(layers())) for room in layer}
    own = height[room_of(path.relative_to(CORE).parts)]
    assert [room for room in imported_rooms(path) if height[room] >= own] == []


def test_no_layer_of_the_picture_could_be_lower() -> None:
    """Each room stands right above the highest room that it needs."""
    height = {room: number for number, layer in enumerate(reversed(layers())) for room in layer}
    needs: dict[str, set[str]] = {room: set() for room in height}
    for path in FILES:
        needs[room_of(path.relative_to(CORE).parts)] |= imported_rooms(path)
    assert height == {room: max((height[below] + 1 for below in rooms), default=0) for room, rooms in needs.items()}


def test_every_file_is_described_in_the_docs() -> None:
    section = ARCHITECTURE.split("## The layers of the core")[1].split("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([a-z_0-9/]+)`", table))
    described = {path.relative_to(CORE).with_suffix("").as_posix() for path in FILES}
    assert {name for name in described if not name.startswith("policies/")} <= named
    assert {name for name in named if "/" in name} <= described


def columns() -> dict[str, str]:
    """The table in the docstring of `SequenceTable`: column → who writes it."""
    tree = ast.parse(TABLE.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SequenceTable"]
    text = ast.get_docstring(classes[0]) or ""
    return dict(re.findall(r"^(\w+) {2,}([a-z_, ]+)$", text, re.MULTILINE))


def columns_made() -> set[str]:
    """The lists and arrays of one item for each row that `SequenceTable` makes."""
    made = re.findall(
        r"self\.([a-z]\w*)(?:: [^=]+)? = (?:zeros_i64\(max_num_seqs\)|\[.*\] \* max_num_seqs)", TABLE.read_text()
    )
    return set(made)


def written_in(path: Path, names: set[str]) -> set[str]:
    """Columns of the sequences that a file assigns items of, also by another name of its own."""
    written = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        local = {
            target.id: node.value.attr
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in names
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in nodes:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AugAssign) else targets
            for target in targets:
                if isinstance(target, ast.Subscript):
                    of = target.value
                    name = of.attr if isinstance(of, ast.Attribute) else local.get(ast.unparse(of), "")
                    written |= {name} & names
    return written


def test_the_table_of_columns_is_who_writes_them() -> None:
    told = columns()
    assert set(told) == columns_made()
    writers: dict[str, set[str]] = {name: set() for name in told}
    for path in FILES:
        if path.name not in ("group_table.py", "block_table.py"):
            for name in written_in(path, set(told)):
                writers[name].add("open and close" if path == TABLE else path.stem)
    assert {name: ", ".join(sorted(names)) for name, names in writers.items()} == told


def test_the_list_of_checkpoint_fields_is_who_assigns_them() -> None:
    """In files that import `Checkpoint`, whatever they call one."""
    path = CORE / "policies" / "states" / "checkpoint.py"
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    text = (ast.get_docstring(classes[0]) or "").split("never change:")[1]
    rows = re.findall(r"^(\w+) +([a-z_]+(?:,\s+[a-z_]+)*)$", text, re.MULTILINE)
    listed = {writer: set(re.split(r",\s+", names)) for writer, names in rows}
    fields = {
        node.attr
        for node in ast.walk(classes[0])
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert set().union(*listed.values()) | {"number", "node", "position"} == fields
    assigned = {
        file.stem: {
            node.attr
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) != "self"
        }
        & fields
        for file in FILES
        if re.search(r"import .*\bCheckpoint\b", file.read_text())
    }
    assert {writer: names for writer, names in assigned.items() if names} == listed
