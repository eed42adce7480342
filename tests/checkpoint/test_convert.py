"""Files from one format into another, published files, and the two tools on the command line.

What is refused stands in test_convert_refused.py.
"""
import argparse
import hashlib
import json
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from peers import (
    HEADS,
    PEERS,
    VOCAB,
    assert_equal,
    assert_same_outputs,
    hf_peer,
    mmpretrain_peer,
    ours,
    outputs,
    read,
    timm_peer,
)
from safetensors import safe_open
from safetensors.torch import save_file

from beit_mm.checkpoint.convert import TARGETS, convert_checkpoint, publish_checkpoint
from beit_mm.checkpoint.formats import from_ours, to_ours
from beit_mm.checkpoint.reader import read_checkpoint

PREPROCESSING = dict(mean=[127.5, 100, 90], std=[127.5, 64, 32], size=[48, 48])
META = dict(beit_mm_format=1, preprocessing=PREPROCESSING, architecture=dict(num_heads=HEADS),
            dataset_meta=dict(classes=['a', 'b', 'c', 'd', 'e']), cfg='model = dict()')


@pytest.fixture
def run_file(tmp_path):
    """A checkpoint as a training run leaves it, and its weights."""
    model = ours('classification', 'per_layer')
    optimizer = torch.optim.AdamW(model.parameters())
    model.head.fc.weight.sum().backward()
    optimizer.step()
    path = tmp_path / 'epoch_3.pth'
    torch.save(dict(state_dict=model.state_dict(), optimizer=optimizer.state_dict(),
                    param_schedulers=[dict(last_step=3)], message_hub=dict(log_scalars={}),
                    meta=dict(META, epoch=3, seed=5, experiment_name='run', time='now')), path)
    return path, {name: tensor.detach() for name, tensor in model.state_dict().items()}


# --- convert_checkpoint ---------------------------------------------------------------------------

@pytest.mark.parametrize('to', TARGETS)
@pytest.mark.parametrize('name', ['made/new.pth', 'new.safetensors'])
def test_a_run_into_every_format(to, name, run_file, tmp_path):
    path, state = run_file
    target = tmp_path / ('hub' if to == 'hf' else name)
    conversion = convert_checkpoint(path, target, to)
    expected, left_out = from_ours(state, to)
    assert_equal(read(target / 'model.safetensors' if to == 'hf' else target), expected)
    assert (conversion.source, conversion.task) == ('beit_mm', 'classification')
    assert conversion.tensors == len(expected) and conversion.left_out == left_out
    assert not list(tmp_path.rglob('*.part'))


@pytest.mark.parametrize(('to', 'wrapper'), [
    ('beit_mm', {'state_dict', 'meta'}), ('unilm', {'model'}), ('timm', None), ('mmpretrain', {'state_dict', 'meta'}),
    ('mmseg', {'state_dict', 'meta'})])
def test_the_container_is_what_the_code_base_reads(to, wrapper, run_file, tmp_path):
    convert_checkpoint(run_file[0], tmp_path / 'new.pth', to)
    content = torch.load(tmp_path / 'new.pth', weights_only=True)
    if wrapper is None:
        assert 'cls_token' in content
    else:
        assert set(content) == wrapper


def test_from_every_format_with_meta(run_file, tmp_path):
    """There and back in files; preprocessing survives where the format has a place for it."""
    path, state = run_file
    for to, name in (('hf', 'hub'), ('mmpretrain', 'mm.pth'), ('beit_mm', 'ours.safetensors'),
                     ('timm', 'timm.safetensors'), ('unilm', 'unilm.pth')):
        middle = tmp_path / name
        convert_checkpoint(path, middle, to)
        convert_checkpoint(middle, tmp_path / 'back.pth')
        back = torch.load(tmp_path / 'back.pth', weights_only=True)
        assert_equal(back['state_dict'], state)
        assert back['meta']['beit_mm_format'] == 1
        if to not in ('timm', 'unilm'):
            found = back['meta']['preprocessing']
            assert found['size'] == [48, 48]
            assert found['mean'] == pytest.approx(PREPROCESSING['mean'])
            assert found['std'] == pytest.approx(PREPROCESSING['std'])


def test_the_folder_for_transformers(run_file, tmp_path):
    conversion = convert_checkpoint(run_file[0], tmp_path / 'hub', 'hf')
    assert conversion.notes == []
    assert sorted(file.name for file in (tmp_path / 'hub').iterdir()) == [
        'config.json', 'model.safetensors', 'preprocessor_config.json']
    config = json.loads((tmp_path / 'hub/config.json').read_text())
    assert config['id2label'] == {'0': 'a', '1': 'b', '2': 'c', '3': 'd', '4': 'e'}
    assert config['image_size'] == 48 and config['num_attention_heads'] == HEADS
    from transformers import BeitImageProcessor
    processor = BeitImageProcessor.from_pretrained(tmp_path / 'hub')
    image = torch.randint(0, 256, (3, 48, 48), dtype=torch.uint8)
    found = processor(image, return_tensors='pt')['pixel_values'][0]
    mean, std = (torch.tensor(PREPROCESSING[name]).view(3, 1, 1) for name in ('mean', 'std'))
    torch.testing.assert_close(found, (image - mean) / std, atol=1e-4, rtol=1e-4)


