"""One HTML file that runs a model in a browser, without Python and without a network."""

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
from beit_mm.terminal import say

RUNTIME = 'onnxruntime-web@1.30.0'  # npm's name; by Microsoft, MIT licence
FILES = dict(script='ort.wasm.bundle.min.mjs', wasm='ort-wasm-simd-threaded.wasm')  # in its folder `dist`
KERNELS = ('bilinear', 'bicubic')  # with which the page resizes
# Of a graph. WebAssembly has 4 GiB, and loading takes three times the graph; weights in float16 become float32 besides.
# In Chromium 1,024 MiB open in float32, and 768 in float16, of which 1,024 end in std::bad_alloc.
MAX_BYTES, MAX_BYTES_FLOAT16 = 2**30, 768 * 2**20
PART = 3 * 2**23  # bytes of a script element; browsers limit the length of a string


def write_page(model: Path, out: Path, runtime: Path, name: str = '') -> None:
    """Writes a page for a browser that classifies or segments photos.

    Args:
        model: an ONNX file of `export`.
        out: the page.
        runtime: folder with the unpacked npm package onnxruntime-web.
        name: of the model, for the heading (default: of the page).

    Raises:
        UserError: the model sees bands, resizes as no page can, or is too large; or `runtime` lacks a file.
    """
    import onnx

    graph = onnx.load(model, load_external_data=False)
    notes = json.loads(next(each.value for each in graph.metadata_props if each.key == 'beit_mm'))
    if notes.get('bands'):
        raise UserError('a page reads photos, and this model sees bands; export it to a file that ends in .onnx')
    for kernel in [step['interpolation'] for step in notes['steps'] if 'interpolation' in step]:
        if kernel not in KERNELS:
            raise UserError(f'a page resizes by {" or ".join(KERNELS)}, not by {kernel}; export to .onnx instead')
    size = sum(file.stat().st_size for file in model.parent.glob(f'{model.name}*'))  # with the weights beside it
    is_half = any(weights.data_type == onnx.TensorProto.FLOAT16 for weights in graph.graph.initializer)
    most, advice = (MAX_BYTES_FLOAT16, '') if is_half else (MAX_BYTES, 'try --float16, or ')
    if size > most:
        found = f'{size / 2**20:,.0f} MiB' + ' in float16' * is_half
        raise UserError(f'the model has {found}, a browser can load {most / 2**20:,.0f}; {advice}export to .onnx')
    notes['title'] = f'{"Label maps" if "crop_size" in notes else "Classes"} of photos: {name or out.stem}'
    contents = dict(notes=json.dumps(notes).encode(), model=model.read_bytes())
    try:
        contents |= {name: (runtime / 'dist' / file).read_bytes() for name, file in FILES.items()}
    except OSError as error:
        missing = quoted(str(error.filename))
        raise UserError(f'no {missing}; --runtime takes a folder with {RUNTIME} of npm, unpacked') from None
    with atomic_file(out) as page:
        page.write(Path(__file__).with_suffix('.html').read_bytes())
        for name, content in contents.items():
            packed = gzip.compress(content, compresslevel=1)
            for start in range(0, len(packed), PART):
                text = base64.b64encode(packed[start : start + PART]).decode()
                page.write(f'<script type="text/plain" class="{name}">{text}</script>\n'.encode())


def cached_runtime() -> Path:
    """The folder of RUNTIME in torch's cache, where the npm client puts it at the first call."""
    cache = Path(torch.hub.get_dir(), RUNTIME)
    if all((cache / 'dist' / file).is_file() for file in FILES.values()):
        return cache
    npm = shutil.which('npm')
    if not npm:
        raise UserError(f'a page needs npm, to get {RUNTIME}; install npm, or give --runtime FOLDER with it unpacked')
    with TemporaryDirectory() as folder:
        say(f'npm gets {RUNTIME} once, into {cache}')
        command = [npm, 'pack', '--ignore-scripts', '--loglevel=error', '--fetch-retries=0', RUNTIME]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors='replace')
        if done.returncode:
            lines = done.stderr.splitlines() or ['']
            reason = next((line for line in lines if 'reason:' in line), lines[-1]).strip()
            raise UserError(
                f'npm pack {RUNTIME} failed ({reason}); without a network give --runtime FOLDER with it unpacked'
            )
        with tarfile.open(next(Path(folder).glob('*.tgz'))) as archive:
            for file in FILES.values():
                with atomic_file(cache / 'dist' / file) as copy:
                    copy.write(archive.extractfile(f'package/dist/{file}').read())
    return cache
