"""Configurations are edited, not made anew: read from the source, and held to a list of the modules that make them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from soap.strategy.config import OpConfig, Strategy, SyncConfig

ROOT = Path(__file__).parent.parent
CLASSES = {"OpConfig": OpConfig, "SyncConfig": SyncConfig, "Strategy": Strategy}
MADE_ANEW = {
    "cli.wanted",  # read from a table
    "elastic.simulation.work", "measure.neighbours", "measure.link_timing", "measure.upkeep_timing", "plan.tiling",
    "runtime.sync.look_ups",
    "search.compiled.space_arrays", "search.dynamic", "search.space",
    "strategy.classical", "strategy.config", "strategy.grids", "strategy.json_file", "strategy.served", "strategy.sync",
    "tracing.footprints",
}  # fmt: skip
"""Modules that make configurations from nothing: classical strategies, files, the space, and single tiles to measure or to ask about."""


def made_in(tree: ast.AST) -> Iterator[tuple[str, ast.AST, int]]:
    """Class, innermost function (or statement of the module) and line of each call that makes a configuration of given values."""

    def visit(node: ast.AST, scope: ast.AST) -> Iterator[tuple[str, ast.AST, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and (child.args or child.keywords):
                called = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
                if called in CLASSES:
                    yield called, scope, child.lineno
            inner = node is tree or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from visit(child, child if inner else scope)

    return visit(tree, tree)


def taken(name: str, scope: ast.AST) -> list[str]:
    """What the function reads that looks like a field of another configuration of the class.

    Fields of a method's ``contract`` are no copy: they name the combination that it serves. A configuration's own contract does not count
    as one, for a configuration made from it loses the other fields.
    """
    wanted = {field.name for field in fields(CLASSES[name])}
    read = [node for node in ast.walk(scope) if isinstance(node, ast.Attribute) and node.attr in wanted]
    sources = [(node, ast.unparse(node.value)) for node in read]
    return [ast.unparse(node) for node, of in sources if of != "contract" and not of.endswith(("graph", "topology", "space"))]


def sources() -> Mapping[str, ast.AST]:
    """Of the modules that name a class."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "soap").rglob("*.py"))}
    named = {path: text for path, text in texts.items() if any(name in text for name in CLASSES)}
    return {".".join(path.relative_to(ROOT / "soap").with_suffix("").parts): ast.parse(text) for path, text in named.items()}


@pytest.mark.slow
def test_configurations_are_made_anew_in_few_modules_only() -> None:
    """Elsewhere they are edited: by ``replace``, ``placed``, ``placed_like`` and ``with_changes``, which keep what they do not name."""
    trees = sources()
    made = {module: list(made_in(tree)) for module, tree in trees.items()}
    assert {module for module, found in made.items() if found} == MADE_ANEW
    copied = [
        (module, line, name, read)
        for module, found in made.items()
        for name, scope, line in found
        if (read := taken(name, scope))
    ]
    assert copied == []
    renamed = [
        (module, alias.name)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in CLASSES and alias.asname not in (None, alias.name)
    ]
    assert renamed == []


@pytest.mark.parametrize("edit", [
    "def f(config, devices):\n    return OpConfig(config.degrees, devices, config.replicas)",
    "def f(strategy, name, config):\n    return soap.strategy.config.Strategy({**strategy.operators, name: config}, strategy.parameters)",
    "def f(config):\n    degrees = config.degrees\n    return OpConfig(degrees=degrees, devices=(0,))",
    "def f(sync):\n    return SyncConfig(sync.owner, partitions=2)",
    "def f(sync):\n    return SyncConfig(sync.contract.owner, partitions=2)",
])  # fmt: skip
def test_the_search_for_copies_finds_some(edit: str) -> None:
    ((name, scope, line),) = made_in(ast.parse(edit))
    assert taken(name, scope) and line > 1
