"""Rules for the text of any source: lines of code, and code in comments."""

from __future__ import annotations

import ast
import io
import tokenize

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def commented_code(source: str) -> list[tuple[int, str]]:
    """Comments that parse as Python statements other than a bare name or string."""
    broken = []
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text.startswith("# ") and not text.startswith(("# type:", "# noqa", "# pragma")):
            with_code = _parsed(text[2:])
            if with_code and not isinstance(with_code[0], ast.Expr):
                broken.append((number, text))
    return broken


def _parsed(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):
        return []


def num_code_lines(source: str) -> int:
    """Lines that hold code: without blank lines, comments and docstrings."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and ast.get_docstring(node) is not None
        ):
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)
