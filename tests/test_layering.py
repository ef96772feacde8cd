"""Import directions, as docs/architecture.md gives them, read from the source; and what must start without torch, tried."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.sources import statements

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "soap"

GROUND_FLOOR = tuple(sorted(f"soap.{path.stem}" for path in PACKAGE.glob("*.py") if path.stem != "__init__"))
"""Errors, units, files and logs."""
PLANNING = ("soap.model", "soap.cluster", "soap.schedules", "soap.strategy", "soap.plan", *GROUND_FLOOR)
RUNTIME = ("soap.runtime", "soap.tracing", "soap.simulator", "soap.weights", *PLANNING)
EVERYTHING = ("soap",)
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GROUND_FLOOR, GROUND_FLOOR),
    "soap.model": ("soap.model", *GROUND_FLOOR),
    "soap.cluster": ("soap.cluster", *GROUND_FLOOR),
    "soap.schedules": ("soap.schedules", *GROUND_FLOOR),
    "soap.strategy": ("soap.strategy", "soap.schedules", "soap.cluster", "soap.model", *GROUND_FLOOR),
    "soap.plan": PLANNING,
    "soap.simulator": ("soap.simulator", *PLANNING),
    "soap.simulator.throughput": ("soap.profiles.work", *PLANNING),  # work is counted from the graph alone
    "soap.search": ("soap.search", "soap.simulator", *PLANNING),
    "soap.zoo": ("soap.zoo", "soap.errors"),
    "soap.tracing": ("soap.tracing", "soap.model", "soap.plan.tiling", *GROUND_FLOOR),
    "soap.tracing.footprints": ("soap.tracing", "soap.simulator.memory.footprint", *PLANNING),  # adds what that lacks
    "soap.tracing.load": ("soap.tracing", "soap.model", "soap.zoo", *GROUND_FLOOR),  # the one place where model names meet models
    "soap.runtime": RUNTIME,
    "soap.runtime.system": ("soap.runtime.system", *GROUND_FLOOR),
    "soap.emulation": ("soap.emulation", "soap.runtime.system", "soap.cluster", *GROUND_FLOOR),
    "soap.elastic": ("soap.elastic", *RUNTIME),
    "soap.mixed": ("soap.mixed", "soap.elastic", "soap.search", "soap.simulator", *PLANNING),
    "soap.mixed.run": ("soap.mixed", "soap.elastic", "soap.search", *RUNTIME),
    "soap.measure": ("soap.measure", "soap.emulation.reference_work", *RUNTIME),
    "soap.profiles": ("soap.profiles", "soap.measure", "soap.emulation.reference_work", "soap.simulator", *PLANNING),
    "soap.preprocessing": (
        "soap.preprocessing",
        "soap.elastic.session",
        "soap.elastic.faults",
        "soap.runtime.system.process",
        *GROUND_FLOOR,
    ),
    "soap.data": ("soap.data", *GROUND_FLOOR),
    "soap.weights": ("soap.weights", "soap.tracing", *PLANNING),
    "soap.exported_plans": ("soap.exported_plans", "soap.strategy", "soap.schedules", "soap.cluster", "soap.model", *GROUND_FLOOR),
    "soap.report": ("soap.report", "soap.api.what_if", "soap.search", "soap.simulator", *PLANNING),
    "soap.report.page": EVERYTHING,  # says which version made it
    "soap.api": EVERYTHING,
    "soap.runner": EVERYTHING,
    "soap.cli": EVERYTHING,
    "soap": EVERYTHING,
}
"""Prefix of module names -> prefixes of our modules that they may import. The longest prefix counts."""

COMMANDS = tuple(
    f"soap.cli.{name}"
    for name in (
        "search", "run", "simulate", "diff", "compare", "profile", "tune", "preprocess", "schedule", "report", "export", "export_plan",
    )
)  # fmt: skip
WITHOUT_TORCH = (
    *PLANNING, "soap.simulator", "soap.search", "soap.emulation", "soap.runtime.system.clock", "soap.preprocessing", "soap.report",
    "soap.exported_plans",
)  # fmt: skip


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def _names(node: ast.stmt) -> list[str]:
    """Modules that an import statement names; ``from package import module`` names the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import; write it absolutely"
        base = node.module or ""
        return sorted({f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names})
    return []


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def _imports(path: Path) -> tuple[list[str], list[str]]:
    """All imports of a file, wherever they stand; and those that run when the module is imported. Its tree is not kept: trees of all files
    are so many objects that Python's collector of garbage takes its time over them in every later test."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [name for node in statements(tree) for name in _names(node)], [*_imports_at_start(tree.body)]


def _imports_at_start(body: list[ast.stmt]) -> Iterator[str]:
    """Imports that run when the module is imported."""
    for node in body:
        yield from _names(node)
        if isinstance(node, ast.If) and not _is_type_checking(node):
            yield from _imports_at_start([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _imports_at_start([*node.body, *node.orelse, *node.finalbody])


def test_modules_import_only_what_their_package_may() -> None:
    forbidden: dict[str, list[str]] = {}
    for module in MODULES:
        home = max((prefix for prefix in MAY_IMPORT if _below(module, prefix)), key=len)
        assert home != "soap" or module == "soap", f"{module} belongs to no layer: add it to docs/architecture.md and to this table"
        ours = [name for name in _imports(MODULES[module])[0] if _below(name, "soap")]
        forbidden[module] = [name for name in ours if not any(_below(name, allowed) for allowed in MAY_IMPORT[home])]
    assert {module: names for module, names in forbidden.items() if names} == {}


def test_planning_never_names_torch() -> None:
    planning = [module for module in MODULES if any(_below(module, prefix) for prefix in WITHOUT_TORCH)]
    named = {module: [name for name in _imports(MODULES[module])[0] if _below(name, "torch")] for module in planning}
    assert planning and {module: names for module, names in named.items() if names} == {}


def test_links_at_the_root_are_never_imported() -> None:
    links = ("simulator", "search", "profiles")
    wrong = {m: [n for n in _imports(path)[0] if any(_below(n, link) for link in links)] for m, path in MODULES.items()}
    assert {m: names for m, names in wrong.items() if names} == {}


def test_no_cycle_among_modules() -> None:
    graph = {}
    for module, path in MODULES.items():
        graph[module] = {name for name in _imports(path)[1] if name in MODULES and name != module}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(MODULES)  # raises CycleError, naming the cycle


def test_nothing_of_planning_loads_torch_and_commands_do_without_numba() -> None:
    """Every rank starts as ``soap-run`` does, so what a command imports is paid for once more by each of them."""
    light = [m for m in MODULES if any(_below(m, prefix) for prefix in (*WITHOUT_TORCH, "soap.api", *COMMANDS))]
    program = f"""
import importlib, sys
for name in {["soap", "soap.api", *COMMANDS]!r}:
    importlib.import_module(name)
    assert "numba" not in sys.modules, name
for name in {light!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_links_at_the_root_lead_into_the_package() -> None:
    for name in ("simulator", "search", "profiles"):
        link = ROOT / name
        assert link.is_symlink()
        assert link.readlink() == Path("soap") / name
