"""Write the signatures and docstrings on the pages of docs/api (`make docs`).

A page lists public names in a comment. What the sources say about them stands below it, up to the
next comment:

    <!-- api hvdlite.torch
    allreduce
    grouped_allreduce
    -->

    <!-- end of api -->

Nothing is imported: torch, TensorFlow, Keras, Ray and Spark need not be installed, and the core
need not be built. Griffe reads the sources.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
LIST = re.compile(
    r"^(?P<head><!-- api (?P<module>[\w.]+)\n(?P<names>.*?)^-->\n)"
    r".*?^(?P<end><!-- end of api -->)$",
    re.MULTILINE | re.DOTALL,
)
# Names that a module's __getattr__ imports at their first use.
LATE = {
    "keras.Compression": "tensorflow.ops.Compression",
    "tensorflow.PartialDistributedOptimizer": "keras.optimizer.PartialDistributedOptimizer",
    "tensorflow.SyncBatchNormalization": "tensorflow.sync_batch_norm.SyncBatchNormalization",
}
# Methods that a framework calls.
CALLED_BY_FRAMEWORKS = {"forward", "set_model"}
# Methods by which parts of hvdlite work together: they take no underscore, as they cross modules.
CALLED_BY_HVDLITE = {
    *("Handle.first", "Handle.then", "Late.members", "Late.seconds"),
    *("Group.client", "Group.serve_storage", "ServerReport.from_json"),
    "State.forget_host_updates",
}
# What a script calls `hvd`.
ADAPTER = re.compile(r"^hvdlite\.(?!run|ray|spark)((api|errors|torch|tensorflow|keras|numpy)\.)?")
FORM = re.compile(r"parameters_of\((\w+)\)")  # a decorator
LABELS = {"parameters": "Parameters", "attributes": "Attributes", "raises": "Raises"}


@cache
def package() -> griffe.Object:
    """Return the package as Griffe reads it."""
    loaded = griffe.load(
        "hvdlite", search_paths=[ROOT], allow_inspection=False, resolve_aliases=True
    )
    assert isinstance(loaded, griffe.Object)
    return loaded


def find(path: str) -> griffe.Object:
    """Return the definition of a name such as hvdlite.torch.allreduce; KeyError if none has it."""
    inside = path.removeprefix("hvdlite").removeprefix(".")
    found = package()[LATE.get(inside, inside)] if inside else package()
    if found.is_module and found.name == "run":
        found = found["run"]  # The package imports this function, which hides the module.
    found = found.final_target if isinstance(found, griffe.Alias) else found
    if isinstance(found, griffe.Function):
        for decorator in found.decorators:
            if verb := FORM.fullmatch(str(decorator.value)):
                found.parameters = found.module[verb[1]].parameters
    return found


@cache
def public_modules() -> frozenset[str]:
    """Return the modules that users import: those of the lists that say what is public in them."""
    listed = {one["module"] for page in PAGES for one in LIST.finditer(page.read_text("utf-8"))}
    return frozenset(one for one in listed if find(one).exports or one == "hvdlite.errors")


def names_of(module: str) -> list[str]:
    """Return the names in a module's `__all__`; without one, its classes and functions."""
    public = find(module)
    if public.exports is None:
        defined = [one for one in public.members.values() if not one.is_alias]
        names = [one.name for one in defined if one.is_class or one.is_function]
    else:
        names = [str(name) for name in public.exports]
    return [name for name in names if not name.startswith("_")]


def listed_names() -> dict[str, griffe.Object]:
    """Return what the pages list: all public names, and classes that they return."""
    paths = [
        f"{found['module']}.{name}"
        for page in PAGES
        for found in LIST.finditer(page.read_text("utf-8"))
        for name in found["names"].split()
    ]
    return {path: find(path) for path in paths}


def initializer_of(public: griffe.Object) -> griffe.Object | None:
    """Return the `__init__` that a class defines."""
    found = public.members.get("__init__") if public.is_class else None
    return found if isinstance(found, griffe.Function) and found.lineno else None


def sections_of(public: griffe.Object) -> Iterator[griffe.DocstringSection]:
    """Give the parts of a docstring; that of a class has the sections of its `__init__`, too."""
    initializer = initializer_of(public)
    for one in (public, initializer):
        if one is not None and one.docstring is not None:
            for section in one.docstring.parse(
                "google", returns_multiple_items=False, warnings=False
            ):
                if one is public or section.kind is not griffe.DocstringSectionKind.text:
                    yield section


