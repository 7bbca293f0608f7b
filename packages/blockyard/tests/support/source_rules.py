"""The rules a compiled source must keep, each a function from a syntax tree to what breaks it.

mypyc accepts every one of these mistakes and compiles it to something that differs from Python. Each function
returns `(line, what)` pairs; an empty list means that the rule is kept.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

Broken = list[tuple[int, str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

VEC_FUNCTIONS = {"append", "extend", "remove", "pop"}
FIXED_WIDTH = {"i64", "i32", "i16", "u8", "int"}
LOOPS = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
UPPERCASE = re.compile(r"_*[A-Z][A-Z0-9_]*$")


# ---------------------------------------------------------------- 1: the vec is in the result


def dropped_vec_results(tree: ast.Module) -> Broken:
    """`append(v, x)` returns the new vec; as a statement it does nothing."""
    names = _names_from(tree, "librt.vecs", VEC_FUNCTIONS)
    modules = _module_names(tree, "librt.vecs")
    broken = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            continue
        called = node.value.func
        by_name = isinstance(called, ast.Name) and called.id in names
        by_module = (
            isinstance(called, ast.Attribute) and called.attr in VEC_FUNCTIONS and ast.unparse(called.value) in modules
        )
        if by_name or by_module:
            broken.append((node.lineno, f"the result of {ast.unparse(node.value)} is dropped"))
    return broken


def _names_from(tree: ast.Module, module: str, wanted: set[str]) -> set[str]:
    """Local names of what `from module import ...` brings in."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
        if alias.name in wanted
    }


def _module_names(tree: ast.Module, module: str) -> set[str]:
    """Local names of `module` itself."""
    names = set()
    package, _, last = module.rpartition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name == module}
        if isinstance(node, ast.ImportFrom) and node.module == package:
            names |= {alias.asname or alias.name for alias in node.names if alias.name == last}
    return names


# ---------------------------------------------------------------- 2: shifts


def shifted_constants(tree: ast.Module) -> Broken:
    """A constant, an UPPERCASE name or a local that only holds constants, shifted by a variable."""
    broken = []
    for function in _functions(tree):
        locals_ = _constant_locals(function)
        for left, right, line in _shifts(function):
            if not _is_constant(right, set()) and _is_constant(left, locals_):
                broken.append((line, f"{ast.unparse(left)} is shifted by the variable {ast.unparse(right)}"))
    return broken


def _shifts(function: Function) -> Iterator[tuple[ast.expr, ast.expr, int]]:
    for node in ast.walk(function):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.LShift, ast.RShift)):
            left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            yield left, right, node.lineno


def _is_constant(node: ast.expr, constant_locals: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return (
            isinstance(node.func, ast.Name)
            and node.func.id in FIXED_WIDTH
            and all(_is_constant(argument, constant_locals) for argument in node.args)
        )
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand, constant_locals)
    if isinstance(node, ast.BinOp):
        return _is_constant(node.left, constant_locals) and _is_constant(node.right, constant_locals)
    if isinstance(node, ast.Name):
        return bool(UPPERCASE.match(node.id)) or node.id in constant_locals
    if isinstance(node, ast.Attribute):
        return bool(UPPERCASE.match(node.attr))
    return isinstance(node, ast.Constant)


