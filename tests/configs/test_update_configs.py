"""update_configs.py names what is out of date and rewrites it; tools/run_tests.sh asks it for the repository."""

import importlib.util
import shutil
from types import ModuleType

import pytest
from helpers import ROOT


@pytest.fixture
def tool(monkeypatch, tmp_path) -> ModuleType:
    """The tool on a copy of two folders of configs."""
    spec = importlib.util.spec_from_file_location('update_configs', ROOT / 'tools/dev/update_configs.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shutil.copytree(ROOT / 'configs', tmp_path / 'configs', ignore=shutil.ignore_patterns('__pycache__'))
    monkeypatch.setattr(module, 'ROOT', tmp_path)
    monkeypatch.setattr(module, 'FOLDERS', ('configs/beit', 'configs/dvae'))  # which need nothing of the others
    pages = dict(MAP='update_file_map', RELEASED='update_released', PACKAGE_MAP='update_package_map')
    for page, update in pages.items():
        (tmp_path / page).write_text('')
        monkeypatch.setattr(module, page, page)
        monkeypatch.setattr(module, update, (tmp_path / page).read_text)
    return module


def test_stale_numbers_are_named_and_rewritten(tool, tmp_path, capsys):
    changes = {
        'configs/beit/pretrain_800e.py': ('= 500,000,', '= 400,000,'),
        'configs/beit/metafile.yml': ('Parameters: 92089856', 'Parameters: 92089855'),
        'configs/dvae/README.md': ('50,000 batches', '60,000 batches'),
    }
    texts = {file: (tmp_path / file).read_text() for file in changes}
    for file, (right, wrong) in changes.items():
        assert right in texts[file]
        (tmp_path / file).write_text(texts[file].replace(right, wrong, 1))
    assert tool.main(['--check']) == 1
    named = {line.split()[0] for line in capsys.readouterr().out.splitlines() if 'out of date' in line}
    assert named == set(changes)
    assert tool.main([]) == 0
    assert {file: (tmp_path / file).read_text() for file in changes} == texts


def test_a_changed_config_changes_its_header(tool, tmp_path):
    """Epochs, batch, rate, warm-up and name of the checkpoint follow; prose stays."""
    path = tmp_path / (config := 'configs/beit/pretrain_300e.py')
    text = path.read_text()
    path.write_text(
        text + 'train_cfg = dict(max_epochs=40)\ntrain_dataloader = dict(batch_size=64)\n'
        'optim_wrapper = dict(accumulative_counts=2, optimizer=dict(lr=2e-3))\n'
    )
    header = tool.update_header(config).split('"""')[1]
    assert 'Batch:   16 GPUs x 64 x 2 accumulated = 2048 images, lr 2e-3\n' in header
    assert 'Steps:   40 epochs x 625 = 25,000, ImageNet-1K with 1,281,167 images; warm-up 6,250\n' in header
    assert 'Writes:  work_dirs/pretrain_300e/epoch_40.pth\n' in header
    assert header.split('\n\n')[2] == text.split('"""')[1].split('\n\n')[2]
