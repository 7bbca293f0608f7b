"""The stubs of the classes whose methods take `object`, made from their sources: `python -m tests.stubs` writes them.

mypyc would check declared types of arguments itself and raise bare TypeErrors, so the sources declare `object`; type
checkers read the `.pyi` beside the source instead, where each argument has the type that its name has in `ARGUMENTS`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from blockyard_testing.source_only import PACKAGE_DIR

STUBBED = (
    "core/manager.py",
    "core/states.py",
    "core/waiting/queue.py",
    "core/waiting/rule.py",
    *(f"core/pools/{pool}_pool.py" for pool in ("block", "lease", "named", "standalone")),
)

ARGUMENTS = {
    **dict.fromkeys(["token_ids", "parents"], "Integers"),
    **dict.fromkeys(["seqs", "num_computed"], "OneOrMore"),
    **dict.fromkeys(
        [
            "seq",
            "num_seqs",
            "num_forks",
            "num_tokens",
            "checkpoint",
            "num_blocks",
            "num_cached_blocks",
            "block_id",
            "block_size",
        ],
        "Integer",
    ),
    **dict.fromkeys(["hash_seed", "num_bytes"], "Integer | None"),
    **dict.fromkeys(["history_size", "start", "position"], "Integer"),
    "stop": "Integer | None",
    **dict.fromkeys(["group", "priority"], "Integer"),
    **dict.fromkeys(["resumed", "enable_prefix_caching"], "bool"),
    "next_tokens": "NextTokens | None",
    "prompts": "Sequence[Integers]",
    "holder": "str",
    "holders": "Sequence[str]",
    "extra_keys": "ExtraKeys",
    "lease": "BlockLease",
    "found": "FoundBlocks",
    "extend_by": "Integer",
    "at": "Integer",
    **dict.fromkeys(["last", "may_evict"], "bool"),
    "block_ids": "Integers",
    "eviction_policy": "Policy",
    **dict.fromkeys(["retention_blocks", "residency_sample"], "Integer"),
    "enable_kv_cache_events": "bool",
    "callback": "Callable[[npt.NDArray[np.int32]], object] | None",
    "listener": "Callable[[], object] | None",
    "policy": "Policy",
    "config": "CacheConfig",
    "name": "bytes",
    "names": "Sequence[bytes]",
    "groups": "Sequence[int]",
    "blocks": "BlockLease | Integers",
    **dict.fromkeys(["source", "target", "max_events"], "Integer"),
    "now": "Number",
    **dict.fromkeys(["expires_at"], "Number | None"),
    "session": "str | None",
    "over": "bool",
    "states": "StateHints | None",
    **dict.fromkeys(["ticket", "count", "max_new_tokens"], "Integer"),
    "arrived": "Number",
    "is_over": "bool",
    "queue": "WaitingQueue",
    "order": "str",
    "seconds": "float | Callable[[int, int], float]",
    "k": "float | None",
}
#: Arguments of one call that another one takes otherwise.
OF_THE_CALL = {
    "append": {"next_tokens": "NextTokens"},
    "reserve": {"num_new_tokens": "OneOrMore | None"},
    "can_append": {"num_new_tokens": "OneOrMore"},
    "commit": {"step": "Integer | None"},
    "end_step": {"step": "Integer"},
    "hint": {"target": "Integer | str"},
    "hold": {"num_blocks": "Integer | None"},
    "finished": {"blocks": "BlockLease | Integer | Integers | None"},
}
#: What calls that take one handle or many return for each. Arrays come first: they are SupportsIndex too.
BY_SHAPE = {
    "num_tokens": (("Integers", "npt.NDArray[np.int64]"), ("Integer", "int")),
    "num_computed_tokens": (("Integers", "npt.NDArray[np.int64]"), ("Integer", "int")),
}
#: Where the types in stubs come from that the sources do not import.
TYPES = {
    "argument_types": {"Integer", "Integers", "OneOrMore", "NextTokens", "ExtraKeys", "Policy", "Number"},
    "state_hints": {"StateHints"},
    "core.blocks.lease": {"BlockLease"},
}


def stub(source: Path) -> str:
    """The text of the stub of one source: its public classes with their public methods, and no bodies."""
    tree = ast.parse(source.read_text())
    classes = [class_stub(node) for node in tree.body if isinstance(node, ast.ClassDef)]
    used = {node.id for node in ast.walk(ast.parse("\n".join(classes))) if isinstance(node, ast.Name)}
    imports = ["from collections.abc import Sequence"] if "Sequence" in used else []
    imports += ["from typing import overload"] if "overload" in used else []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept = [alias for alias in node.names if (alias.asname or alias.name) in used]
            if kept:
                level = "." * (node.level if isinstance(node, ast.ImportFrom) else 0)
                names = ", ".join(ast.unparse(alias) for alias in kept)
                module = f"from {level}{node.module or ''} " if isinstance(node, ast.ImportFrom) else ""
                imports.append(f"{module}import {names}")
    depth = "." * len(source.relative_to(PACKAGE_DIR).parts)
    imported = {node.name for node in ast.walk(ast.parse("\n".join(imports))) if isinstance(node, ast.alias)}
    if "Callable" in used - imported:
        imports.insert(0, "from collections.abc import Callable")
    for module, names in TYPES.items():
        missing = used & names - imported
        if missing:
            imports.append(f"from {depth}{module} import {', '.join(sorted(missing))}")
    head = f'"""For type checkers, who read it instead of {source.name}. Written by `python -m tests.stubs`."""'
    return "\n".join([head, "", *imports, "", *classes]) + "\n"


def class_stub(node: ast.ClassDef) -> str:
    lines = [ast.unparse(ast.ClassDef(node.name, node.bases, [], [ast.Pass()], [])).removesuffix("\n    pass")]
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            lines += attributes(inner)
        if isinstance(inner, ast.FunctionDef) and (inner.name == "__init__" or not inner.name.startswith("_")):
            lines += ["    " + line for line in function_stub(inner).splitlines()]
    return "\n".join(lines)


def attributes(init: ast.FunctionDef) -> list[str]:
    """`name: type` of each public attribute; one that is given an argument as it is has that one's type."""
    lines = []
    for node in ast.walk(init):
        if isinstance(node, ast.AnnAssign):
            target, told = node.target, ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign):
            target, told = node.targets[0], ARGUMENTS.get(ast.unparse(node.value), "")
        else:
            continue
        if isinstance(target, ast.Attribute) and not target.attr.startswith("_"):
            if not told:
                raise ValueError(f"{ast.unparse(node)}: the stub needs the type of this attribute, so annotate it")
            lines.append(f"    {target.attr}: {plain(told)}")
    return lines