def test_a_source_without_preprocessing_is_said(tmp_path):
    torch.save(timm_peer('classification', 'per_layer').state_dict(), tmp_path / 'timm.pth')
    conversion = convert_checkpoint(tmp_path / 'timm.pth', tmp_path / 'hub', 'hf')
    assert 'no preprocessor_config.json' in str(conversion)
    assert not (tmp_path / 'hub/preprocessor_config.json').exists()


def test_blocks_that_transformers_cannot_tap_are_said(tmp_path):
    state = ours('segmentation', 'per_layer').state_dict()
    for taps, said in (([0, 1, 2, 3], False), ([1, 2, 3, 4], True)):
        torch.save(dict(state_dict=state, meta=dict(architecture=dict(out_indices=taps))), tmp_path / 'ours.pth')
        text = str(convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'hub', 'hf'))
        assert ('features after the last block' in text) == said


@pytest.mark.parametrize(('imagenet', 'mean'), [(True, [123.675, 116.28, 103.53]), (False, [127.5] * 3)])
def test_a_released_training_checkpoint(imagenet, mean, tmp_path):
    """Its `args` are an argparse.Namespace, its optimizer goes."""
    state = ours('pretraining', 'shared').state_dict()
    args = argparse.Namespace(imagenet_default_mean_and_std=imagenet, input_size=48)
    torch.save(dict(model=from_ours(state, 'unilm')[0], optimizer=dict(state={}), epoch=7, args=args),
               tmp_path / 'unilm.pth')
    conversion = convert_checkpoint(tmp_path / 'unilm.pth', tmp_path / 'ours.pth')
    assert (conversion.source, conversion.task, conversion.left_out) == ('unilm/timm', 'pretraining', [])
    content = torch.load(tmp_path / 'ours.pth', weights_only=True)
    assert_equal(content['state_dict'], state)
    assert content['meta']['preprocessing']['mean'] == mean and content['meta']['preprocessing']['size'] == [48, 48]


def test_a_file_onto_itself(run_file):
    path, state = run_file
    convert_checkpoint(path, path)
    assert set(torch.load(path, weights_only=True)) == {'state_dict', 'meta'}
    assert_equal(read(path), state)


@pytest.mark.parametrize('padding', range(0, 256, 8))
def test_safetensors_files_with_a_header_of_any_length(padding, tmp_path):
    """The first byte is the low byte of the header's length, and 0x80 for some: that is how pickles begin."""
    weights = timm_peer('classification', 'per_layer').state_dict()
    save_file(weights, tmp_path / 'timm.safetensors', dict(note='x' * padding))
    assert_equal(read(tmp_path / 'timm.safetensors'), weights)


def test_tokenizer_weights_in_a_file_of_mmpretrain(tmp_path):
    state = from_ours(ours('pretraining', 'shared').state_dict(), 'mmpretrain')[0]
    torch.save(dict(state_dict=dict(state, **{'target_generator.blocks.input.w': torch.ones(2)})), tmp_path / 'mm.pth')
    conversion = convert_checkpoint(tmp_path / 'mm.pth', tmp_path / 'ours.pth')
    assert conversion.left_out == ['target_generator.blocks.input.w']
    assert 'left out, 1: target_generator.blocks.input.w' in str(conversion)


def test_a_rectangle_whose_sides_are_known(tmp_path):
    state = ours('classification', 'per_layer', size=(48, 80)).state_dict()
    torch.save(dict(state_dict=state, meta=dict(preprocessing=dict(size=[48, 80]))), tmp_path / 'ours.pth')
    convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'hub', 'hf')
    assert json.loads((tmp_path / 'hub/config.json').read_text())['image_size'] == [48, 80]


# --- publish_checkpoint ---------------------------------------------------------------------------

@pytest.mark.parametrize('suffix', ['.safetensors', '.pth'])
def test_publish(suffix, run_file, tmp_path):
    path, state = run_file
    found = publish_checkpoint(path, tmp_path / f'out/beit{suffix}')
    assert [found] == list((tmp_path / 'out').iterdir())  # and nothing else is left there
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    assert found.name == f'beit-{digest[:8]}{suffix}'
    content = read_checkpoint(found)
    assert set(content) == {'state_dict', 'meta'} and content['meta'] == META
    assert_equal(content['state_dict'], state)
    if suffix == '.safetensors':
        with safe_open(found, framework='pt') as file:
            assert set(file.keys()) == set(state)


def test_publish_gives_equal_files_equal_names(run_file, tmp_path):
    names = {publish_checkpoint(run_file[0], tmp_path / name / 'beit.safetensors').name for name in 'ab'}
    assert len(names) == 1


