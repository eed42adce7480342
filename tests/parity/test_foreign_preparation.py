"""Classifiers of transformers and timm see the part of an image that their own pipelines show them."""

import json

import numpy as np
import pytest
import timm
import torch
import transformers
from helpers import ROOT
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from beit_mm import ClassificationInferencer, FeatureExtractor
from beit_mm.apis.export import describe_use
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.features.extractor import usual_preparation
from beit_mm.models import BEiTBackbone

SIZE, CLASSES = 32, 5
SQUARE = dict(height=SIZE, width=SIZE)
SHAPES = [(64, 192), (33, 47), (500, 200), (47, 33)]  # some leave an odd number of rows or columns beside the crop
PROCESSORS = {
    'squashed': ('ViT', dict(size=SQUARE)),
    'squashed and cut': ('Beit', dict(size=dict(height=40, width=36), do_center_crop=True, crop_size=SQUARE)),
    'by the short side': ('Bit', dict(size=dict(shortest_edge=37), crop_size=SQUARE)),
    'nearest': ('Bit', dict(size=dict(shortest_edge=32), crop_size=SQUARE, resample=0)),
    'scaled to 2': ('ViT', dict(size=SQUARE, rescale_factor=1 / 127.5)),
    'not scaled': ('ViT', dict(size=SQUARE, do_rescale=False, image_mean=[100.0] * 3, image_std=[50.0] * 3)),
    'not normalised': ('ViT', dict(size=SQUARE, do_normalize=False)),
}
TIMM = {
    'center': dict(crop_pct=0.9, interpolation='bicubic'),
    'all': dict(crop_pct=1.0, crop_mode='center', interpolation='bilinear'),
    'squash': dict(crop_pct=1.0, crop_mode='squash', interpolation='bicubic'),
    'squash and cut': dict(crop_pct=0.8, crop_mode='squash', interpolation='lanczos'),
}
LEVELS = dict(mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.4])


@pytest.fixture
def images() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in SHAPES]


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    for parameter in model.eval().parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def hf_folder(path, kind: str, options: dict):
    """A saved classifier, and what its own pipeline of Pillow answers; torchvision's rounds some pixels differently."""
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=64, image_size=SIZE)
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, patch_size=8, num_labels=CLASSES, layer_norm_eps=1e-6)
    )
    randomised(model).save_pretrained(path)
    names = (f'{kind}ImageProcessorPil', f'{kind}ImageProcessor')  # of transformers 5 and 4
    processor = next(getattr(transformers, name) for name in names if hasattr(transformers, name))(**options)
    processor.save_pretrained(path)
    return lambda image: model(processor(image, return_tensors='pt')['pixel_values']).logits


def timm_folder(path, settings: dict, **described):
    model = randomised(VisionTransformer(SIZE, 8, embed_dim=64, depth=2, num_heads=1, num_classes=CLASSES))
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path / 'model.safetensors')
    settings = dict(LEVELS, input_size=[3, SIZE, SIZE], **settings)
    config = dict(architecture='vit', num_classes=CLASSES, pretrained_cfg=settings, **described)
    (path / 'config.json').write_text(json.dumps(config))
    return lambda image: model(timm.data.create_transform(**settings)(image)[None])


def folder_of(path, name: str):
    return timm_folder(path, TIMM[name]) if name in TIMM else hf_folder(path, *PROCESSORS[name])


@torch.no_grad()
@pytest.mark.parametrize('name', [*PROCESSORS, *TIMM])
def test_probabilities_are_the_librarys_own(name, tmp_path, images, warnings):
    peer = folder_of(tmp_path / 'hub', name)
    images[0].resize((1700, 1200)).save(tmp_path / 'large.jpg')
    images.append(Image.open(tmp_path / 'large.jpg'))
    expected = torch.cat([peer(image).softmax(dim=1) for image in images])
    assert expected.std(dim=0).max() > 0.02  # the images differ, so what is seen of them counts
    found = ClassificationInferencer(tmp_path / 'hub', 'cpu')([*images[:-1], tmp_path / 'large.jpg'])
    scores = torch.tensor([[score for _, score in sorted(map(tuple, result['scores']))] for result in found])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-3)
    assert not warnings()


