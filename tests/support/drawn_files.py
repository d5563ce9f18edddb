# SPDX-License-Identifier: Apache-2.0
"""Drawn configuration files: legal, with one mistake, or pasted from another framework's configuration."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

CLASSES = ("legal", "misspelt", "out of range", "wrong type", "YAML 1.1", "no effect", "pasted")


class DrawnFile(NamedTuple):
    """``keys``: the text of the value of each key. ``wrong``: the key with the mistake, or None."""

    kind: str
    launch: str
    keys: dict[str, str]
    wrong: str | None

    @property
    def text(self) -> str:
        """The file, one line per key."""
        return "".join(f"{key}: {value}\n" for key, value in self.keys.items())


def draw(seed: int, count: int) -> list[DrawnFile]:
    """``count`` files, equally many of each class."""
    random = Random(seed)
    return [_DRAW[CLASSES[place % len(CLASSES)]](random) for place in range(count)]


def _correction(random: Random) -> dict[str, str]:
    """Legal keys of a correction, as users combine them."""
    keys = {"use_tis": "true"}
    level = random.choice(("token", "token", "sequence", "geometric", "none"))
    low, high = ("0.99", "1.01") if level == "geometric" else ("0.5", random.choice(("1.5", "2.0", "5")))
    if level != "token" or random.random() < 0.5:
        keys["tis_level"] = level
    if level != "none":
        mode = random.choice(("truncate", "clip", "mask", "unbounded"))
        keys["tis_mode"] = mode
        if mode != "unbounded":
            keys["tis_upper_bound"] = high
        if mode in ("clip", "mask") and random.random() < 0.5:
            keys["tis_lower_bound"] = low
        if random.random() < 0.2:
            keys["tis_batch_normalize"] = "true"
            keys["tis_normalize_scope"] = random.choice(("micro_batch", "data_parallel"))
    if level == "none" or random.random() < 0.4:
        keys |= {"use_rs": "true", "rs_level": random.choice(("token", "sequence", "geometric"))}
        keys |= {"rs_lower_bound": "0.95", "rs_upper_bound": "1.05"}
        if random.random() < 0.4:
            gate = random.choice(("{statistic: k3, high: 0.5}", "{reduce: sum, low: 0.2, high: 5.0, action: zero}"))
            keys["rs_gates"] = f"[{gate}]"
    for key, values in _ALONE.items():
        if random.random() < 0.15:
            keys[key] = random.choice(values)
    return keys


_ALONE = {
    "rs_veto_threshold": ("1.0e-4", "0.001"),
    "rs_veto_upper_threshold": ("100", "1.0e+4"),
    "rs_veto_probability": ("1.0e-6",),
    "mis_metrics": ("core", "all", "[mis_kl, mis_k3_kl]"),
    "mis_metric_max": ("5", "20.0"),
    "mis_guard": ("warn", "error", "{degenerate_behavior: warn}"),
    "mis_denominator": ("fixed",),
    "mis_max_reject_fraction": ("0.5", "1"),
}
"""Keys that need no other, with legal values."""

_LOSSES = (
    {},
    {"mis_loss_mode": "decoupled"},
    {"mis_loss_mode": "bypass"},
    {"mis_loss_mode": "reinforce"},
    {"mis_loss_method": "icepop", "use_tis": "false"},
    {"mis_loss_method": "{name: gspo, high: 1.01}", "use_tis": "false"},
    {"mis_loss_denominator": "sequence"},
    {"mis_loss_denominator": "constant", "mis_loss_constant": "1024"},
    {"mis_loss_proximal": "current"},
    {"mis_loss_scoring": "fused", "mis_loss_inplace": "true"},
    {"use_kl_loss": "true", "kl_loss_coef": "0.01", "mis_loss_unbiased_kl": "true"},
    {"entropy_coef": "0.01", "eps_clip": "0.2"},
)


def _legal(random: Random) -> DrawnFile:
    keys, launch = _correction(random), random.choice(("hook", "hook", "loss"))
    if launch == "loss":
        loss = random.choice(_LOSSES)
        keys = dict(loss) if loss.get("use_tis") == "false" else keys | loss
    return DrawnFile("legal", launch, keys, None)


def _with(file: DrawnFile, kind: str, key: str, value: str, *, drop: str | None = None) -> DrawnFile:
    """The file with a wrong key at any place."""
    keys = {name: each for name, each in file.keys.items() if name not in (key, drop)}
    if key.startswith("mis_loss_"):
        return DrawnFile(kind, "loss", keys | {key: value}, key)
    return DrawnFile(kind, file.launch, {key: value} | keys, key)


def _slip(random: Random, key: str) -> str:
    """Typing errors in a name: a letter missing, doubled or exchanged, another case, a dash, a lost prefix."""
    place = random.randrange(1, len(key) - 1)
    pair = key[place + 1] + key[place]
    slips = [
        key[:place] + key[place + 1 :],
        key[:place] + key[place] + key[place:],
        key[:place] + pair + key[place + 2 :],
        f"{key}s",
        key.upper(),
        key.replace("_", "-"),
    ]
    if key.count("_") > 1 and not key.startswith("use_"):
        slips.append(key.partition("_")[2])
    return random.choice([slip for slip in slips if slip != key])


def _misspelt(random: Random) -> DrawnFile:
    file = _legal(random)
    key = random.choice([*file.keys])
    while (slip := _slip(random, key)) in _OTHER_NAMES or "_" not in slip.replace("-", "_"):
        key = random.choice([*file.keys])
    return _with(file, "misspelt", slip, file.keys[key], drop=key)


_OTHER_NAMES = ("kl_loss", "loss_coef", "entropy", "clip")
"""Slips that are names of other flags."""

_OUT_OF_RANGE = {
    "tis_level": ("tokens", "seq", "segment", "Token"),
    "tis_mode": ("truncated", "clamp", "cap"),
    "tis_upper_bound": ("0", "-1.0", ".inf", ".nan"),
    "tis_lower_bound": ("-0.5", ".inf", "7.0"),
    "tis_when": ("old", "never"),
    "rs_level": ("sample", "geometric_mean"),
    "rs_lower_bound": ("-1", "9.0"),
    "rs_upper_bound": ("0.0", "-2"),
    "rs_gates": ("[{reduce: prefix, high: 2.0}]", "[{statistic: k4, high: 1.0}]", "[{low: 3.0, high: 1.0}]", "[{}]"),
    "rs_veto_threshold": ("0", "2.0"),
    "rs_veto_upper_threshold": ("0.5", ".inf"),
    "rs_veto_probability": ("1.5",),
    "rs_max_staleness": ("-1",),
    "rs_staleness_level": ("sequence",),
    "tis_normalize_scope": ("global", "batch"),
    "tis_normalize_over": ("all",),
    "mis_denominator": ("survivors", "token"),
    "mis_metrics": ("some", "[mis_k4_kl]"),
    "mis_metric_max": ("-1",),
    "mis_guard": ("ignore", "{shifted: warn}", "{degenerate_behavior: skip}"),
    "mis_max_reject_fraction": ("1.5", "-0.1"),
    "mis_group_baseline": ("median",),
    "mis_group_over": ("rejected",),
    "mis_loss_mode": ("ppo", "Bypass"),
    "mis_loss_method": ("gsp", "{name: gspo, clip: 0.2}", "{name: gspo, clip_low: 7}"),
    "mis_loss_denominator": ("tokens",),
    "mis_loss_constant": ("0", "-5"),
    "mis_loss_kl_tokens": ("none",),
    "mis_loss_entropy_tokens": ("rejected",),
    "mis_loss_proximal": ("old",),
    "mis_loss_scoring": ("slime",),
}


def _out_of_range(random: Random) -> DrawnFile:
    key = random.choice([*_OUT_OF_RANGE])
    return _with(_legal(random), "out of range", key, random.choice(_OUT_OF_RANGE[key]))


_SWITCHES = (
    *("use_tis", "use_rs", "tis_batch_normalize", "rs_veto_requires_rs", "mis_staleness", "mis_prompt_mean"),
    *("get_mismatch_metrics", "calculate_per_token_loss", "use_rollout_logprobs"),
    *("mis_loss_unbiased_kl", "mis_loss_inplace"),
)
_NUMBERS = (
    *("tis_upper_bound", "tis_lower_bound", "rs_upper_bound", "rs_lower_bound", "rs_veto_threshold"),
    *("rs_veto_upper_threshold", "rs_veto_probability", "rs_max_staleness", "mis_metric_max"),
    *("mis_max_reject_fraction", "mis_loss_constant"),
)
_WORDS = ("tis_level", "tis_mode", "rs_level", "mis_denominator", "tis_normalize_over", "mis_loss_mode")


def _wrong_type(random: Random) -> DrawnFile:
    kinds = (
        (_SWITCHES, ("1", "'true'", "[true]", "'yes'")),
        (_NUMBERS, ("true", "'2.0'", "[2.0]", "{high: 2.0}", "two")),
        (_WORDS, ("1", "true", "[token]", "{name: token}")),
        (("rs_gates",), ("{high: 2.0}", "token", "[token]", "[{high: '2'}]", "[{high: 2.0, name: 5}]", "2.0")),
        (("mis_metrics",), ("{mis_kl: true}", "[1]", "true")),
        (("mis_guard",), ("[warn]", "1", "{1: warn}")),
        (("mis_loss_method",), ("1", "[gspo]", "{clip_low: 0.2}")),
    )
    keys, values = random.choices(kinds, weights=[len(keys) for keys, _ in kinds])[0]
    return _with(_legal(random), "wrong type", random.choice(keys), random.choice(values))


def _yaml_1_1(random: Random) -> DrawnFile:
    kinds = (
        (_NUMBERS, ("1e-4", "1e4", "inf", "-.inf", "1:30", "0x10", "2,0", "1_000", "5e-1", "~", ".NaN", "1.e3")),
        (_SWITCHES, ("on", "yes", "off", "y", "True", "'on'", "no", "~")),
        (_WORDS, ("off", "no", "null", "~", "None", "on", "2e1")),
        (("mis_guard", "mis_metrics"), ("off", "no", "on", "yes", "~", "none")),
        (("rs_gates",), ("[{high: 1e-4}]", "[{level: no, high: 2.0}]", "~", "[{high: ~}]", "[~]")),
    )
    keys, values = random.choices(kinds, weights=[len(keys) for keys, _ in kinds])[0]
    return _with(_legal(random), "YAML 1.1", random.choice(keys), random.choice(values))


_NO_EFFECT = (
    ({"use_tis": "true"}, "rs_level", "token"),
    ({"use_tis": "true"}, "rs_upper_bound", "2.0"),
    ({"use_tis": "true"}, "rs_gates", "[{high: 2.0}]"),
    ({"use_tis": "true"}, "tis_normalize_scope", "micro_batch"),
    ({"use_tis": "true"}, "tis_normalize_over", "kept"),
    ({"use_tis": "true"}, "rs_veto_requires_rs", "true"),
    ({"use_tis": "true"}, "rs_staleness_level", "token"),
    ({"use_tis": "true", "tis_mode": "unbounded"}, "tis_upper_bound", "2.0"),
    ({"use_tis": "true", "tis_level": "none", "use_rs": "true"}, "tis_mode", "clip"),
    ({"use_tis": "true", "tis_level": "none", "use_rs": "true"}, "tis_batch_normalize", "true"),
    ({"use_tis": "true", "tis_mode": "mask"}, "use_rs", "true"),
    ({"use_tis": "true", "mis_metrics": "[mis_kl]"}, "mis_metric_max", "5.0"),
    ({"use_tis": "true"}, "rs_max_staleness", "2"),
    ({"use_tis": "true"}, "tis_when", "stale"),
    ({"use_tis": "true"}, "mis_loss_mode", "bypass"),
    ({"use_tis": "true"}, "mis_loss_constant", "100"),
    ({"use_tis": "true"}, "mis_loss_kl_tokens", "all"),
    ({"use_tis": "true", "mis_loss_method": "gspo"}, "mis_loss_mode", "bypass"),
    ({"use_tis": "false", "mis_loss_mode": "bypass"}, "tis_upper_bound", "2.0"),
    ({"use_tis": "false", "mis_loss_mode": "bypass"}, "mis_metrics", "all"),
    ({"use_tis": "false", "get_mismatch_metrics": "true"}, "tis_level", "token"),
    ({"use_tis": "false", "get_mismatch_metrics": "true"}, "rs_veto_threshold", "0.1"),
    ({"use_tis": "true"}, "tis_clip", "3.0"),
    ({"use_tis": "true"}, "tis_clip_low", "0.5"),
    ({"use_tis": "true", "mis_loss_denominator": "kept"}, "mis_denominator", "kept"),
    ({"use_tis": "true", "mis_loss_denominator": "constant", "mis_loss_constant": "5"}, "mis_denominator", "kept"),
    ({"use_tis": "true", "mis_loss_proximal": "current"}, "use_rollout_logprobs", "true"),
    ({"use_tis": "true"}, "use_rollout_logprobs", "true"),
    ({"use_tis": "true", "use_rs": "true", "rs_level": "none"}, "rs_lower_bound", "0.5"),
    ({"use_tis": "true"}, "mis_group_over", "kept"),
)


def _no_effect(random: Random) -> DrawnFile:
    keys, key, value = random.choice(_NO_EFFECT)
    launch = "loss" if any(name.startswith("mis_loss") for name in keys) else "hook"
    if key.startswith("mis_loss") and random.random() < 0.7:
        launch = "loss"
    extra = {
        name: random.choice(_ALONE[name]) for name in ("mis_max_reject_fraction", "mis_guard") if random.random() < 0.3
    }
    keys = keys | extra if keys["use_tis"] == "true" else keys
    return DrawnFile("no effect", launch, keys | {key: value}, key)


_PASTED: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "rollout_is": ("token", "sequence", "null"),
        "rollout_is_threshold": ("2.0", "5.0"),
        "rollout_is_batch_normalize": ("true", "false"),
        "rollout_rs": ("token_k1", "seq_mean_k1", "null"),
        "rollout_rs_threshold": ("0.5_2.0", "null"),
        "rollout_token_veto_threshold": ("1.0e-4", "null"),
        "bypass_mode": ("true", "false"),
        "loss_type": ("ppo_clip",),
    },
    {
        "rollout_correction": ("{rollout_is: token, rollout_is_threshold: 2.0}",),
        "algorithm": ("{rollout_correction: {rollout_is: token}}",),
        "actor_rollout_ref": ("{actor: {clip_ratio: 0.2}}",),
    },
    {
        "vllm_importance_sampling_correction": ("true", "false"),
        "vllm_importance_sampling_mode": ("sequence_mask", "token_truncate"),
        "vllm_importance_sampling_cap": ("3.0",),
        "importance_sampling_level": ("sequence",),
        "epsilon_high": ("0.28",),
        "beta": ("0.0",),
        "use_vllm": ("true",),
    },
)
"""Options of verl, one of them under the name of its section, and of TRL, with their usual values."""


def _pasted(random: Random) -> DrawnFile:
    options = random.choice(_PASTED)
    names = random.sample([*options], random.randint(1, min(4, len(options))))
    keys = {name: random.choice(options[name]) for name in options if name in names}
    begun = {"use_tis": "true"} if random.random() < 0.5 else {}
    return DrawnFile("pasted", "hook", begun | keys, next(iter(keys)))


_DRAW: dict[str, Callable[[Random], DrawnFile]] = dict(
    zip(CLASSES, (_legal, _misspelt, _out_of_range, _wrong_type, _yaml_1_1, _no_effect, _pasted), strict=True)
)
