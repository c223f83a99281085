# SPDX-License-Identifier: Apache-2.0
"""Names of Transformer Engine: which ones a Python file uses, and which ones published sources define.

Both are read as text, nothing is imported. What a file reaches through ``getattr``, ``hasattr`` or a signature is a
probe, and no use.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TE, BINDING = "transformer_engine", "transformer_engine_torch"
_DEFINED = re.compile(r'(?:class_|enum_)<[^;]*?>\(\s*m,\s*"(\w+)"|\bm\.def\(\s*"(\w+)"|\.(?:def|value)\(\s*"(\w+)"')


@dataclass(frozen=True)
class Use:
    """A dotted name, and the keywords that it is called with."""

    name: str
    keywords: frozenset[str] = frozenset()


def uses(path: Path) -> set[Use]:
    """Every name of TE that a file imports, reads as an attribute of what it imported, or calls."""
    tree = ast.parse(path.read_text())
    aliases = dict(_imports(tree))
    found = {Use(name) for name in aliases.values()}
    for node in ast.walk(tree):
        keywords: frozenset[str] = frozenset()
        if isinstance(node, ast.Call):
            keywords = frozenset(each.arg for each in node.keywords if each.arg is not None)
            node = node.func
        elif not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if name := _dotted(node, aliases):
            found.add(Use(name, keywords))
    return found


def attributes(path: Path) -> set[str]:
    """Every attribute that a file reads, of whatever object."""
    return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.startswith(TE):
                    yield (each.asname, each.name) if each.asname else (each.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith(TE):
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    owner = _dotted(node.value, aliases) if isinstance(node, ast.Attribute) else None
    return owner and f"{owner}.{node.attr}"  # type: ignore[attr-defined]


class Binding:
    """What ``transformer_engine_torch`` defines. ``members``: by class or enum."""

    def __init__(self, sources: Iterable[Path]) -> None:
        self._text = "\n".join(path.read_text().replace("\\\n", "\n") for path in sources)
        self.names: set[str] = set()
        self.members: dict[str, set[str]] = {}
        owner = ""
        for kind, function, member in _DEFINED.findall(self._text):
            owner = kind or owner
            self.names |= {kind or function} - {""}
            self.members.setdefault(owner, set()).update({member} - {""})

    def arguments(self, function: str) -> list[str]:
        """Names of a function's arguments, in order."""
        found = re.search(rf'\bm\.def\(\s*"{function}".*?;', self._text, re.DOTALL)
        return re.findall(r'py::arg\("(\w+)"\)', found.group()) if found else []

    def communicator_methods(self) -> set[str]:
        """All that any class of communicators, or an enum beside them, has."""
        return set().union(*(each for name, each in self.members.items() if name.startswith("CommOverlap")))


class Package:
    """The Python files of TE below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module] = {}

    def lacks(self, use: Use) -> str | None:
        """What of a use is not there, or None."""
        found: object = use.name.split(".")[0]
        for part in use.name.split(".")[1:]:
            found = self._member(found, part)
            if found is None:
                return f"{use.name}: there is no {part}"
        unknown = use.keywords - known if (known := _parameters(found)) is not None else set()
        return f"{use.name} does not take {sorted(unknown)}" if unknown else None

    def _member(self, owner: object, name: str) -> object:
        """A module (its name), a definition, or a statement that says no more; None if there is nothing."""
        if isinstance(owner, str):
            return self._of_module(owner, name)
        if isinstance(owner, ast.ClassDef) and not owner.bases:
            return next((node for node in owner.body if name in _names(node)), None)
        return owner

    def _of_module(self, module: str, name: str) -> object:
        for node in _statements(self._tree(module).body):
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    if each.name == "*" or name == (each.asname or each.name):
                        found = self._imported(module, node, name if each.name == "*" else each.name)
                        if found is not None:
                            return found
            elif name in _names(node):
                return node
        return f"{module}.{name}" if self._file(f"{module}.{name}") else None

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> object:
        source = node.module or ""
        if node.level:
            file = self._file(module)
            inside = module.split(".") if file and file.name == "__init__.py" else module.split(".")[:-1]
            source = ".".join([*inside[: len(inside) - node.level + 1], *([source] if source else [])])
        if source != TE and not source.startswith(f"{TE}."):
            return node if node.names[0].name != "*" else None
        if self._file(f"{source}.{name}"):
            return f"{source}.{name}"
        return self._of_module(source, name) if self._file(source) else None

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            file = self._file(module)
            self._trees[module] = ast.parse(file.read_text() if file else "")
        return self._trees[module]

    def _file(self, module: str) -> Path | None:
        place = self._root / module.replace(".", "/")
        return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run as a module is imported."""
    for node in body:
        yield node
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            for part in ("body", "orelse", "finalbody", "handlers"):
                yield from _statements(getattr(node, part, ()))


def _names(node: ast.AST) -> set[str]:
    """What a statement defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return {node.name}
    if isinstance(node, ast.Import):
        return {each.asname or each.name for each in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _parameters(node: object) -> set[str] | None:
    """Those of a function or of a class that is constructed; None where they cannot be read."""
    if isinstance(node, ast.ClassDef):
        init = next((each for each in node.body if "__init__" in _names(each)), None)
        fields = {name for each in node.body if isinstance(each, ast.AnnAssign) for name in _names(each)}
        return _parameters(init) if init else fields or None
    if not isinstance(node, ast.FunctionDef) or node.args.kwarg:
        return None
    return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
