"""The mismatch of a running job on its dashboard: a few lines in a hook that slime has.

    --rollout-data-postprocess-path examples.report_online.log_mismatch

slime calls it on every rank, once per rollout, with the samples of that rank and the log-probs of both engines. The
numbers are those of ``mis-ext report``, of the first rank's samples. They go to wandb if a run is open, else to
TensorBoard, into the folder that ``MISMATCH_LOG_DIR`` names.
"""

import os

from mis_ext.report import Part, summarize


def mismatch_of(rollout_data: dict, *, step: int) -> dict[str, float]:
    """The numbers of the summary by name; empty where the host did not score the rollout."""
    if not rollout_data.get("log_probs") or not rollout_data.get("rollout_log_probs"):
        return {}
    part = Part.of_lists(
        proximal=rollout_data["log_probs"],
        behavior=rollout_data["rollout_log_probs"],
        masks=rollout_data["loss_masks"],
        step=str(step),
    )
    return {f"mismatch/{name}": value for name, value in summarize([part]).scalars().items()}


def log_mismatch(args: object, rollout_id: int, rollout_data: dict) -> None:
    """Write the numbers of a rollout; changes nothing."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    numbers = mismatch_of(rollout_data, step=rollout_id)
    try:
        import wandb

        is_open = wandb.run is not None
    except ImportError:
        is_open = False
    if is_open:
        wandb.log(numbers | {"rollout/step": rollout_id})
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(os.environ.get("MISMATCH_LOG_DIR", "runs/mismatch")) as writer:
        for name, value in numbers.items():
            writer.add_scalar(name, value, rollout_id)
