"""Gather the site's pages: the README, docs/, the examples, and a reference of every public name.

    python site/gather.py build/site

The Markdown stays as it reads in the repository. What changes here is where its links lead: the README is the first
page, an example is a page with its code. The reference has one page for each module that the navigation of
zensical.toml lists, made from its `__all__`.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "site" / "zensical.toml"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def site_link(page: Path, link: str) -> str:
    """Where a link of a page of the repository leads on the site, whose pages lie in one folder."""
    name, mark, heading = link.partition("#")
    if not name or re.match(r"\w+:", link):
        return link
    target = (page.parent / name).resolve().relative_to(ROOT)
    if target == Path("examples"):
        return "examples/index.md"
    if target.parts[0] == "packages":
        return f"packages/{target.parts[1]}.md"
    if target == Path("examples/engines"):
        return "examples/index.md"
    if target.parts[0] == "examples":
        return f"{target.as_posix()}.md"
    if target.name == "README.md":
        return "index.md" + mark + heading
    inside = target.relative_to("docs") if target.parts[0] == "docs" else target
    return inside.as_posix() + mark + heading


def with_site_links(page: Path, text: str) -> str:
    """The text of a page, with the links outside its code led to the site's pages."""
    parts = CODE.split(text)
    for place in range(0, len(parts), 2):
        parts[place] = LINK.sub(lambda found: found[1] + site_link(page, found[2]) + found[3], parts[place])
    return "".join(parts)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def gather_pages(target: Path) -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        name = "index.md" if page.name == "README.md" else page.name
        write(target / name, with_site_links(page, page.read_text()))
    for page in sorted((ROOT / "packages").glob("*/README.md")):
        text = re.sub(r"\]\((?!\w+:)", "](../", with_site_links(page, page.read_text()))
        write(target / "packages" / f"{page.parent.name}.md", text)
    shutil.copytree(ROOT / "docs" / "images", target / "images")


def gather_examples(target: Path) -> None:
    """A page for each example, its docstring's first line as the heading of its entry in the list."""
    entries = []
    for source in sorted((ROOT / "examples").rglob("*.py")):
        name = source.relative_to(ROOT).as_posix()
        doc = (ast.get_docstring(ast.parse(source.read_text())) or name).splitlines()[0]
        entries.append(f"- [`{name}`]({source.relative_to(ROOT / 'examples').as_posix()}.md): {doc}")
        write(target / f"{name}.md", f"# {source.name}\n\n```python\n{source.read_text()}```\n")
    write(target / "examples" / "index.md", "# Examples\n\n" + "\n".join(entries) + "\n")


def public_names(module: str) -> list[str]:
    """The names in a module's `__all__`; without one, the classes and functions that it defines."""
    top = module.partition(".")[0]
    path = ROOT / "packages" / top.replace("_", "-") / "src" / Path(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    defined = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    return [name for name in defined if not name.startswith("_")]


def reference_modules() -> list[str]:
    """The modules whose reference the navigation lists, in its order."""
    return re.findall(r'"reference/(blockyard[\w.]*)\.md"', CONFIG.read_text())


def gather_reference(target: Path) -> None:
    entries = []
    for module in reference_modules():
        names = public_names(module)
        entries.append(f"- [`{module}`]({module}.md): {', '.join(f'`{name}`' for name in names)}")
        write(target / f"{module}.md", f"# {module}\n\n" + "\n".join(f"::: {module}.{name}\n" for name in names))
    write(target / "index.md", "# Reference\n\nMade from the docstrings.\n\n" + "\n".join(entries) + "\n")


def main(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    pages = target / "pages"
    gather_pages(pages)
    gather_examples(pages)
    gather_reference(pages / "reference")
    shutil.copy(CONFIG, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
