"""What the sources must look like. Every rule is also run on a small bad source, so that it can fail."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from blockyard_testing.each import for_each
from blockyard_testing.places import PACKAGE_DIR, child_environment
from blockyard_testing.public_face import tree_of

from ..support import source_rules
from ..support.source_rules import TREE_RULES

sys.path.insert(0, str(PACKAGE_DIR))
from _sources import compiled_sources

sys.path.pop(0)

COMPILED = compiled_sources(PACKAGE_DIR)
PACKAGE_FILES = sorted(path for path in PACKAGE_DIR.rglob("*.py") if path.name != "_build_record.py")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE_DIR).as_posix()


def every_file(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    return for_each(paths, relative)


# ---------------------------------------------------------------- what mypyc compiles


def test_what_is_compiled() -> None:
    names = [relative(path) for path in COMPILED]
    assert "ids.py" in names
    assert "core/manager.py" in names
    assert all(name in ("ids.py", "windows.py") or name.startswith(("core/", "events/tables/")) for name in names)
    assert not any(name.endswith(("__init__.py", "__main__.py")) for name in names)


@every_file(COMPILED)
def test_compiled_sources_keep_the_rules(path: Path) -> None:
    tree = tree_of(path)
    assert {rule: broken for rule, check in TREE_RULES.items() if (broken := check(tree))} == {}


@cache
def slow_classes() -> set[str]:
    return set().union(*(source_rules.slow_classes(tree_of(file)) for file in PACKAGE_FILES))


@every_file(COMPILED)
def test_no_slow_object_is_made_in_a_compiled_loop(path: Path) -> None:
    assert source_rules.slow_objects_in_loops(tree_of(path), slow_classes()) == []


#: What compiled code may narrow to 32 or 8 bits: `i32(...)` wraps silently, so each argument is listed with the
#: check at construction that keeps it in range.
BLOCK_ID = "a block id: below num_blocks, at most MAX_BLOCKS = 2**27"
TABLE_ROW = "a row of a table of what a cache told: below its capacity, which memory limits"
GUARD_ROW = "a row of a block or of as many ghosts, 13 words of both: below 2**31"
ROW = "a row plus one: at most MAX_SEQS = 2**20"
CHECKED_ONCE: dict[str, dict[str, str]] = {
    "core/pools/named_pool.py": {"block": BLOCK_ID},
    "core/calls/hold.py": {"block": BLOCK_ID},
    "core/index/room.py": {"step": "blocks that a pool grows by: below 2**27"},
    "core/blocks/word_ledger.py": dict.fromkeys(["self._first_unused", "entry", "block"], "blocks and names: 2**27"),
    "core/blocks/ledger.py": {"block": BLOCK_ID},
    "core/blocks/lease.py": dict.fromkeys(["block", "new"], BLOCK_ID),
    "core/blocks/by_id.py": {"block": BLOCK_ID},
    "core/waiting/lookups.py": {"block": BLOCK_ID},
    "core/waiting/room.py": {"change": "1 or -1", "counted": "0 or 1"},
    "core/store/transfers.py": {"number": "a block id or a layer group: below 2**27"},
    "core/store/grouped.py": {"token_block": BLOCK_ID},
    "core/store/checkpoint_hits.py": {"block": BLOCK_ID},
    "core/index/continuations.py": dict.fromkeys(["block", "following", "before", "after"], BLOCK_ID),
    "core/policies/parts/lists.py": dict.fromkeys(
        ["block", "end", "after", "before", "number + 1", "target + 1"],
        "a block, or behind all blocks a list, at most two for each of MAX_SESSIONS = 2**20 sessions: below 2**28",
    ),
    "core/policies/parts/keys.py": dict.fromkeys(
        ["row", "self._free", "last", "following", "previous"], "a row: at most twice the capacity, 2**28"
    ),
    "core/policies/layers/shadow.py": dict.fromkeys(
        ["row", "row_of(parent)", "ghost", "end", "self._free_ghost"], GUARD_ROW
    )
    | {"key & LOW_31": "31 bits", "key >> 31": "a key: below 2**62"},
    "core/watch/history.py": {"block": BLOCK_ID},
    "core/blocks/free_queue.py": dict.fromkeys(
        ["block", "block - 1", "num_blocks - 1", "before", "after", "NULL_BLOCK"], BLOCK_ID
    ),
    "core/sequences/joins.py": {"heir + 1": ROW},
    "core/index/content_log.py": dict.fromkeys(["self.num_entries", "kept"], "at most four entries a block: 2**29"),
    "core/store/event_reader.py": {"entries[place]": BLOCK_ID},
    "events/tables/block_trie.py": dict.fromkeys(["before", "node"], "a node: below the capacity, which memory limits"),
    "events/tables/content_rows.py": dict.fromkeys(["parent", "after", "row", "before"], TABLE_ROW)
    | {"self._free": "a row of a table, or a page: below their number, which memory limits"},
    "events/tables/content_table.py": {"row": TABLE_ROW},
    "events/tables/place_rows.py": dict.fromkeys(["content", "row", "self._free"], TABLE_ROW)
    | {"place": "twice a layer group plus a medium"},
    "core/index/rows.py": dict.fromkeys(["block", "newest", "oldest", "before", "after"], BLOCK_ID),
    "core/index/prefix_index.py": {
        "block": BLOCK_ID,
        "slot & ID_MASK": "27 bits",
        "owner": ROW,
    },
    "core/sequences/block_table.py": {"block": BLOCK_ID},
    "core/blocks/fence.py": dict.fromkeys(["block", "NULL_BLOCK"], BLOCK_ID),
    "core/store/content_ledger.py": {"block": BLOCK_ID},
    "core/store/group_table.py": {"block": BLOCK_ID},
}


def test_the_checks_that_the_list_names_are_there() -> None:
    assert "MAX_BLOCKS = 2**27" in (PACKAGE_DIR / "cache_options.py").read_text()
    assert "MAX_SEQS = 2**20" in (PACKAGE_DIR / "config.py").read_text()


@every_file(COMPILED)
def test_narrowing_only_where_the_range_was_checked(path: Path) -> None:
    allowed = CHECKED_ONCE.get(relative(path), {})
    found = source_rules.narrowed(tree_of(path))
    assert [(line, text) for line, text in found if text not in allowed] == []
    assert set(allowed) <= {text for _, text in found}, "the list names a narrowing that is gone"


BAD_SOURCES = {
    "1 dropped vec result": [
        "from librt.vecs import append\nappend(v, 1)",
        "from librt.vecs import pop as take\ntake(v)",
        "import librt.vecs\nlibrt.vecs.extend(v, [1])",
        "from librt import vecs\nvecs.remove(v, 1)",
    ],
    "2 shifted constant": [
        "def f(n):\n    return 1 << n",
        "def f(n):\n    return i64(1) << n",
        "def f(n):\n    return ONE << n",
        "def f(self, n):\n    return self.ONE >> n",
        "def f(n):\n    one = 1\n    return one << n",
        "def f(n):\n    one: i64 = 1\n    one <<= n\n    return one",
    ],
    "3 raise from": ["try:\n    f()\nexcept E as e:\n    raise X('why') from e"],
    "4 quiet abstract method": [
        "class A:\n    @abstractmethod\n    def f(self): ...",
        "class A:\n    @abc.abstractmethod\n    def f(self):\n        'Only a docstring.'",
        "class A:\n    @abstractmethod\n    def f(self):\n        return 0",
    ],
    "5 runtime_checkable": [
        "@runtime_checkable\nclass P(Protocol): ...",
        "@typing.runtime_checkable\nclass P(Protocol): ...",
    ],
    "6 rebound iterable": [
        "for x in v:\n    v = append(v, x)",
        "for i in range(n):\n    n += 1",
        "for i in range(len(v)):\n    if i:\n        v, w = w, v",
        "for i, x in enumerate(v):\n    with f() as v: pass",
        "for x in v:\n    for v in w: pass",
        "for x in v:\n    if (v := f()): pass",
    ],
    "7 TYPE_CHECKING else": [
        "if TYPE_CHECKING:\n    import a\nelse:\n    a = None",
        "if typing.TYPE_CHECKING:\n    import a\nelif b:\n    a = None",
    ],
    "literal of 2**62 or more": ["MASK = 4611686018427387904", "x = -9223372036854775808"],
    "assert": ["assert x > 0"],
}

GOOD_SOURCES = {
    "1 dropped vec result": ["from librt.vecs import append\nv = append(v, 1)", "queue.append(1)"],
    "2 shifted constant": [
        "def f(x, n):\n    return x << n",
        "def f(self, n):\n    return self.x[0] >> n",
        "def f(x):\n    return x >> 27 & 1 << 3",
        "def f(x, n):\n    y = x * 3\n    return y >> n",
        "def f(x):\n    return x >> SHIFT",
    ],
    "3 raise from": ["raise X('why')"],
    "4 quiet abstract method": [
        "class A:\n    @abstractmethod\n    def f(self):\n        'Say it.'\n        raise NotImplementedError"
    ],
    "5 runtime_checkable": ["class P(Protocol): ..."],
    "6 rebound iterable": ["for x in v:\n    w = x", "for i in range(n):\n    v[i] = 0", "v = w\nfor x in v: pass"],
    "7 TYPE_CHECKING else": ["if TYPE_CHECKING:\n    import a", "if ready:\n    a()\nelse:\n    b()"],
    "literal of 2**62 or more": ["MASK = 4611686018427387903"],
    "assert": ["if x: raise InvariantError('x')"],
}


def test_every_rule_has_bad_and_good_sources() -> None:
    assert set(BAD_SOURCES) == set(GOOD_SOURCES) == set(TREE_RULES)


@pytest.mark.parametrize(("rule", "source"), [(r, s) for r, sources in BAD_SOURCES.items() for s in sources])
def test_a_bad_source_breaks(rule: str, source: str) -> None:
    assert TREE_RULES[rule](ast.parse(source))


@pytest.mark.parametrize(("rule", "source"), [(r, s) for r, sources in GOOD_SOURCES.items() for s in sources])
def test_a_good_source_keeps(rule: str, source: str) -> None:
    assert TREE_RULES[rule](ast.parse(source)) == []


def test_slow_objects_in_loops_are_seen() -> None:
    source = (
        "@dataclass(frozen=True)\nclass A: ...\nclass B(NamedTuple): ...\nclass C(enum.IntEnum): ...\nclass D: ...\n"
        "for i in v:\n    A(i)\nwhile True:\n    x = B(1)\ny = [C(i) for i in v]\nfor i in v:\n    D(i)\nA(1)\n"
    )
    tree = ast.parse(source)
    slow = source_rules.slow_classes(tree)
    assert slow == {"A", "B", "C"}
    assert [line for line, _ in source_rules.slow_objects_in_loops(tree, slow)] == [7, 9, 10]


def test_unchecked_narrowing_is_found() -> None:
    tree = ast.parse("a = i32(block)\nb = u8(x + 1)\nc = i32(0)\nd = i64(block)")
    assert source_rules.narrowed(tree) == [(1, "block"), (2, "x + 1")]


# ---------------------------------------------------------------- the layers


#: Layers from the bottom up; a module imports only from layers below its own, or from its own package.
LAYERS = {
    "errors": 0,
    "ids": 0,
    "windows": 0,
    "_sources": 0,
    "_generated_c": 0,
    "_build_record": 0,
    "_build": 1,
    "amounts": 1,
    "arguments": 1,
    "cache_options": 2,
    "hash_seeds": 2,
    "progress": 1,
    "groups": 2,
    "keys": 2,
    "answers": 2,
    "kv_events": 2,
    "tenants": 3,
    "config": 4,
    "naming": 4,
    "argument_types": 3,
    "state_hints": 4,
    "sizing": 5,
    "core": 5,
    "admission": 6,
    "named": 6,
    "policies": 6,
    "storage": 6,
    "observe": 6,
    "metrics": 6,
    "wire": 7,
    "events": 8,
    "steps": 8,
    "routing": 9,
    "extending": 9,
    "signatures": 1,
    "engine_versions": 2,
    "cli": 11,
    "__main__": 12,
}
#: Packages within a package, from the bottom up, in the same way. Files that stand in none of them are below all.
INNER_LAYERS = {
    "events": {"tables": 1, "publishing": 2, "following": 2},
}
#: What a room needs from outside, besides the standard library. Everything else is an optional extra.
OUTSIDE = {
    "core": {"numpy", "librt", "mypy_extensions"},
    "ids": {"mypy_extensions"},
    "windows": {"mypy_extensions"},
    "naming": {"numpy", "cbor2", "xxhash"},
    "argument_types": {"numpy"},
    "kv_events": {"numpy"},
    "progress": {"rich"},  # where it is installed
    "observe": {"numpy"},
    "metrics": {"numpy", "prometheus_client"},
    "storage": {"numpy", "torch"},
    "wire": {"numpy"},
    "steps": set(),
    "routing": {"numpy"},
    "events": {"numpy", "librt", "mypy_extensions", "msgspec", "zmq"},
}
#: Rooms that may name `__version__` and its like.
KNOWS_THE_VERSION = {"cli", "__main__"}
NO_OUTSIDE_WORLD = {"time", "datetime", "random", "secrets", "os", "socket", "threading", "uuid"}


def room_of(path: Path) -> str:
    """`core` for core/manager.py, `config` for config.py."""
    return path.relative_to(PACKAGE_DIR).with_suffix("").parts[0]


def imports_of(path: Path, tree: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
    """Each import as (line, kind, module parts); kind is "inside" or "outside", inside parts start at the package."""
    package = list(path.relative_to(PACKAGE_DIR).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, "outside", alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, "outside", (node.module or "").split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)]
            named = node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, "inside", [*base, *named, alias.name]


def upward_imports(path: Path, tree: ast.Module) -> list[str]:
    """Imports that do not go down, or that name the package in full."""
    room, broken = room_of(path), []
    for line, kind, parts in imports_of(path, tree):
        where = f"{path.name}:{line} imports {'.'.join(parts)}"
        if kind == "outside":
            if parts[0] == "blockyard":
                broken.append(f"{where}, not by a relative import")
        elif room != "__init__" and parts[0] not in LAYERS:
            if room not in KNOWS_THE_VERSION or not parts[0].startswith("_"):
                broken.append(f"{where}, which is in no layer")
        elif room not in ("__init__", parts[0]) and LAYERS[parts[0]] >= LAYERS[room]:
            broken.append(f"{where}, which is not below {room}")
    return broken


def upward_imports_within(path: Path, tree: ast.Module) -> list[str]:
    """Imports from one inner room to another that do not go down. The face of the whole room may import any."""
    room, *rest = path.relative_to(PACKAGE_DIR).parts
    layers = INNER_LAYERS.get(room, {})
    if not layers or rest == ["__init__.py"]:
        return []
    own = rest[0] if len(rest) > 1 else ""
    return [
        f"{path.name}:{line} imports {'.'.join(parts)}, which is not below {own or room}"
        for line, kind, parts in imports_of(path, tree)
        if kind == "inside" and parts[0] == room and parts[1] in layers and parts[1] != own
        if layers[parts[1]] >= layers.get(own, 0)
    ]


@every_file(PACKAGE_FILES)
def test_every_file_has_a_layer_and_imports_go_down(path: Path) -> None:
    assert room_of(path) == "__init__" or room_of(path) in LAYERS
    assert upward_imports(path, tree_of(path)) == []
    assert upward_imports_within(path, tree_of(path)) == []


@pytest.mark.parametrize("room", INNER_LAYERS)
def test_every_inner_package_has_a_layer(room: str) -> None:
    assert {path.parent.name for path in (PACKAGE_DIR / room).glob("*/__init__.py")} == set(INNER_LAYERS[room])


@every_file(PACKAGE_FILES)
def test_lower_layers_need_little_from_outside(path: Path) -> None:
    room = room_of(path)
    allowed = OUTSIDE.get(room, set())
    for line, kind, parts in imports_of(path, tree_of(path)):
        if kind == "outside" and (room in OUTSIDE or LAYERS.get(room, 10) <= LAYERS["storage"]):
            assert parts[0] in sys.stdlib_module_names | allowed | {"__future__"}, f"{relative(path)}:{line}"


@every_file([path for path in PACKAGE_FILES if path not in COMPILED])
def test_only_compiled_code_makes_vecs(path: Path) -> None:
    """A vec that interpreted code makes and passes to a compiled function is never freed (mypyc 2.4.1): pass arrays."""
    outside = {parts[0] for _, kind, parts in imports_of(path, tree_of(path)) if kind == "outside"}
    assert "librt" not in outside


@every_file(PACKAGE_FILES)
def test_the_core_reads_no_clock_environment_or_global_random(path: Path) -> None:
    if room_of(path) in {"core", "errors", "config", "groups", "ids", "keys", "storage"}:
        tree = tree_of(path)
        outside = {parts[0] for _, kind, parts in imports_of(path, tree) if kind == "outside"}
        assert outside & NO_OUTSIDE_WORLD == set()
        assert "np.random.seed" not in path.read_text()
    if room_of(path) == "sizing":
        outside = {parts[0] for _, kind, parts in imports_of(path, tree_of(path)) if kind == "outside"}
        assert outside & {"time", "random", "secrets", "uuid"} == set()


def test_a_wrong_import_is_seen() -> None:
    def broken(name: str, source: str) -> list[str]:
        return upward_imports(PACKAGE_DIR / name, ast.parse(source))

    assert broken("core/pool.py", "from ..storage.kv_cache import KVCache")
    assert broken("core/pool.py", "from .. import routing")
    assert broken("core/pool.py", "from blockyard.errors import OutOfBlocks")
    assert broken("core/pool.py", "import blockyard.errors")
    assert broken("storage/a.py", "from ..observe import b")
    assert broken("routing/a.py", "from ..cli import main")
    assert broken("errors.py", "from .config import CacheConfig")
    assert broken("core/pool.py", "from ..nowhere import x")
    assert not broken("core/pool.py", "import numpy\nfrom ..errors import A\nfrom .free_queue import B")
    assert not broken("routing/a.py", "from ..core import KVCacheManager\nfrom ..storage.kv import A")


def test_a_wrong_import_within_a_room_is_seen() -> None:
    def broken(name: str, source: str) -> list[str]:
        return upward_imports_within(PACKAGE_DIR / name, ast.parse(source))

    assert broken("events/tables/a.py", "from ..following.mirror import Mirror")
    assert broken("events/publishing/a.py", "from ..following import mirror")
    assert broken("events/wire.py", "from .publishing.publisher import KVEventPublisher")
    assert not broken("events/following/a.py", "from ..tables.block_trie import BlockTrie\nfrom ..errors import b")
    assert not broken("events/wire.py", "from .sockets import bound\nfrom ..errors import InvalidArgument")
    assert not broken("events/__init__.py", "from .following.mirror import Mirror")
    assert not broken("wire/a.py", "from .message import pack")


def test_the_package_imports_without_its_extras() -> None:
    """`import blockyard` must work, and stay quick, without torch."""
    code = (
        "import sys\n"
        "extras = ('torch', 'transformers', 'rich', 'gguf', 'safetensors', 'prometheus_client')\n"
        "for name in extras: sys.modules[name] = None\n"
        "import blockyard\nblockyard.KVCacheManager(blockyard.CacheConfig(num_blocks=8))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=None, env=child_environment(), timeout=120)
