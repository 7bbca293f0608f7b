"""Changes to the C code that mypyc generates: docstrings, weak references, and branch hints.

`setup.py` imports this file by path before the package exists, so it imports nothing of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

#: A documented object: its kind (a key of `PLACES`) and its dotted name, split.
Name: TypeAlias = tuple[str, tuple[str, ...]]

_C_STRING: Final = r'"(?:[^"\\]|\\.)*"|NULL'
#: Where mypyc (2.4.1) leaves room for a docstring. A string there has the signature, which precedes the docstring.
PLACES: Final = {
    "module": re.compile(
        r'(?P<before>struct PyModuleDef \w+ = \{\s*PyModuleDef_HEAD_INIT,\s*"(?P<name>[\w.]+)",\s*)'
        r"(?P<text>NULL)(?=, /\* docstring \*/)"
    ),
    "class": re.compile(
        r"(?P<before>CPyType_(?P<name>\w+)_template_ = \{[^{}]*?\.tp_doc = PyDoc_STR\()" rf"(?P<text>{_C_STRING})(?=\))"
    ),
    "function": re.compile(
        r"(?P<before>\(PyCFunction\)CPyPy_(?P<name>\w+),\s*[A-Z_| ]+, PyDoc_STR\()" rf"(?P<text>{_C_STRING})(?=\))"
    ),
    "property": re.compile(
        r"(?P<before>\(getter\)(?P<name>\w+),\s*(?:\(setter\)\w+|NULL),\s*)(?P<text>NULL)(?=, NULL\})"
    ),
}


def documented_c(c_file: Path, sources: dict[str, Path], change: Callable[[str], str] = str) -> Path:
    """Write a copy of mypyc's C file with the docstrings of `sources`, beside it; return its path.

    mypyc's own file stays unchanged and the copy is written only if it differs, so that an unchanged build compiles
    nothing.

    Args:
        c_file: the generated C file.
        sources: source files by module name.
        change: a further change of the text.
    """
    wanted: dict[Name, str] = {}
    for module, source in sources.items():
        stub = source.with_suffix(".pyi")
        stub_tree = ast.parse(stub.read_text(encoding="utf-8")) if stub.exists() else None
        wanted.update(docstrings(module, ast.parse(source.read_text(encoding="utf-8")), stub_tree))
    # mypyc (2.4.1) indents each class further than the last: four bytes in five are spaces.
    c_text = re.sub(r"\n {16,}", "\n", c_file.read_text(encoding="utf-8"))
    text = change(with_docstrings(c_text, wanted)).encode()
    copy = c_file.with_name(f"{c_file.stem}_documented.c")
    if not copy.exists() or copy.read_bytes() != text:
        copy.write_bytes(text)
    return copy


def docstrings(module: str, tree: ast.Module, stub: ast.Module | None = None) -> Iterator[tuple[Name, str]]:
    """Yield the docstrings of a module, its functions, classes, methods and properties, without indentation.

    The docstring of a method in `stub` begins with its signature there: compiled code has no annotations.

    Args:
        module: dotted name of the module.
        tree: its source.
        stub: its stub, if it has one.
    """
    types = {} if stub is None else _signatures(stub)
    parts = tuple(module.split("."))
    members: list[tuple[str, tuple[str, ...], ast.Module | ast.ClassDef | ast.FunctionDef]] = [("module", parts, tree)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            members.append(("function", (*parts, node.name), node))
        elif isinstance(node, ast.ClassDef):
            members.append(("class", (*parts, node.name), node))
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not _is_setter(inner):
                    members.append((_kind(inner), (*parts, node.name, inner.name), inner))
    for kind, name, member in members:
        text = ast.get_docstring(member)
        if text:
            signature = types.get(name[-2:], "") if kind == "function" else ""
            yield (kind, name), signature + text


def _signatures(stub: ast.Module) -> dict[tuple[str, ...], str]:
    """Return the signatures of all methods with their types, a line for each overload, before an empty line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for owner in [node for node in stub.body if isinstance(node, ast.ClassDef)]:
        for node in [inner for inner in owner.body if isinstance(inner, ast.FunctionDef)]:
            lines.setdefault((owner.name, node.name), []).append(_signature(node))
    return {name: "\n".join(signatures) + "\n\n" for name, signatures in lines.items()}


def _signature(node: ast.FunctionDef) -> str:
    plain, defaults = node.args.args, node.args.defaults
    parts = list(map(_parameter, plain, [*[None] * (len(plain) - len(defaults)), *defaults]))
    if node.args.kwonlyargs:
        parts += ["*", *map(_parameter, node.args.kwonlyargs, node.args.kw_defaults)]
    return f"{node.name}({', '.join(parts)}) -> {ast.unparse(node.returns or ast.Constant(None))}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) if default is None else f"{ast.unparse(argument)} = {ast.unparse(default)}"


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]


def _kind(node: ast.FunctionDef) -> str:
    return "property" if "property" in _decorators(node) else "function"


