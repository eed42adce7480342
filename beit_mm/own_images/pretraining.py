"""Pretraining on a folder of images: tokenizer or teacher, configs, and the report on what its features gained."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from beit_mm.apis import configs, rebuild
from beit_mm.apis.inference import draw_predictions
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.find import DEMO, path_of_checkpoint
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.datasets.segmentation_folder import check_images_alone
from beit_mm.errors import UserError, check_choice, warn
from beit_mm.features.evaluation import knn_predict, linear_predict, mean_and_error, standardiser
from beit_mm.features.extractor import ExistingPath, FeatureExtractor
from beit_mm.models.feature_targets import EMA
from beit_mm.models.vit import sizes_of
from beit_mm.own_images import report
from beit_mm.own_images.images import Images, evenly, find_images
from beit_mm.own_images.label_maps import MIN_PAIRS
from beit_mm.own_images.layouts import find_map_folders
from beit_mm.own_images.record import NONE, USUAL_LENGTH, Record
from beit_mm.own_images.report import Metric, Metrics, Report
from beit_mm.own_images.task import BACKBONE, HEAD, NARROW, WIDE_PRETRAINING, Plan, Settings, Task, fitted_in
from beit_mm.pictures import draw_neighbours

PRETRAIN, TOKENIZER = 'pretrain', 'tokenizer'  # stages
NEW = 'new'  # option: a tokenizer trained on these images
TOKENS, FEATURES = 'tokens', 'features'  # what is predicted
GOING_ON_RATE = 5e-6  # for a wide start, once it has a head; see docs/pretraining.md
MAX_GOING_ON_STEPS = 180  # by which its own features gain; longer runs lost more
MAX_TOKENIZER_STEPS = 4000  # more steps hardly improve its tokens
MAX_HEAD_STEPS = 500  # of a linear layer on frozen features
FEW_IMAGES = 5000  # with fewer, minutes of further pretraining gained nothing
FEATURE_RECIPES = {  # the same recipes with features instead of visual tokens
    configs.NARROW_PRETRAINING: 'demo/pretrain_features.py',
    WIDE_PRETRAINING: 'beit/pretrain_features_dinov2_300e.py',
}
MIN_BANK, MAX_BANK = 200, 2000  # images to compare held-out ones with; MIN_BANK even if time is short
OTHER_FEATURES = dict(start='the initial weights', random='random weights', thumbnails='thumbnails')
METHODS = dict(knn='nearest neighbours', linear='linear layer')  # that test features
MIN_LOSS_GAIN = 0.05  # nats, or for features a share of variance; smaller differences of losses do not count
HOW_FEATURES_ARE_JUDGED = (
    'From the features of one block, the 20 nearest images vote, or a linear layer learns. The pretraining itself used '
    'no labels. The verdict on features comes from the linear layer.'
)
NUM_QUERIES = 6  # in the picture of neighbours
DECODED = 'predicted, the correct tokens decoded'
FILLED = 'each masked patch drawn as the masked patch of these images with the nearest features'


@dataclass(kw_only=True)
class PretrainingPlan(Plan):
    targets: dict[str, Any] | None = None  # config of the tokenizer or FeatureTargets; None: a tokenizer is trained
    teacher_width: int | None = None  # of a frozen teacher
    keeps_head: bool = False  # `init` already predicts tokens of this tokenizer; its head is trained further
    predicts_start: bool = False  # the teacher is a frozen copy of `init`

    @property
    def teacher(self) -> str | None:
        """The checkpoint whose features are predicted, or EMA; None if tokens are predicted."""
        return (self.targets or {}).get('teacher')


class Pretraining(Task):
    """A backbone, trained without labels to predict tokens or features of masked patches."""

    model, plan_type = 'pretrained', PretrainingPlan
    shares_of_time = {TOKENIZER: 1 / 3, HEAD: 0.2}
    most_steps = {TOKENIZER: MAX_TOKENIZER_STEPS, HEAD: MAX_HEAD_STEPS}

    @staticmethod
    def check(call: Record) -> None:
        """Refuses options that do not fit each other; a teacher becomes a file, which the report needs again."""
        options = call.options
        if options['tokenizer'] is not None:
            check_choice('tokenizer', options['tokenizer'], (DEMO, NEW))
        if options['targets'] is not None:
            check_choice('targets', options['targets'], (TOKENS, FEATURES))
        predicts_features, teacher = options['targets'] == FEATURES, options['teacher']
        if teacher is not None and not predicts_features:
            raise UserError('--teacher is for features; give --targets features too')
        if predicts_features and options['tokenizer'] is not None:
            raise UserError('--targets features needs no tokenizer; leave --tokenizer out')
        if teacher not in (None, DEMO, EMA):
            options['teacher'] = str(path_of_checkpoint(teacher).absolute())

    @classmethod
    def find(cls, record: Record) -> 'Pretraining':
        check_images_alone(Path(record.images))
        if maps := find_map_folders(record.images, MIN_PAIRS):
            raise UserError(
                f'{maps.pairs[0][1]} has label maps, which would count as images; give a folder of images alone'
            )
        return cls(record, find_images(record.images, labelled=False))

    @property
    def stages(self) -> list[str]:
        parts = {TOKENIZER: not self.plan.targets, HEAD: self.begins_with_head, PRETRAIN: True}
        return [stage for stage, is_needed in parts.items() if is_needed]

    @property
    def is_strong(self) -> bool:
        """Whether the start knows what a new head, and tokens of another model, would destroy."""
        return bool(self.plan.init) and self.plan.width > NARROW

    @property
    def begins_with_head(self) -> bool:
        """Whether a new head is trained alone first."""
        return self.is_strong and not self.plan.keeps_head

    # Planning

    def usual_start(self, device: str) -> tuple[str, str]:
        if device == 'cpu':
            return DEMO, ''
        if self.call.targets or self.call.tokenizer:
            return NONE, ''
        start, advice = self.released_start()
        return (NONE if start == DEMO else start), advice

    def choose_parts(self, checkpoint: Checkpoint | None) -> None:
        plan, call = self.plan, self.call
        if checkpoint:
            plan.backbone['drop_path_rate'] = 0.0 if plan.device == 'cpu' else 0.1
        own = None if call.targets == FEATURES or call.tokenizer == NEW else self.own_tokenizer(checkpoint)
        if call.targets != FEATURES and (call.targets or call.tokenizer or own or not self.is_strong):
            plan.targets, plan.keeps_head = self.choose_tokenizer(own)
            return
        # an address has become a file
        start = str(path_of_checkpoint(plan.init).absolute()) if self.is_strong else None
        plan.predicts_start = self.is_strong and call.teacher in (None, start)
        teacher = call.teacher or start or DEMO
        if not (call.teacher or start) and plan.device == 'cuda':  # DEMO is too small to teach what a GPU trains
            teacher, plan.advice = self.released_start()
        plan.base = FEATURE_RECIPES[plan.base]
        plan.targets = dict(type='beit_mm.FeatureTargets', teacher=teacher)
        if plan.predicts_start:
            plan.targets |= {name: given for name, given in self.mean_std.items() if given is not None}
            if (self.record.length or USUAL_LENGTH).unit == 'minutes':
                self.most_steps = {**self.most_steps, PRETRAIN: MAX_GOING_ON_STEPS}
        if teacher != EMA:
            arguments = rebuild.backbone_config(Checkpoint.open(teacher))
            plan.teacher_width = sizes_of(arguments['arch'])['embed_dims']

    def own_tokenizer(self, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
        """The config of the tokenizer whose tokens the checkpoint's head predicts, if it is found."""
        if checkpoint and 'head.lm_head.weight' in checkpoint.state_dict:
            try:
                return rebuild.targets_config(checkpoint)
            except (CheckpointError, FileNotFoundError) as error:
                self.plan.advice = f'the head of {self.plan.init} is not used: {error}'
        return None

    def choose_tokenizer(self, own: dict[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
        """The config of the tokenizer (None: train one), and whether the head of the start predicts its tokens."""
        option = self.call.tokenizer
        if option == NEW:
            return None, False
        if own and (option is None or own.get('checkpoint') == DEMO):
            return own, True
        if option == DEMO:
            return rebuild.trained_tokenizer(DEMO), False
        return (rebuild.find_dalle() if self.plan.device == 'cuda' else None), False

    def decided(self) -> dict[str, Any]:
        return dict(super().decided(), targets=FEATURES if self.plan.teacher else TOKENS, teacher=self.plan.teacher)

    @property
    def targets_name(self) -> str | None:
        """Type and file of the tokenizer or teacher; None until there is one."""
        targets = self.plan.targets
        return f'{targets["type"]} of {targets.get("teacher") or targets.get("checkpoint")}' if targets else None

    @property
    def tokenizer_batch(self) -> int:
        """Images per step of the tokenizer, at most the number that its learning rate was chosen for."""
        return min(configs.bundled_config(rebuild.TOKENIZER).train_dataloader.batch_size, self.plan.batch)

    def described(self) -> list[tuple[str, str]]:
        plan, targets = self.plan, ('tokenizer', self.targets_name or '')
        if plan.teacher:
            targets = ('targets', f'features of {self.described_teacher}')
        elif plan.keeps_head:
            targets = ('tokenizer', f'that of {plan.init}, whose head is trained further')
        elif not plan.targets:
            targets = ('tokenizer', f'one is trained first, {self.tokenizer_batch} images a step')
        trained = 'first the head alone, which is new; then all, at a low rate' if self.begins_with_head else ''
        if PRETRAIN in self.most_steps:
            trained += f', at most {MAX_GOING_ON_STEPS} steps, as more lost what these gained; for more, give --steps'
        return [*super().described(), ('pays', self.what_paid), targets, ('trained', trained)]

    @property
    def what_paid(self) -> str:
        """What was seen of such trainings."""
        plan, where = self.plan, 'see docs/pretraining.md'
        if plan.predicts_start:
            return f'15 minutes of a core gained two points for neighbours, none for a linear layer: {where}'
        if self.begins_with_head:
            return '' if plan.teacher else f'a strong start lost by tokens; leave --targets, --tokenizer out: {where}'
        if plan.init and len(self.images.train.names) < FEW_IMAGES:
            return 'with few images `finetune` alone did as well: see "What pays" in docs/own_images.md'
        return ''

    @property
    def described_teacher(self) -> str:
        plan = self.plan
        if plan.teacher == EMA:
            return "this model's moving average"
        return f'{plan.teacher}, a frozen copy of the start' if plan.predicts_start else plan.teacher

    # Stages

    def settings(self, stage: str, lists: Path, steps: int, earlier: Mapping[str, Path]) -> Settings:
        if stage == TOKENIZER:
            return rebuild.TOKENIZER, self.tokenizer_settings(lists, steps)
        targets = rebuild.trained_tokenizer(earlier[TOKENIZER]) if TOKENIZER in earlier else self.plan.targets
        settings = self.pretraining_settings(lists, steps, targets)
        if stage == HEAD:
            settings['model']['backbone']['frozen_stages'] = self.plan.depth
        elif HEAD in earlier:  # with the last norm, which was trained too
            settings['model']['backbone']['init_cfg']['checkpoint'] = str(earlier[HEAD])
            settings['model']['head']['init_cfg'] = fitted_in(earlier[HEAD], 'head.')
        settings['optim_wrapper'] = dict(optimizer=dict(lr=self.usual_rate(stage)))
        return self.plan.base, settings

    def tokenizer_settings(self, lists: Path, steps: int) -> dict[str, Any]:
        base, batch = configs.bundled_config(rebuild.TOKENIZER), self.tokenizer_batch
        data = self.loaders(lists, [base.train_pipeline, base.val_pipeline])
        for loader in data.values():
            loader['batch_size'] = batch
        return dict(
            model=dict(temperature_steps=steps, kl_steps=max(1, steps // 4)),  # the recipe's shares of the run
            **data,
            **configs.warmup_and_cosine(steps, 50, batch, base.param_scheduler[-1].eta_min_ratio),
        )

    def pretraining_settings(self, lists: Path, steps: int, targets: dict[str, Any]) -> dict[str, Any]:
        plan, base = self.plan, configs.bundled_config(self.plan.base)
        if plan.teacher:
            stride, outputs = None, dict(target_dims=plan.teacher_width or plan.width)
        else:
            stride, vocab_size = rebuild.stride_and_vocab(targets)
            outputs = dict(vocab_size=vocab_size)
        masks = configs.mask_settings(plan.grid, stride)
        pipelines = [
            configs.pipeline_for_size(base[f'{name}_pipeline'], plan.size, **masks) for name in ('train', 'val')
        ]
        backbone = dict(plan.backbone, _delete_=True, type=BACKBONE, masked_input=True, out_type='raw')
        head = dict(outputs, embed_dims=plan.width)
        length = configs.warmup_and_cosine(steps, steps // 20, plan.batch, base.param_scheduler[-1].eta_min_ratio)
        if plan.init:
            backbone['init_cfg'] = dict(type='Pretrained', checkpoint=plan.init)
        if plan.keeps_head:
            length['train_cfg']['val_begin'] = 0  # to show what its weights already predict
            # loaded separately: an init_cfg of the whole model would override the backbone's
            head['init_cfg'] = dict(type='Pretrained', checkpoint=plan.init, prefix='head.')
        if plan.teacher == EMA:
            length['custom_hooks'] = [*base.custom_hooks, dict(type='beit_mm.TeacherMomentumHook')]
        return dict(
            model=dict(
                backbone=backbone,
                head=head,
                target_generator=dict(targets, _delete_=True),
                data_preprocessor=dict(plan.preprocessing),
            ),
            **self.loaders(lists, pipelines),
            **length,
        )

    def usual_rate(self, stage: str) -> float:
        """The learning rate of a stage that predicts masked patches."""
        plan, base = self.plan, configs.bundled_config(self.plan.base)
        rate = base.optim_wrapper.optimizer.lr
        if plan.base.startswith('demo/'):  # chosen at width 128, it is too high above width 256
            rate *= min(1.0, 256 / plan.width) * (0.5 if plan.keeps_head else 1.0)  # to keep what is learned
        if self.begins_with_head and stage == PRETRAIN:
            return GOING_ON_RATE
        return configs.rate_for_batch(rate, plan.batch / base.auto_scale_lr.base_batch_size)

    # Results

    def results_of(self, validations: Sequence[Mapping[str, float]]) -> dict[str, float]:
        results = super().results_of(validations)
        if self.plan.keeps_head:  # then IterLoop validated before the first step too
            results['mim_loss_start'] = float(validations[0]['mim_loss'])
        return results

    def make_report(self, weights: Path, metrics: Metrics, seconds: float, images_in_time: float) -> Report:
        # features are also computed for half as many held-out images, each at most at twice its cost in training
        compared = min(MAX_BANK, max(MIN_BANK, int(images_in_time / 3)))
        images, start, folder = self.images, self.plan.init, weights.parent
        trained = Checkpoint.open(weights)
        chosen = [images.held_out.root / path for path in evenly(images.held_out.names, 8)]
        draw_predictions(trained, chosen, folder / 'reconstruction.png')
        answers, neighbours_drawn = compare_features(trained, images, compared, start)
        neighbours_drawn.save(folder / 'neighbours.png')
        gains = gains_by_pairs(answers.get('linear', {}))
        verdict, following = judge(metrics, gains, folder, images, start)
        filled = FILLED if self.plan.teacher else DECODED
        parts: list[report.Part] = [
            keep_start(weights, start) if 'start' in gains and gains['start'].sign == report.WORSE else '',
            f'Predicted on masked patches: features of {self.described_teacher}.' if self.plan.teacher else '',
            'This is one training with one seed.',
            HOW_FEATURES_ARE_JUDGED if answers else '',
            report.Picture('reconstruction.png', f'Held-out images: masked, {filled}'),
            report.Picture(
                'neighbours.png', 'Held-out images (left), each beside the training images with the closest features'
            ),
            report.draw_curves(folder / PRETRAIN),
        ]
        return Report(metrics | accuracies(answers), verdict, parts, following, did_it_help(answers))


def keep_start(weights: Path, start: str) -> str:
    """Puts the weights of the start, whose features are better, where those of the run are looked for."""
    convert_checkpoint(start, weights)
    said = f'{weights.name} holds the weights of {start}, which are better; those at the end are in {PRETRAIN}/'
    warn(said)
    return f'{said}.'


def accuracies(answers: Mapping[str, Mapping[str, Tensor]]) -> Metrics:
    """Accuracy of each method, at the end (`knn_accuracy`) and by other features (`knn_accuracy_start`)."""
    found = {}
    for method, of_method in answers.items():
        for name, right in of_method.items():
            ending = '' if name == 'end' else f'_{name}'
            found[f'{method}_accuracy{ending}'] = Metric(*mean_and_error(right), len(right))
    return found


def gains_by_pairs(right: Mapping[str, Tensor]) -> Metrics:
    """How much better the features at the end are than each of the others, from paired answers."""
    return {name: Metric.of_pairs(right['end'] - other) for name, other in right.items() if name != 'end'}


def did_it_help(answers: Mapping[str, Mapping[str, Tensor]]) -> list[list[str]]:
    """Tabulates the answers from `compare_features`, and how much better the end is than the start."""
    if not answers:
        return []
    names = dict(OTHER_FEATURES, end='this pretraining')
    table = [['Did it help? Held-out images classified correctly, %', *(METHODS[method] for method in answers)]]
    for name in answers['knn']:
        shares = [Metric.share(mean_and_error(right[name])[0], len(right[name])) for right in answers.values()]
        table.append([names[name], *(f'{share.value:.1f} +- {share.error:.1f}' for share in shares)])
    baseline = 'start' if 'start' in answers['knn'] else 'random'
    gains = [gains_by_pairs(right)[baseline] for right in answers.values()]
    cells = (f'{gain.value:+.1f} +- {gain.error:.1f}' for gain in gains)
    return [*table, [f'this pretraining - {names[baseline]}, by pairs', *cells]]


def judge(
    metrics: Mapping[str, Metric], gains: Metrics, folder: Path, images: Images, start: str | None
) -> tuple[str, str]:
    """A verdict from the metrics of a validation and the `gains_by_pairs` of features, and what to run next."""
    loss_gains = gains_of_loss(metrics)
    return sentence_on(metrics, loss_gains, gains), next_command(loss_gains, gains, folder, images, start)


def gains_of_loss(metrics: Mapping[str, Metric]) -> Metrics:
    """How much better the loss is than the loss at the `start`, where it is known, and than those of two guesses.

    One `guess` is the same everywhere, the other one differs by `position`.
    """
    if 'explained' in metrics:
        gained = dict(guess=metrics['explained'].value, position=metrics['explained_at_position'].value)
    else:
        others = dict(start='mim_loss_start', guess='token_entropy', position='position_entropy')
        loss = metrics['mim_loss'].value
        gained = {name: metrics[other].value - loss for name, other in others.items() if other in metrics}
    return {name: Metric(gain, MIN_LOSS_GAIN / 2) for name, gain in gained.items()}


def sentence_on(metrics: Mapping[str, Metric], loss_gains: Metrics, gains: Metrics) -> str:
    """What the validation and the `gains_by_pairs` of features show."""
    if loss_gains['guess'].sign != report.BETTER:
        guess = 'the mean feature' if 'explained' in metrics else 'token frequency'
        sentence = f'nothing learned yet: masked patches are not clearly better predicted than by {guess} alone'
    elif loss_gains['position'].value <= 0:
        sentence = 'the model learned, but shows no more than where things usually are'
    else:
        sentence = 'masked patches are predicted from what surrounds them'
    if 'start' in loss_gains:
        sentence += f'; the loss is {report.verdict({"that of the initial weights": loss_gains["start"]})}'
    if gains:
        of_others = {OTHER_FEATURES[name]: gain for name, gain in gains.items()}
        sentence += f'; the learned features are {report.verdict(of_others)}'
    return sentence


def next_command(loss_gains: Metrics, gains: Metrics, folder: Path, images: Images, start: str | None) -> str:
    """A fine-tuning that starts from the pretrained weights only if they are better than the initial ones.

    They are compared by their features or, where these are too close, by the loss.
    """
    compared = [gains.get('start' if start else 'random'), loss_gains.get('start' if start else 'guess')]
    signs = [gain.sign for gain in compared if gain is not None]
    is_better = next((sign for sign in signs if sign != report.TOO_CLOSE), report.TOO_CLOSE) == report.BETTER
    labelled = str(images.train.root) if images.classes else 'LABELLED_IMAGES'
    init = str(folder) if is_better else start or DEMO
    command = shlex.join(['beit-mm', 'finetune', labelled, '--init', init, '--out', f'{folder}_ft'])
    if is_better:
        return command
    if not signs:
        other = f'--init {shlex.quote(str(folder))}'
        return f'without classes nothing shows whether it helped; compare with {other}: {command}'
    return f'skip this pretraining, which did not clearly help, or give it more images and minutes: {command}'


def compare_features(
    trained: Checkpoint, images: Images, size: int, start: str | None = None
) -> tuple[dict[str, dict[str, Tensor]], Image.Image]:
    """Classifies held-out images by the features at the `end`, by those at the `start`, and by baselines.

    Each learns from `size` images. Returns method of METHODS -> features -> `right_answers`, empty without classes, and
    a picture of neighbours.
    """
    parts, extract, number = report.labels_of(images, size), FeatureExtractor(trained), len(images.classes)
    features = dict(end=read_features(extract, parts))
    bank, held_out = features['end']
    chosen = evenly(range(len(held_out['paths'])), NUM_QUERIES)
    queries = dict(paths=[held_out['paths'][row] for row in chosen], features=held_out['features'][chosen])
    names = {path: images.classes[label] for part in parts for path, label in part.items()} if number else {}
    picture = draw_neighbours(queries, bank, names)
    if not number:
        return {}, picture
    if start:
        features['start'] = read_features(FeatureExtractor(start, mean=extract.mean, std=extract.std), parts)
    features['random'] = read_features(extract.with_random_weights(), parts)
    # Pixels are compared without their brightness.
    pixels = (report.read_thumbnails(part.items()) for part in parts)
    features['thumbnails'] = [dict(features=(x - x.mean(dim=1, keepdim=True)).float(), labels=y) for x, y in pixels]
    answers: dict[str, dict[str, Tensor]] = {method: {} for method in METHODS}
    for name, (known, asked) in features.items():
        for method, right in answers.items():
            right[name] = right_answers(method, known, asked, number)
    return answers, picture


def right_answers(method: str, bank: Mapping[str, Any], held_out: Mapping[str, Any], number: int) -> Tensor:
    """1 or 0 for each held-out image, float64: whether a method of METHODS that learned from a bank is right."""
    asked, known, labels = held_out['features'], bank['features'], bank['labels']
    if method == 'linear':
        predicted, _ = linear_predict(asked, known, labels, number)
    else:
        predicted = knn_predict(asked, known, labels, number)
    return (predicted == held_out['labels']).double().cpu()


def read_features(extract: FeatureExtractor, parts: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Paths, standardised features and labels of each part's readable files."""
    found = []
    for part in parts:
        features, samples = extract.means([*map(ExistingPath, part)])
        paths = [sample['path'] for sample in samples if 'error' not in sample]
        found.append(dict(paths=paths, features=features, labels=torch.tensor([part[path] for path in paths])))
    standardise = standardiser(found[0]['features'])
    return [dict(part, features=standardise(part['features'])) for part in found]
