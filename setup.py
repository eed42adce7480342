"""What pyproject.toml has no words for: the folder `.mim`, where mim looks for a package's configs and tools."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# of tools/: what needs the checkout
LEFT_OUT = shutil.ignore_patterns('__pycache__', 'dev', 'run_*.sh', '_environment.sh')


def place_mim_folder(package: Path, link: bool) -> None:
    """Makes `<package>/.mim`, where mim looks for configs, tools and the model index of a package.

    Args:
        package: the folder of beit_mm, in the build folder or in the source tree.
        link: symbolic links to the source tree, so that an editable install sees every edit.
    """
    mim = package / '.mim'
    shutil.rmtree(mim, ignore_errors=True)  # removes links, never what they point to
    mim.mkdir(parents=True)
    for name in ('configs', 'tools', 'model-index.yml'):
        if link:
            (mim / name).symlink_to(Path('../..', name))
        elif name == 'model-index.yml':
            shutil.copy2(ROOT / name, mim)
        else:
            shutil.copytree(ROOT / name, mim / name, ignore=LEFT_OUT)


class BuildPy(build_py):
    """Wheels get copies in the build folder, editable installs links in the source tree."""

    def run(self) -> None:
        super().run()
        package = ROOT / 'beit_mm' if self.editable_mode else Path(self.build_lib, 'beit_mm')
        place_mim_folder(package, link=self.editable_mode)


setup(cmdclass=dict(build_py=BuildPy))
