"""Every process draws its own noise."""
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.runner import Runner, set_random_seed

from beit_mm.registry import HOOKS


@HOOKS.register_module()
class RankSeedHook(Hook):
    """Seeds each process with the run's seed plus its rank, once the model stands.

    mmengine seeds all alike: sixteen processes would mix, cut and drop with the same draws. (Its own
    `randomness.diff_rank_seed` takes the seed away from the samplers.) Weights are drawn before and stay the same in
    all processes; samples are drawn by their own keys (see functional.sample_seed) and stay the same for any number
    of them; process 0 draws what a run of one process draws.

    Source: microsoft/unilm `beit/run_class_finetuning.py`: seed = args.seed + rank.
    """

    def before_train(self, runner: Runner) -> None:
        """Runs once, after the weights are drawn or loaded."""
        if get_rank() > 0:
            set_random_seed(runner.seed + get_rank())
