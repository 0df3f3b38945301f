"""Imports go one way, and nothing heavy or foreign is imported. Read from the source, so that no import can hide."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import multihead as mh

SOURCE = Path(mh.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# errors <- masks, positions <- reference | request <- kernels <- attention <- module <- explain, doctor, models
#        <- training <- commands <- cli
TIERS = [
    {"errors", "labels", "packages", "textbook", "web", "whole_files"},
    {"plane", "mask_kinds", "masks", "positions", "rotary", "layouts", "options"},
    {"cache", "cache_calls", "cache_format", "cache_ledger", "cache_pages", "cache_state", "cache_storage"},
    {"reference", "request"},
    {"kernels"},
    {"attention", "projections"},
    {"weights", "watching"},
    {"whole"},
    {"layer"},
    {"module"},
    {"compat", "torch_inputs", "torch_masks"},
    {"swapping"},
    {"explaining", "doctor", "models", "inspection"},
    {"training"},
    {"commands"},
    {"cli", "demo", "side_by_side"},
    {"__init__"},
]
RANK = {name: rank for rank, tier in enumerate(TIERS) for name in tier}
# Of one tier, and strangers.
APART = [
    ("reference", "request"),
    ("attention", "projections"),
    ("weights", "projections"),
    ("explaining", "doctor"),
    ("models", "explaining"),
    ("inspection", "explaining"),
]
COMMAND_LINE = {"cli": {"typer", "rich"}, "commands": {"typer", "rich"}, "demo": {"rich"}}
# Others are imported by name, where they are needed: see packages.py.
COMMAND_LINE |= {
    "training": {"rich", "matplotlib"},
    "inspection": {"matplotlib"},
    "labels": {"matplotlib"},
    "explaining": {"matplotlib"},
}


class Import(NamedTuple):
    of: str  # the importing file's name in the tiers
    what: str  # the imported one's, or the package if it is another
    own: bool  # whether it is of this package
    where: str


def part(name: str) -> str:
    """A module's place in the tiers: `kernels` for all kernels, `__init__` for the package itself."""
    names = name.split(".")
    return names[1] if len(names) > 1 else "__init__"


def module_of(path: Path) -> str:
    names = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> Iterator[Import]:
    """All imports of a file, those inside of functions too; not those that only type checkers see."""
    of = part(module_of(path))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in MODULES else str(node.module) for name in whole]
        else:
            continue
        for name in found:
            top, own = name.split(".")[0], name.split(".")[0] == "multihead"
            if own or node not in for_types:
                yield Import(of, part(name) if own else top, own, f"{path.name}:{node.lineno}")


ALL = [found for path in FILES for found in imports(path)]
OWN = [found for found in ALL if found.own]


def test_every_file_has_a_place():
    missing = {part(name) for name in MODULES} - set(RANK)
    assert not missing, f"say in TIERS, and in docs/design.md, where {missing} belongs"
    assert len(FILES) > 15


def test_imports_go_one_way():
    assert len(OWN) > 60
    wrong = [found for found in OWN if RANK[found.what] > RANK[found.of] and found.what != "__init__"]
    assert not wrong
    strangers = [found for found in OWN if (found.of, found.what) in [*APART, *((b, a) for a, b in APART)]]
    assert not strangers


def test_only_the_version_is_imported_from_the_package():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "multihead":
                names = {alias.name for alias in node.names if f"multihead.{alias.name}" not in MODULES}
                assert names <= {"__version__"}, f"{path.name}:{node.lineno}"


def test_there_is_no_circle():
    """Over single files: within a tier too."""
    edges = {name: set() for name in MODULES}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                edges[name] |= {target for target in (*whole, str(node.module)) if target in MODULES and target != name}
    # A file of a package needs the package only as a place: its __init__ is run first and imports the file itself.
    edges = {name: {t for t in targets if not name.startswith(f"{t}.")} for name, targets in edges.items()}
    done, seen = set(), []

    def visit(name):
        assert name not in seen, f"{' -> '.join([*seen, name])}"
        if name in done:
            return
        seen.append(name)
        for target in sorted(edges[name]):
            visit(target)
        seen.pop()
        done.add(name)

    for name in edges:
        visit(name)
    assert done == set(MODULES)


def test_the_reference_and_the_kernels_do_not_know_each_other():
    pairs = {(found.of, found.what) for found in OWN}
    assert not {("reference", "kernels"), ("kernels", "reference"), ("kernels", "attention")} & pairs
    assert {("attention", "kernels"), ("attention", "reference")} <= pairs


def test_the_layer_names_no_kernel():
    for name in ("module", "projections"):
        tree = ast.parse((SOURCE / f"{name}.py").read_text(encoding="utf-8"))
        docstrings = {
            ast.get_docstring(node, clean=False)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        }
        words = set()
        for node in ast.walk(tree):
            words |= {
                getattr(node, field)
                for field in ("id", "attr", "arg", "module")
                if isinstance(getattr(node, field, None), str)
            }
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
                words.add(node.value)
        named = {word for word in words for kernel in (*mh.KERNELS, "flash", "KERNELS") if kernel in word.split(".")}
        assert "kernel" not in words
        assert not named, f"{name}.py: {named}"


def test_nothing_but_torch_and_the_standard_library():
    for found in ALL:
        allowed = {"torch"} | COMMAND_LINE.get(found.of, set())
        assert found.own or found.what in sys.stdlib_module_names or found.what in allowed, found


def test_importing_is_light():
    """In a fresh interpreter; what torch itself imports is torch's."""
    code = (
        "import sys, torch; before = set(sys.modules); import multihead; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PYTHONPATH": str(SOURCE.parent), "PATH": ""},
    )
    new = set(run.stdout.split())
    assert "multihead" in new
    assert not new & {"typer", "rich", "matplotlib", "click", "pytest"}
    assert not new & {"sympy", "mpmath", "numpy"}, "what compiles is imported when it is used: this takes seconds"
    assert not run.stderr


# What is public -------------------------------------------------------------------------------------------------------


def test_all_is_complete_and_sorted():
    public = {name for name, thing in vars(mh).items() if not name.startswith("_") and not inspect.ismodule(thing)}
    assert set(mh.__all__) == public
    assert len(mh.__all__) == len(set(mh.__all__))
    kinds = {name: 0 if name.isupper() else 1 if name[0].isupper() else 2 for name in mh.__all__}
    assert mh.__all__ == sorted(mh.__all__, key=lambda name: (kinds[name], name))


@pytest.mark.parametrize("name", mh.__all__)
def test_public_names_have_docstrings(name):
    thing = getattr(mh, name)
    if name == "KERNELS":  # a dict: its values are what can be read
        return
    text = inspect.getdoc(thing)
    assert text
    assert not text.startswith(f"{name}("), "dataclasses make one up"
    assert text.split("\n")[0].rstrip().endswith((".", ":")) or "\n\n" in text
    if inspect.isclass(thing):
        for method, function in vars(thing).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert inspect.getdoc(getattr(thing, method)), f"{name}.{method}"


def test_every_file_says_what_it_is():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 440, "it is two ideas"


def test_it_is_typed():
    assert (SOURCE / "py.typed").exists()
