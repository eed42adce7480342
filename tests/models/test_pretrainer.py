"""The pretrainer: its loss against the plain formula, its ablations, and what it keeps out of the way."""

import pytest
import torch
import torch.nn.functional as F
from helpers import narrow_batch, narrow_model

from beit_mm.engine.optim import parameter_groups
from beit_mm.models.provenance import target_provenance
from beit_mm.models.tokenizers import Tokenizer
from beit_mm.pictures import reconstructed
from beit_mm.registry import MODELS


def plain_loss(model, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's loss written out: all tokens, all hidden states, one boolean gather. And the share that is right."""
    tokens = model.target_generator.encode(inputs['tokenizer_images'])[inputs['mask']]
    hidden = model.backbone(inputs['images'], inputs['mask'])[0][:, 1:]
    logits = model.head(hidden[inputs['mask'].flatten(1)])
    return F.cross_entropy(logits, tokens), (logits.argmax(dim=1) == tokens).float().mean()


def test_loss_accuracy_and_gradients_equal_the_plain_formula():
    model, inputs = MODELS.build(narrow_model()), narrow_batch()
    tokens = model.target_generator.encode(inputs['tokenizer_images'])
    with torch.no_grad():
        model.head.lm_head.bias[tokens[inputs['mask']].mode().values] += 1  # so that the model is right now and then
    losses, (expected, share) = model(inputs, mode='loss'), plain_loss(model, inputs)
    torch.testing.assert_close(losses, dict(loss=expected, mim_acc=share))
    assert 0 < share < 1
    trained = [p for p in model.parameters() if p.requires_grad]
    got, wanted = (torch.autograd.grad(loss, trained) for loss in (losses['loss'], expected))
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)


def test_no_masked_patch_gives_zero_and_finite_gradients():
    model = MODELS.build(narrow_model())
    inputs = narrow_batch(torch.zeros(3, 4, 4, dtype=torch.bool))
    loss = model(inputs, mode='loss')['loss']
    loss.backward()
    assert loss == 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize('kind', ['BEiTPretrainer', 'BEiTV2Pretrainer'])
def test_recover_all_counts_every_patch(kind):
    """Of images without a mask too."""
    layers = dict(early_layers=1, aggregation_layers=1) if 'V2' in kind else {}
    some, every = (MODELS.build(narrow_model(type=f'beit_mm.{kind}', recover=x, **layers)) for x in ('masked', 'all'))
    every.load_state_dict(some.state_dict())
    inputs, patches = narrow_batch(), torch.arange(16).expand(3, 16)
    torch.testing.assert_close(every.loss(inputs), some.loss(dict(inputs, positions=patches)))
    whole = dict(inputs, mask=None, positions=None)
    torch.testing.assert_close(every.loss(whole), some.loss(dict(whole, positions=patches)))


