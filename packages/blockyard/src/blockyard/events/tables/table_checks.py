"""Invariants of the tables of events, for tests."""

from ...errors import InvariantError
from .block_trie import AMBIGUOUS, BlockTrie
from .content_rows import GONE, ROOT, ContentRows
from .content_table import ContentTable


def check_contents(table: ContentTable) -> None:
    """Raise `InvariantError` unless rows, links, places and reachability are consistent. O(capacity)."""
    rows = table.rows
    children: dict[int, int] = {}
    num_rows = 0
    for row in range(1, int(rows.capacity)):
        if rows.find(rows.name[row]) != row:
            continue  # a free row
        num_rows += 1
        parent = int(rows.parent[row])
        if parent:
            children[parent] = children.get(parent, 0) + 1
        _require(rows.kind[row] != GONE or rows.first_child[row] != 0 or rows.first_place[row] != 0, "unused", row)
        _require(rows.request[row] == _request_of(table, row), "request", row)
        _require((rows.kind[row] == ROOT) == (row in table.roots), "root", row)
    _require(num_rows == rows.num_rows, f"{num_rows} rows are counted as {rows.num_rows}", 0)
    for parent, count in children.items():
        _require(_num_children(rows, parent) == count, "children", parent)
    _check_places(table)


def _request_of(table: ContentTable, row: int) -> int:
    """Return the row of the root that a row is reachable from; 0 for none."""
    rows = table.rows
    while rows.kind[row] != GONE:
        if rows.parent[row] == 0:
            return row if rows.kind[row] == ROOT else 0
        row = int(rows.parent[row])
    return 0


def _num_children(rows: ContentRows, parent: int) -> int:
    count, previous, child = 0, 0, int(rows.first_child[parent])
    while child:
        _require(rows.parent[child] == parent and rows.previous[child] == previous, "links", child)
        count, previous, child = count + 1, child, int(rows.next_one[child])
    return count


def _check_places(table: ContentTable) -> None:
    """Check that each place's blocks are counted once."""
    places, held = table.places, 0
    for row in range(1, int(table.rows.capacity)):
        place = int(table.rows.first_place[row]) if table.rows.find(table.rows.name[row]) == row else 0
        while place:
            _require(places.content[place] == row and places.num_blocks[place] > 0, "place", row)
            held += int(places.num_blocks[place])
            place = int(places.next_one[place])
    _require(held == places.num_holdings, f"{held} blocks in places are counted as {places.num_holdings}", 0)


def check_trie(trie: BlockTrie) -> None:
    """Raise `InvariantError` unless nodes, their uses and the holders' names are consistent. O(capacity)."""
    uses: dict[int, int] = {}
    for holder in range(int(trie.num_holders)):
        for name in trie.holdings.names_of(holder):
            node = int(trie.holdings.node_of(holder, name))
            if node != AMBIGUOUS:
                uses[node] = uses.get(node, 0) + 1
    num_nodes = 0
    for node in range(1, int(trie.capacity)):
        if trie.index.is_cached(node):
            num_nodes += 1
            before = int(trie.node_before(node))
            if before:
                uses[before] = uses.get(before, 0) + 1
    _require(num_nodes == trie.num_nodes, f"{num_nodes} nodes are counted as {trie.num_nodes}", 0)
    for node in range(1, int(trie.capacity)):
        if trie.index.is_cached(node):
            _require(trie.num_uses(node) == uses.get(node, 0) > 0, "uses", node)
            behind = int(trie.child_of(node))
            _require(behind == 0 or (trie.index.is_cached(behind) and trie.node_before(behind) == node), "child", node)


def _require(holds: bool, what: str, row: int) -> None:
    if not holds:
        raise InvariantError(f"a table of events: {what}, at {row}")
