"""Files from one format into another, published files, and the two tools on the command line."""

import argparse
import hashlib
import importlib.util
import json
import re
import sys

import pytest
import torch
from helpers import ROOT
from peers import (
    CLASSES,
    DIMS,
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

from beit_mm.checkpoint.convert import convert_checkpoint, publish_checkpoint
from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.checkpoint.read import CheckpointError, read_checkpoint

PREPROCESSING = dict(mean=[127.5, 100, 90], std=[127.5, 64, 32], size=[48, 48])
META = dict(
    beit_mm_format=1,
    preprocessing=PREPROCESSING,
    architecture=dict(num_heads=HEADS),
    dataset_meta=dict(classes=['a', 'b', 'c', 'd', 'e']),
    config_dict=dict(model=dict()),
)


@pytest.fixture
def run_file(tmp_path):
    """A checkpoint as a training run leaves it, and its weights."""
    model = ours('classification', 'per_layer')
    optimizer = torch.optim.AdamW(model.parameters())
    model.head.fc.weight.sum().backward()
    optimizer.step()
    path = tmp_path / 'epoch_3.pth'
    torch.save(
        dict(
            state_dict=model.state_dict(),
            optimizer=optimizer.state_dict(),
            param_schedulers=[dict(last_step=3)],
            message_hub=dict(log_scalars={}),
            meta=dict(META, epoch=3, seed=5, experiment_name='run', time='now'),
        ),
        path,
    )
    return path, {name: tensor.detach() for name, tensor in model.state_dict().items()}


# --- convert_checkpoint ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('to', 'wrapper'),
    [
        ('beit_mm', {'state_dict', 'meta'}),
        ('unilm', {'model'}),
        ('timm', None),
        ('mmpretrain', {'state_dict', 'meta'}),
        ('mmseg', {'state_dict', 'meta'}),
        ('hf', None),
    ],
)
def test_a_run_into_every_format(to, wrapper, run_file, tmp_path):
    """And in the container that the code base reads."""
    path, state = run_file
    expected, dropped, _ = convert_state_dict(state, target=to)
    for name in ('made/new.pth', 'new.safetensors'):
        target = tmp_path / ('hub' if to == 'hf' else name)
        conversion = convert_checkpoint(path, target, to)
        assert_equal(read(target / 'model.safetensors' if to == 'hf' else target), expected)
        assert (conversion.source, conversion.task) == ('beit_mm', 'classification')
        assert conversion.tensors == len(expected) and conversion.dropped_keys == dropped
    assert not list(tmp_path.rglob('*.part'))
    if wrapper:
        assert set(torch.load(tmp_path / 'made/new.pth', weights_only=True)) == wrapper
    elif to == 'timm':
        assert 'cls_token' in torch.load(tmp_path / 'made/new.pth', weights_only=True)


def test_from_every_format_with_meta(run_file, tmp_path):
    """There and back in files; preprocessing survives where the format has a place for it."""
    path, state = run_file
    for to, name in (
        ('hf', 'hub'),
        ('mmpretrain', 'mm.pth'),
        ('beit_mm', 'ours.safetensors'),
        ('timm', 'timm.safetensors'),
        ('unilm', 'unilm.pth'),
    ):
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
        'README.md',
        'config.json',
        'model.safetensors',
        'preprocessor_config.json',
    ]
    config = json.loads((tmp_path / 'hub/config.json').read_text())
    assert config['id2label'] == {'0': 'a', '1': 'b', '2': 'c', '3': 'd', '4': 'e'}
    assert config['image_size'] == 48 and config['num_attention_heads'] == HEADS
    from transformers import BeitImageProcessor

    processor = BeitImageProcessor.from_pretrained(tmp_path / 'hub')
    image = torch.randint(0, 256, (3, 48, 48), dtype=torch.uint8)
    found = processor(image, return_tensors='pt')['pixel_values'][0]
    mean, std = (torch.tensor(PREPROCESSING[name]).view(3, 1, 1) for name in ('mean', 'std'))
    torch.testing.assert_close(found, (image - mean) / std, atol=1e-4, rtol=1e-4)


def test_the_model_card_says_what_the_files_say(run_file, tmp_path):
    from huggingface_hub import ModelCard

    convert_checkpoint(run_file[0], tmp_path / 'hub', 'hf')
    card = ModelCard.load(tmp_path / 'hub/README.md')
    assert card.data.library_name == 'transformers' and card.data.pipeline_tag == 'image-classification'
    assert 'BeitForImageClassification.from_pretrained' in card.text
    (tmp_path / 'hub/README.md').write_text('mine')
    conversion = convert_checkpoint(run_file[0], tmp_path / 'hub', 'hf')
    assert (tmp_path / 'hub/README.md').read_text() == 'mine' and 'left as it is' in str(conversion)