def plain(annotation: str) -> str:
    return "int" if annotation == "i64" else annotation


def function_stub(node: ast.FunctionDef) -> str:
    if node.name in BY_SHAPE:
        forms = [f"def {node.name}(self, seqs: {taken}) -> {returned}: ..." for taken, returned in BY_SHAPE[node.name]]
        return f"@overload\n{forms[0]}  # type: ignore[overload-overlap]\n@overload\n{forms[1]}"
    arguments = node.args
    for argument in [*arguments.args, *arguments.kwonlyargs]:
        if argument.annotation is not None and ast.unparse(argument.annotation) == "object":
            told = OF_THE_CALL.get(node.name, {}).get(argument.arg) or ARGUMENTS[argument.arg]
            argument.annotation = ast.parse(told, mode="eval").body
        elif argument.annotation is not None:
            argument.annotation = ast.parse(plain(ast.unparse(argument.annotation)), mode="eval").body
    assert node.returns is not None
    returns = ast.parse(plain(ast.unparse(node.returns)), mode="eval").body
    return ast.unparse(
        ast.FunctionDef(node.name, arguments, [ast.Expr(ast.Constant(...))], node.decorator_list, returns, lineno=0)
    )


def stub_of(name: str) -> Path:
    return (PACKAGE_DIR / name).with_suffix(".pyi")


def same_form(text: str) -> str:
    """The text without its layout, and its imports in one order."""
    tree = ast.parse(text)
    tree.body.sort(key=lambda node: ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else "~")
    return ast.unparse(tree)


if __name__ == "__main__":
    for name in STUBBED:
        stub_of(name).write_text(stub(PACKAGE_DIR / name))
        for order in (["format", "-q"], ["check", "-q", "--select", "I", "--fix"]):
            subprocess.run([sys.executable, "-m", "ruff", *order, str(stub_of(name))], check=True)
