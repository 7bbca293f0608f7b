"""Compiled or interpreted, a class, method, property or function has the docstring and the signature of its source."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, WrapperDescriptorType
from typing import Any

import pytest

import blockyard
from blockyard.core.manager import KVCacheManager
from blockyard.core.pools.block_pool import BlockPool
from blockyard_testing.each import for_each
from blockyard_testing.source_only import PACKAGE_DIR

sys.path.insert(0, str(PACKAGE_DIR))
from _generated_c import Name, c_escaped, docstrings, documented_c, with_docstrings, with_expected_ranges
from _sources import compiled_sources

sys.path.pop(0)

FunctionOrClass = ast.FunctionDef | ast.ClassDef
SOURCES = {
    ".".join(path.relative_to(PACKAGE_DIR.parent).with_suffix("").parts): path for path in compiled_sources(PACKAGE_DIR)
}
every_module = for_each(SOURCES, str)


def members(tree: ast.Module, module: ModuleType) -> Iterator[tuple[str, FunctionOrClass, Any]]:
    """Name, source and what there is at run time, of each class and function of a module and all inside its classes."""
    for node in tree.body:
        if isinstance(node, FunctionOrClass):
            owner = getattr(module, node.name)
            yield node.name, node, owner
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, FunctionOrClass):
                    yield f"{node.name}.{inner.name}", inner, plain(inspect.getattr_static(owner, inner.name))


def plain(found: Any) -> Any:
    """Return the function in a class method; where that is interpreted, its docstring is not told by the wrapper."""
    return found.__func__ if isinstance(found, classmethod) else found


def all_members(module: str) -> Iterator[tuple[str, FunctionOrClass, Any]]:
    """As `members`, but without setters, whose getter has the docstring, and Python's own wrappers, which have no room.

    What `__init__` takes is in the signature of its class.
    """
    for name, node, found in members(ast.parse(SOURCES[module].read_text()), importlib.import_module(module)):
        if not isinstance(found, WrapperDescriptorType) and not is_setter(node):
            yield name, node, found


def is_setter(node: FunctionOrClass) -> bool:
    return any(isinstance(item, ast.Attribute) and item.attr == "setter" for item in node.decorator_list)


@every_module
def test_docstrings_are_those_of_the_source(module: str) -> None:
    tree = ast.parse(SOURCES[module].read_text())
    assert inspect.getdoc(importlib.import_module(module)) == ast.get_docstring(tree)
    said = {name: inspect.cleandoc(found.__doc__ or "") for name, _, found in all_members(module)}
    stub = SOURCES[module].with_suffix(".pyi")
    types = ast.parse(stub.read_text()) if stub.exists() and blockyard.compiled() else None
    texts = {".".join(name[1][len(module.split(".")) :]): text for name, text in docstrings(module, tree, types)}
    assert said == {name: texts.get(name, "") for name, _, _ in all_members(module)}


def test_docstring_of_a_method_begins_with_its_types() -> None:
    stub = ast.parse(
        "class Box:\n"
        "    def open(self, by: Integer, *, name: str = '', key: str | None = None) -> list[int]: ...\n"
        "    @overload\n"
        "    def size(self, at: Integers) -> Array: ...\n"
        "    @overload\n"
        "    def size(self, at: Integer = 1) -> int: ...\n"
    )
    tree = ast.parse(
        'class Box:\n    def open(self, by, *, name, key):\n        "Open it."\n    def size(self, at):\n        "Big."'
    )
    texts = dict(docstrings("house.box", tree, stub))
    assert texts["function", ("house", "box", "Box", "open")] == (
        "open(self, by: Integer, *, name: str = '', key: str | None = None) -> list[int]\n\nOpen it."
    )
    assert texts["function", ("house", "box", "Box", "size")] == (
        "size(self, at: Integers) -> Array\nsize(self, at: Integer = 1) -> int\n\nBig."
    )


@pytest.mark.skipif(not blockyard.compiled(), reason="interpreted methods have annotations, not text")
def test_help_of_compiled_methods_shows_types() -> None:
    text = " ".join(pydoc.plain(pydoc.render_doc(KVCacheManager.allocate)).split())
    assert "allocate(self, token_ids: Integers, *, holder: str = ''," in text
    assert "states: StateHints | None = None) -> int" in text
    tokens = " ".join(pydoc.plain(pydoc.render_doc(KVCacheManager.num_tokens)).split())
    assert "num_tokens(self, seqs: Integer) -> int" in tokens


Parameters = list[tuple[str, bool]]


def written(node: FunctionOrClass) -> Parameters:
    """Name of each parameter and whether it has a default; of a class: of its `__init__`, without self."""
    if isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        return written(inits[0])[1:] if inits else []
    arguments = node.args
    plain = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
    first_default = len(plain) - len(arguments.defaults)
    parameters = [(name, place >= first_default) for place, name in enumerate(plain)]
    parameters += [(arguments.vararg.arg, False)] if arguments.vararg else []
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append((argument.arg, default is not None))
    return parameters + ([(arguments.kwarg.arg, False)] if arguments.kwarg else [])


def at_run_time(found: Any) -> Parameters:
    function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.default is not parameter.empty) for parameter in parameters]


@every_module
def test_signatures_are_those_of_the_source(module: str) -> None:
    for name, node, found in all_members(module):
        inherits_init = isinstance(node, ast.ClassDef) and "__init__" not in vars(found)
        if not inspect.isdatadescriptor(found) and not inherits_init:
            assert at_run_time(found) == written(node), name


def test_the_search_finds_the_ways_in() -> None:
    """If it found nothing, nothing would fail."""
    names = [name for name, _, _ in all_members("blockyard.core.manager")]
    assert {"KVCacheManager", "KVCacheManager.reserve"} <= set(names)
    assert sum(1 for module in SOURCES for _ in all_members(module)) > 700


@pytest.mark.parametrize("what", [KVCacheManager, KVCacheManager.reserve, BlockPool, BlockPool.num_usable_blocks])
def test_help_says_it(what: Any) -> None:
    text = pydoc.plain(pydoc.render_doc(what))
    doc = inspect.getdoc(what)
    assert doc
    assert [line for line in doc.splitlines() if line.strip() not in text] == []


def test_arguments_are_in_the_help_of_a_method() -> None:
    text = pydoc.plain(pydoc.render_doc(blockyard.KVCacheManager.reserve))
    names = list(inspect.signature(KVCacheManager.reserve).parameters)
    assert all(name in text.splitlines()[2] for name in names)


# ---------------------------------------------------------------- the build step

SOURCE = '''
"""A module."""

def double(n):
    """Twice."""

def silent(n): ...

class Box:
    """Holds "it"."""

    def __init__(self, size=1): ...

    def open(self):
        """Open it.

        As in:
            open
        """

    @property
    def width(self):
        """Wide?"""

    @width.setter
    def width(self, width): ...
'''

#: What mypyc 2.4.1 writes.
C_CODE = r"""
static PyMethodDef box___Box_methods[] = {
    {"open",
     (PyCFunction)CPyPy_box___Box___open,
     METH_FASTCALL | METH_KEYWORDS, PyDoc_STR("open($self)\n--\n\n")},
static PyGetSetDef box___Box_getseters[] = {
    {"size",
     (getter)box___Box_get_size, (setter)box___Box_set_size,
     NULL, NULL},
    {"width",
     (getter)box___Box_get_width,
     (setter)box___Box_set_width,
    NULL, NULL},
static PyTypeObject CPyType_box___Box_template_ = {
    .tp_name = "Box",
    .tp_doc = PyDoc_STR("Box(size=1)\n--\n\n"),
};
static PyMethodDef boxmodule_methods[] = {
    {"double", (PyCFunction)CPyPy_box___double, METH_FASTCALL, PyDoc_STR("double(n)\n--\n\n") /* docstring */},
    {"silent", (PyCFunction)CPyPy_box___silent, METH_FASTCALL | METH_KEYWORDS, PyDoc_STR(NULL) /* docstring */},
static struct PyModuleDef boxmodule = {
    PyModuleDef_HEAD_INIT,
    "house.box",
    NULL, /* docstring */
"""


def wanted(source: str = SOURCE, module: str = "house.box") -> dict[Name, str]:
    return dict(docstrings(module, ast.parse(source)))


def test_docstrings_go_behind_the_signatures() -> None:
    text = with_docstrings(C_CODE, wanted())
    lines = [line.strip() for line in text.splitlines()]
    assert r'METH_FASTCALL | METH_KEYWORDS, PyDoc_STR("open($self)\n--\n\nOpen it.\n\nAs in:\n    open")},' in lines
    assert r'.tp_doc = PyDoc_STR("Box(size=1)\n--\n\nHolds \"it\"."),' in lines
    assert any(r'PyDoc_STR("double(n)\n--\n\nTwice.") /*' in line for line in lines)
    assert r'"Wide\077", NULL},' in lines
    assert r'"A module.", /* docstring */' in lines
    assert sum(a != b for a, b in zip(lines, map(str.strip, C_CODE.splitlines()), strict=True)) == 5


def test_a_function_without_a_signature_has_its_docstring_alone() -> None:
    text = with_docstrings(C_CODE, {("function", ("house", "box", "silent")): "Says nothing."})
    assert 'PyDoc_STR("Says nothing.")' in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("CPyPy_box___Box___open", "CPyPy_box___Box___close"),
        ("CPyPy_box___double,", "CPyNew_box___double,"),
        ("box___Box_get_width", "box___Box_get_height"),
        (".tp_doc = PyDoc_STR(", ".tp_doc = ("),
        ('"house.box"', '"house.boxes"'),
        ("NULL, /* docstring */", "NULL,"),
    ],
)
def test_a_docstring_without_a_place_fails_the_build(old: str, new: str) -> None:
    assert old in C_CODE
    with pytest.raises(LookupError, match=r"house\.box.* has 0"):
        with_docstrings(C_CODE.replace(old, new), wanted())


def test_two_places_fail_the_build() -> None:
    with pytest.raises(LookupError, match=r"class house\.box\.Box has 2"):
        with_docstrings(C_CODE + C_CODE, wanted())


def test_modules_of_one_name_are_told_apart() -> None:
    """mypyc then writes as many packages as it needs; a name that could mean both is nobody's."""
    both = wanted('def f():\n    "One."', "house.box") | wanted('def f():\n    "Two."', "ship.box")
    line = '(PyCFunction)CPyPy_{}, METH_FASTCALL, PyDoc_STR("f()\\n--\\n\\n")'
    text = with_docstrings(line.format("house___box___f") + line.format("ship___box___f"), both)
    assert text.index("One.") < text.index("ship___box___f") < text.index("Two.")
    with pytest.raises(LookupError, match=r"function ship\.box\.f has 0"):
        with_docstrings(line.format("box___f"), both)


@pytest.mark.parametrize(
    "text",
    [
        "one\ntwo\n",
        "a \"quoted\" 'word'",
        "back\\slash and \\n",
        "??= is a trigraph, ?? too",
        "é, 漢 and 😀, then digits: é7",
        "tab\tand \x07 bell",
        "%s and {braces} )",
        "long " * 20_000,
    ],
)
def test_text_comes_back_from_c(text: str) -> None:
    """The escapes used mean the same in a bytes literal of Python."""
    escaped = c_escaped(text)
    assert ast.literal_eval(f'b"{escaped}"').decode() == text
    assert escaped.isascii()
    assert escaped.isprintable()
    assert "??" not in escaped


def test_a_null_character_is_refused() -> None:
    with pytest.raises(ValueError, match="null character"):
        c_escaped("a\0b")


def test_an_unchanged_copy_is_not_written_again(tmp_path: Path) -> None:
    source, c_file = tmp_path / "box.py", tmp_path / "box.c"
    source.write_text(SOURCE)
    c_file.write_text(C_CODE)

    def build() -> tuple[str, int]:
        copy = documented_c(c_file, {"house.box": source})
        return copy.read_text(), copy.stat().st_mtime_ns

    first = build()
    assert build() == first
    source.write_text(SOURCE.replace("Twice.", "Two times."))
    assert "Two times." in build()[0]
    assert c_file.read_text() == C_CODE


def test_range_checks_are_marked_likely() -> None:
    asked = "cpy_r_r5 = (uint64_t)cpy_r_at < (uint64_t)cpy_r_r4;\n{}if ({}) goto CPyL3;\nif (cpy_r_r5) goto CPyL4;"
    assert with_expected_ranges(asked.format("  ", "cpy_r_r5")) == asked.format("  ", "likely(cpy_r_r5)")
    with pytest.raises(LookupError, match="no range check"):
        with_expected_ranges(asked.format("", "cpy_r_r6"))
