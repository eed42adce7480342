"""The parts of check.sh that are not tests or benchmarks: `python tools/dev/gpu/parts.py PART ...`.

    facts                               versions, cores, memory, rates of this GPU
    images FOLDER COUNT                 drawn class folders with label maps, COUNT images to train on
    train TRAINING                      a run of tools/train.py: its speed, its wait for data, its warnings
    residual TRAINING                   the same with the residual stream in bfloat16
    distributed TRAINING                the same with DistributedDataParallel, in one process
    resume TRAINING                     the same run with and without a SIGTERM in it: are they equal to the last bit?
    all_scales TRAINING                 tests what a short training left, at all scales with flips, by both test tools
    learn FOLDER INIT OPTION...         beit-mm pretrain on FOLDER/train; k-NN and a linear layer beside random weights
    finetune IMAGES INIT OPTION...      beit-mm finetune to its report; INIT demo or dinov2 (random weights)
    packaged FOLDER TEACHER STEPS       the packaged pretraining taught again; k-NN and a linear layer
    thousand FOLDER TRAINING            the same by a config with the packaged tokenizer, stopped at half and resumed

TRAINING is CONFIG STEPS BATCH WORKERS and words for --cfg-options. FOLDER has train/<class>/ and val/<class>/; IMAGES
is what `beit-mm finetune` takes; both may be a zip. Figures are printed and added to the file $RESULTS as lines of
JSON. Work folders are made below $WORK. When check.sh ends a part by SIGTERM, what was measured until then is
reported.
"""

import importlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT / 'tools/dev/benchmarks'), str(ROOT / 'tools/dev/stress')]
PYTHON = sys.executable
WORK = Path(os.environ.get('WORK', '/tmp/beit_mm_gpu'))
NAME = os.environ.get('PART', 'part')  # check.sh's name of the part
PACKAGES = 'torch torchvision triton timm transformers numpy opencv-python-headless pillow pytest'.split()
PACKAGES += [f'onedl-{name}' for name in ('mmengine', 'mmcv', 'mmpretrain', 'mmsegmentation')]
MAX_DRAWN = 200  # images; more are links to them
JPEG_QUALITY = 99  # at which drawn images of 375 pixels have about as many bytes as ImageNet's
LOGGED = ('step', 'loss', 'mim_acc', 'grad_norm', 'images_per_second', 'time', 'data_time', 'memory', 'skipped_steps')
WARNING_SIGNS = ('warning:', 'WARNING', 'Warning:', 'ERROR', 'error:', 'Traceback')
# of short runs, without the tokenizer's weights, and of deterministic ones
EXPECTED_WARNINGS = ('Effective batch', 'random weights', 'cudnn.benchmark')
# its tokens are of 8 x 8 pixels, for views of 112 or 96 pixels
WITH_DEMO_TOKENIZER = """_base_ = '{base}'
tokenizer = dict(
    type='beit_mm.DiscreteVAE', arch='conv', hidden=48, vocab_size=1024, embed_dims=64, num_levels=3,
    bottleneck_blocks=2, checkpoint='demo', _delete_=True)
model = dict(head=dict(vocab_size=1024), target_generator=tokenizer)
"""
NOT_COMPILED = 'could not be compiled'  # CompileHook's warning


