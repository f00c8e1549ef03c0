"""The import directions of the design, read from the sources: owners below never know their users above."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dsflash_jax", "experiments", "pallas_kernels")

BASE = {"numerics", "config", "config_io", "config_rules", "roles", "replay", "types"}
MODEL = BASE | {"ops", "cache", "modules"}
STEPS = MODEL | {"steps", "batch", "sampling"}
HOST = STEPS | {"session", "host_tables"}
PRODUCTS = HOST | {"training", "analysis", "weights"}
EVERYTHING = PRODUCTS | {"speculative", "draft_step", "speculate"}
EVERYTHING |= {"generate", "lab_text", "parity", "bench", "shipped", "engine", "store"}

# Unit of the package (folder or module) -> the other units it may import. A new unit needs a line here.
ALLOWED = {
    "__init__": set(),
    "numerics": set(),
    "config": BASE,
    "config_io": BASE,
    "config_rules": BASE,
    "roles": BASE,
    "replay": BASE,
    "types": BASE,
    "shipped": set(),
    "ops": BASE | {"pallas_kernels"},
    "cache": BASE | {"pallas_kernels"},
    "modules": BASE | {"ops", "cache", "pallas_kernels"},
    "steps": STEPS,
    "speculative": BASE | {"sampling"},
    "draft_step": STEPS | {"speculative", "weights"},
    "speculate": HOST | {"speculative", "draft_step", "generate"},
    "batch": STEPS - {"modules"},
    "sampling": BASE | {"ops"},
    "weights": MODEL,
    "training": PRODUCTS - {"analysis"},
    "host_tables": BASE,
    "session": STEPS | {"host_tables"},
    "sharding": STEPS | {"speculative", "draft_step"},
    "analysis": HOST | {"weights"},
    "generate": HOST,
    "lab_text": PRODUCTS | {"generate", "speculate"},
    "parity": PRODUCTS | {"draft_step", "pallas_kernels"},
    "bench": PRODUCTS | {"peer", "shipped"},
    "aot_model": STEPS | {"weights", "shipped", "pallas_kernels"},
    "peer": BASE | {"weights"},
    "engine": STEPS | {"store"},
    "store": BASE | {"cache"},
    "pallas_kernels": set(),
    "cli": EVERYTHING | {"experiments", "pallas_kernels"},
    "experiments": EVERYTHING,
}
# Third-party package -> the only units that may import it.
CONFINED = {
    "flax": {"modules", "training", "weights", "steps"},
    "matplotlib": {"cli", "experiments"},
    "tyro": {"cli", "experiments"},
    "rich": {"cli", "experiments"},
}
HOST_UNITS = {"engine", "store"}
DEVICE_MODULES = {"executor", "swap_in", "snapshot"}


def imported_names(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted names that a module imports anywhere, in functions and TYPE_CHECKING blocks too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                anchor = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*anchor, base]) if base else ".".join(anchor)
            # `from package import unit` names the unit; of other modules only the module counts.
            yield from (f"{base}.{alias.name}" if base in PACKAGES else base for alias in node.names)


def unit_of(dotted: str) -> str:
    """dsflash_jax.ops.rope -> ops; experiments.registry -> experiments; dsflash_jax itself -> __init__."""
    first, *rest = dotted.split(".")
    if first != "dsflash_jax":
        return first
    return rest[0] if rest and not rest[0].startswith("__") else "__init__"


def violations(root: Path) -> list[str]:
    """One line per import that the rules refuse, for all packages under `root`."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            unit = unit_of(module)
            where = path.relative_to(root).as_posix()
            if unit not in ALLOWED:
                found.append(f"{where}: unit {unit!r} has no line in ALLOWED")
                continue
            for name in sorted(set(imported_names(path.read_text(), module, path.name == "__init__.py"))):
                if refused(unit, path.stem, name):
                    found.append(f"{where}: may not import {name}")
    return found


