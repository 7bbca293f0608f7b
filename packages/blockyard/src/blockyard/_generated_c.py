"""Adds what mypyc leaves out to the C code that it writes: docstrings, room for weak references, what is expected.

`setup.py` imports this file by path, before the package exists, so it imports nothing of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

#: What is documented: a kind (a key of `PLACES`) and its name in parts: package, module, class, method.
Name: TypeAlias = tuple[str, tuple[str, ...]]

_C_STRING: Final = r'"(?:[^"\\]|\\.)*"|NULL'
#: Where mypyc (2.4.1) has room for a docstring. The strings there hold the signature; it goes before the docstring.
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
    """A copy of mypyc's C file, beside it, with the docstrings of `sources` (by module name); its path.

    change: what else is done to the text.

    mypyc's own file stays as it is and the copy is written only when it changes: both are how a build knows that there
    is nothing to compile.
    """
    wanted: dict[Name, str] = {}
    for module, source in sources.items():
        wanted.update(docstrings(module, ast.parse(source.read_text(encoding="utf-8"))))
    # mypyc (2.4.1) indents each class further than the last: four bytes in five are spaces.
    c_text = re.sub(r"\n {16,}", "\n", c_file.read_text(encoding="utf-8"))
    text = change(with_docstrings(c_text, wanted)).encode()
    copy = c_file.with_name(f"{c_file.stem}_documented.c")
    if not copy.exists() or copy.read_bytes() != text:
        copy.write_bytes(text)
    return copy


def docstrings(module: str, tree: ast.Module) -> Iterator[tuple[Name, str]]:
    """The docstrings of a module, its functions, its classes and their methods and properties, without indentation."""
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
            yield (kind, name), text


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]


def _kind(node: ast.FunctionDef) -> str:
    return "property" if "property" in _decorators(node) else "function"


def _is_setter(node: ast.FunctionDef) -> bool:
    return not {"setter", "deleter"}.isdisjoint(_decorators(node))


def with_docstrings(c_text: str, wanted: dict[Name, str]) -> str:
    """`c_text` with every docstring in its place. LookupError names those for which there is no place, or two."""
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
    """By the names they may have in C. mypyc leaves out the packages that are not needed to tell modules apart."""
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
    """The inside of a C string literal, in ASCII. An octal escape ends after three digits whatever follows it.

    Question marks are escaped because two of them begin a trigraph. MSVC takes 16 KiB a literal; none here is longer.
    """
    if "\0" in text:
        raise ValueError(f"a docstring with a null character ends there in C: {text!r}")
    plain = {ord("\n"): r"\n", ord('"'): r"\"", ord("\\"): r"\\", ord("?"): r"\077"}
    return "".join(
        plain.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in text.encode("utf-8")
    )


#: The classes that people refer to weakly, as mypyc names them in C.
CLASSES = (
    "manager___KVCacheManager",
    "lease_pool___LeasePool",
    "standalone_pool___StandalonePool",
    "block_pool___BlockPool",
    "named_pool___NamedPool",
)


def with_weak_references(c_text: str, classes: tuple[str, ...] = CLASSES) -> str:
    """mypyc's C (2.4.1) with a place for a list of weak references behind the fields of each class.

    The list is cleared before the object goes. Raises `LookupError` where the C is not what it was.
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


#: Where mypyc (2.4.1) asks whether an index of a vec is in range; where not, it may count from the end.
_RANGE_ASKED: Final = re.compile(
    r"(?P<before>(?P<name>cpy_r_r\d+) = \(uint64_t\)\w+ < \(uint64_t\)\w+;\n\s*if \()(?P=name)\)"
)


def with_expected_ranges(c_text: str) -> str:
    """mypyc's C, in which the compiler is told that an index of a vec is in range: what follows then comes first.

    Without a word gcc puts a jump there: a tenth of the time of a lookup, of a commit, of a free. Raises `LookupError`
    where the C is not what it was.
    """
    c_text, count = _RANGE_ASKED.subn(r"\g<before>likely(\g<name>))", c_text)
    if count == 0:
        raise LookupError("mypyc's C has no index of a vec that is asked whether it is in range")
    return c_text


def changed_c(c_text: str) -> str:
    """All that is done to mypyc's C besides docstrings."""
    return with_expected_ranges(with_weak_references(c_text))
