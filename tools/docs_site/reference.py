"""Write the API reference: Markdown for Sphinx's Python domain, of signatures and docstrings.

A page of the reference is a page of docs/api with fences like this one, which a git host shows as a
list of names:

    ```api hvdlite.torch
    allreduce
    grouped_allreduce
    ```

`expanded` replaces each fence by what the sources say about the names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from docs_site.docstrings import Docstring, Link, markdown, parse, referring
from docs_site.public_names import MODULES, ROOT, Function, NotFoundError, Public, find, names_of

PAGES = ROOT / "docs" / "api"
FENCE = re.compile(r"^```api (?P<module>[\w.]+)\n(?P<names>.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(
    r"^(?P<prefix>(?:hvd|hvdlite)\.(?:[a-z]\w*\.)*)?(?P<name>\w+)(?:\.\w+)*(?:\(.*\))?$"
)
_CLASS = re.compile(r"(?<![\w.])[A-Z]\w*")


@dataclass(frozen=True)
class Entry:
    """A name on a page of the reference: the module that users import it from, and the name."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """The full name, by which other pages refer to it."""
        return f"{self.module}.{self.name}"


def entries_of(page: str) -> Iterator[Entry]:
    """Give the names that the fences of a page list."""
    for fence in FENCE.finditer(page):
        for name in fence["names"].split():
            yield Entry(fence["module"], name)


class Reference:
    """Knows as what each public definition is in the reference, from the texts of its pages."""

    def __init__(self, pages: Iterable[str]) -> None:
        self._shown_as: dict[str, str] = {}
        for entry in (entry for page in pages for entry in entries_of(page)):
            self._shown_as[definition_of(entry.module, entry.name).path] = entry.path

    def expanded(self, page: str) -> str:
        """Return the text of a page with its fences replaced."""

        def replaced(fence: re.Match[str]) -> str:
            module, names = fence["module"], fence["names"].split()
            # Types in signatures are those of this module.
            here = f"```{{py:currentmodule}} {module}\n```"
            return "\n\n".join([here, *(self._documented(Entry(module, one)) for one in names)])

        return FENCE.sub(replaced, page)

    def target(self, module: str, code: str) -> str | None:
        """Return what a code span such as `hvd.allreduce` names, or None if it names nothing."""
        # `module` is the adapter that `hvd` stands for.
        match = _NAMED.match(code)
        if match is None:
            return None
        prefix = (match["prefix"] or "").removesuffix(".")
        inside = module if prefix in ("", "hvd") else prefix.replace("hvd.", f"{module}.")
        if inside not in MODULES or match["name"] not in names_of(inside):
            if prefix or match["name"] not in names_of("hvdlite.errors"):
                return None
            inside = "hvdlite.errors"
        public = find(inside, match["name"])
        return None if public is None else self._shown_as.get(public.path)

    def _documented(self, entry: Entry) -> str:
        own = (entry.name, f"hvd.{entry.name}")

        def link(code: str) -> str | None:
            if code.split("(")[0] in own:
                return None
            return self.target(entry.module, code) or self.target("hvdlite.api", code)

        return directive(definition_of(entry.module, entry.name), entry, link, self._shown_as)


def definition_of(module: str, name: str) -> Public:
    """Return the definition of a name of the reference; NotFoundError for that of a module."""
    public = find(module, name)
    if public is None:
        raise NotFoundError(f"{module}.{name} is a module; give it a page of its own")
    return public


def listed_names() -> dict[str, Public]:
    """Return what the pages of docs/api list: all public names, and classes that they return."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))]
    entries = [entry for page in pages for entry in entries_of(page)]
    return {entry.path: definition_of(entry.module, entry.name) for entry in entries}


def docstring_of(public: Public) -> Docstring:
    """Return the docstring of a definition; that of a class has the sections of its `__init__`."""
    docstring, initializer = parse(public.docstring), public.initializer
    if initializer is None:
        return docstring
    sections = {**parse(initializer.docstring).sections, **docstring.sections}
    return Docstring(docstring.text, sections)


