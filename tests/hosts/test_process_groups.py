# SPDX-License-Identifier: Apache-2.0
"""Real gloo processes: where a rank stands, and what the other one learns when it fails."""

import argparse
import itertools
import os
import platform
import runpy
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hook_batches import make_batch
from process_ranks import on_processes
from torch.distributed.device_mesh import init_device_mesh

import mis_ext
from mis_ext import Groups, prepare_rollout
from mis_ext.correction import collectives

pytestmark = pytest.mark.distributed

KEPT = {"use_tis": True, "mis_denominator": "kept", "use_rs": True, "rs_lower_bound": 0.98, "rs_upper_bound": 1.02}


def places(groups: Groups) -> tuple[int, ...]:
    return groups.cp_rank, groups.cp_size, groups.dp_rank, groups.dp_size


def check_process_groups(rank: int) -> None:
    everyone, alone = dist.group.WORLD, dist.new_subgroups(1)[0]
    assert places(Groups.of_process_groups()) == (0, 1, 0, 1)
    assert Groups.of_process_groups().is_alone
    of_dp = Groups.of_process_groups(dp_group=everyone, cp_group=alone)
    assert places(of_dp) == (0, 1, rank, 2)
    assert (of_dp.cp_group, of_dp.dp_group) == (None, everyone)
    assert of_dp.without_data_parallelism == Groups()
    of_cp = Groups.of_process_groups(cp_group=everyone)
    assert places(of_cp) == (rank, 2, 0, 1)
    assert of_cp.without_data_parallelism == of_cp
    assert of_cp.is_first_rank == of_dp.is_first_rank == (rank == 0)


class Reloadable(dist.ProcessGroup):
    """A group as slime and Miles make them: their functions of torch.distributed take it, and torch's own do not."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(rank=dist.get_rank(group), size=dist.get_world_size(group))
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    @staticmethod
    def patched(name: str) -> Any:
        function = getattr(dist, name)

        def unwrapped(value: Any) -> Any:
            return value.group if isinstance(value, Reloadable) else value

        def unwrapping(*args: Any, **given: Any) -> Any:
            # torch 2.13 warns of the old name, and so it does in a host.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return function(*map(unwrapped, args), **{key: unwrapped(value) for key, value in given.items()})

        return mock.patch.object(dist, name, unwrapping)


def check_groups_of_a_host(rank: int) -> None:
    row, group = torch.full((2,), float(rank)), Reloadable(dist.group.WORLD)
    with Reloadable.patched("get_world_size"), Reloadable.patched("all_gather_into_tensor"):
        rows = collectives.gather_rows(row, group)
    assert rows.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def check_session(rank: int) -> None:
    """A session over a mesh gives the numbers of one rank."""
    groups = Groups.of_process_groups(dp_group=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).get_group("dp"))
    config = mis_ext.config_from_mapping(KEPT)

    def streams(*batches: dict) -> mis_ext.PackedStreams:
        names = ("train_log_probs", "rollout_log_probs", "loss_masks")
        columns = [torch.cat([sample for batch in batches for sample in batch[name]]) for name in names]
        lengths = [length for batch in batches for length in batch["response_lengths"]]
        return mis_ext.PackedStreams(*columns, mis_ext.PackedLayout.whole(lengths))

    batches = [make_batch(seed=seed) for seed in range(2)]
    whole = mis_ext.Session(config).correct(streams(*batches))
    mine = mis_ext.Session(config).correct(streams(batches[rank]), groups=groups)
    torch.testing.assert_close(mine.weights_T, whole.weights_T.chunk(2)[rank], rtol=1e-6, atol=0.0)
    assert torch.equal(mine.keep_mask_R, whole.keep_mask_R.chunk(2)[rank])


def check_rollout(rank: int) -> None:
    """No Megatron here: `prepare_rollout` is told its groups."""
    from mis_ext.hosts.slime_miles import rollout

    rollout.find_groups = lambda: Groups.of_process_groups(dp_group=dist.group.WORLD)
    batch = make_batch(seed=rank)
    data = batch | {"rollout_mask_sums": [mask.sum() for mask in batch["loss_masks"]]}
    args = argparse.Namespace(**KEPT)
    prepare_rollout(args, 0, data)
    if rank == 1:
        del data["loss_masks"]
    kind, message = (KeyError, "loss_masks") if rank == 1 else (RuntimeError, "failed on rank 1;")
    with pytest.raises(kind, match=message):
        prepare_rollout(args, 1, data)


HOOK = {"use_tis": True, "custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp"}


def start(**keys: Any) -> None:
    mis_ext.check_setup(argparse.Namespace(**HOOK | {"rank": dist.get_rank()} | keys))


@contextmanager
def own_folder(**texts: str) -> Iterator[Path]:
    """What a node has in the folder in which it works, which Python's path names first."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend("")
        for name, text in texts.items():
            Path(f"{name}.py").write_text(text)
        yield Path(folder)