def report(title: str, **figures: object) -> None:
    """Prints figures, and adds them to the results."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    print(f'{title}:', ', '.join(f'{key} {value}' for key, value in rounded.items()), flush=True)
    if file := os.environ.get('RESULTS'):
        with open(file, 'a') as lines:
            lines.write(json.dumps(dict(part=NAME, title=title, **figures), default=str) + '\n')


# Facts


def facts() -> None:
    import torch

    installed = {each.metadata['Name']: each.version for each in importlib.metadata.distributions()}
    report('versions', python=sys.version.split()[0], **{name: installed.get(name) for name in PACKAGES})
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30
    report('machine', cores=len(os.sched_getaffinity(0)), memory_gib=memory)
    if not torch.cuda.is_available():
        report('GPU', name='none')
        return
    gpu, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    switches = dict(matmul_tf32=torch.backends.cuda.matmul.allow_tf32, cudnn_tf32=torch.backends.cudnn.allow_tf32)
    libraries = dict(cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), nccl=torch.cuda.nccl.version())
    report('GPU', name=gpu.name, count=count, gib=gpu.total_memory / 2**30, processors=gpu.multi_processor_count)
    report('libraries', capability=(gpu.major, gpu.minor), **libraries, **switches)
    report('rates', **rates())


def rates() -> dict[str, float]:
    """Matrix products in TFLOP/s, copies on the device in TB/s, copies from the host in GB/s."""
    import torch
    from _timing import measured_limit, median_seconds

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    found = {f'{str(dtype).removeprefix("torch.")}_tflops': measured_limit(dtype) / 1e3 for dtype in dtypes}
    source = torch.empty(2**32, dtype=torch.uint8, device='cuda')
    target = torch.empty_like(source)
    found['copy_tb'] = 2 * source.nbytes / median_seconds(lambda: target.copy_(source)) / 1e12  # read and written
    host, there = torch.empty(2**26, dtype=torch.uint8), target[: 2**26]
    for name, tensor in dict(pinned_gb=host.pin_memory(), pageable_gb=host).items():
        seconds = median_seconds(lambda tensor=tensor: there.copy_(tensor, non_blocking=True))
        found[name] = host.nbytes / seconds / 1e9
    return found


# Images


def images(folder: str, count: str) -> None:
    """Draws few images and links them under many names: reading them costs the same, drawing them does not."""
    from PIL import Image

    copies = int(count) // MAX_DRAWN
    number, size = (MAX_DRAWN, 375) if copies else (int(count), 96)
    unfinished = f'{folder}.unfinished'
    shutil.rmtree(unfinished, ignore_errors=True)  # of a call that was ended
    sizes = ['--num-train', str(number), '--num-val', '40', '--size', str(size)]
    subprocess.run([PYTHON, 'tools/demo/draw_images.py', unfinished, *sizes], check=True)
    train = sorted(Path(unfinished, 'train').rglob('*.jpg'))
    for file in train:
        Image.open(file).save(file, quality=JPEG_QUALITY)
    for copy in range(1, copies):
        for file in [*train, *Path(unfinished, 'annotations/train').rglob('*.png')]:
            os.link(file, file.with_stem(f'{file.stem}_{copy}'))
    kilobytes = sum(file.stat().st_size for file in train) / len(train) / 1e3
    report('images', train=number * max(copies, 1), drawn=number, kilobytes=kilobytes)
    os.rename(unfinished, folder)


# Trainings


def command_of(config: str, steps: str, batch: str, workers: str, *words: str) -> list[str]:
    loader = [f'train_dataloader.batch_size={batch}', f'train_dataloader.num_workers={workers}']
    return [config, '--no-validate', '--steps', steps, '--cfg-options', *loader, *words]


def train(*training: str) -> None:
    run(PYTHON, 'tools/train.py', *command_of(*training))


def residual(*training: str) -> None:
    run(PYTHON, 'tools/dev/gpu/bf16_residual.py', 'tools/train.py', *command_of(*training))


def distributed(*training: str) -> None:
    config, *words = command_of(*training)
    run('bash', 'tools/dist_train.sh', config, '1', *words)


def run(*command: str) -> None:
    """Fails where the training fails, and where it was not compiled though it should be."""
    folder = WORK / NAME
    shutil.rmtree(folder, ignore_errors=True)
    try:
        code = subprocess.call([*command, '--work-dir', str(folder)])
    finally:
        log = report_training(folder)
        remove_checkpoints(folder)
    if code or NOT_COMPILED in log:
        sys.exit(code or f'error: {NOT_COMPILED}')


def all_scales(*training: str) -> None:
    folder = WORK / NAME
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([PYTHON, 'tools/train.py', *command_of(*training), '--work-dir', str(folder)], check=True)
    options = ['--tta', '--cfg-options', *training[4:], 'test_dataloader.num_workers=4']
    checkpoint = max(folder.glob('iter_*.pth'))
    # mim runs mmseg's tool
    tools = {'ours': ROOT / 'tools/test.py', 'mim': installed('mmseg') / '.mim/tools/test.py'}
    found = {}
    for name, tool in tools.items():
        begin = time.monotonic()
        test = [PYTHON, tool, training[0], checkpoint, '--work-dir', folder / name, *options]
        subprocess.run(test, check=True, env=dict(os.environ, PYTHONPATH=f'{ROOT}:{os.environ.get("PYTHONPATH", "")}'))
        figures = json.loads(max(folder.glob(f'{name}/*/*.json'), key=os.path.getmtime).read_text())
        found[name] = figures['mIoU']
        report(f'all scales with flips, {name}', seconds_with_start=time.monotonic() - begin, **figures)
    remove_checkpoints(folder)
    if found['ours'] != found['mim']:
        sys.exit(f'error: both tools test the same weights, and find {found}')


def installed(package: str) -> Path:
    return Path(importlib.import_module(package).__file__).parent


def report_training(folder: Path) -> str:
    """Reports the first and the last line that a training logged, and its warnings; returns its log."""
    rows = logged(folder)
    if rows:
        first, last = ({key: row[key] for key in LOGGED if key in row} for row in (rows[0], rows[-1]))
        waiting = last['data_time'] / last['time']
        report(folder.name, **last, share_of_waiting_for_data=waiting, first=first)
    log = '\n'.join(file.read_text(errors='replace') for file in folder.glob('*/*.log'))
    signs = [line for line in log.splitlines() if any(sign in line for sign in WARNING_SIGNS)]
    unexpected = [line for line in signs if not any(words in line for words in EXPECTED_WARNINGS)]
    if unexpected:
        report(f'warnings of {folder.name}', number=len(unexpected), lines=unexpected[:8])
    return log


def logged(folder: Path) -> list[dict]:
    """The lines that a training has logged; the last one may be incomplete while it runs."""
    lines = [line for file in sorted(folder.glob('*/vis_data/scalars.json')) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith('}')]


def remove_checkpoints(folder: Path) -> None:
    for file in folder.glob('*.pth'):
        file.unlink()


def resume(*training: str) -> None:
    from kill_loop import differences

    from beit_mm.checkpoint.read import read_checkpoint

    command = [PYTHON, 'tools/train.py', *command_of(*training)]
    straight, stopped = (WORK / f'{NAME}_{kind}' for kind in ('straight', 'stopped'))
    for folder in (straight, stopped):
        shutil.rmtree(folder, ignore_errors=True)
    undisturbed = subprocess.Popen([*command, '--work-dir', str(straight)])
    interrupted = subprocess.Popen([*command, '--work-dir', str(stopped)])
    while interrupted.poll() is None and not logged(stopped):
        time.sleep(0.02)
    interrupted.send_signal(signal.SIGTERM)
    code = interrupted.wait()
    kept = sorted(file.name for file in stopped.glob('*.pth'))
    step = logged(stopped)[-1]['step'] if logged(stopped) else None
    report('interrupted', after_step=step, exit=code, checkpoints=kept)
    resumed = subprocess.call([*command, '--work-dir', str(stopped), '--resume'])
    if undisturbed.wait() or resumed or code != 75:
        sys.exit(f'error: exit codes {undisturbed.returncode}, {code} and, resumed, {resumed}; expected 0, 75 and 0')
    name = max(straight.glob('iter_*.pth')).name
    one, two = (read_checkpoint(folder / name) for folder in (straight, stopped))
    parts = [part for part in ('state_dict', 'optimizer', 'param_schedulers') if part in one]
    found = [place for part in parts for place in differences(one[part], two[part], part)]
    report('resumed', equal=not found, tensors=len(one['state_dict']), differences=[place[:200] for place in found[:5]])
    report_training(stopped)
    for folder in (straight, stopped):
        remove_checkpoints(folder)
    if found:
        sys.exit(f'error: {len(found)} differences')


# Learning


def learn(folder: str, init: str, *options: str) -> None:
    """By our own commands; `options` are those of the pretraining. Weights to start from are evaluated too."""
    folder, out = unpacked(folder), WORK / NAME
    shutil.rmtree(out, ignore_errors=True)
    pretrain = [PYTHON, '-m', 'beit_mm', 'pretrain', f'{folder}/train', '--out', out, '--init', init, *options]
    subprocess.run(pretrain, check=True)
    evaluate(folder, out / 'pretrained.pth')
    if init != 'none':
        evaluate(folder, init)


def finetune(images: str, init: str, *options: str) -> None:
    """Reports what the record of the run says, and the seconds of the whole command."""
    images, out = unpacked(images), WORK / NAME
    shutil.rmtree(out, ignore_errors=True)
    if init == 'dinov2':
        sys.path.append(str(ROOT / 'tests'))
        from peers import dinov2_layout

        WORK.mkdir(parents=True, exist_ok=True)
        init = dinov2_layout(WORK / 'dinov2_vits14_reg4_random.pth', 384, 12)
    command = [PYTHON, '-m', 'beit_mm', 'finetune', images, '--out', out, '--init', init, *options]
    begin = time.monotonic()
    subprocess.run(command, check=True)
    record = json.loads((out / 'plan.json').read_text())
    figures = {name: record[name] for name in ('options', 'seconds', 'stages', 'metrics', 'verdict')}
    report(f'finetune of {init}', whole_seconds=time.monotonic() - begin, **figures)


def packaged(folder: str, teacher: str, steps: str) -> None:
    """The first stage of beit_mm/weights/README.md, from today's weights; what is gained decides on the second."""
    folder, out = unpacked(folder), WORK / NAME
    shutil.rmtree(out, ignore_errors=True)
    tool, views = [PYTHON, 'tools/dev/teach_packaged.py'], out / 'views'
    subprocess.run([*tool, 'look', f'{folder}/train', views, '--teacher', teacher], check=True)
    options = ['--steps', steps, '--work-dir', out / 'taught', '--cfg-options', 'train_dataloader.num_workers=4']
    subprocess.run([*tool, 'train', f'{folder}/train', views, *options], check=True)
    report_training(out / 'taught')
    evaluate(folder, max((out / 'taught').glob('iter_*.pth'), key=os.path.getmtime))
    evaluate(folder, 'demo')


