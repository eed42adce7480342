"""How mmengine reads checkpoint files once our models are there: safely, and BEiT files of any format."""
import logging
from typing import Any

from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader

from beit_mm.checkpoint.content import architecture_of, check_version, meta_of, preprocessing_of, weights_of
from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.formats import first_names, to_ours
from beit_mm.checkpoint.keys import recognise
from beit_mm.checkpoint.locate import locate_weights
from beit_mm.checkpoint.origin import Origin, mark_origin
from beit_mm.checkpoint.reader import read_checkpoint

ADVICE = 'Name a file that exists, as load_from, init_cfg.checkpoint, --resume or on the command line.'
# Files with OpenMMLab's names keep them: its own classes in the same process may want them, and ours translate what
# they are given. Others have no prefix by which mmengine could find the backbone's part, so they get our names at once.
OPENMMLAB = ('beit_mm', 'mmpretrain/mmseg', None)


def load_from_file(filename: str, map_location: object = None) -> dict[str, Any]:
    """Content of a checkpoint file in OpenMMLab's form: dict(state_dict=..., meta=..., ...).

    Args:
        filename: path or URL.
        map_location: ignored; models and optimizers copy to where their parameters are.

    Raises:
        FileNotFoundError: with the places looked at.
        CheckpointError: no checkpoint, damaged, or written by a later version.
        UnsafeCheckpointError: the file wants to run code.
    """
    path = locate_weights(filename, ADVICE)
    # Not mapped: an optimizer on the CPU keeps the very tensors that it is given, and would crash the process when the
    # file is written again in place, as a script would that edits a checkpoint.
    content = read_checkpoint(path, copied=True)
    check_version(content, path)
    weights = weights_of(content)
    source = recognise(weights)
    preprocessing = preprocessing_of(content, path)
    origin = Origin(str(path), source, preprocessing, architecture_of(content, path), first_names(weights))
    if source not in OPENMMLAB:
        try:
            translation = to_ours(weights)
        except CheckpointError as error:
            raise CheckpointError(f'{path} {error}. Nothing was loaded.') from None
        content = dict(state_dict=translation.weights, meta=dict(meta_of(content), preprocessing=preprocessing))
        if translation.left_out:
            print_log(f'{path} ({source}) holds tensors that no model of ours has: {translation.left_out}',
                      logger='current', level=logging.WARNING)
    elif source is not None:
        content['state_dict'] = weights  # under names without wrappers
    mark_origin(weights_of(content), origin)
    if 'message_hub' in content and 'beit_mm_format' not in meta_of(content):
        print_log(f'The log history in {path} consists of pickled objects and is left out.', logger='current',
                  level=logging.WARNING)
        content['message_hub'] = dict(log_scalars={}, runtime_info={}, resumed_keys={})
    return content


def refuse_scheme(filename: str, map_location: object = None) -> None:
    """Stands for mmengine's other ways to read, which would run what a file holds."""
    raise CheckpointError(f'{filename}: only paths and http(s) addresses are read, since nothing in these files is '
                          'executed; fetch the file and name it.')


def install_loader() -> None:
    """Makes `load_from_file` the way in which mmengine reads paths and URLs, and closes its other ways.

    mmengine 0.10.7 cannot read its own checkpoints with torch >= 2.6; its successors run whatever code a file holds.
    `mim` and the libraries' own scripts start processes in which nothing of ours runs but what the config names, so
    this is done when our models are imported.
    """
    CheckpointLoader.register_scheme(list(CheckpointLoader._schemes), refuse_scheme, force=True)
    CheckpointLoader.register_scheme(('', 'http://', 'https://'), load_from_file, force=True)
