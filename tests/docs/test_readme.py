"""The Python of the README and the pages runs as it stands there, and so does every example that needs no model."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

import blockyard
from blockyard import BlockPool, CacheConfig, KVCacheManager
from blockyard.cli.parsing import parse
from blockyard.core.blocks.block_queue import FreeKVCacheBlockQueue
from blockyard_testing.places import ROOT
from blockyard_testing.twin import count_handles_from_the_start

#: Folders of tests: the repository's, and one in each package.
TESTS = [ROOT / "tests", *(ROOT / "packages").glob("*/tests")]
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "packages").glob("*/README.md")),
]
FENCED = re.compile(r"^```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
SNIPPETS = [(page, number, text) for page in PAGES for number, text in enumerate(FENCED.findall(page.read_text()))]

#: Examples without `blockyard_engine`, which wants weights, and a line each must print.
EXAMPLES = {
    "copy_on_write.py": "0 blocks leaked",
    "engine_loop.py": "1 forked with 1 blocks copied on write",
    "hit_rates.py": "the first 160 of 200 tokens           78.4%",
    "own_policy.py": "YoungestFirst   52.5%",
    "trace_allocation.py": "48 of them are cached",
}


def test_there_are_snippets_to_run() -> None:
    found = [page.name for page, _, _ in SNIPPETS]
    assert "README.md" in found
    assert found.count("embed.md") >= 2
    assert found.count("guide.md") >= 7
    assert found.count("coming-from.md") >= 2
    assert "engine.md" in found


@pytest.mark.parametrize(
    ("page", "text"),
    [(p, t) for p, _, t in SNIPPETS],
    ids=[f"{page.parent.name}/{page.stem}-{number}" for page, number, _ in SNIPPETS],
)
def test_a_snippet_runs(page: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = compile(text, page.name, "exec")
    if "path/to/" in text:
        return
    count_handles_from_the_start(blockyard)
    exec(code, {})
    printed = capsys.readouterr().out
    for shown in re.findall(r"print\(.*\)\s+# ((?:\[|\d).*)$", text, flags=re.MULTILINE):
        assert shown.partition(":")[0] in printed, "what stands before a colon is printed"


COMMANDS = sorted(
    {
        (page, command)
        for page in PAGES
        for command in re.findall(r"^    blockyard (?!--)([^#\n]*\w[^#\n]*)", page.read_text(), flags=re.MULTILINE)
        if not command.endswith(("\\", "...", "... "))
    }
)


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: getattr(value, "name", value))
def test_a_command_of_a_page_has_the_options_that_it_is_given(page: Path, command: str) -> None:
    assert parse(shlex.split(command)).command


PROGRAMS = {
    (page, *module.split("."))
    for page in PAGES
    for module in re.findall(r"python -m ((?:tests|benchmarks)\.[\w.]*\w)", page.read_text())
}


def test_a_program_that_a_page_names_exists_in_the_folder_of_a_package_that_it_names() -> None:
    """`tests.stress` is started in packages/blockyard, and nowhere else."""
    missing = []
    for page, *words in sorted(PROGRAMS):
        named = re.findall(r"packages/blockyard(?:-\w+)?(?!-?\w)", page.read_text())
        folders = [ROOT, page.parent, *(ROOT / name for name in named)]
        path = Path(*words)
        if not any((folder / path).is_dir() or (folder / path.with_suffix(".py")).is_file() for folder in folders):
            missing.append((page.name, ".".join(words)))
    assert missing == []


def skeleton(readme: str) -> dict[str, object]:
    """What a translation keeps: the levels of its headings, its programs, pictures, links, and commands."""
    fenced = r"^```(\w+)\n(.*?)^```$"
    text = re.sub(fenced, "", readme, flags=re.DOTALL | re.MULTILINE)
    return {
        "headings": re.findall(r"^#+ ", text, re.MULTILINE),
        "fenced": re.findall(fenced, readme, flags=re.DOTALL | re.MULTILINE),
        "rows": [row.count("|") for row in text.splitlines() if row.startswith("|")],
        "links": {link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("README")},
        "commands": [
            line.partition("#")[0].split() for line in re.findall(r"^    ((?!free )\w.*)$", text, re.MULTILINE)
        ],
    }


def test_the_chinese_readme_says_the_same() -> None:
    english, chinese = (skeleton((ROOT / name).read_text()) for name in ("README.md", "README.zh-CN.md"))
    assert chinese == english


def test_a_readme_stays_short() -> None:
    """What somebody with two minutes reads; the rest has pages of its own."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


