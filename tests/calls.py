"""Calls of `pretrain` and `finetune`, planned without being run."""

import inspect

import beit_mm
from beit_mm.own_images.classification import Classification
from beit_mm.own_images.images import Images
from beit_mm.own_images.label_maps import LabelMaps
from beit_mm.own_images.pretraining import Pretraining
from beit_mm.own_images.record import Record
from beit_mm.own_images.segmentation import Segmentation
from beit_mm.own_images.task import Task


def call_of(verb: str, images: object = '.', device: str | None = None, **options: object) -> Record:
    """The record of a call with these options."""
    arguments = dict.fromkeys(inspect.signature(getattr(beit_mm, verb)).parameters) | options
    del arguments['images'], arguments['out']
    call = Record.of_call(verb, images, arguments)
    (Pretraining if verb == 'pretrain' else Segmentation).check(call)
    call.device = device
    return call


def task_of(images: Images, verb: str, init: str | None = None, **options: object) -> Task:
    """The task with its plan."""
    kind = Segmentation if isinstance(images, LabelMaps) else Classification
    task = (Pretraining if verb == 'pretrain' else kind)(call_of(verb, init=init, **options), images)
    task.make_plan()
    return task


def described(task: Task, subject: str) -> list[str]:
    """What the user is told about a subject of the plan."""
    return [text for of, text in task.described() if of == subject and text]
