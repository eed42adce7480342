"""Scripts of tools/dev that no other file here runs: packaged weights, benchmarks of data, VQ-KD, generated headers."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run_tool

from beit_mm.checkpoint import find
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.read import read_checkpoint, write_checkpoint
from beit_mm.models import VQKD

# Stands in for the released modeling_vqkd.py: our model under its names, whose features' loss counts so many times
RELEASED_VQKD = """
from types import SimpleNamespace

from beit_mm.models.tokenizers.vqkd_training import VQKD as Ours

ARCH = dict(embed_dims=32, num_layers=2, num_heads=4)
get_model_default_params = dict


class VQKD(Ours):
    def __init__(self, encoder, decoder, codes, code_dims, teacher_model_type, decoder_out_dim):
        options = dict(vocab_size=codes, code_dims=code_dims, decoder_layers=decoder['depth'])
        super().__init__(arch=ARCH, img_size=224, teacher={}, teacher_dims=decoder_out_dim, **options)
        self.teacher = (lambda images, grid: [self.get_regress_target(images)],)
        self.quantize = SimpleNamespace(embedding=SimpleNamespace(weight=self.codebook))

    def named_parameters(self, *args, **options):
        for name, parameter in super().named_parameters(*args, **options):
            yield name.replace('coder.norm.', 'coder.fc_norm.'), parameter

    def forward(self, images):
        losses = super().forward(dict(images=images))
        feature, commit = TIMES * losses['loss_feature'], losses['loss_commit']
        return feature + commit, {'train/rec_loss': feature.detach(), 'train/quant_loss': commit.detach()}
