"""The pages of the docs by copy and paste: each shell block and each program in Python, in the page's order.

pytest -m slow tests/test_docs_commands.py -k own_images

A page runs in a folder that looks like a fresh checkout, with small images where the pages name some, small
checkpoints under the names that the pages use, and the runs of the pages that it says to do first. What is run is the
page's text, with the changes of SHORTER and EXTRA; training loops begin two steps, or one epoch, before their end.
"""

import copy
import glob
import re
import shlex
import subprocess
import sys
import tarfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from doc_commands import PAGES, Block, Command, blocks, commands, config, config_of, joined, split
from helpers import NO_WORKERS, ROOT, last_steps, run_tool
from label_maps import make_label_maps
from PIL import Image

from beit_mm import __main__ as beit_mm_main
from beit_mm.registry import MODELS

NEEDS = [  # commands that need what is not here -> how the page says so, in the block or in the line above it
    (r'tools/dist_\w+\.sh .* (8|16)\b', r'GPUs'),
    (r'slurm_train', r'Slurm'),
    (r'train(\.py| mmpretrain) configs/beit/(pretrain_300e|linear_probe_in1k)', r'ImageNet'),
    (r'mim test mmsegmentation', r'ADE20K'),
    (r'test.py configs/beit\S+ https:', r'network'),
    (r'^beit-mm \w+ beit_', r'network'),
    (r'pytest -m gpu', r'CUDA'),
    (r'get_model\(.*pretrained=True', r'network'),
]
ELSEWHERE = [  # what is tested in another file, or never ends
    (r'run_demo\.sh', 'tests/cli/test_demo.py'),
    (r'run_tests\.sh', 'it runs this file'),
    (r'mkdocs serve', 'tests/test_docs.py builds the site'),
    (r'^tensorboard', 'a server'),
    (r'^pip (install|wheel)', 'it changes the environment'),
    (r'ImageClassificationInferencer|MMSegInferencer', 'tests/parity/test_mixing.py'),
]
SHORTER = [  # text of a page -> what is run instead
    (r"out='run'(, minutes=15)?", "out='run', minutes=0.5"),
    (r"out='run_ft'", "out='run_ft', minutes=0.5"),
    (r'--workers 32', '--workers 1'),
    (r'\bCKPT\b', 'work_dirs/pretrain/iter_7000.pth'),
    (r'\bDIR\b', 'new_folder'),
    (r'\bFILE\b', 'work_dirs/pretrain/iter_7000.pth'),
]
EXTRA = [  # commands -> what is added
    (r'beit_mm (pretrain|finetune)', ['--minutes', '0.5']),
    (r'(train|test)\.py|mim (run|train) mmpretrain', ['--cfg-options', *NO_WORKERS]),
    (r'trivial_baselines', ['--cfg-options', *NO_WORKERS]),
    (r'test\.py configs/dvae', ['model.hidden=8', 'model.vocab_size=32', 'model.embed_dims=16']),
    (r'^mim train mmpretrain mine', ['train_cfg.max_iters=2', 'train_cfg.val_interval=2']),
    (r'draw_bands', ['--num-train', '70', '--num-val', '24']),
    (r'reproduce_table', ['--dry-run']),
    (r'--masks 10000', ['--masks', '200']),
]
CHECKPOINT_OF = {
    'configs/demo/pretrain.py': 'work_dirs/pretrain/iter_7000.pth',
    'configs/demo/finetune_folder.py': 'work_dirs/finetune_folder/epoch_24.pth',
    'configs/demo/segment_upernet.py': 'work_dirs/segment_upernet/iter_300.pth',
    'configs/dvae/discrete_vae_8k_in1k.py': 'discrete_vae.pth',
}
DEMO = [f'python tools/train.py configs/demo/{name}.py' for name in ('dvae', 'pretrain', 'finetune_folder')]
FIRST = {  # page -> commands that it says to run first
    'README.md': [*DEMO, 'python tools/train.py configs/demo/segment_upernet.py'],
    **dict.fromkeys(['docs/features.md', 'docs/reliability.md', 'docs/tokenizers.md'], DEMO[:2]),
    'docs/mixing.md': DEMO,
}


