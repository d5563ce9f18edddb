# SPDX-License-Identifier: Apache-2.0
"""What a session begins with, here and in the lab, and the fixtures that several files share."""

import contextlib
import gc
import os
import random
import sys
from collections import Counter
from types import ModuleType

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Properties draw other examples in each run, all from one seed."""
    if config.pluginmanager.hasplugin("hypothesispytest") and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.getrandbits(32))


def pytest_sessionstart(session):
    """Without a GPU, Triton's kernels run in its interpreter; and no example of Hypothesis is too slow."""
    if session.config.pluginmanager.has_plugin("dsession"):
        # The process that hands tests out with -n imports neither torch nor tests.
        return
    import torch

    # Of the data of a test; tests of these warnings use pytest.warns.
    session.config.addinivalue_line("filterwarnings", "ignore::mis_ext.hosts.guards.MismatchWarning")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # The environment of SGLang has no Hypothesis.
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        # In place of its own, for a machine that others use.
        settings.register_profile("default", settings.get_profile("default"), deadline=None)
        settings.load_profile("default")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files whose ranks are processes are one: what forks the ranks starts once, for which it takes some seconds."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    of_ranks = {
        path.relative_to(config.rootpath).as_posix()
        for folder in ("tests", "lab/tests")
        for path in (config.rootpath / folder).rglob("test_*.py")
        if "process_ranks" in path.read_text(encoding="utf-8")
    }

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            name = super()._split_scope(nodeid)
            return "ranks" if name in of_ranks else name

    return Files(config, log)


def pytest_terminal_summary(terminalreporter, config):
    # Of a skipped test the third part says why.
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} skipped: {' '.join(reason.removeprefix('Skipped: ').split())}")
    if terminalreporter.stats.get("failed"):
        import torch

        terminalreporter.line(f"kernels of torch: {torch.backends.cpu.get_cpu_capability()}")
        if seed := getattr(config.option, "hypothesis_seed", None):
            terminalreporter.line(f"The same examples: --hypothesis-seed={seed}")


def pytest_collection_modifyitems(items):
    """Files with long tests first, so that at the end no process is left alone with one of them."""
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("distributed")}
    items.sort(key=lambda item: item.path not in long)


_NVTE = {name for name in os.environ if name.startswith("NVTE_")}


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Megatron-Core writes a model's kernels of attention into the environment, and refuses those of the next model."""
    for name in [name for name in os.environ if name.startswith("NVTE_") and name not in _NVTE]:
        del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing that collecting makes is garbage: looking for it took an eighth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """What was imported stays: a collector that looks through all of it takes a fifth of the time of the tests.

    Tests import and keep more. With Python's thresholds it looked through that 180 times, for 6 % of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        from interpreted import quicken

        quicken(interpreter)


@pytest.fixture
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer():
    """That of the recorded responses, where a file has no other."""
    from responses import recorded_tokenizer

    return recorded_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """The tiny English tokenizer as a checkpoint; to be read only."""
    from tiny_tokenizers import english_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    english_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Llama with its tokenizer, as a checkpoint; to be read only."""
    from tiny_checkpoint import write_tiny_checkpoint

    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def graded(monkeypatch):
    """Rewards that differ from answer to answer, so that there is something to learn."""
    from grpo import questions

    monkeypatch.setitem(
        questions._TASKS, "arithmetic", lambda rng: (f"{rng.randrange(100)} x 7?", lambda answer: len({*answer}) / 9)
    )


@pytest.fixture
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def short_pauses(monkeypatch):
    """Between attempts to reach a server."""
    from mis_ext.rollout.custom_generate import endpoints

    monkeypatch.setattr(endpoints, "_SECONDS_BETWEEN_ATTEMPTS", 0.01)


@pytest.fixture
def environment(monkeypatch):
    """Names an environment that says what it was given, and records what it was told."""

    def install(*replies):
        module = ModuleType("an_environment")
        module.told = []
        left = list(replies)

        async def step(sample, text):
            module.told.append(text)
            return left.pop(0)

        module.step = step
        monkeypatch.setitem(sys.modules, "an_environment", module)
        return module

    return install
