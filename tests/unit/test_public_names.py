"""`import dsflash_jax` is the way in: its names are there when asked for, and importing it loads nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

import dsflash_jax

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [name for name in dsflash_jax.__all__ if name != "__version__"])
def test_every_public_name_is_what_its_module_defines(name):
    value = getattr(dsflash_jax, name)
    assert value.__name__ == name and value.__doc__
    assert value.__module__.startswith("dsflash_jax.")


def test_an_unknown_name_is_an_attribute_error():
    name = "nonsense"
    with pytest.raises(AttributeError, match="'dsflash_jax' has no attribute 'nonsense'"):
        getattr(dsflash_jax, name)
    with pytest.raises(ImportError):
        from dsflash_jax import nonsense  # noqa: F401


def test_importing_the_package_loads_neither_jax_nor_numpy():
    program = "import sys, dsflash_jax\ndir(dsflash_jax)\nassert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
