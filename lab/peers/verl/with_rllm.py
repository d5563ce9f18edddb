# SPDX-License-Identifier: Apache-2.0
"""rLLM's own trainer with its verl backend, in one process; ``train.py --rllm`` starts it.

Where rLLM asks Ray for workers, a server and the way of new weights to it, verl's worker is in this process, and the
engine is the recorded one of ``on_cpu.py``. The workflow is one response to a prompt. All else is rLLM's: what its task
runner does, its loop, its batches, its log-probs and advantages, its call of the update.
"""

from __future__ import annotations

import os
import pickle
from types import SimpleNamespace
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from on_cpu import Engine
from rllm.data import Dataset
from rllm.engine.rollout import ModelOutput
from rllm.trainer.verl.verl_backend import VerlBackend
from rllm.trainer.verl.verl_launcher import VerlTaskRunner
from rllm.types import Episode, Step, Trajectory
from rllm.workflows.workflow import Workflow
from verl.utils.ray_utils import auto_await
from verl.workers.engine_workers import ActorRolloutRefWorker

ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}


class OneTurn(Workflow):
    """One call of the engine; the reward is how many tokens are even."""

    async def run(self, task: dict[str, Any], uid: str, **_: Any) -> Episode:
        """The tokens and log-probs of verl's server, as rLLM's engine hands them on."""
        found = await self.rollout_engine.get_token_output_from_token_input(task["tokens"], application_id=uid)
        reward = float(sum(token % 2 == 0 for token in found.token_ids))
        names = {"prompt_ids": task["tokens"], "completion_ids": found.token_ids, "logprobs": found.log_probs}
        step = Step(model_output=ModelOutput(**names), reward=reward)
        return Episode(id=uid, task=task, trajectories=[Trajectory(name="words", steps=[step], reward=reward)])


class OneWorker:
    """A worker group: what goes to the worker is a copy, as between processes."""

    world_size = 1

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        self.worker, self._dispatch_info = worker, {"actor": [0]}

    def __getattr__(self, name: str) -> Any:
        return lambda *given: getattr(self.worker, name)(*pickle.loads(pickle.dumps(given)))


def without_ray(self: VerlBackend) -> None:
    """Takes the place of ``_init_colocated_workers``."""
    worker = ActorRolloutRefWorker(config=self.config.actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    self.actor_rollout_wg, self.async_rollout_manager = OneWorker(worker), True
    engine = Engine()

    async def update_weights(step: int) -> None:
        await worker.update_weights(global_steps=step, mode="naive")

    self.llm_server_manager = SimpleNamespace(get_client=lambda: engine, get_addresses=list)
    calls = {"sleep_replicas": auto_await(engine.nothing), "update_weights": update_weights}
    self.checkpoint_manager = SimpleNamespace(**calls)


@hydra.main(config_path="pkg://rllm.trainer.config", config_name="unified", version_base=None)
def main(config: Any) -> None:
    """What rLLM's launcher has its task runner do."""
    os.environ.update(ONE_RANK, MASTER_PORT="0", DIST_INIT_METHOD=f"file://{os.environ['RUN']}/group")
    VerlBackend._init_colocated_workers = without_ray
    pairs = [(first, second) for first in range(2, 6) for second in range(2, 6)]
    prompts = Dataset([{"id": f"{first}-{second}", "tokens": [first, second]} for first, second in pairs])
    runner = VerlTaskRunner.__ray_metadata__.modified_class()
    runner.run(config, OneTurn, {}, hydra_overrides=list(HydraConfig.get().overrides.task), train_dataset=prompts)


if __name__ == "__main__":
    main()
