"""A simple way to see docstrings that are no sentences: no finite verb in the main clause of the first sentence.

A sentence counts as one with a verb if, before any word that begins a clause of its own ("what", "which", "where"),

- a word is a finite verb of `FINITE`: "A hit is exact.", "It takes no lock."; or
- the first word acts on something: the next one is a determiner, a pronoun or a number, or the first is one of
  `ALONE`: "Draws the knee.", "Return all blocks.", "Wait until it ends."

It is a heuristic: some sentences are taken for fragments, because a list of verbs has an end, and few fragments for
sentences. So a count is compared with an earlier count, and no single docstring is refused.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Forms that are hardly ever nouns.
FINITE = _words(
    """
    is are was were has have had can cannot may must will would should could does do did takes take gives give
    sends finds aligns
    holds hold keeps keep reads writes write needs says say tells tell knows know comes come goes go stands
    stand makes make means mean uses serves serve shows finds lets let asks ask stays stay belongs belong begins
    begin becomes become brings bring follows follow contains contain allows allow depends depend appears appear
    happens happen gets get puts sees leaves loses lose grows grow refuses accepts accept ends waits runs counts
    returns raises changes works answers stops drops covers costs fits moves holds lies lie differs differ
    """
)
#: Verbs that stand first and need no object.
ALONE = _words(
    """
    begin begins close closes end ends go goes leave leaves look looks move moves raise raises read reads run
    runs stop stops wait waits write writes draw draws print prints say says tell tells ask asks return returns
    """
)
_OBJECTS = _words(
    """
    a an the all each every any its their one two both no some what whether where how it them this these those
    that itself up more as many much only
    """
)
#: Words that begin no sentence with a verb, though a determiner may follow.
_NOT_VERBS = _words(
    """
    of for from in on at by to with without behind before after beside between below above within under over
    during as than like and or but nor if where when what which who whose whether how why because that this
    these those all each every any a an the its their one two both no some same only also not so such more most
    many much half
    """
)
_CLAUSES = _words(
    """
    what which who whose where when whether why how if that as because than until
    """
)


def first_sentence(docstring: str) -> list[str]:
    """The words of the first sentence or line before a blank one, in lower case; code in it is a single noun."""
    text = " ".join(docstring.split("\n\n")[0].split())
    text = re.sub(r"``?[^`]*``?", "code", text)
    return re.findall(r"[a-z']+|\d+", re.split(r"[.:;?!](?:\s|$)", text)[0].lower())


def _is_object(word: str) -> bool:
    return word in _OBJECTS or word == "code" or word[0].isdigit()


def is_sentence(docstring: str) -> bool:
    """Whether the main clause of the first sentence has a finite verb, as far as this can be seen."""
    words = first_sentence(docstring)
    if not words:
        return True
    if words[0] in ALONE:
        return True
    if (
        len(words) > 1
        and words[0] not in _NOT_VERBS
        and (words[1] in _OBJECTS or words[1] == "code" or words[1][0].isdigit())
    ):
        return True
    for word in words:
        if word in _CLAUSES:
            return False
        if word in FINITE:
            return True
    return False


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the docstring of the module and of each class and function in it that has one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            said = ast.get_docstring(node)
            if said:
                yield node.body[0].lineno, said


def main() -> None:
    """Print the docstrings without a finite verb, of the part of the package that is named, or of all."""
    from .places import PACKAGE_DIR

    for path in sorted(PACKAGE_DIR.joinpath(*sys.argv[1:2]).rglob("*.py")):
        for line, said in docstrings(path):
            if not is_sentence(said):
                print(f"{path.relative_to(PACKAGE_DIR)}:{line}: {said.splitlines()[0]}")


if __name__ == "__main__":
    main()
