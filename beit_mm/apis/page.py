"""One HTML file that runs an ONNX file of `export` in a browser, without Python and without a network."""

import base64
import gzip
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from beit_mm.errors import UserError
from beit_mm.files import atomic_file, quoted

VERSION = '1.30.0'  # of onnxruntime-web, whose files are not part of this package
RUNTIME = dict(script='dist/ort.wasm.bundle.min.mjs', wasm='dist/ort-wasm-simd-threaded.wasm', about='package.json')
KERNELS = ('bilinear', 'bicubic')  # that the page resizes with
MAX_BYTES = 2**30  # of a graph; a browser gives WebAssembly 4 GiB, and loading takes three times the graph
PART = 3 * 2**23  # bytes of a script element; browsers limit the length of a string


def write_page(model: Path, out: Path, runtime: str | Path | None = None) -> None:
    """Writes a page for a browser that classifies or segments photos.

    Args:
        model: an ONNX file of `export`.
        out: the page.
        runtime: folder with the unpacked npm package onnxruntime-web; by default the npm client gets it once.

    Raises:
        UserError: a page cannot prepare images as this model needs, the model is too large, or there is no runtime.
    """
    import onnx

    notes = json.loads(next(each.value for each in onnx.load(model).metadata_props if each.key == 'beit_mm'))
    if notes.get('bands'):
        raise UserError('a page reads only RGB, and this model sees bands; export it to a file that ends in .onnx')
    for step in notes['steps']:
        if step.get('interpolation', KERNELS[0]) not in KERNELS:
            raise UserError(f'a page resizes by {" or ".join(KERNELS)}, not by {step["interpolation"]}; export to .onnx')
    size = model.stat().st_size
    if size > MAX_BYTES or model.with_name(f'{model.name}.data').exists():
        raise UserError(f'the model has {size / 2**20:,.0f} MiB, a page takes 1,024; give --float16, or export to .onnx')
    folder = Path(runtime).expanduser() if runtime else cached_runtime()
    files = {name: folder / file for name, file in RUNTIME.items()}
    if absent := [file for file in files.values() if not file.is_file()]:
        raise UserError(f'no {quoted(str(absent[0]))}; give --runtime FOLDER with the unpacked npm package onnxruntime-web')
    about = json.loads(files.pop('about').read_bytes())
    licence = f'it runs the model with {about["name"]} {about["version"]} (Microsoft, {about["license"]} licence).'
    notes['title'] = f'{"Label maps" if "crop_size" in notes else "Classes"} of photos: {out.stem}'
    contents = dict(notes=json.dumps(notes).encode(), model=model.read_bytes())
    contents |= {name: file.read_bytes() for name, file in files.items()}
    page = Path(__file__).with_name('page.html').read_text(encoding='utf-8')
    with atomic_file(out) as file:
        file.write(page.replace('LICENCE', licence).encode())
        for name, content in contents.items():
            packed = gzip.compress(content, compresslevel=1)
            for start in range(0, len(packed), PART):
                text = base64.b64encode(packed[start : start + PART])
                file.write(b'<script type="text/plain" class="%s">%s</script>\n' % (name.encode(), text))


def cached_runtime() -> Path:
    """The folder of onnxruntime-web in torch's cache, where the npm client puts it at the first call."""
    cache = Path(torch.hub.get_dir(), f'onnxruntime-web-{VERSION}')
    if all((cache / name).is_file() for name in RUNTIME.values()):
        return cache
    if not shutil.which('npm'):
        raise UserError(
            f'a page needs onnxruntime-web {VERSION}, and npm, which gets it, was not found; install npm, or give '
            '--runtime FOLDER with the unpacked package'
        )
    with TemporaryDirectory() as folder:
        command = ['npm', 'pack', f'onnxruntime-web@{VERSION}', '--ignore-scripts', '--silent']
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            raise UserError(f'`{" ".join(command)}` failed: {error.stderr.strip()[-300:]}; or give --runtime FOLDER') from None
        with tarfile.open(next(Path(folder).glob('*.tgz'))) as archive:
            for name in RUNTIME.values():
                with atomic_file(cache / name) as file:
                    file.write(archive.extractfile(f'package/{name}').read())
    return cache
