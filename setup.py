"""Puts the demonstration models into the wheel, as tideway/models, so that `tideway up` has them outside of a checkout. All
else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithModels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in Path("models").glob("tideway-demo-*"):
            shutil.copytree(folder, Path(self.build_lib, "tideway", "models", folder.name), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithModels})