def test_a_source_without_preprocessing_is_said(tmp_path):
    torch.save(timm_peer('classification', 'per_layer').state_dict(), tmp_path / 'timm.pth')
    conversion = convert_checkpoint(tmp_path / 'timm.pth', tmp_path / 'hub', 'hf')
    assert 'no preprocessor_config.json' in str(conversion)
    assert not (tmp_path / 'hub/preprocessor_config.json').exists()


@pytest.mark.parametrize(('imagenet', 'mean'), [(True, [123.675, 116.28, 103.53]), (False, [127.5] * 3)])
def test_a_released_training_checkpoint(imagenet, mean, tmp_path):
    """Its `args` are an argparse.Namespace, its optimizer goes."""
    state = ours('pretraining', 'shared').state_dict()
    args = argparse.Namespace(imagenet_default_mean_and_std=imagenet, input_size=48)
    weights = convert_state_dict(state, target='unilm').state_dict
    torch.save(dict(model=weights, optimizer=dict(state={}), epoch=7, args=args), tmp_path / 'unilm.pth')
    conversion = convert_checkpoint(tmp_path / 'unilm.pth', tmp_path / 'ours.pth')
    assert (conversion.source, conversion.task, conversion.dropped_keys) == ('unilm', 'pretraining', [])
    content = torch.load(tmp_path / 'ours.pth', weights_only=True)
    assert_equal(content['state_dict'], state)
    assert content['meta']['preprocessing']['mean'] == mean and content['meta']['preprocessing']['size'] == [48, 48]


def test_a_file_onto_itself(run_file):
    path, state = run_file
    convert_checkpoint(path, path)
    assert set(torch.load(path, weights_only=True)) == {'state_dict', 'meta'}
    assert_equal(read(path), state)


def test_tokenizer_weights_in_a_file_of_mmpretrain(tmp_path):
    state = convert_state_dict(ours('pretraining', 'shared').state_dict(), target='mmpretrain').state_dict
    torch.save(dict(state_dict=dict(state, **{'target_generator.blocks.input.w': torch.ones(2)})), tmp_path / 'mm.pth')
    conversion = convert_checkpoint(tmp_path / 'mm.pth', tmp_path / 'ours.pth')
    assert conversion.dropped_keys == ['target_generator.blocks.input.w']
    assert 'dropped, 1: target_generator.blocks.input.w' in str(conversion)


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