def test_a_page_marks_what_cannot_run_everywhere():
    """Fast: every command that is in no list runs below."""
    for page in PAGES:
        intro = (ROOT / page).read_text().partition('##')[0] if page == 'docs/released.md' else ''
        for block in blocks(page):
            for each in [*commands(block), block]:
                near = ' '.join([intro, block.before, getattr(each, 'comment', '')])
                for pattern, mark in NEEDS if isinstance(each, Command) or block.language == 'python' else ():
                    if re.search(pattern, each.text) and mark not in near:
                        raise AssertionError(f'{page}: {each.text}: the page does not say {mark!r}')


def left_out(text: str) -> bool:
    """Whether a command or program stands in one of the lists."""
    return any(re.search(pattern, text, re.M) for pattern, _ in NEEDS + ELSEWHERE)


def programs(page: str) -> list[Block | Command]:
    """What of a page runs here, in its order."""
    found: list[Block | Command] = []
    for block in blocks(page):
        found += commands(block)
        if block.language == 'python' and re.search(r'^(from|import) ', block.text, re.M):
            found.append(block)
    return [each for each in found if not left_out(each.text)]


@pytest.fixture(scope='module')
def pictures(tmp_path_factory) -> Path:
    """Drawn images: in class folders, with label maps, as an archive."""
    folder = tmp_path_factory.mktemp('pictures')
    run_tool('demo/draw_images.py', folder / 'demo', '--num-train', '120', '--num-val', '30', '--size', '64')
    make_label_maps(folder / 'camvid', number=8, size=(96, 128))
    names = '\n'.join(f'class {number}' for number in range(11))
    (folder / 'camvid/classes.txt').write_text(names)
    with tarfile.open(folder / 'a.tar', 'w') as archive:
        for path in sorted((folder / 'demo/val').rglob('*.jpg'))[:4]:
            archive.add(path, path.relative_to(folder / 'demo/val'))
    return folder


@pytest.fixture(scope='module')
def runs() -> dict[str, Path]:
    """Work directories by the commands of FIRST that made them; the first page that asks for one makes it."""
    return {}


def checkout(root: Path, pictures: Path) -> Path:
    """A folder like the repository's, with small data in the places that the pages name."""
    for name in ('beit_mm', 'configs', 'docs', 'tools', 'tests'):
        (root / name).symlink_to(ROOT / name)
    (root / 'work_dirs').mkdir()
    some = sorted((pictures / 'demo/val').rglob('*.jpg'))
    for name in ('demo', 'caltech101', 'imagenet', 'imagenet22k'):
        (root / 'data' / name).mkdir(parents=True)
        for part in sorted((pictures / 'demo').iterdir()):
            (root / 'data' / name / part.name).symlink_to(part)
    (root / 'data/camvid').symlink_to(pictures / 'camvid')
    (root / 'data/webdataset').mkdir()
    (root / 'data/webdataset/a.tar').hardlink_to(pictures / 'a.tar')
    for name in ('images', 'new_images'):
        (root / name).mkdir()
    for part in ('train', 'val'):
        (root / 'images' / part).symlink_to(pictures / 'demo' / part)
    for number, path in enumerate(some[:6]):
        (root / f'new_images/{number}.jpg').symlink_to(path)
        (root / f'images/{number}.jpg').symlink_to(path)
    for name in ('image.jpg', 'a.jpg', 'b.jpg'):
        Image.open(some[0]).resize((300, 240)).save(root / name)
    return root


def run_text(text: str, block: Block | None = None) -> None:
    """A command or a program, shortened."""
    for pattern, instead in SHORTER:
        text = re.sub(pattern, instead, text)
    if block is not None and block.language == 'python':
        exec(compile(text, block.page, 'exec'), {})
        return
    words = split(text)[0]
    if 'CONFIG' in words:
        words[words.index('CONFIG')] = config_of(block, 'CONFIG')
    path = next((word for word in words if word.startswith('configs/')), 'configs/demo/pretrain.py')
    words = [CHECKPOINT_OF[path] if word == 'CHECKPOINT' else word for word in words]
    words = [found for word in words for found in (sorted(glob.glob(word)) if '*' in word else [word])]
    for pattern, extra in EXTRA:
        if re.search(pattern, text) and '--help' not in words:
            words += extra
    run_words(words)