def directive(public: Public, entry: Entry, link: Link, shown_as: Mapping[str, str]) -> str:
    """Write the directive of one definition, with those of its members."""
    # The definition is shown as `entry`. `shown_as` has, by path, the names of all definitions of
    # the reference.
    body = markdown(docstring_of(public), link)
    node = public.node
    if isinstance(node, Function):
        return _block(
            5, "function", f"{entry.name}{signature(public, shown_as)}", entry.module, body
        )
    if isinstance(node, ast.ClassDef):
        names = {ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases}
        error = bool(names) and all(name.endswith(("Error", "Warning")) for name in names)
        shown = "" if error else class_signature(public)
        known = {base.path: base for one in public.lineage(shown_as) for base in one.bases()}
        heading = [
            f"Base class: {referring(base.name, shown_as[path])}"
            for path, base in known.items()
            if path in shown_as
        ]
        shown_members = [one for one in public.members(shown_as) if called_by_users(one)]
        members = [_member(one, entry, link, shown_as) for one in shown_members]
        text = "\n\n".join([body, *heading, *members])
        return _block(6, "exception" if error else "class", entry.name + shown, entry.module, text)
    value = ast.unparse(node.value) if node.value is not None else ""
    return _block(5, "data", entry.name, entry.module, body, value=value)


def _member(public: Public, entry: Entry, link: Link, shown_as: Mapping[str, str]) -> str:
    assert isinstance(public.node, Function)
    name = public.node.name
    decorators = {ast.unparse(one) for one in public.node.decorator_list}
    body = markdown(parse(public.docstring), link)
    if is_property(public.node):
        return _block(5, "property", f"{entry.name}.{name}", entry.module, body)
    shown = signature(public, shown_as, bound="staticmethod" not in decorators)
    kind = "classmethod" if "classmethod" in decorators else "method"
    return _block(5, kind, f"{entry.name}.{name}{shown}", entry.module, body)


def is_property(node: Function) -> bool:
    """Return whether a method is read like a variable."""
    decorators = {ast.unparse(one) for one in node.decorator_list}
    return bool({"property", "cached_property", "functools.cached_property"} & decorators)


def called_by_users(member: Public) -> bool:
    """Return whether users call a method; those that a framework calls override one of its own."""
    name = member.name.rsplit(".", 1)[-1]
    called_by_frameworks = name.startswith("on_") or name in _CALLED_BY_FRAMEWORKS
    internal = called_by_frameworks or member.name in _CALLED_BY_HVDLITE
    return bool(member.docstring) and not internal


_CALLED_BY_FRAMEWORKS = {"forward", "set_model"}
# Methods by which parts of hvdlite work together: they take no underscore, as they cross modules.
_CALLED_BY_HVDLITE = {
    *("Handle.first", "Handle.then", "Late.members", "Late.seconds"),
    *("Group.client", "Group.serve_storage", "ServerReport.from_json"),
    "State.forget_host_updates",
}


def _block(ticks: int, kind: str, head: str, module: str, body: str, value: str = "") -> str:
    fence = "`" * ticks
    options = f":module: {module}\n" + (f":value: {value}\n" if value else "")
    return f"{fence}{{py:{kind}}} {head}\n{options}\n{body}\n{fence}"


def signature(public: Public, shown_as: Mapping[str, str], bound: bool = False) -> str:
    """Return the signature of a function; that of a method without its first parameter."""
    node = public.node
    assert isinstance(node, Function)
    names = [path.rsplit(".", 1)[-1] for path in shown_as.values()]

    def clear(match: re.Match[str]) -> str:
        """Return the name of a class; in full, of which `~` shows the end, if two have it."""
        found = find(public.module, match[0]) if names.count(match[0]) > 1 else None
        return match[0] if found is None else f"~{shown_as.get(found.path, match[0])}"

    arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if bound:
        first = arguments.args.posonlyargs or arguments.args.args
        del first[0]
    returns = f" -> {_CLASS.sub(clear, ast.unparse(node.returns))}" if node.returns else ""
    return f"({ast.unparse(arguments.args)}){returns}"


def class_signature(public: Public) -> str:
    """Return the parameters of a class: of its `__init__`, or its fields where it has none."""
    initializer, node = public.initializer, public.node
    assert isinstance(node, ast.ClassDef)
    if initializer is not None:
        return signature(initializer, {}, bound=True).removesuffix(" -> None")
    if not has_fields(node):
        return ""
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    return "(" + ", ".join(ast.unparse(one) for one in fields) + ")"


def has_fields(node: ast.ClassDef) -> bool:
    """Return whether callers give the fields of a class: a dataclass or a NamedTuple."""
    made_of = [ast.unparse(one) for one in (*node.decorator_list, *node.bases)]
    return any("dataclass" in one or one == "NamedTuple" for one in made_of)


def every_name() -> dict[str, Public]:
    """Return all public definitions, each under the first name that it has."""
    found: dict[str, Public] = {}
    paths: set[str] = set()
    for module in MODULES:
        for name in names_of(module):
            public = None if name.startswith("__") else find(module, name)
            if public is not None and public.path not in paths:
                paths.add(public.path)
                found[f"{module}.{name}"] = public
    return found