def _constant_locals(function: Function) -> set[str]:
    """Locals that are not parameters and are assigned nothing but constants."""
    values: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in _target_names(target):
                    values.setdefault(name, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            for name in _target_names(node.target):
                values.setdefault(name, []).append(node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            for name in _target_names(node.target):
                values.setdefault(name, []).append(None)
    parameters = {argument.arg for argument in _parameters(function)}
    return {
        name
        for name, assigned in values.items()
        if name not in parameters and all(v is not None and _is_constant(v, set()) for v in assigned)
    }


# ---------------------------------------------------------------- 3 to 5, 7: constructs that break


def raise_from(tree: ast.Module) -> Broken:
    """`raise X from e` loses the cause."""
    return [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.cause is not None
    ]


def quiet_abstract_methods(tree: ast.Module) -> Broken:
    """An abstract method with any body but `raise NotImplementedError` aborts the process."""
    return [
        (function.lineno, f"{function.name} is abstract and does not raise NotImplementedError")
        for function in _functions(tree)
        if any(_last_name(decorator).startswith("abstract") for decorator in function.decorator_list)
        and not _raises_not_implemented(function)
    ]


def _raises_not_implemented(function: Function) -> bool:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return len(body) == 1 and isinstance(body[0], ast.Raise) and _last_name(body[0].exc) == "NotImplementedError"


def runtime_checkable(tree: ast.Module) -> Broken:
    """`@runtime_checkable` is a TypeError at import."""
    return [
        (node.lineno, f"{node.name} is runtime_checkable")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(_last_name(decorator) == "runtime_checkable" for decorator in node.decorator_list)
    ]


def type_checking_else(tree: ast.Module) -> Broken:
    """`if TYPE_CHECKING: ... else: ...` is compiled to unreachable code, and crashes."""
    return [
        (node.lineno, "TYPE_CHECKING has an else")
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and node.orelse
        and any(_last_name(part) == "TYPE_CHECKING" for part in ast.walk(node.test))
    ]


# ---------------------------------------------------------------- 6: what a for loop reads


def rebound_iterables(tree: ast.Module) -> Broken:
    """`for x in v: v = ...` and `for i in range(n): n = ...` change the loop once compiled."""
    broken = []
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For):
            read = _iterated_names(loop.iter)
            for statement in loop.body:
                for node in ast.walk(statement):
                    broken += [
                        (statement.lineno, f"{name} is rebound inside the loop over it")
                        for name in _bound_names(node) & read
                    ]
    return broken


def _iterated_names(iterated: ast.expr) -> set[str]:
    """Names that the loop may read again: the iterable, and what range, enumerate, zip or reversed take."""
    if isinstance(iterated, ast.Name):
        return {iterated.id}
    if isinstance(iterated, ast.Call) and _last_name(iterated.func) in {"range", "enumerate", "zip", "reversed"}:
        return (
            {
                node.id
                for argument in iterated.args
                for node in ast.walk(argument)
                if isinstance(node, ast.Name) and not UPPERCASE.match(node.id)
            }
            - FIXED_WIDTH
            - {"len"}
        )
    return set()


def _bound_names(node: ast.AST) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    return {name for target in targets for name in _target_names(target)}


# ---------------------------------------------------------------- 8: objects a loop


def slow_classes(tree: ast.Module) -> set[str]:
    """Dataclasses, named tuples and enums defined here: 100 to 300 ns each when made in compiled code."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (
            any("dataclass" in _last_name(decorator) for decorator in node.decorator_list)
            or any(_last_name(base) in {"NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag"} for base in node.bases)
        )
    }


def slow_objects_in_loops(tree: ast.Module, slow: set[str]) -> Broken:
    """Calls of a dataclass, named tuple or enum inside a loop."""
    return sorted(
        {
            (node.lineno, f"{ast.unparse(node)} makes a {_last_name(node.func)} in a loop")
            for loop in ast.walk(tree)
            if isinstance(loop, LOOPS)
            for node in ast.walk(loop)
            if isinstance(node, ast.Call) and _last_name(node.func) in slow
        }
    )


# ---------------------------------------------------------------- 9: narrowing


def narrowed(tree: ast.Module) -> list[tuple[int, str]]:
    """Every `i32(...)`, `i16(...)` or `u8(...)` of something that is no literal and no `... & 255`, with its text."""
    return [
        (node.lineno, ast.unparse(node.args[0]))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"i32", "i16", "u8"}
        and len(node.args) == 1
        and not isinstance(node.args[0], ast.Constant)
        and not _is_a_byte(node.args[0])
    ]


def _is_a_byte(node: ast.expr) -> bool:
    """`... & 255`."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.BitAnd)
        and isinstance(node.right, ast.Constant)
        and node.right.value == 255
    )


# ---------------------------------------------------------------- more that breaks


def wide_literals(tree: ast.Module) -> Broken:
    """A literal of 2**62 or more is unboxed from a Python int at every use."""
    return [
        (node.lineno, f"{node.value} is 2**62 or more")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) >= 2**62
    ]


def asserts(tree: ast.Module) -> Broken:
    """`assert` stays under -O and says nothing to a user: raise an error of the tree."""
    return [(node.lineno, ast.unparse(node)) for node in ast.walk(tree) if isinstance(node, ast.Assert)]


# ---------------------------------------------------------------- helpers


def _functions(tree: ast.Module) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _target_names(target: ast.expr) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, (ast.Tuple, ast.List)):
        return {name for item in target.elts for name in _target_names(item)}
    if isinstance(target, ast.Starred):
        return _target_names(target.value)
    return set()


def _last_name(node: ast.AST | None) -> str:
    """`b` for a, a.b, and b(...); empty for anything else."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


Rule = Callable[[ast.Module], Broken]
#: Rules that need nothing but the tree.
TREE_RULES: dict[str, Rule] = {
    "1 dropped vec result": dropped_vec_results,
    "2 shifted constant": shifted_constants,
    "3 raise from": raise_from,
    "4 quiet abstract method": quiet_abstract_methods,
    "5 runtime_checkable": runtime_checkable,
    "6 rebound iterable": rebound_iterables,
    "7 TYPE_CHECKING else": type_checking_else,
    "literal of 2**62 or more": wide_literals,
    "assert": asserts,
}
