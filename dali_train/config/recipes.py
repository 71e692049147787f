"""The recipes that ship with the package: found by name, and listed with source, target and what was measured."""

import re
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_INSTALLED = _PACKAGE / "recipes"
RECIPES = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"
"""In a wheel dali_train/recipes; in the repository configs/, which setup.py installs there."""


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.py"))


def find_recipe(name: str) -> Path | None:
    """Return the file of the recipe `name`, such as vit-b16; None if there is none."""
    return RECIPES / f"{name}.py" if name in recipe_names() else None


def recipe_table() -> list[tuple[str, ...]]:
    """Return name, description, target, source and measurement of each recipe, from the README beside them."""
    rows = []
    for line in (RECIPES / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell.strip()) for cell in line.strip("|").split("|")]
        rows += [(name, *cells[1:]) for name in re.findall(r"([\w-]+)\.py", cells[0]) if len(cells) == 5]
    return rows