def test_the_readme_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "packages" / "blockyard" / "pyproject.toml").read_text())["project"]
    section = (ROOT / "README.md").read_text().split("## Install")[1].split("\n## ")[0]
    extras = set(project["optional-dependencies"])
    assert extras & set(re.findall(r"`(\w+)`", section)) == extras


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_extras_compile_nothing_and_torch_comes_before_the_engine(page: Path) -> None:
    """An extra of the checkout builds it again; and unasked, pip takes the torch with all of CUDA."""
    text = page.read_text()
    assert not re.search(r"pip install [^\n]*'\.\[", text)
    first = re.search(r"pip install 'blockyard\[[^\]]*(?:engine|serve)", text)
    assert first is None or "torch" in text[: text.find("\n\n", first.start())]


def test_every_example_without_a_model_is_run() -> None:
    # "blockyard serve" names a server, and test_serving.py runs what talks to one.
    needs = ("blockyard_engine", "blockyard serve")
    alone = {
        path.name for path in (ROOT / "examples").glob("*.py") if not any(each in path.read_text() for each in needs)
    }
    assert alone == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert EXAMPLES[name] in capsys.readouterr().out


def test_the_engine_loop_without_a_model_preempts_and_leaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "engine_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert " 0 preempted" not in printed
    assert "0 blocks leaked" in printed


def test_answers_of_the_engine_loop_begin_with_tokens_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "engine_loop.py"), run_name="__main__")
    begun = re.search(r"answers that begin with \[(\d+), (\d+)\]", capsys.readouterr().out)
    assert begun is not None
    assert begun[1] != begun[2]


# ---------------------------------------------------------------- names in the tables of "coming from"


#: Packages of `blockyard` whose names stand in the tables with the package before them.
PACKAGES = (
    "admission",
    "engine",
    "events",
    "tiers",
    "live",
    "metrics",
    "steps",
    "tenants",
    "answers",
    "named",
    "naming",
    "observe",
    "parallel",
    "policies",
    "sizing",
    "storage",
)
#: Those of them that are packages of their own.
MODULES = {
    "engine": "blockyard_engine",
    "tiers": "blockyard_tiers",
    "live": "blockyard_serve.live",
    "parallel": "blockyard_engine.parallel",
}
OWNERS = "|".join(("cache", "pool", "queue", "plan", "block", *PACKAGES))
#: What tutorials and courses call the parts of such a system.
COURSE_NAMES = [
    "BlockAllocator",
    "BlockHashToBlockMap",
    "BlockPool",
    "DebugBlockPool",
    "KVCacheBlock",
    "LeakDetector",
    "LogicalTokenBlock",
    "MultiGPUBlockPool",
    "PhysicalTokenBlock",
    "_maybe_evict",
    "allocate_batch",
    "allocate_with_prefix_cache",
    "calculate_cache_budget",
    "can_allocate",
    "enable_kv_cache_events",
    "find_optimal_block_size",
    "fork_block",
    "get_all_free_blocks",
    "get_block_hash",
    "get_cache_block_size",
    "get_num_blocks",
    "get_one_block",
    "is_null",
    "last_accessed",
    "make_block_hash_with_group_id",
    "metrics_collector",
    "num_tokens_total",
    "print_allocation_summary",
    "profile_num_available_blocks",
    "resize_block_pool",
    "robust_block_hash",
    "share_block",
    "smart_eviction_score",
    "swap_space",
    "used_block_ids",
    "visualize_block_pool",
    "watermark_blocks",
]


def table_names(page: str) -> list[str]:
    """Return the names in the column "ours" (or "keep your scheduler"), and the dotted ones after it."""
    found: list[str] = []
    column = 0
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        heads = [cells.index(head) for head in ("ours", "keep your scheduler") if head in cells]
        if heads:
            column = heads[0]
        elif line.startswith("| "):
            found += re.findall(r"`([\w.]+)`", cells[column])
            found += re.findall(rf"`((?:{OWNERS})\.\w+)`", " ".join(cells[column + 1 :]))
    return found


NAMES = table_names((ROOT / "docs" / "coming-from.md").read_text())


