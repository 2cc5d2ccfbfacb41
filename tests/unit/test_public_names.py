"""Every public name has a docstring that says what a caller needs, in Google style.

A function that has the parameters of another one may say "arguments as for `allreduce`", or
"otherwise as `allreduce`": what the other docstring says counts then. So does a sentence that
names a parameter in `code`.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path

import griffe
import pytest

from api_doc import (
    LIST,
    PAGES,
    find,
    initializer_of,
    listed_names,
    members_of,
    names_of,
    page_of,
    public_modules,
    sections_of,
)
from hvdlite import errors

ROOT = Path(__file__).resolve().parents[2]
LIKE = re.compile(r"(?i)\b(?:as for|otherwise as|are those of) `(?:hvd\.)?((?:[A-Z]\w+\.)?\w+)`")
PARTS = ("elastic", "callbacks", "parameter_server")  # modules that users reach as hvd.elastic
NO_EXAMPLE = re.compile(r"(Error|Warning|Interrupt)$")
LISTED = listed_names()
PATHS = {public.path for public in LISTED.values()}
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
WRITTEN_BY_HAND = "".join(LIST.sub("", text) for text in TEXTS.values())


def told(public: griffe.Object, kind: str) -> str:
    """Return what the parts of a docstring of one kind, such as text, say."""
    return "\n".join(str(one.value) for one in sections_of(public) if one.kind.value == kind)


def example_of(public: griffe.Object) -> str:
    found = [one.value.contents for one in sections_of(public) if one.title == "Example"]
    return "\n".join(found)


def raised_by(function: griffe.Object) -> set[str]:
    """Return the classes that a body raises itself, not those that its calls raise."""
    found = set()
    for one in ast.walk(ast.parse(textwrap.dedent(function.source))):
        if isinstance(one, ast.Raise) and isinstance(one.exc, ast.Call):
            found.add(ast.unparse(one.exc.func).rsplit(".", 1)[-1])
    return found - {"AttributeError"}


def items(module: str, public: griffe.Object, kind: str) -> set[str]:
    """Return the items of a section, with those of the docstring to which this one refers."""
    text = told(public, "text")
    own = set(re.findall(r"`(\w+)`", text)) if kind == "parameters" else set()
    for section in sections_of(public):
        if section.kind.value == kind:
            names = [str(getattr(one, "name", one.annotation)) for one in section.value]
            own |= {name.lstrip("*") for listed in names for name in listed.split(", ")}
    match = LIKE.search(" ".join(text.split()))
    return own | items(module, find(f"{module}.{match[1]}"), kind) if match else own


def gaps(module: str, public: griffe.Object) -> Iterator[str]:
    """Say what the docstring of a public name, or of one of its methods, lacks."""
    text = told(public, "text")
    if not text:
        yield "has no docstring"
        return
    if not text.splitlines()[0].endswith((".", ":")):
        yield "begins with a line that is not a sentence"
    body = initializer_of(public) or public
    if isinstance(body, griffe.Function) and "; see `torch." not in text:
        names = [one.name.lstrip("*") for one in body.parameters]
        known = {"self", "cls", *items(module, public, "parameters")}
        missing = [name for name in names if name not in known]
        if missing:
            yield f"lacks Args: {', '.join(missing)}"
        unsaid = raised_by(body) - items(module, public, "raises")
        if unsaid:
            yield f"lacks Raises: {', '.join(sorted(unsaid))}"
    if "dataclass" in public.labels:
        fields = [name for name, one in public.attributes.items() if "property" not in one.labels]
        known = {*items(module, public, "attributes"), *items(module, public, "parameters")}
        missing = [name for name in fields if not name.startswith("_") and name not in known]
        if missing:
            yield f"lacks Attributes: {', '.join(missing)}"
    if isinstance(public, griffe.Function):
        yield from gaps_of_result(public, text)


def gaps_of_result(function: griffe.Function, text: str) -> Iterator[str]:
    said = re.search(r"\b(Returns?|returns?|Yield|result)\b", text)
    manager = any("contextmanager" in str(one.value) for one in function.decorators)
    section = told(function, "returns") + told(function, "yields")
    if str(function.returns or "None") != "None" and not said and not manager and not section:
        yield "lacks Returns"


def has_example(name: str, public: griffe.Object) -> bool:
    other = LIKE.search(told(public, "text"))  # has an example
    if other or not (public.is_function or public.is_class) or NO_EXAMPLE.search(name):
        return True
    if any(example_of(one) for one in (public, *members_of(public))):
        return True
    code = "".join(re.findall(r"^```python\n(.*?)^```$", WRITTEN_BY_HAND, re.MULTILINE | re.DOTALL))
    return f"hvd.{name}(" in code


def cases() -> Iterator[tuple[str, str, griffe.Object]]:
    for path, public in LISTED.items():
        module = path.rpartition(".")[0]
        yield path, module, public
        for member in members_of(public, PATHS):
            yield f"{path}.{member.name}", module, member


@pytest.mark.parametrize("name", TEXTS)
def test_page_is_up_to_date(name: str) -> None:
    assert page_of(TEXTS[name]) == TEXTS[name], "run `make docs`"


def test_every_public_name_is_on_one_page() -> None:
    shown = [public.path for public in LISTED.values()]
    assert sorted(set(shown)) == sorted(shown)
    public = {
        f"{module}.{name}": find(f"{module}.{name}")
        for module in public_modules()
        for name in names_of(module)
    }
    lacking = [path for path, one in public.items() if not one.is_module and one.path not in PATHS]
    assert lacking == [], "add it to a list of a page of docs/api, and run `make docs`"


@pytest.mark.parametrize("path, module, public", [pytest.param(*c, id=c[0]) for c in cases()])
def test_docstring_is_complete(path: str, module: str, public: griffe.Object) -> None:
    found = list(gaps(module, public))
    if path in LISTED and not has_example(path.rsplit(".", 1)[-1], public):
        found.append("lacks an Example")
    assert not found, f"{public.filepath}:{public.lineno}: {path} {'; '.join(found)}"


@pytest.mark.parametrize("path", LISTED)
def test_example_is_python_with_names_that_exist(path: str) -> None:
    module = path.rsplit(".", 1)[0]
    known = {name for one in (module, "hvdlite.torch", "hvdlite.keras") for name in names_of(one)}
    example = example_of(LISTED[path])
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
        for module in public_modules()
        for name in names_of(module)
        if find(f"{module}.{name}").is_module
    ]
    assert sorted(set(packages) - public_modules()) == [], "add it to a page of docs/api"


@pytest.mark.parametrize(
    "name",
    [name for name, value in vars(errors).items() if inspect.isclass(value) and name[0] != "_"],
)
def test_every_error_class_is_explained(name: str) -> None:
    assert f"### hvd.{name}\n" in TEXTS["errors.md"]


def test_what_an_error_says_besides_is_shown() -> None:
    ours = errors.RankFailedError("rank 1 died")
    own, copy = ValueError(f"epoch 7: {ours}"), RuntimeError(f"{ours}\n\nAt:\n  train.py(1): f")
    own.__cause__ = ours
    errors.passed_on.append(ours)
    with pytest.raises(errors.RankFailedError):
        exec(compile("raise ours", "site-packages/mine/train.py", "exec"), {"ours": ours})
    assert "train.py" in str(traceback.extract_tb(errors.as_shown(ours).__traceback__)[-1])
    assert (errors.as_shown(own), errors.as_shown(copy)) == (own, ours)
    copy.__notes__ = ["epoch 7"]
    assert errors.as_shown(copy) is copy
