"""Packaging of beit_mm.

    pip install -e ".[onedl]"        the maintained onedl releases; nothing compiles
    pip install -e ".[openmmlab]"    OpenMMLab's own releases; mmcv first, with MMCV_WITH_OPS=1

Both families are imported under the same names (mmengine, mmcv, mmpretrain, mmseg), and requiring
one would install it on top of the other. So install_requires names neither, and the extras choose.
Ranges stand here; the exact versions the tests run with stand in requirements/.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.develop import develop

ROOT = Path(__file__).resolve().parent
MIM_CONTENTS = ('configs', 'tools', 'model-index.yml')
BANDS = ['tifffile>=2023.7.18', 'imagecodecs>=2023.7.10']  # imagecodecs: LZW, Zstandard, differences of floats
ONNX = ['onnx>=1.17,<2', 'onnxruntime>=1.20,<2', 'onnxscript>=0.5,<1']  # for tools/export_onnx.py


def place_mim_folder(package: Path, link: bool) -> None:
    """Make `<package>/.mim`, where mim looks for configs, tools and the model index of a package.

    Args:
        package: the folder of beit_mm, in the build folder or in the source tree.
        link: symbolic links to the source tree, so that an editable install sees every edit;
            copies where the file system has no links.
    """
    mim = package / '.mim'
    shutil.rmtree(mim, ignore_errors=True)  # removes links, never what they point to
    mim.mkdir(parents=True)
    for name in MIM_CONTENTS:
        source = ROOT / name
        if link:
            try:
                (mim / name).symlink_to(Path('../..', name), target_is_directory=source.is_dir())
                continue
            except OSError:
                pass
        if source.is_dir():
            shutil.copytree(source, mim / name, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            shutil.copy2(source, mim / name)


class BuildPy(build_py):
    """Wheels get copies in the build folder, editable installs links in the source tree."""

    def run(self) -> None:
        super().run()
        package = ROOT / 'beit_mm' if self.editable_mode else Path(self.build_lib, 'beit_mm')
        place_mim_folder(package, link=self.editable_mode)


class Develop(develop):
    """`python setup.py develop`, which before setuptools 80 does not run build_py."""

    def run(self) -> None:
        place_mim_folder(ROOT / 'beit_mm', link=True)
        super().run()


setup(
    name='beit_mm',
    version=re.search(r"__version__ = '(.+)'", (ROOT / 'beit_mm/__init__.py').read_text())[1],
    description='BEiT (arXiv 2106.08254) as a plugin of MMPretrain and MMSegmentation',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=('beit_mm', 'beit_mm.*')),
    package_data={'beit_mm': ['weights/*', 'weights/*/*']},
    entry_points={'console_scripts': ['beit-mm=beit_mm.__main__:script']},
    zip_safe=False,
    python_requires='>=3.10',
    install_requires=[
        'torch>=2.6',  # before, torch.load runs code of a file even with weights_only (CVE-2025-32434)
        'torchvision>=0.21',  # 0.(n + 15) belongs to torch 2.n, 0.29 to 2.15 too; of newer ones doctor.py warns
        'numpy>=1.24,<3',
        'pillow>=10.1',  # Image.has_transparency_data
        'scipy>=1.10,<2',
        'safetensors>=0.4,<1',
        'matplotlib>=3.7,<4',
        'tensorboard>=2.14,<3',
    ],
    extras_require={
        'onedl': [
            'onedl-mmengine>=0.10.12,<0.11',
            'onedl-mmcv>=2.3.6,<2.4',
            'onedl-mmpretrain>=1.3.6,<1.4',
            'onedl-mmsegmentation>=1.4.2,<1.5',
            'onedl-mim>=0.5.1,<0.6',
            'openxlab<0.1',  # later ones pin setuptools, rich and requests of 2023
        ],
        'openmmlab': [
            'mmengine>=0.10.7,<0.11',
            'mmcv>=2.1,<2.2',  # mmseg 1.2.2 refuses 2.2
            'mmpretrain>=1.2,<1.3',
            'mmsegmentation>=1.2.2,<1.3',
            'ftfy>=6',  # mmseg imports these two and does not require them
            'regex',
            'openmim>=0.3.9,<0.4',
            'openxlab<0.1',  # as above: the pinned setuptools 60 does not run on Python 3.12
            'setuptools>=64,<82',  # openmim imports pkg_resources, which 82 removed
        ],
        'bands': BANDS,  # for .tif files of many bands
        'onnx': ONNX,
        'dev': [
            'pytest>=8',
            'pytest-timeout>=2.3',
            'pytest-cov>=6',
            'pytest-xdist>=3',
            'ruff>=0.6',
            'codespell>=2.3',
            'mypy>=1.15',
            'timm>=1.0',
            'transformers>=4.45',
            *ONNX,
            *BANDS,
        ],
    },
    cmdclass={'build_py': BuildPy, 'develop': Develop},
)