def exists(name: str) -> bool:
    cache = KVCacheManager(CacheConfig(num_blocks=4, max_num_seqs=1))
    plan = cache.reserve([cache.allocate([1])], 1)
    pool = BlockPool(4)
    things = {
        "cache": cache,
        "pool": pool,
        "plan": plan,
        "block": cache.block(1),
        "found": pool.find_cached_blocks([1]),
    }
    owner, _, attribute = name.rpartition(".")
    if owner in PACKAGES or owner.startswith("core."):
        return hasattr(importlib.import_module(MODULES.get(owner, f"blockyard.{owner}")), attribute)
    return hasattr({**things, "queue": FreeKVCacheBlockQueue(4), "": blockyard}[owner], attribute)


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_a_name_in_the_tables_exists(name: str) -> None:
    assert exists(name)


def test_the_tables_are_read() -> None:
    assert len(NAMES) > 60
    page = "| theirs | ours | |\n|---|---|---|\n| `a` | `cache.b`, `C` | `d` `plan.f` |\n"
    page += "\n| ours |\n|---|\n| `pool.e` |\n"
    assert table_names(page) == ["cache.b", "C", "plan.f", "pool.e"]
    assert not exists("cache.nothing")
    assert exists("observe.draw_pool")
    assert not exists("observe.nothing")


def course() -> dict[str, tuple[str, str]]:
    """Of the table "A first course": what stands in its first column, and the two cells behind it."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    section = page.split("\n## A first course\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert rows[0][:2] == ["theirs", "ours"]
    assert all(len(row) == 3 for row in rows)
    return {row[0]: (row[1], row[2]) for row in rows[2:]}


@pytest.mark.parametrize("name", COURSE_NAMES)
def test_a_name_of_a_course_leads_to_ours(name: str) -> None:
    """One row each, with a name of ours; or, while it is open, with a link to the promise."""
    [(ours, differs)] = [cells for theirs, cells in course().items() if re.search(rf"`{name}\b", theirs)]
    names = table_names(f"| ours |\n|---|\n| {ours} |\n")
    assert all(exists(each) for each in names)
    assert names or "promises.md" in differs


# ---------------------------------------------------------------- the promises


def promises() -> list[list[str]]:
    """The cells of each promise: number, promise, names, tests, example."""
    page = (ROOT / "docs" / "promises.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in row] for row in rows]


def test_every_promise_is_in_the_table() -> None:
    assert [int(row[0]) for row in promises()] == list(range(1, 40))
    assert all(len(row) == 5 for row in promises())


@pytest.mark.parametrize("row", promises(), ids=lambda row: row[0])
def test_what_a_promise_names_exists(row: list[str]) -> None:
    assert all(exists(name) for name in re.findall(r"`([\w.]+)`", row[2]))
    tests = re.findall(r"`(\w+/test_\w+\.py)`", row[3])
    assert all(any((folder / name).is_file() for folder in TESTS) for name in tests)
    assert tests or row[3].startswith("open")
    for name in re.findall(r"`([\w./]+)`", row[4]):
        assert (ROOT / name).is_file() or (ROOT / "examples" / name).is_file()


@pytest.mark.parametrize(
    "path", [*PAGES, *sorted((ROOT / "examples").glob("*.py"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_what_people_read_imports_public_places_alone(path: Path) -> None:
    """`blockyard` and its packages but `core`; a name that starts with an underscore is nowhere public."""
    imported = re.findall(r"(?:from|import) (blockyard(?:\.\w+)*)", path.read_text())
    assert [name for name in imported if ".core" in name or "._" in name] == []


@pytest.mark.parametrize(
    "path", [*PAGES, *sorted((ROOT / "examples").glob("*.py"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_what_people_read_imports_names_of_public_faces(path: Path) -> None:
    """Below `blockyard` and its packages a module is public by its `__all__`; adapters of other engines are by name."""
    found = re.findall(r"from (blockyard(?:\.\w+){2,}) import (\([^)]*\)|[^\n#]*)", path.read_text())
    below = [(module, name) for module, names in found for name in re.findall(r"\w+", names)]
    own = [(module, name) for module, name in below if not module.startswith(("blockyard_vllm.", "blockyard_sglang."))]
    assert [pair for pair in own if pair[1] not in getattr(importlib.import_module(pair[0]), "__all__", ())] == []
