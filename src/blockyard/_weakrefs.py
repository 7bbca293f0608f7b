"""Weak references to compiled classes: mypyc makes no room for them, so the C code that it writes is given some.

`setup.py` imports this file by path, before the package exists, so it imports nothing of the package.
"""

from __future__ import annotations

import re

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
