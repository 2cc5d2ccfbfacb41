"""Every public name has a docstring that says what a caller needs, in Google style.

A function that has the parameters of another one may say "arguments as for `allreduce`", or
"otherwise as `allreduce`": what the other docstring says counts then. So does a sentence that
names a parameter in `code`.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs_site.docstrings import Docstring, parse
from docs_site.public_names import MODULES, Function, Public, find, names_of
from docs_site.reference import (
    called_by_users,
    docstring_of,
    has_fields,
    is_property,
    listed_names,
)

ROOT = Path(__file__).resolve().parents[2]
LIKE = re.compile(r"(?i)\b(?:as for|otherwise as|are those of) `(?:hvd\.)?(\w+)`")
PARTS = ("elastic", "callbacks", "parameter_server")  # modules that users reach as hvd.elastic
NO_EXAMPLE = re.compile(r"(Error|Warning|Interrupt)$")
LISTED = listed_names()
PATHS = {public.path for public in LISTED.values()}
PAGES = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))


def parameters_of(node: Function) -> list[str]:
    arguments = node.args
    rest = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]
    return [one.arg for one in listed if one.arg not in ("self", "cls")]


def raised_by(node: ast.AST) -> set[str]:
    """Return the classes that a body raises itself, not those that its calls raise."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Raise) and isinstance(one.exc, ast.Call):
            found.add(ast.unparse(one.exc.func).rsplit(".", 1)[-1])
    return found - {"AttributeError"}


def items(module: str, docstring: Docstring, title: str) -> dict[str, str]:
    """Return the items of a section, with those of the docstring to which this one refers."""
    match = LIKE.search(" ".join(docstring.text.split()))
    told = re.findall(r"`(\w+)`", docstring.text) if title == "Args" else []
    own = {**dict.fromkeys(told, ""), **docstring.items(title)}
    if match is None:
        return own
    public = find(module, match[1])
    assert public is not None
    return {**items(module, parse(public.docstring), title), **own}


def gaps(module: str, public: Public) -> Iterator[str]:
    """Say what the docstring of a public name, or of one of its methods, lacks."""
    node, docstring = public.node, docstring_of(public)
    if not docstring.text:
        yield "has no docstring"
        return
    first = docstring.text.splitlines()[0]
    if not first.endswith((".", ":")):
        yield "begins with a line that is not a sentence"
    body = node if public.initializer is None else public.initializer.node
    if isinstance(body, Function) and "; see `torch." not in docstring.text:
        known = items(module, docstring, "Args")
        missing = [name for name in parameters_of(body) if name not in known]
        if missing:
            yield f"lacks Args: {', '.join(missing)}"
        unsaid = raised_by(body) - set(items(module, docstring, "Raises"))
        if unsaid:
            yield f"lacks Raises: {', '.join(sorted(unsaid))}"
    if isinstance(node, ast.ClassDef) and has_fields(node):
        fields = [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]
        known = {**docstring.items("Attributes"), **docstring.items("Args")}
        missing = [name for name in fields if not name.startswith("_") and name not in known]
        if missing:
            yield f"lacks Attributes: {', '.join(missing)}"
    if isinstance(node, Function) and not is_property(node):
        yield from gaps_of_result(node, docstring)


def gaps_of_result(node: Function, docstring: Docstring) -> Iterator[str]:
    returns = "None" if node.returns is None else ast.unparse(node.returns)
    told = re.search(r"\b(Returns?|returns?|Yield|result)\b", docstring.text)
    told = told or "contextlib.contextmanager" in map(ast.unparse, node.decorator_list)
    if returns != "None" and not told and not {"Returns", "Yields"} & set(docstring.sections):
        yield "lacks Returns"


def has_example(name: str, public: Public) -> bool:
    if parse(public.docstring).example or not isinstance(public.node, Function | ast.ClassDef):
        return True
    if NO_EXAMPLE.search(name):
        return True
    if any(parse(member.docstring).example for member in public.members()):
        return True
    code = "".join(re.findall(r"^```python\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL))
    return f"hvd.{name}(" in code


def cases() -> Iterator[tuple[str, str, Public]]:
    for path, public in LISTED.items():
        module = path.rsplit(".", 1)[0]
        yield path, module, public
        for member in public.members(PATHS):
            if called_by_users(member):
                yield f"{path}.{member.name.rsplit('.', 1)[-1]}", module, member


@pytest.mark.parametrize("path, module, public", [pytest.param(*c, id=c[0]) for c in cases()])
def test_docstring_is_complete(path: str, module: str, public: Public) -> None:
    found = list(gaps(module, public))
    if path in LISTED and not has_example(path.rsplit(".", 1)[-1], public):
        found.append("lacks an Example")
    assert not found, f"{public.place}: {path} {'; '.join(found)}"


@pytest.mark.parametrize("path", LISTED)
def test_example_is_python_with_names_that_exist(path: str) -> None:
    module = path.rsplit(".", 1)[0]
    known = {name for one in (module, "hvdlite.torch", "hvdlite.keras") for name in names_of(one)}
    example = parse(LISTED[path].docstring).example
    parsed = doctest.DocTestParser().get_examples(example)
    for source in [one.source for one in parsed] or [example]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hvd":
                assert node.attr in known or node.attr in PARTS, node.attr


def test_every_package_with_public_names_is_documented() -> None:
    packages = [
        f"hvdlite.{file.parent.name}"
        for file in (ROOT / "hvdlite").glob("*/__init__.py")
        if "__all__" in file.read_text(encoding="utf-8")
    ]
    packages += [
        f"{module}.{name}"
        for module in MODULES
        for name in names_of(module)
        if not name.startswith("__") and find(module, name) is None
    ]
    assert sorted(set(packages) - set(MODULES)) == [], "add it to MODULES, and a page to docs/api"