@pytest.mark.parametrize('name', ['squashed and cut', 'by the short side', 'squash and cut'])
def test_features_and_programs_of_an_onnx_file_see_the_same_pixels(name, tmp_path, images, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tools')
    from onnx_predict import prepare

    folder_of(tmp_path / 'hub', name)
    classifier, extractor = ClassificationInferencer(tmp_path / 'hub', 'cpu'), FeatureExtractor(tmp_path / 'hub', 'cpu')
    given = FeatureExtractor(BEiTBackbone.from_checkpoint(tmp_path / 'hub'))
    steps = json.loads(json.dumps(describe_use(classifier)['steps']))
    for image in images:
        seen = classifier.reader.prepare(classifier.reader.load(image))['inputs']
        assert torch.equal(extractor.prepared(image), seen) and torch.equal(given.prepared(image), seen)
        assert np.array_equal(prepare(np.asarray(image), steps), seen.permute(1, 2, 0))
    assert FeatureExtractor(tmp_path / 'hub', 'cpu', size=48).prepared(images[0]).shape == (3, 48, 48)


@pytest.mark.parametrize('name', ['squashed and cut', 'by the short side', 'all'])
def test_a_converted_folder_is_prepared_as_before(name, tmp_path, images):
    folder_of(tmp_path / 'hub', name)
    convert_checkpoint(tmp_path / 'hub', tmp_path / 'ours.pth')
    steps = ClassificationInferencer(tmp_path / 'ours.pth', 'cpu').reader.prepare
    before = ClassificationInferencer(tmp_path / 'hub', 'cpu').reader.prepare
    assert [*map(repr, steps.transforms)] == [*map(repr, before.transforms)]


def test_transformers_reads_the_preparation_of_a_file_that_says_none(tmp_path, images):
    """The middle of the image, as ours."""
    beit = timm.models.beit.Beit(SIZE, 8, embed_dim=64, depth=2, num_heads=1, num_classes=CLASSES, init_values=0.1)
    meta = dict(preprocessing=dict(mean=[127.5] * 3, std=[127.5] * 3, size=[SIZE, SIZE]))
    torch.save(dict(state_dict=randomised(beit).state_dict(), meta=meta), tmp_path / 'beit.pth')
    convert_checkpoint(tmp_path / 'beit.pth', tmp_path / 'hub', 'hf')
    processor = transformers.BitImageProcessorPil.from_pretrained(tmp_path / 'hub')
    theirs = torch.tensor(np.array([processor(image)['pixel_values'][0] for image in images]))
    with torch.no_grad():
        peer = transformers.BeitForImageClassification.from_pretrained(tmp_path / 'hub').eval()
        expected = peer(theirs).logits.softmax(dim=1)
    found = ClassificationInferencer(tmp_path / 'hub', 'cpu')(images)
    scores = torch.tensor([[score for _, score in sorted(map(tuple, result['scores']))] for result in found])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-3)


OF_TIMM = ('border', dict(crop_mode='border')), ('crop_border_pixels', dict(crop_border_pixels=4))
OF_TIMM += ('cubist', dict(interpolation='cubist')), ('resize', dict(crop_pct=1e-7)), ('resize', dict(crop_pct=2.0))
OF_TRANSFORMERS = ('do_pad', dict(do_pad=True)), ('size', dict(size=dict(longest_edge=90)))
OF_TRANSFORMERS += ('do_resize', dict(do_resize=False)), ('interpolation', dict(resample=9))


@pytest.mark.parametrize(('named', 'change'), OF_TIMM + OF_TRANSFORMERS)
def test_what_a_library_does_and_we_cannot_is_one_line_and_the_middle_is_cropped(named, change, tmp_path, warnings):
    if (named, change) in OF_TIMM:
        timm_folder(tmp_path / 'hub', change)
    else:
        hf_folder(tmp_path / 'hub', 'ViT', dict(size=SQUARE))
        file = tmp_path / 'hub/preprocessor_config.json'
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    resize, crop, _ = usual_preparation((SIZE, SIZE), 'pillow')
    for user in (ClassificationInferencer, FeatureExtractor):
        transforms = user(tmp_path / 'hub', 'cpu').reader.prepare.transforms
        assert (transforms[0].scale, transforms[1].crop_size) == (resize['scale'], crop['crop_size'])
    assert len(warnings()) == 2 and all(named in line and str(tmp_path) in line for line in warnings())


def test_numbers_of_old_processors_are_both_sides_and_names_of_timm_are_read(tmp_path):
    hf_folder(tmp_path / 'hf', 'ViT', dict(size=SQUARE))
    (tmp_path / 'hf/preprocessor_config.json').write_text('{"size": 40, "do_center_crop": true, "crop_size": 32}')
    geometry = Checkpoint.open(tmp_path / 'hf').preprocessing['geometry']
    assert (geometry['resize'], geometry['crop'], geometry['interpolation']) == ([40, 40], [32, 32], 'bilinear')
    synsets = [f'n{number}' for number in range(CLASSES)]
    timm_folder(tmp_path / 'timm', dict(label_names=synsets))
    timm_folder(tmp_path / 'named', {}, label_names=synsets, label_descriptions=dict(n1='fox', n2='fish'))
    assert ClassificationInferencer(tmp_path / 'timm', 'cpu').classes == (*synsets,)
    assert ClassificationInferencer(tmp_path / 'named', 'cpu').classes == ('n0', 'fox', 'fish', 'n3', 'n4')