def run_words(words: list[str]) -> None:
    """A command, in this process where it is Python's."""
    try:
        words = ['python', '-m', 'beit_mm', *words[1:]] if words[0] == 'beit-mm' else words
        if words[:3] == ['python', '-m', 'beit_mm'] and '>' not in words:
            with pytest.MonkeyPatch.context() as patch, last_steps() if words[3] == 'train' else nullcontext():
                patch.setattr(sys, 'argv', ['beit_mm', *words[3:]])
                beit_mm_main.main()
        elif words[0] == 'python' and '>' not in words:
            with last_steps():
                run_tool(words[1].removeprefix('tools/'), *words[2:])
        else:
            environment = dict(PYTHONPATH=str(ROOT), PATH=f'{Path(sys.executable).parent}:/usr/bin:/bin')
            done = subprocess.run(
                ['bash', '-c', joined(words)], env=environment, capture_output=True, text=True, timeout=200
            )
            assert not done.returncode, done.stderr[-2000:]
    except SystemExit as end:
        assert not end.code, f'{shlex.join(words)}: {end.code}'


def checkpoints(root: Path) -> None:
    """Files of released names and of runs that a page takes for granted, with small models in them."""
    model = copy.deepcopy(config('configs/demo/pretrain.py').model)
    model.backbone.arch.num_layers, model.target_generator.checkpoint = 12, None
    torch.save(dict(state_dict=MODELS.build(model).state_dict(), meta={}), root / 'model.pth')
    for name in ('beit_base_patch16_224_pt1k_800ep.pth', 'beit_base_patch16_224_pt22k.pth'):
        run_tool('convert_checkpoint.py', root / 'model.pth', root / name, '--to', 'unilm')
    for name, source in (
        ('run/epoch_100.pth', CHECKPOINT_OF['configs/demo/pretrain.py']),
        ('upernet_512_ade20k_160k/iter_160000.pth', CHECKPOINT_OF['configs/demo/segment_upernet.py']),
    ):
        if (root / source).exists():
            (root / 'work_dirs' / name).parent.mkdir()
            (root / 'work_dirs' / name).symlink_to(root / source)


def tokenizers(root: Path) -> None:
    """Files like DALL-E's and of the config's tokenizer, narrow, with random weights."""
    dall_e = pytest.importorskip('dall_e')
    torch.save(dall_e.Encoder(n_hid=8, vocab_size=32), root / 'encoder.pkl')
    torch.save(dall_e.Decoder(n_init=16, n_hid=8, vocab_size=32), root / 'decoder.pkl')
    model = dict(config('configs/dvae/discrete_vae_8k_in1k.py').model, hidden=8, vocab_size=32, embed_dims=16)
    torch.save(dict(state_dict=MODELS.build(model).state_dict(), meta={}), root / 'discrete_vae.pth')


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('page', [page for page in PAGES if any(programs(page))])
def test_a_page_by_copy_and_paste(page, pictures, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(checkout(tmp_path, pictures))
    for text in FIRST.get(page, ()):
        if text not in runs:
            first, _, number = text.partition(' ')
            before = set(Path('work_dirs').iterdir())
            run_text(programs(first)[int(number)].text if number.isdecimal() else text)
            runs[text] = (set(Path('work_dirs').iterdir()) - before).pop().resolve()
        elif not (here := Path('work_dirs', runs[text].name)).exists():
            here.symlink_to(runs[text])
    checkpoints(tmp_path)
    if page in ('README.md', 'docs/tokenizers.md'):
        tokenizers(tmp_path)
    for each in programs(page):
        block = each.block if isinstance(each, Command) else each
        run_text(each.text, block)