def test_pixel_regression():
    model, named = (
        MODELS.build(narrow_model(target_generator=target, head=PIXELS))
        for target in (None, dict(type='beit_mm.PixelTargets'))
    )
    named.load_state_dict(model.state_dict())
    inputs = narrow_batch()
    assert torch.equal(named.loss(inputs)['loss'], model.loss(inputs)['loss'])
    hidden = model.backbone(inputs['images'], inputs['mask'])[0][:, 1:]
    errors = []
    for image, row, column in inputs['mask'].nonzero().tolist():
        patch = inputs['images'][image, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        predicted = model.head(hidden[image, 4 * row + column]).view(3, 8, 8)
        errors.append((predicted - patch).square().mean())
    losses = model(inputs, mode='loss')
    assert set(losses) == {'loss'}
    torch.testing.assert_close(losses['loss'], torch.stack(errors).mean())


def test_a_model_of_tokens_does_without_a_tokenizer_until_its_loss_is_asked_for():
    model = MODELS.build(narrow_model(target_generator=None))
    assert model(narrow_batch(), mode='tensor').shape == (3, 17, 32) and target_provenance(model) is None
    with pytest.raises(ValueError, match='BEiTMIMHead does not predict pixels; set target_generator'):
        model(narrow_batch(), mode='loss')


def test_pixels_of_an_image_that_is_not_whole_patches_are_those_of_the_image_padded_with_zeros():
    model, inputs = MODELS.build(narrow_model(target_generator=None, head=PIXELS)), narrow_batch()
    cut = inputs['images'][:, :, :29, :27]
    padded = F.pad(cut, (0, 5, 0, 3))
    torch.testing.assert_close(model.loss(dict(inputs, images=cut)), model.loss(dict(inputs, images=padded)))


def test_a_tokenizer_without_encode_at_gives_the_same_loss():
    @MODELS.register_module(name='PlainTokenizer', force=True)
    class PlainTokenizer(Tokenizer):
        """The least that the interface of tokenizers asks for."""

        vocab_size = 32
        stride = 8

        def encode(self, images):
            return (F.avg_pool2d(images, 8).sum(1) * 10).long().clamp(0, 31)

    model = MODELS.build(narrow_model(target_generator=dict(type='beit_mm.PlainTokenizer')))
    inputs = narrow_batch()
    torch.testing.assert_close(model(inputs, mode='loss')['loss'], plain_loss(model, inputs)[0])
    assert target_provenance(model) == dict(type='PlainTokenizer')  # which a run logs and stores


def test_tokenizer_stays_out_of_training_and_checkpoints():
    vae = dict(type='beit_mm.DiscreteVAE', hidden=8, vocab_size=32, embed_dims=8)  # which can be trained
    model = MODELS.build(narrow_model(target_generator=vae)).train()
    assert not model.target_generator.training and model.backbone.training
    assert not any(p.requires_grad for p in model.target_generator.parameters())
    state = model.state_dict()
    assert {k.split('.')[0] for k in state} == {'backbone', 'head'}
    model.load_state_dict(state, strict=True)
    torch.nn.ModuleDict(dict(module=model)).load_state_dict({f'module.{k}': v for k, v in state.items()}, strict=True)
    grouped = {name for group in parameter_groups(model) for name in group['names']}
    assert grouped == set(state)


def test_prediction_sums_up_to_the_loss():
    model, inputs = MODELS.build(narrow_model()).eval(), narrow_batch()
    results = model(inputs, mode='predict')
    losses = model(inputs, mode='loss')
    count = sum(r['count'] for r in results)
    assert [r['count'] for r in results] == [5, 2, 0]
    assert sum(r['loss'] for r in results) / count == pytest.approx(losses['loss'].item(), rel=1e-5)
    assert sum(r['correct'] for r in results) / count == pytest.approx(losses['mim_acc'].item())
    tokens = model.target_generator.encode(inputs['tokenizer_images']).flatten(1)
    assert torch.equal(torch.stack([r['tokens'] for r in results]), tokens)


def test_pictures_show_what_was_hidden():
    model, inputs = MODELS.build(narrow_model()).eval(), narrow_batch()
    columns = reconstructed(model, inputs)
    assert list(columns) == ['image', 'masked', 'prediction', 'tokens, decoded']
    hidden = inputs['mask'].repeat_interleave(8, 1).repeat_interleave(8, 2).unsqueeze(1).expand(-1, 3, -1, -1)
    assert (columns['masked'][hidden] == 0.5).all()
    assert torch.equal(columns['masked'][~hidden], columns['image'][~hidden])
    torch.testing.assert_close(columns['image'], (inputs['images'] + 1) / 2)
    assert torch.equal(columns['prediction'][~hidden], columns['image'][~hidden])
    tokens = model.target_generator.encode(inputs['tokenizer_images'])
    with torch.no_grad():  # a head that is certain of the right tokens, the same one everywhere
        tokens[:] = tokens[0, 0, 0]
        model.head.lm_head.bias[tokens[0, 0, 0]] = 1e4
        model.target_generator.encode = lambda images: tokens
    columns = reconstructed(model, inputs)
    assert_close = torch.testing.assert_close
    assert_close(columns['prediction'][hidden], columns['tokens, decoded'][hidden], atol=1e-4, rtol=0)
    model.target_generator.decoder = None
    assert list(reconstructed(model, inputs)) == ['image', 'masked']


TOKENS_64 = dict(type='beit_mm.DALLETokenizer', random_weights=True, hidden=8, vocab_size=64)
PIXELS = dict(type='beit_mm.PixelRegressionHead', embed_dims=32, patch_size=8)


def test_wrong_combinations_are_refused():
    for changes, message in (
        (dict(target_generator=TOKENS_64), 'the head is a BEiTMIMHead; .*vocab_size=64'),
        (dict(recover='some'), "recover is 'some'"),
        (dict(head=PIXELS), 'the head is a PixelRegressionHead'),
        (dict(head=dict(PIXELS, patch_size=16), target_generator=None), 'head.patch_size is 16; expected 8'),
        (dict(head=dict(PIXELS, embed_dims=16), target_generator=None), 'head.embed_dims is 16; expected 32'),
    ):
        with pytest.raises(ValueError, match=message):
            MODELS.build(narrow_model(**changes))


def test_views_that_do_not_fit_are_refused():
    model = MODELS.build(narrow_model())
    with pytest.raises(ValueError, match='add BlockwiseMask to the pipeline'):
        model(dict(narrow_batch(), mask=None, positions=None), mode='loss')
    for height, width in ((16, 32), (16, 64)):  # the latter with as many tokens as patches, but of other places
        with pytest.raises(ValueError, match=f'2 x {width // 8} visual tokens, the mask 4 x 4 cells; .* second_'):
            model(dict(narrow_batch(), tokenizer_images=torch.rand(3, 3, height, width)), mode='loss')