"""


def test_larger_start_weights_are_xavier_uniform_in_the_mlps_alone(tmp_path):
    run_tool('dev/start_weights.py', tmp_path / 'start.pth')
    weights = read_checkpoint(tmp_path / 'start.pth')['state_dict']
    bound = (6 / (128 + 512)) ** 0.5
    for name, tensor in weights.items():
        if name.endswith(('mlp.fc1.weight', 'mlp.fc2.weight')):
            assert 0.99 * bound < tensor.abs().max() <= bound
            assert float(tensor.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
        elif name.endswith('weight') and tensor.ndim == 2:
            assert float(tensor.std()) < 0.03


def test_start_weights_of_a_run_are_those_of_its_backbone(tmp_path):
    classifier = find.PACKAGED / 'classifier.safetensors'
    run_tool('dev/start_weights.py', tmp_path / 'start.pth', '--of', classifier)
    weights, whole = (Checkpoint.open(file).weights for file in (tmp_path / 'start.pth', classifier))
    assert weights.keys() == {name for name in whole if name.startswith('backbone.')} < whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in weights)


def test_packaging_a_packaged_file_again_changes_nothing(tmp_path, monkeypatch):
    """Even with what only the training needed beside it, and a path of the machine."""
    packaged = read_checkpoint(find.PACKAGED / 'segmentor.safetensors')
    trained = dict(packaged, state_dict=dict(packaged['state_dict']))
    trained['state_dict'] = {
        name: it.float() if it.is_floating_point() else it for name, it in trained['state_dict'].items()
    }
    trained['state_dict']['auxiliary_head.conv_seg.weight'] = torch.ones(2, 2, 1, 1)
    config = dict(packaged['meta']['config_dict'], work_dir='/home/somebody/run', load_from='/home/somebody/start.pth')
    trained['meta'] = dict(packaged['meta'], config_dict=config, iter=3)
    write_checkpoint(tmp_path / 'run.pth', trained)
    monkeypatch.setattr(find, 'PACKAGED', tmp_path)
    run_tool('dev/package_weights.py', 'segmentor', tmp_path / 'run.pth')
    again = read_checkpoint(tmp_path / 'segmentor.safetensors')
    assert again['meta'] == packaged['meta'] and again['state_dict'].keys() == packaged['state_dict'].keys()
    for name, tensor in packaged['state_dict'].items():
        assert again['state_dict'][name].dtype == tensor.dtype and torch.equal(again['state_dict'][name], tensor)


@pytest.mark.parametrize('times', [1, 2])
def test_vqkd_beside_itself_is_not_apart_and_beside_another_loss_it_is(times, tmp_path, monkeypatch, capsys):
    for name in ('modeling_vqkd', 'vqkd_teacher', 'utils'):  # as which the script imports or replaces modules
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    with pytest.raises(SystemExit, match='modeling_vqkd.py; expected'):
        run_tool('dev/compare_vqkd.py', tmp_path)
    (tmp_path / 'modeling_vqkd.py').write_text(RELEASED_VQKD.replace('TIMES', str(times)))
    narrow = dict(embed_dims=32, num_layers=2, num_heads=4)
    monkeypatch.setattr('beit_mm.models.VQKD', lambda arch, **options: VQKD(arch=narrow, **options))
    run_tool('dev/compare_vqkd.py', tmp_path)
    steps = re.findall(r'apart: (.*)', capsys.readouterr().out)
    figures = [{name: float(value) for name, value in re.findall(r'(\w+) (\S+)', step)} for step in steps]
    assert len(figures) == 3
    if times == 1:
        assert all(value == 0 for step in figures for value in step.values())
    else:
        assert figures[0]['feature'] > 0.1 and figures[0]['gradients'] > 0.1 and figures[0]['commit'] == 0


def test_an_index_is_timed_with_as_many_images_as_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_tool('dev/benchmarks/shards.py', '--index', 1000)
    assert '1,000 images, 2 classes:' in capsys.readouterr().out  # 650 images of a class
    assert not [*tmp_path.iterdir()]


def test_pipelines_are_timed_beside_mmpretrains(images, capsys):
    words = ('--data', images, '--images', 4, '--rounds', 1)
    run_tool('dev/benchmarks/pipeline.py', *words, '--finetune')
    said = capsys.readouterr().out
    rates = dict(re.findall(r'^(\S.*?)  +(\d+) +[\d.]+$', said.partition('whole pipeline')[2], flags=re.M))
    assert rates.keys() == {'beit_mm', "beit_mm, mmpretrain's crop", 'mmpretrain'} and all(map(int, rates.values()))
    assert 'RandomResizedCrop' in said and 'over 4 images' in said


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tools/dev/benchmarks')
    import _timing

    return _timing


def test_a_profile_counts_each_moment_once(timing):
    """One operation calls two others; a second thread works beside it, and after a pause."""
    spans = [('outer', 0, 10, 1), ('gemm', 1, 3, 1), ('copy', 5, 2, 1), ('gemm', 2, 4, 2), ('adam', 15, 5, 2)]
    events = [dict(name=name, ts=ts, dur=dur, pid=1, tid=tid) for name, ts, dur, tid in spans]
    own = {(event['name'], event['tid']): time for event, time in timing.own_times(events)}
    assert own == {('outer', 1): 5, ('gemm', 1): 3, ('copy', 1): 2, ('gemm', 2): 4, ('adam', 2): 5}
    assert timing.wall_and_busy(events) == (20, 15)
    groups = dict(ampere_bf16_s16816gemm='product', triton_poi_fused_gemm='triton', Memcpy='copy', spam='other')
    assert {name: timing.group_of(name) for name in groups} == groups


def test_parts_of_a_step_have_the_arithmetic_of_their_products(timing):
    a, b = torch.ones(20, 30), torch.ones(30, 40)

    def run(mark):
        product = a @ b
        mark('first')
        (product @ b.T) @ b
        mark('second')

    times, gflop = timing.time_parts(run, rounds=2)
    once = 2 * 20 * 30 * 40 / 1e9
    assert gflop == dict(first=pytest.approx(once), second=pytest.approx(2 * once)) and min(times.values()) > 0


def test_generated_figures_follow_from_the_images_and_the_batch_and_stand_between_marks(monkeypatch):
    """The paper: batches of 1024, 100 epochs with 20 of warm-up, of 1,281,167 images."""
    monkeypatch.syspath_prepend(ROOT / 'tools/dev')
    update = runpy.run_path(str(ROOT / 'tools/dev/update_configs.py'))
    facts, config, steps = update['facts'], 'beit/finetune_in1k_100e.py', 1_281_167 // 1024
    assert facts.batch_of(config)[3] == 1024 and facts.updates_of(config) == (100 * steps, 20 * steps)
    page = ROOT / 'configs/beit/README.md'
    changed, marks = update['between_marks'](page, 'table\n'), (update['BEGIN'], update['END'])
    before, after = page.read_text().split(marks[0])[0], page.read_text().split(marks[1])[1]
    assert changed == f'{before}{marks[0]}table\n{marks[1]}{after}'


@pytest.mark.slow
def test_the_wheel_trains_and_tests():
    environment = dict(os.environ, PATH=f'{Path(sys.executable).parent}:{os.environ["PATH"]}')
    done = subprocess.run(
        ['bash', str(ROOT / 'tools/dev/check_wheel.sh')], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for verb in ('--version', 'config', 'pretrain', 'train', 'test'):
        assert f'+ site/bin/beit-mm {verb}' in done.stderr


def test_a_change_that_no_test_notices_is_named(tmp_path):
    """One function is tested in full, one only executed."""
    (tmp_path / 'under_test.py').write_text(
        'def tested(a, b):\n    return a + b\n\n\ndef executed(a):\n    return not a\n'
    )
    test = 'import under_test as it\n\n\ndef test_it():\n    assert it.tested(2, 3) == 5\n    it.executed(1)\n'
    (tmp_path / 'test_it.py').write_text(test)
    words = ['under_test.py', '--tests', 'test_it.py', '--preload', 'pytest', 'pytest_cov.plugin']
    command = [sys.executable, ROOT / 'tools/dev/mutate.py', *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = re.findall(r'^(\w+)\S*: under_test.py:(\d)', done.stdout, flags=re.M)
    assert sorted(found) == [('SURVIVED', '6'), ('SURVIVED', '6'), ('test_it', '2'), ('test_it', '2')], done.stderr
