"""How a model's images are prepared, and whether its weights were trained on images prepared like that."""
import logging
from typing import Any

import numpy as np
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import nn

from beit_mm.registry import HOOKS

TOLERANCE = 1  # pixel values of 0-255: the rounding of published means


def preprocessing_of_model(model: nn.Module) -> dict[str, Any]:
    """Mean and standard deviation of each channel, pixels 0-255, and the image size that the model is built for.

    Returns:
        Plain lists `mean`, `std` and `size` (height, width) in pixels, each only where the model has it.
    """
    model = model.module if is_model_wrapper(model) else model
    found = {}
    for name in ('mean', 'std'):
        if (values := getattr(getattr(model, 'data_preprocessor', None), name, None)) is not None:
            # six digits are what a float32 keeps of 123.675
            found[name] = [float(f'{value:.6g}') for value in values.flatten().tolist()]
    backbone = getattr(model, 'backbone', None)
    if hasattr(backbone, 'grid'):
        found['size'] = [side * backbone.patch_size for side in backbone.grid]
    return found


@HOOKS.register_module()
class PreprocessingCheckHook(Hook):
    """Warns when the weights were trained on images that were normalised otherwise.

    The released checkpoints use three conventions, and a model that is fed by the wrong one works, only worse.
    """

    def before_train(self, runner: Runner) -> None:
        """Compares once the weights are loaded."""
        self._compare(runner)

    def before_test(self, runner: Runner) -> None:
        """Compares once the weights are loaded."""
        self._compare(runner)

    def _compare(self, runner: Runner) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        report = getattr(getattr(model, 'backbone', None), 'load_report', None)
        if report is None:
            return
        now = preprocessing_of_model(model)
        for name in ('mean', 'std'):
            before = report.preprocessing.get(name)
            if before and name in now and not np.allclose(before, now[name], atol=TOLERANCE):
                print_log(f'The weights from {report.source} were trained on images with {name} {before}; this config '
                          f"normalises with {name} {now[name]}. Set data_preprocessor.{name}, unless it is meant.",
                          logger='current', level=logging.WARNING)
