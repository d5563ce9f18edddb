# SPDX-License-Identifier: Apache-2.0
"""Stands for CUDA in the processes of slime, Miles and Megatron-LM: their calls for a GPU go to the CPU.

No file of theirs is changed. `install` replaces functions of ``torch.cuda`` in the running process, sends tensors that
are asked for on CUDA to the CPU, and registers an accelerator with slime's own registry, where slime is. Every Ray
worker calls it first, as Ray's ``worker_process_setup_hook``.
"""

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

from . import weight_transfer

MEMORY_BYTES = 2**34
# They ask torch.cuda while they are imported, and must hear the truth.
ASK_AT_IMPORT = ("torch._dynamo", "transformers.modeling_utils", "sglang.srt.server_args", "sglang.srt.utils")

RENAMED_COLLECTIVES = ("all_gather_single", "reduce_scatter_single")


def always(value: Any) -> Callable[..., Any]:
    """Make a function of any arguments that returns ``value``."""
    return lambda *_, **__: value


class Stream:
    """A stream or an event of which every operation has already happened."""

    wait = wait_stream = wait_event = record = synchronize = always(None)
    query = always(True)
    elapsed_time = always(0.0)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, *_: Any) -> "Stream":
        """Return an event that has happened."""
        return self


def names_cuda(device: Any) -> bool:
    """Whether a ``device`` argument means a GPU: ``"cuda"``, ``"cuda:1"``, ``torch.device("cuda")``, or an index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class CudaTensorsOnCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA, or pinned, are plain CPU tensors. Their type name says CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if name == "to" and len(args) > 1 and names_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        result = func(*args, **kwargs)
        # Megatron-LM's gradient clipping looks for this name.
        if name == "type" and len(args) == 1 and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def install() -> None:
    """Let a process that has no GPU pass for one that has one."""
    for module in ASK_AT_IMPORT:
        if find_spec(module.partition(".")[0]) is not None:
            importlib.import_module(module)
    _replace_cuda_functions()
    _replace_meshes()
    CudaTensorsOnCpu().__enter__()
    for host in ("slime", "miles"):
        if find_spec(host) is not None:
            _pass_on_new_names(importlib.import_module(f"{host}.utils.reloadable_process_group").ReloadableProcessGroup)
    if find_spec("slime") is not None:
        _register_accelerator()
    weight_transfer.install_engine()
    if find_spec("miles") is not None:
        weight_transfer.install()
        weight_transfer.find(OVER_GLOO)


def _replace_cuda_functions() -> None:
    cuda = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "ipc_collect", "init", "_lazy_init"):
        setattr(cuda, name, always(None))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, always(0))
    cuda.reset_peak_memory_stats = always(None)
    cuda.memory_stats = always({})
    cuda.mem_get_info = always((MEMORY_BYTES, MEMORY_BYTES))
    cuda.current_device = always(0)
    cuda.device_count = always(1)
    cuda.is_initialized = always(True)
    cuda.get_device_capability = always((9, 0))
    cuda.get_device_name = always("cpu")
    cuda.get_device_properties = always(SimpleNamespace(name="cpu", major=9, minor=0, total_memory=MEMORY_BYTES))
    cuda._lazy_call = lambda callback, **_: callback()
    cuda.Stream = cuda.Event = Stream
    cuda.stream = cuda.device = always(nullcontext())
    cuda.current_stream = cuda.default_stream = always(Stream())
    cuda.default_generators = (torch.default_generator,)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        module.manual_seed = module.manual_seed_all = _seed
        module.initial_seed = torch.initial_seed
    torch.nn.Module.cuda = lambda self, device=None: self
    # The compiler does not take the functions above.
    torch.compile = _not_compiled


def _replace_meshes() -> None:
    """Make a mesh of CUDA devices one of processes on the CPU."""
    original = device_mesh.init_device_mesh

    @functools.wraps(original)
    def on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.distributed.init_device_mesh = device_mesh.init_device_mesh = on_cpu


def _pass_on_new_names(wrapper: Any) -> None:
    """Let the frameworks' wrapper of a process group forward the collectives that torch 2.13 renamed.

    Megatron-LM's reduce-scatter and all-gather arrive there by them, and would find no backend.
    """

    def passing_on(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self.group, name)(*args, **kwargs)

    for name in RENAMED_COLLECTIVES:
        if name not in vars(wrapper):
            setattr(wrapper, name, passing_on(name))


def _over_gloo(name: str) -> Callable[[Any], None]:
    """Make a completion of a module or class whose function joins a group by the name of its backend."""

    def complete(owner: Any) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def joined(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
            return function(*args, backend="gloo" if backend == "nccl" else backend, **kwargs)

        setattr(owner, name, joined)

    return complete


def _engine_over_gloo(module: Any) -> None:
    _over_gloo("init_weights_update_group")(module.SGLangEngine)


# Miles says NCCL to itself and to the engine that gets its weights, and has no flag for it.
OVER_GLOO = {
    "miles.utils.distributed_utils": _over_gloo("init_process_group"),
    "miles.backends.sglang_utils.sglang_engine": _engine_over_gloo,
}


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _not_compiled(function: Any = None, **_: Any) -> Any:
    return function if function is not None else lambda decorated: decorated


def _register_accelerator() -> None:
    """Give slime's registry a CPU whose processes speak gloo."""
    from slime.utils.accelerator import register_accelerator
    from slime.utils.accelerator.base import Accelerator

    class Cpu(Accelerator):
        name = device_type = "cpu"
        communication_backend_name = "gloo"
        is_available = always(True)
        device = always(torch.device("cpu"))
        device_name = current_device = always("cpu")
        device_count = always(1)
        set_device = synchronize = empty_cache = always(None)
        current_stream = default_stream = always(Stream())
        mem_get_info = always((MEMORY_BYTES, MEMORY_BYTES))
        memory_allocated = memory_reserved = always(0)

        def stream(self, _: Any) -> AbstractContextManager[None]:
            return nullcontext()

        def supports(self, capability: str) -> bool:
            return capability in ("rng", "bf16")

    register_accelerator("cpu", Cpu, always(True), priority=50, communication_backends=("gloo",))
