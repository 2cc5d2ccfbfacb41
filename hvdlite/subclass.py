"""Give an object of a framework's class methods of ours, without making another object.

The object becomes an instance of a subclass that is made for its class. So a scheduler that holds
the object goes on as before.
"""

from __future__ import annotations

import functools
from typing import Any


def subclass_in_place(thing: Any, mixin: type) -> None:
    """Put a mixin before the class of an object; `super()` in it leads to the old class."""
    # The new class has the name of the old one, which the object keeps as `_wrapped_class`.
    wrapped_class: Any = type(thing)
    become(thing, _subclass(mixin, wrapped_class))


def become(thing: Any, its_class: type) -> None:
    """Change the class of an object, also where its class makes `__class__` a property."""
    object.__dict__["__class__"].__set__(thing, its_class)


@functools.cache
def _subclass(mixin: type, wrapped_class: Any) -> type:
    return type(
        wrapped_class.__name__,
        (mixin, wrapped_class),
        {
            "__doc__": wrapped_class.__doc__,
            "__module__": wrapped_class.__module__,
            "__qualname__": wrapped_class.__qualname__,
            "_wrapped_class": wrapped_class,
        },
    )
