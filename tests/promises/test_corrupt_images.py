"""Images that cannot be read: replaced, listed once, and counted alike by any processes, workers and resumed runs."""

from pathlib import Path

import pytest
from helpers import make_runner, run_ranks, train
from labelled import classifier_config, make_images
from mmengine.config import Config

from beit_mm.datasets import UnreadableImageError
from beit_mm.engine.unreadable import UnreadableImagesHook
from beit_mm.errors import UserError


def break_images(folder: Path) -> list[str]:
    """Breaks three of 150 images, each in its way, and returns their paths."""
    cut, page, gone = (folder / name for name in ('blue/7.png', 'green/20.png', 'red/49.png'))
    cut.write_bytes(cut.read_bytes()[:500])
    page.write_bytes(b'<html>not found</html>')
    gone.unlink()
    gone.symlink_to('nowhere')
    return [str(cut), str(page), str(gone)]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two epochs of a classifier on 150 images, without validation."""
    config = classifier_config(make_images(tmp_path / 'data', per_class=50), tmp_path / 'work')
    config.train_dataloader.dataset.on_error = 'skip'
    config.train_dataloader.batch_size = 10
    config.train_dataloader.dataset.pipeline[-1].meta_keys = ('img_path', 'unreadable')
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=2)
    config.randomness = dict(seed=0)  # of which the first steps show one or two of the three
    checkpoint = dict(type='beit_mm.CheckpointHook', by_epoch=False, interval=5, max_keep_ckpts=-1)
    config.default_hooks = dict(checkpoint=checkpoint, logger=dict(type='beit_mm.LoggerHook', interval=5))
    return config


@pytest.fixture
def broken(config, tmp_path) -> list[str]:
    """The unreadable images of the training."""
    return break_images(tmp_path / 'data/train')


def listed(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / 'work/unreadable_images.txt').read_text().splitlines())


def test_two_processes_train_to_the_end_with_one_exact_list(config, broken, tmp_path):
    two = {'launcher': 'pytorch', 'train_dataloader.batch_size': 5, 'train_cfg.max_epochs': 1}
    run_ranks(lambda rank: train(config, **two) and None, tmp_path)
    assert listed(tmp_path) == broken


def test_a_resumed_run_goes_on_with_the_list(config, broken, tmp_path):
    train(config, train_cfg=dict(type='beit_mm.IterLoop', max_iters=5, _delete_=True))
    before = listed(tmp_path)
    assert 0 < len(before) < 3  # it ended before it had seen all
    train(config, resume=True)
    assert listed(tmp_path) == broken and set(before) < set(broken)


def test_more_than_a_share_of_the_images_ends_the_run(config, tmp_path):
    hook = UnreadableImagesHook()
    hook.begin(tmp_path)
    for count, total in ((50, 1000), (10, 40)):
        hook.check_rate(count, total)
        with pytest.raises(ValueError, match=f'{count + 1} of {total} images cannot be read'):
            hook.check_rate(count + 1, total)
    with pytest.raises(ValueError, match='3 of 3 images'):
        hook.check_rate(3, 3)
    for number in range(11):
        (tmp_path / f'data/train/blue/{number}.png').write_bytes(b'')
    with pytest.raises(ValueError, match='11 of 150 images cannot be read, at most 10.*work/unreadable_images.txt'):
        train(config)
    assert len(listed(tmp_path)) == 11


@pytest.fixture
def validated(config, tmp_path) -> Config:
    """The same with a validation on 150 images, of which three are broken."""
    break_images(tmp_path / 'data/val')
    held_out = classifier_config(tmp_path / 'data', tmp_path / 'work')
    config.update(val_cfg=dict(), val_dataloader=held_out.val_dataloader, val_evaluator=held_out.val_evaluator)
    config.train_cfg.max_epochs = 1
    return config


def test_a_broken_held_out_image_stops_a_run_before_its_first_step(validated, tmp_path):
    runner = make_runner(validated)
    with pytest.raises(UnreadableImageError, match=r'val/blue/7.png: .*; 3 of 150 held-out images .*on_error') as error:
        runner.train()
    assert runner.iter == 0 and '\n' not in str(error.value)
    assert [Path(line).name for line in listed(tmp_path)] == ['7.png', '20.png', '49.png']


def test_too_many_broken_held_out_images_end_the_run(validated, tmp_path):
    validated.val_dataloader.dataset.update(on_error='skip', test_mode=False)
    for number in range(8):
        (tmp_path / f'data/val/red/{number}.png').write_bytes(b'')
    with pytest.raises(UserError, match='11 of 150 images .*work/unreadable_images.txt'):
        make_runner(validated).train()


def test_or_is_left_out_of_the_metric_and_named_but_of_no_test(validated, tmp_path):
    validated.val_dataloader.dataset.on_error = validated.test_dataloader.dataset.on_error = 'skip'
    validated.val_dataloader.dataset.test_mode = False  # as a config may have it

    def run(rank: int) -> tuple[float, int, str, dict]:
        runner = train(validated, launcher='pytorch')
        runner.val_evaluator.metrics[0].results.clear()
        metrics = runner.val_loop.run()
        log = ''.join(path.read_text() for path in Path(runner.work_dir).glob('*/*.log'))
        return metrics['accuracy/top1'], len(runner.val_dataloader.dataset), log, runner.model.state_dict()

    accuracy, number, log, weights = run_ranks(run, tmp_path)[0]
    assert number == 147 and '3 of 150 held-out images cannot be read' in log
    with pytest.raises(UnreadableImageError, match='val/blue/7.png'):
        make_runner(validated).test()
    for line in listed(tmp_path):
        Path(line).unlink()
    validated.work_dir = str(tmp_path / 'second')
    clean = make_runner(validated)
    clean.model.load_state_dict({name.removeprefix('module.'): weight for name, weight in weights.items()})
    assert len(clean.val_dataloader.dataset) == 147
    assert clean.val()['accuracy/top1'] == pytest.approx(accuracy, abs=1e-4)
