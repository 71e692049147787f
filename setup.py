"""What pyproject.toml cannot say: configs/ is installed as dali_train/recipes, beside the packages that are found."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["dali_train*"]), "dali_train.recipes"],
    package_dir={"dali_train.recipes": "configs"},
)