def check_a_start_that_is_right_on_every_node(rank: int) -> None:
    with redirect_stdout(StringIO()) as out:
        start()
    assert out.getvalue().count("\n") == 1 - rank


def check_a_function_that_is_on_one_node_alone(rank: int) -> None:
    module = {} if rank else {"only_here": "from mis_ext import compute_mis_weights_with_cp as mine\n"}
    message = f"ranks differ; rank 1 on {platform.node()}: ModuleNotFoundError: .*No module named 'only_here'"
    with own_folder(**module), pytest.raises(RuntimeError, match=message) as caught:
        start(custom_tis_function_path="only_here.mine")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError) == bool(rank)


def check_a_file_of_keys_that_is_on_one_node_alone(rank: int) -> None:
    """The host has read it where train.py runs."""
    with own_folder() as folder:
        if rank == 0:
            (folder / "keys.yaml").write_text("tis_upper_bound: 2.0\n")
        start(custom_config_path="keys.yaml", tis_upper_bound=2.0)


def check_an_error_of_all_nodes_is_that_of_one(rank: int) -> None:
    with pytest.raises(ValueError, match=r"^unknown keys: 'tis_levl'"):
        start(tis_levl="token")


def check_other_files_of_the_package_on_one_node(rank: int) -> None:
    with own_folder() as folder:
        copy = shutil.copytree(Path(mis_ext.__file__).parent, folder / "copy")
        with mock.patch.object(mis_ext, "__file__", str(copy / "__init__.py")):
            if rank:
                # An editor's lock, and its copies.
                (copy / ".#weights.py").symlink_to("nobody@nowhere.1")
                (copy / ".ipynb_checkpoints").mkdir()
                (copy / ".ipynb_checkpoints" / "weights-checkpoint.py").touch()
            start()
            if rank:
                (copy / "_presets" / "mis.yaml").open("a").write("# another commit\n")
            files = rf"mis_ext {mis_ext.__version__}, files \w+, eager"
            message = f"rank 0 on {platform.node()}: {files}; rank 1 on {platform.node()}: {files}; install the same"
            with pytest.raises(RuntimeError, match=message):
                start()


def check_another_backend_on_one_node(rank: int) -> None:
    backend = {} if rank else {"MIS_EXT_BACKEND": "tritn"}
    with mock.patch.dict(os.environ, backend), pytest.raises(RuntimeError, match=r"rank 0 on .*'tritn'.*install the"):
        start()


def plain_gradient(model: torch.nn.Module, batches: list[Any]) -> torch.Tensor:
    """One token after the other, with the rules of `TRUNCATE_AND_MASK`."""
    loss, count = torch.zeros(()), 0.0
    for batch in batches:
        for first, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            log_probs = model(batch.token_ids[first:end]).log_softmax(-1)
            for place in range(first + 1, end):
                current = log_probs[place - 1 - first, batch.token_ids[place]]
                mask = float(batch.response_mask[place])
                ratio = float((current.detach() - batch.behavior_logprobs[place]).exp())
                count += mask
                if mask and 0.35 <= ratio <= 1.8:
                    loss = loss - mask * min(ratio, 1.05) * batch.advantages[place] * current
    (loss / count).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


TRUNCATE_AND_MASK = {
    "use_tis": True,
    "tis_level": "token",
    "tis_upper_bound": 1.05,
    "use_rs": True,
    "rs_level": "token",
}
TRUNCATE_AND_MASK |= {"rs_lower_bound": 0.35, "rs_upper_bound": 1.8}


def check_the_example_of_context_parallelism(rank: int) -> None:
    """Also with a fractional mask, and where a data-parallel rank has fewer micro-batches than the other."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "context_parallel.py"))
    of_cp = Groups.of_process_groups(cp_group=dist.group.WORLD)
    of_dp = Groups.of_process_groups(dp_group=dist.group.WORLD)
    for groups, seeds in ((of_cp, [[0, 1]] * 2), (of_dp, [[0, 1], [2]])):
        batches = {seed: example["example_batch"](groups.cp_size, seed) for own in seeds for seed in own}
        for batch in batches.values():
            batch.behavior_logprobs[:3] = torch.nan
        half = batches[0].response_mask * torch.tensor([1.0] * 4 + [0.5] + [1.0] * 6)
        batches[0] = batches[0]._replace(response_mask=half)
        model, wanted = example["example_model"](), plain_gradient(example["example_model"](), [*batches.values()])
        session, own = mis_ext.Session(TRUNCATE_AND_MASK), [batches[seed] for seed in seeds[rank]]
        metrics = example["step"](model, own, session, groups, num_calls=2)
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        # float32, sums of 20 tokens in another order.
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
        assert 0.0 < metrics["train/mis_kept_token_fraction"] < 1.0


CHECKS: dict[str, Callable[[int], None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}

test_on_two_processes = on_processes(CHECKS, world_size=2, seconds=60)