def run_tool(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """The main function of a script in tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f'tools/{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, 'argv', [f'{name}.py', *map(str, arguments)])
    module.main()


def test_convert_on_the_command_line(tmp_path, monkeypatch, capsys):
    hf_peer('pretraining', 'shared').save_pretrained(tmp_path / 'hub')
    run_tool('convert_checkpoint', monkeypatch, tmp_path / 'hub', tmp_path / 'new.pth', '--to', 'timm')
    weights = read(tmp_path / 'new.pth')
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f'pretraining weights, hf: {len(weights)} tensors written',
        'dropped, 3: backbone.mask_token, head.lm_head.bias, head.lm_head.weight',
    ]
    PEERS['timm']('features', 'shared').load_state_dict(weights, strict=True)


def test_publish_on_the_command_line(run_file, tmp_path, monkeypatch, capsys):
    run_tool('publish_model', monkeypatch, run_file[0], tmp_path / 'beit.safetensors')
    printed = capsys.readouterr().out.strip()
    assert re.fullmatch(rf'{re.escape(str(tmp_path))}/beit-[0-9a-f]{{8}}\.safetensors', printed)
    assert_equal(convert_state_dict(read(printed)).state_dict, run_file[1])


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


# --- what is refused: one line of the tool, and nothing is written -----------------------------------


def resnet(path) -> None:
    import torchvision

    torch.save(torchvision.models.resnet18().state_dict(), path)


def vit_of_transformers(path) -> None:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=DIMS,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=64,
        image_size=48,
        patch_size=8,
    )
    torch.save(transformers.ViTForImageClassification(config).state_dict(), path)


def rectangle(path, variant: str = 'per_layer') -> None:
    torch.save(
        dict(
            state_dict=ours('classification', variant, size=(48, 80)).state_dict(),
            meta=dict(architecture=dict(num_heads=HEADS)),
        ),
        path,
    )


def rectangle_of_a_vit(path) -> None:
    rectangle(path, 'vit')


def later_version(path) -> None:
    torch.save(dict(state_dict=ours('classification', 'vit').state_dict(), meta=dict(beit_mm_format=99)), path)


def other_head(path) -> None:
    """A head that transformers' segmentation model has not, as SETR's."""
    state = {
        name: tensor
        for name, tensor in ours('segmentation', 'per_layer').state_dict().items()
        if name.startswith(('backbone.', 'decode_head.conv_seg.'))
    }
    torch.save(dict(state_dict=dict(state, **{'decode_head.up_convs.0.0.conv.weight': torch.ones(2, 2, 3, 3)})), path)


def narrow_head(path) -> None:
    """transformers' decoder is as wide as its backbone."""
    state = ours('segmentation', 'per_layer').state_dict()
    state['decode_head.fpn_bottleneck.conv.weight'] = torch.ones(8, 32, 3, 3)
    state['decode_head.conv_seg.weight'] = torch.ones(CLASSES, 8, 1, 1)
    torch.save(dict(state_dict=state), path)


def no_heads(path) -> None:
    """Without a bias table, and with a width that is no multiple of the usual 64, nothing shows them."""
    torch.save(dict(state_dict=ours('classification', 'vit').state_dict()), path)


def cut(path) -> None:
    """A block without its last tensor."""
    state = ours('classification', 'per_layer').state_dict()
    del state['backbone.blocks.1.mlp.fc2.bias']
    torch.save(dict(state_dict=state), path)


def vit(path) -> None:
    torch.save(dict(state_dict=ours('segmentation', 'vit').state_dict()), path)


REFUSED = {
    'ResNet': (resnet, 'new.pth', 'beit_mm', 'holds no BEiT weights: its tensors are conv1.weight'),
    'ViT of transformers': (vit_of_transformers, 'new.pth', 'beit_mm', 'holds no BEiT weights'),
    'suffix': (vit, 'new.ckpt', 'beit_mm', r'must end in \.pth'),
    'no suffix': (vit, 'new', 'beit_mm', r'must end in \.pth'),
    'a file for a folder': (vit, 'new.safetensors', 'hf', 'folder'),
    'position embedding': (vit, 'new.pth', 'mmseg', 'absolute position embedding, which mmsegmentation'),
    'table of a rectangle': (rectangle, 'new.pth', 'mmseg', 'no square patch grid'),
    'table of a rectangle, hf': (rectangle, 'new', 'hf', 'no square patch grid'),
    'embedding of a rectangle, hf': (rectangle_of_a_vit, 'new', 'hf', 'no square patch grid'),
    'later version': (later_version, 'new.pth', 'beit_mm', 'format 99.*upgrade'),
    'another head': (other_head, 'new', 'hf', 'transformers'),
    'narrow head': (narrow_head, 'new', 'hf', 'transformers'),
    'incomplete': (cut, 'new.pth', 'timm', r'lacks backbone\.blocks\.1\.mlp\.fc2\.bias'),
    'unknown heads': (no_heads, 'new', 'hf', 'heads'),
    'no file': (lambda path: None, 'new.pth', 'beit_mm', 'does not exist'),
    'empty folder': (lambda path: path.mkdir(), 'new.pth', 'beit_mm', 'folder without model.safetensors, '),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_be_is_one_line_and_nothing_is_written(case, tmp_path, monkeypatch):
    make, target, to, message = REFUSED[case]
    source = tmp_path / 'source.pth'
    make(source)
    before = set(tmp_path.rglob('*'))
    with pytest.raises(SystemExit, match=f'^error: .*{message}') as error:
        run_tool('convert_checkpoint', monkeypatch, source, tmp_path / target, '--to', to)
    assert str(error.value).count('\n') <= 1 and len(str(error.value)) < 400
    about_target = case in ('suffix', 'no suffix', 'a file for a folder')  # of which the source is not guilty
    assert (str(source) in str(error.value), str(tmp_path / target) in str(error.value)) == (
        not about_target,
        about_target,
    )
    assert set(tmp_path.rglob('*')) == before


def test_publish_of_a_wrong_file_leaves_nothing(tmp_path):
    resnet(tmp_path / 'resnet.pth')
    with pytest.raises(CheckpointError, match='holds no BEiT weights'):
        publish_checkpoint(tmp_path / 'resnet.pth', tmp_path / 'out/beit.pth')
    assert not list(tmp_path.rglob('beit*'))


def test_an_error_of_publish_on_the_command_line(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match='^error: .*nowhere.pth. does not exist'):
        run_tool('publish_model', monkeypatch, tmp_path / 'nowhere.pth', tmp_path / 'beit.pth')


def test_an_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="unknown format 'keras'; choose one of beit_mm, unilm, timm"):
        convert_checkpoint(tmp_path / 'any.pth', tmp_path / 'new.pth', 'keras')