def thousand(folder: str, config: str, steps: str, *training: str) -> None:
    """Reports the whole curve of the loss, and the loss on held-out images."""
    folder, out = unpacked(folder), WORK / NAME
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with_tokenizer = out.with_suffix('.py')
    with_tokenizer.write_text(WITH_DEMO_TOKENIZER.format(base=os.path.abspath(config)))
    words = [f'data_root={folder}']
    command = [PYTHON, 'tools/train.py', *command_of(str(with_tokenizer), steps, *training)]
    command.remove('--no-validate')
    at = command.index('--cfg-options') + 1
    command[at:at] = [*words, 'default_hooks.logger.interval=10', 'default_hooks.checkpoint.max_keep_ckpts=1']
    command += ['--work-dir', str(out)]
    interrupted = subprocess.Popen(command)
    while interrupted.poll() is None and not any(row.get('step', 0) >= int(steps) // 2 for row in logged(out)):
        time.sleep(0.1)
    interrupted.send_signal(signal.SIGTERM)
    code = interrupted.wait()
    code = (code, subprocess.call([*command, '--resume']))
    rows = logged(out)
    curve = {row['step']: round(row['loss'], 3) for row in rows if 'loss' in row}
    held_out = {key: value for row in rows if 'loss' not in row for key, value in row.items()}
    report('curve', exit=code, training=curve, held_out=held_out)
    report_training(out)
    if code != (75, 0):
        sys.exit(f'error: exit codes {code}; expected 75 and, resumed, 0')
    evaluate(folder, max(out.glob('*.pth'), key=os.path.getmtime))
    remove_checkpoints(out)


def unpacked(folder: str) -> str:
    if not folder.endswith('.zip'):
        return folder
    target = str(WORK / 'unpacked' / Path(folder).stem)
    subprocess.run([PYTHON, '-m', 'zipfile', '-e', folder, target], check=True)
    return target


def evaluate(folder: str, checkpoint: Path | str) -> None:
    for method in ('knn', 'linear'):
        file = WORK / f'{method}.json'
        tool = [PYTHON, 'tools/analysis/evaluate_features.py', method, checkpoint]
        options = ['--random', '--workers', str(min(14, os.cpu_count() or 1)), '--json', file]
        subprocess.run([*tool, f'{folder}/train', f'{folder}/val', *options], check=True)
        pretrained, random = json.loads(file.read_text())['results'].values()
        figures = dict(top1=pretrained['top1'], top1_of_random_weights=random['top1'], images=pretrained['images'])
        report(f'{method} of {checkpoint}', **figures)


FUNCTIONS = (facts, images, train, residual, distributed, resume, all_scales, learn, finetune, packaged, thousand)
PARTS = {part.__name__: part for part in FUNCTIONS}

if __name__ == '__main__':
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not PARTS.keys() & set(sys.argv[1:2]):
        sys.exit(__doc__)
    PARTS[sys.argv[1]](*sys.argv[2:])
