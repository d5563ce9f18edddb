# SPDX-License-Identifier: Apache-2.0
"""Checks of the weights of the engines behind the router before a request: versions, and a canary."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mis_ext.rollout.canary import VERDICTS, Canary, CanaryResult, StaleWeightsError, StaleWeightsWarning, Verdict
from mis_ext.rollout.custom_generate.endpoints import SGLANG, ask_json, was_aborted
from mis_ext.rollout.custom_generate.host import KEY, Settings
from mis_ext.rollout.generation import Tokenizer

# Text, numbers, and code, as in prompts and responses; a few hundred tokens in most vocabularies.
CANARY_TEXT = """
A ship leaves the harbour at six in the morning with 48 boxes of oranges and 17 boxes of lemons. Each box of oranges
weighs 12 kilograms, and each box of lemons weighs half as much. How heavy is the freight? First we count the oranges:
48 * 12 = 576. The lemons weigh 17 * 6 = 102. Together that is 678 kilograms. The captain writes the number into her
book, looks at the sky, and decides to wait for an hour, because the wind comes from the west.

def freight(boxes: list[tuple[int, float]]) -> float:
    total = 0.0
    for count, weight in boxes:
        if count < 0:
            raise ValueError(f"a negative number of boxes: {count}")
        total += count * weight
    return total

Some words about the tide. Water rises and falls twice a day, since the Moon pulls the near side of the Earth more than
its centre, and the far side less. Who wants to leave a shallow bay should know the hour of high water; it comes about
fifty minutes later every day. Therefore the answer is: {"freight": 678, "unit": "kg", "departure": "07:00"}.
"""


class EngineWeights(NamedTuple):
    """The weights of all engines at one moment.

    Attributes:
        versions: The version of each engine's weights.
        verdict: The canary's worst verdict of all; None if it is off, or if the framework aborted it.
    """

    versions: tuple[str, ...]
    verdict: Verdict | None = None

    @property
    def cache_key(self) -> str:
        """Equal while no engine changes its weights: one version, or the versions of all engines if they differ."""
        return ",".join(self.versions if len({*self.versions}) > 1 else self.versions[:1])

    def is_outdated(self, meta_info: Mapping[str, Any]) -> bool:
        """True if a response began with later weights and reused a cached prefix of these."""
        spans = meta_info.get("weight_versions")
        began = spans[0]["version"] if spans else meta_info.get("weight_version")
        return bool(meta_info.get("cached_tokens")) and began is not None and str(began) not in self.versions


@dataclass(eq=False)
class Watch:
    """The engines of one address, a router or an engine. Concurrent requests share one reading."""

    address: str
    _reading: asyncio.Task[EngineWeights] | None = None
    _canaries: dict[str, tuple[Canary, CanaryResult]] = field(default_factory=dict)

    async def read(self, settings: Settings, tokenizer: Tokenizer) -> EngineWeights:
        """The current weights, or those of a reading that is in progress."""
        reading = self._reading
        # This event loop cannot wait for a task of another loop, of a thread or a finished run.
        if reading is None or reading.done() or reading.get_loop() is not asyncio.get_running_loop():
            reading = self._reading = asyncio.create_task(self._read(settings, tokenizer))
        # Cancelling one request must not cancel the reading for the others.
        return await asyncio.shield(reading)

    async def _read(self, settings: Settings, tokenizer: Tokenizer) -> EngineWeights:
        engines = await _engines(self.address, settings.max_attempts)
        versions = await asyncio.gather(*(_version(engine, settings.max_attempts) for engine in engines))
        if settings.canary is None:
            return EngineWeights(tuple(versions))
        found = zip(engines, versions, strict=True)
        results = await asyncio.gather(*(self._check(*each, settings, tokenizer) for each in found))
        for engine, result in zip(engines, results, strict=True):
            if result is not None and result.verdict == "old":
                message = f"{engine}: {result.explain()}"
                if settings.canary == "stop":
                    raise StaleWeightsError(message)
                # Python shows the same text only once.
                warnings.warn(message, StaleWeightsWarning, stacklevel=1)
        verdicts = (result.verdict for result in results if result is not None)
        return EngineWeights(tuple(versions), min(verdicts, key=VERDICTS.index, default=None))

    async def _check(self, engine: str, version: str, settings: Settings, tokenizer: Tokenizer) -> CanaryResult | None:
        canary, result = self._canaries.get(engine, (Canary(), None))
        if result is None or result.version != version:
            ids = tokenizer.encode(CANARY_TEXT, add_special_tokens=False)
            # Twice, to measure the engine's noise. Each scoring comes with the version that scored.
            for _ in range(2):
                scores = await _score(engine, ids, settings.max_attempts)
                if scores is None:
                    return None
                result = canary.check(*scores)
            assert result is not None
            self._canaries[engine] = canary, result
        return result


_WATCHES: dict[str, Watch] = {}


async def engine_weights(args: Any, settings: Settings, tokenizer: Tokenizer) -> EngineWeights | None:
    """The weights of the framework's engines, if a setting requires them."""
    if settings.canary is None and not settings.cache_by_version:
        return None
    address = SGLANG.router(args)
    return await _WATCHES.setdefault(address, Watch(address)).read(settings, tokenizer)


async def _engines(address: str, max_attempts: int) -> list[str]:
    """The addresses behind a router of SGLang or Miles; the address itself if it is an engine."""
    for path in ("/workers", "/list_workers"):
        answer = await _ask_or_none(f"{address}{path}", max_attempts)
        if answer is not None:
            workers = answer.get("workers", answer.get("urls"))
            if workers is None:
                break
            if not workers:
                raise ConnectionError(f"{address}{path}: the router has no workers yet")
            # The router sends no requests to unhealthy engines. If all are unhealthy, ask all, because they may
            # recover.
            healthy = [each for each in workers if not (isinstance(each, Mapping) and each.get("is_healthy") is False)]
            urls = [each["url"] if isinstance(each, Mapping) else each for each in healthy or workers]
            # A router with data parallelism lists each rank of a server as address@rank.
            return [*dict.fromkeys(re.sub(r"@\d+$", "", url) for url in urls)]
    return [address]


async def _version(engine: str, max_attempts: int) -> str:
    answer = await _ask_or_none(f"{engine}/model_info", max_attempts) or {}
    if answer.get("weight_version") is None:
        raise ValueError(
            f"{engine} reports no weight_version in /model_info, which {KEY}.cache_by_version and {KEY}.canary need: "
            "remove them, or use an SGLang version that reports it"
        )
    return str(answer["weight_version"])


async def _ask_or_none(url: str, max_attempts: int) -> dict[str, Any] | None:
    try:
        return await ask_json(url, max_attempts=max_attempts)
    except ConnectionError as error:
        if isinstance(error.__cause__, urllib.error.HTTPError) and error.__cause__.code == 404:
            return None
        raise


async def _score(engine: str, ids: list[int], max_attempts: int) -> tuple[str, list[float]] | None:
    """Return the version that scored the text, and its log-probs of all tokens except the first.

    None if the framework aborted it together with all requests.
    """
    request = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await ask_json(f"{engine}/generate", request, max_attempts=max_attempts)
    meta = answer.get("meta_info") or {}
    if was_aborted(meta):
        return None
    rows = meta.get("input_token_logprobs") or []
    if [row[1] for row in rows] != ids or meta.get("weight_version") is None:
        raise ValueError(
            f"{engine} did not score the canary: {len(rows)} log-probs of {len(ids)} tokens, weight_version "
            f"{meta.get('weight_version')!r}; remove canary"
        )
    return str(meta["weight_version"]), [row[0] for row in rows[1:]]