# --- DALL-E ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_pickled_dalle_networks_convert_to_state_dicts(suffix, tmp_path):
    dall_e = pytest.importorskip('dall_e')
    from beit_mm.models import DALLETokenizer
    options = dict(n_hid=16, vocab_size=VOCAB)
    networks = dict(encoder=dall_e.Encoder(**options), decoder=dall_e.Decoder(**options))
    files = {}
    for name, network in networks.items():
        torch.save(network, tmp_path / f'{name}.pkl')
        files[name] = str(tmp_path / f'{name}{suffix}')
        conversion = convert_checkpoint(tmp_path / f'{name}.pkl', files[name])
        assert conversion.task == 'tokenizer' and conversion.tensors == len(network.state_dict())
        assert_equal(read(files[name]), network.state_dict())
    tokenizer = DALLETokenizer(files['encoder'], files['decoder'], hidden=16, vocab_size=VOCAB)
    images = torch.rand(2, 3, 16, 24)
    with torch.no_grad():
        tokens = networks['encoder'](dall_e.map_pixels(images)).argmax(1)
        stats = networks['decoder'](torch.nn.functional.one_hot(tokens, VOCAB).permute(0, 3, 1, 2).float())
    assert torch.equal(tokenizer.encode(images), tokens)
    pictures = dall_e.unmap_pixels(torch.sigmoid(stats[:, :3]))
    torch.testing.assert_close(tokenizer.decode(tokens), pictures, atol=1e-4, rtol=0)


# --- the tools ------------------------------------------------------------------------------------

def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / f'tools/{name}.py'), *map(str, arguments)],
                          capture_output=True, text=True)


def test_convert_on_the_command_line(tmp_path):
    hf_peer('pretraining', 'shared').save_pretrained(tmp_path / 'hub')
    done = run_tool('convert_checkpoint', tmp_path / 'hub', tmp_path / 'new.pth', '--to', 'timm')
    assert done.returncode == 0, done.stderr
    weights = read(tmp_path / 'new.pth')
    first, second = done.stdout.splitlines()
    assert first == f'pretraining weights, hf: {len(weights)} tensors written'
    assert second == 'left out, 3: backbone.mask_token, head.lm_head.bias, head.lm_head.weight'
    PEERS['timm']('features', 'shared').load_state_dict(weights, strict=True)


def test_an_error_on_the_command_line(tmp_path):
    done = run_tool('convert_checkpoint', tmp_path / 'nowhere.pth', tmp_path / 'new.pth')
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr == f'error: there is no file {tmp_path / "nowhere.pth"}\n'


def test_publish_on_the_command_line(run_file, tmp_path):
    done = run_tool('publish_model', run_file[0], tmp_path / 'beit.safetensors')
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf'{re.escape(str(tmp_path))}/beit-[0-9a-f]{{8}}\.safetensors', done.stdout.strip())
    assert_equal(to_ours(read(done.stdout.strip())).weights, run_file[1])


def test_a_rectangle_whose_sides_the_file_says(tmp_path):
    """mmpretrain's own BEiT takes it, index buffers included."""
    model = ours('classification', 'per_layer', size=(48, 80))
    torch.save(dict(state_dict=model.state_dict(), meta=dict(preprocessing=dict(size=[48, 80]))), tmp_path / 'ours.pth')
    convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'theirs.pth', 'mmpretrain')
    peer = mmpretrain_peer('classification', 'per_layer', size=(48, 80))
    peer.load_state_dict(read(tmp_path / 'theirs.pth'), strict=True)
    images = torch.rand(2, 3, 48, 80)
    assert_same_outputs(outputs(peer, 'classification', images), outputs(model, 'classification', images))


def test_what_belongs_to_other_weights_does_not_stay_in_a_folder(tmp_path):
    torch.save(dict(state_dict=ours('features', 'per_layer').state_dict()), tmp_path / 'ours.pth')
    folder = tmp_path / 'hub'
    folder.mkdir()
    (folder / 'preprocessor_config.json').write_text('{"image_mean": [0, 0, 0]}')
    assert 'no preprocessor_config.json' in str(convert_checkpoint(tmp_path / 'ours.pth', folder, 'hf'))
    assert not (folder / 'preprocessor_config.json').exists()


def test_a_tokenizers_path_is_not_published(tmp_path):
    meta = dict(tokenizer=dict(type='DALLETokenizer', path='/home/me/encoder.pkl', sha256='12', decoder_path='x'))
    torch.save(dict(state_dict=ours('pretraining', 'vit').state_dict(), meta=meta), tmp_path / 'run.pth')
    published = publish_checkpoint(tmp_path / 'run.pth', tmp_path / 'beit.safetensors')
    assert read_checkpoint(published)['meta']['tokenizer'] == dict(type='DALLETokenizer', sha256='12')