def refused(unit: str, stem: str, name: str) -> bool:
    """Whether a module `stem` of `unit` may not import the dotted `name`."""
    top = name.split(".")[0]
    if top in PACKAGES:
        target = unit_of(name)
        return target not in {unit, "__init__"} and target not in ALLOWED[unit]
    if unit == "pallas_kernels" and top not in {"jax", "jaxlib", "numpy"}:
        return top not in sys.stdlib_module_names
    if unit in HOST_UNITS and top in {"jax", "jaxlib"}:
        return stem not in DEVICE_MODULES
    return top in CONFINED and unit not in CONFINED[top]


def test_every_import_points_downwards():
    assert violations(ROOT) == []


def test_oracles_know_neither_the_package_nor_jax():
    for path in sorted((ROOT / "tests" / "oracles").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tops = {name.split(".")[0] for name in imported_names(path.read_text(), module, path.name == "__init__.py")}
        assert not tops & {"jax", "jaxlib", "flax", *PACKAGES}, path.name


def test_the_sources_are_really_read():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert {"cli", "config", "roles"} <= {path.stem for path in files}


# Needed by host code (engine, store, command line), which must start without JAX. Direct imports alone do not show it.
HOST_MODULES = ("config", "config_io", "roles", "shipped", "cache.layout", "cache.accounting", "cache.pages", "cli")


@pytest.mark.parametrize("module", HOST_MODULES)
def test_host_modules_load_no_jax(module):
    program = f"import sys, dsflash_jax.{module}\nassert not {{'jax', 'jaxlib', 'flax'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dsflash_jax/ops/rope.py", "from dsflash_jax.modules import attention"),
        ("dsflash_jax/ops/rope.py", "from dsflash_jax import modules"),
        ("dsflash_jax/ops/rope.py", "from ..modules.attention import Attention"),
        ("dsflash_jax/ops/__init__.py", "from ..cache import layout"),
        ("dsflash_jax/ops/rope.py", "def f():\n    import dsflash_jax.steps"),
        ("dsflash_jax/numerics/formats.py", "from dsflash_jax.config import ModelConfig"),
        ("dsflash_jax/cache/layout.py", "from dsflash_jax.ops.rope import rotate"),
        ("dsflash_jax/cache/layout.py", "import flax.nnx"),
        ("dsflash_jax/training/loop.py", "from rich.progress import Progress"),
        ("dsflash_jax/parity.py", "import matplotlib.pyplot as plt"),
        ("dsflash_jax/steps.py", "from experiments.registry import STUDIES"),
        ("dsflash_jax/config.py", "import tyro"),
        ("dsflash_jax/generate.py", "from dsflash_jax.training import vocabulary"),
        ("dsflash_jax/engine/scheduler.py", "import jax"),
        ("dsflash_jax/store/page.py", "from jax import numpy as jnp"),
        ("pallas_kernels/sparse_mla/api.py", "from dsflash_jax.types import RowSource"),
        ("pallas_kernels/sparse_mla/api.py", "import flax"),
        ("dsflash_jax/surprise.py", "x = 1"),
        ("experiments/study.py", "from dsflash_jax.cli import main"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, path, source):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dsflash_jax/modules/attention.py", "import flax\nfrom dsflash_jax.ops import rope\nfrom . import linear"),
        ("dsflash_jax/engine/executor.py", "import jax"),
        ("pallas_kernels/sparse_mla/api.py", "import functools\nimport jax\nimport numpy\nfrom .. import common"),
        ("dsflash_jax/ops/sparse_attention.py", "from pallas_kernels.sparse_mla import api"),
        ("dsflash_jax/cli.py", "import rich, tyro\nfrom experiments import registry\nimport dsflash_jax"),
        ("experiments/figures.py", "import matplotlib\nfrom dsflash_jax.training import loop"),
    ],
)
def test_an_allowed_import_is_not_reported(tmp_path, path, source):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert violations(tmp_path) == []