def _is_setter(node: ast.FunctionDef) -> bool:
    return not {"setter", "deleter"}.isdisjoint(_decorators(node))


def with_docstrings(c_text: str, wanted: dict[Name, str]) -> str:
    """Return `c_text` with every docstring inserted.

    Raises:
        LookupError: a docstring has no place in the C code, or more than one.
    """
    found: dict[Name, int] = dict.fromkeys(wanted, 0)
    for kind, pattern in PLACES.items():
        names = _c_names(name for name in wanted if name[0] == kind)

        def fill(match: re.Match[str], names: dict[str, Name] = names) -> str:
            name = names.get(match["name"])
            if name is None:
                return match[0]
            found[name] += 1
            signature = "" if match["text"] == "NULL" else match["text"][1:-1]
            return f'{match["before"]}"{signature}{c_escaped(wanted[name])}"'

        c_text = pattern.sub(fill, c_text)
    wrong = [f"{kind} {'.'.join(parts)} has {found[kind, parts]}" for kind, parts in wanted if found[kind, parts] != 1]
    if wrong:
        raise LookupError(f"one place for each docstring is expected in mypyc's C code; {'; '.join(wrong)}")
    return c_text


def _c_names(wanted: Iterator[Name]) -> dict[str, Name]:
    """Map possible C names to documented objects.

    mypyc omits packages that are not needed to tell modules apart.
    """
    names: dict[str, Name] = {}
    shared: set[str] = set()
    for kind, parts in wanted:
        if kind == "module":
            names[".".join(parts)] = kind, parts
            continue
        for start in range(len(parts) - 1):
            *outer, last = (part.replace("___", "___3_") for part in parts[start:])
            c_name = "___".join(outer) + ("_get_" if kind == "property" else "___") + last
            if names.setdefault(c_name, (kind, parts)) != (kind, parts):
                shared.add(c_name)
    return {c_name: name for c_name, name in names.items() if c_name not in shared}


def c_escaped(text: str) -> str:
    """Return `text` as the contents of an ASCII string literal in C.

    Octal escapes always have three digits. Question marks are escaped because two of them begin a trigraph. MSVC allows
    16 KiB per literal; no docstring is longer.
    """
    if "\0" in text:
        raise ValueError(f"a docstring with a null character ends there in C: {text!r}")
    plain = {ord("\n"): r"\n", ord('"'): r"\"", ord("\\"): r"\\", ord("?"): r"\077"}
    return "".join(
        plain.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in text.encode("utf-8")
    )


#: Classes that support weak references, by mypyc's names in C.
CLASSES = (
    "manager___KVCacheManager",
    "lease_pool___LeasePool",
    "standalone_pool___StandalonePool",
    "block_pool___BlockPool",
    "named_pool___NamedPool",
)


def with_weak_references(c_text: str, classes: tuple[str, ...] = CLASSES) -> str:
    """Return mypyc's C (2.4.1) with a weak reference list after the fields of each of `classes`.

    The list is cleared before the object is destroyed.

    Raises:
        LookupError: the C code has an unexpected form.
    """
    for name in classes:
        size = re.compile(rf"(CPyType_{name}_template_ = \{{[^{{}}]*?\.tp_basicsize = )(sizeof\(\w+\))")
        c_text = _replace_once(size, r"\1\2 + sizeof(PyObject *),\n    .tp_weaklistoffset = \2", c_text)
        # A collected object's list is emptied by the collector; then there is nothing to clear.
        end = re.compile(rf"(\b{name}_dealloc\(\w+ \*self\)\s*\{{\s*PyObject_GC_UnTrack\(self\);)")
        clear = "if (*(PyObject **)((char *)self + sizeof(*self)) != NULL) PyObject_ClearWeakRefs((PyObject *)self);"
        c_text = _replace_once(end, rf"\1\n    {clear}", c_text)
    return c_text


def _replace_once(pattern: re.Pattern[str], replacement: str, text: str) -> str:
    text, count = pattern.subn(replacement, text)
    if count != 1:
        raise LookupError(f"mypyc's C has {count} places like {pattern.pattern!r}; 1 is needed for weak references")
    return text


#: mypyc's (2.4.1) range check of a vec's index; if it fails, the index may count from the end.
_RANGE_CHECK: Final = re.compile(
    r"(?P<before>(?P<name>cpy_r_r\d+) = \(uint64_t\)\w+ < \(uint64_t\)\w+;\n\s*if \()(?P=name)\)"
)


def with_expected_ranges(c_text: str) -> str:
    """Return mypyc's C with `likely(...)` around the range checks of vec indices.

    Without the hint gcc puts the common case after a jump, which costs a tenth of a lookup, a commit or a free.

    Raises:
        LookupError: there is no such check.
    """
    c_text, count = _RANGE_CHECK.subn(r"\g<before>likely(\g<name>))", c_text)
    if count == 0:
        raise LookupError("mypyc's C has no range check of a vec's index")
    return c_text


def changed_c(c_text: str) -> str:
    """Return the C code with all changes besides docstrings."""
    return with_expected_ranges(with_weak_references(c_text))