def members_of(public: griffe.Object, elsewhere: Container[str] = ()) -> Iterator[griffe.Object]:
    """Give the methods and properties that users call, except those of bases told elsewhere."""
    seen = {"__init__"}
    bases = [public]
    while bases:
        base = bases.pop(0)
        if not isinstance(base, griffe.Class):
            continue
        bases = [one for one in base.resolved_bases if one.path not in elsewhere] + bases
        for name, one in base.members.items():
            called = one.is_function or "property" in one.labels
            if not called or name in seen:
                continue
            seen.add(name)
            hidden = name.startswith(("_", "on_")) or name in CALLED_BY_FRAMEWORKS
            if one.docstring and not hidden and f"{base.name}.{name}" not in CALLED_BY_HVDLITE:
                assert isinstance(one, griffe.Object)
                yield one


def signature_of(public: griffe.Object, name: str) -> str:
    """Return how a name is called, or its type; a long one has a line for each parameter."""
    if isinstance(public, griffe.Attribute):
        return f"{name}: {public.annotation}" if public.annotation else f"{name} = {public.value}"
    assert isinstance(public, griffe.Class | griffe.Function)
    text = public.signature(name=name)
    if len(text) > 88:
        text = re.sub(r"(?<=[(,]) ?(?=\*{0,2}\w+: |\*,|/,)", "\n    ", text)
        text = re.sub(r"\)(?=( -> .*)?$)", ",\n)", text)
    return text


def paragraphs_of(public: griffe.Object, name: str) -> Iterator[str]:
    """Give the paragraphs on a name: its signature, and its docstring with the example last."""
    is_error = public.is_class and name.endswith(("Error", "Warning", "Interrupt"))
    if signature := "" if is_error else signature_of(public, name):
        yield f"```python\n{signature}\n```"
    for section in sorted(sections_of(public), key=lambda one: one.title == "Example"):
        kind, value = section.kind.value, section.value
        if kind in LABELS:
            rows = [f"- `{getattr(one, 'name', one.annotation)}`: {text_of(one)}" for one in value]
            yield f"{LABELS[kind]}:\n\n" + "\n".join(rows)
        elif kind in ("returns", "yields"):
            named = f"{value[0].name}: " if value[0].name else ""
            yield f"{kind.title()}: {named}{text_of(value[0])}"
        elif section.title == "Example":
            language = "pycon" if ">>>" in value.contents else "python"
            yield f"```{language}\n{value.contents}\n```"
        else:
            yield value if isinstance(value, str) else value.contents


def text_of(item: griffe.DocstringElement) -> str:
    """Return the description of an item in one line."""
    return " ".join(item.description.split())


def entry_of(path: str, shown: Container[str]) -> Iterator[str]:
    """Give the paragraphs on a public name and its members; `shown` has the paths of all names."""
    public, title = find(path), ADAPTER.sub("hvd.", path)
    if path.rpartition(".")[0] not in public_modules():
        title = public.name  # Users get an object of it, and do not import it.
    yield f"### {title}"
    yield from paragraphs_of(public, title)
    if isinstance(public, griffe.Class):
        bases = [f"`{one.name}`" for one in public.mro() if one.path in shown]
        if bases:
            yield f"Base class: {bases[0]}"
    for member in members_of(public, shown):
        yield f"#### {public.name}.{member.name}"
        yield from paragraphs_of(member, f"{public.name}.{member.name}")


def page_of(text: str) -> str:
    """Return the text of a page with what the sources now say about the names in its lists."""
    shown = {public.path for public in listed_names().values()}

    def written(found: re.Match[str]) -> str:
        paths = [f"{found['module']}.{name}" for name in found["names"].split()]
        entries = "\n\n".join(one for path in paths for one in entry_of(path, shown))
        entries = re.sub(r"\bdocs/(\w+\.md)\b", r"[\1](../\1)", entries)
        return f"{found['head']}\n{entries}\n\n{found['end']}"

    return LIST.sub(written, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(page_of(page.read_text("utf-8")), encoding="utf-8")
