"""Adapters in the format of Hugging Face PEFT: `adapter_config.json`, `adapter_model.safetensors`.

Everything in a config that is neither known to be without effect on what the adapter computes nor
understood here must ask for nothing, or the adapter is refused by that name: PEFT has many variants
of LoRA, and gains more.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from .config import LlamaConfig
from .lora import lora_shapes
from .lora_adapter import LoraAdapter, Pair
from .safetensors_io import SafetensorsSource, read_json_object
from .weights import WeightsError, listing

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
STEM = "adapter_model"
_PREFIX = "base_model.model."
_PARENTS = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn"}
_PARENTS |= {"o_proj": "self_attn", "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}

_UNDERSTOOD = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
}
# About training, about where things came from, or parameters of what is off.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# Those that leave the base model's weights as they are; PiSSA, OLoRA, CorDA, LoftQ do not.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What the config says about the factors."""

    where: str
    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    # Ends of module names; None if a pattern or an exception says which modules there are.
    targets: tuple[str, ...] | None

    def of(self, module: str) -> tuple[int, float]:
        """Rank and scale of a module's factors."""
        rank = self._look_up(self.ranks, module, self.rank)
        alpha = self._look_up(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rslora else rank)

    def _look_up(self, patterns: Mapping[str, T], module: str, default: T) -> T:
        # The first that matches the whole name, or its end after a dot: PEFT's rule.
        for pattern, value in patterns.items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as error:
                raise WeightsError(f"{self.where}: the pattern {pattern!r}: {error}") from error
        return default


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 16


def _is_alpha(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _read_settings(path: Path) -> _Settings:
    raw = read_json_object(path)
    problems = [
        f"{key}={raw[key]!r:.80} is not supported"
        for key in sorted(raw.keys() - _UNDERSTOOD - _WITHOUT_EFFECT)
        if raw[key] not in (None, False, "none", [], {})
    ]

    def expect(key: str, valid: bool, expected: str) -> None:
        if not valid:
            problems.append(f"{key}={raw.get(key)!r:.80} must be {expected}")

    rank, alpha = raw.get("r", 8), raw.get("lora_alpha", 8)
    ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    targets, rslora = raw.get("target_modules"), raw.get("use_rslora") or False
    init = raw.get("init_lora_weights", True)
    expect("peft_type", raw.get("peft_type") == "LORA", "'LORA'")
    expect("r", _is_rank(rank), "a rank of at least 1")
    expect("lora_alpha", _is_alpha(alpha), "a number")
    expect("use_rslora", isinstance(rslora, bool), "a boolean")
    for key, patterns, is_valid in (
        ("rank_pattern", ranks, _is_rank),
        ("alpha_pattern", alphas, _is_alpha),
    ):
        valid = isinstance(patterns, dict) and all(map(is_valid, patterns.values()))
        expect(key, valid, "an object from names to numbers")
    names = targets if isinstance(targets, list) else []
    valid = bool(targets) and all(isinstance(name, str) for name in names)
    expect("target_modules", valid and isinstance(targets, list | str), "names, or a pattern")
    foreign = [name for name in names if str(name).split(".")[-1] not in _PARENTS]
    expect("target_modules", not foreign, f"among {', '.join(_PARENTS)}")
    if init not in _PLAIN_INITS:
        problems.append(f"init_lora_weights={init!r:.80} changes the base model: not supported")
    if problems:
        raise WeightsError(f"{path}: this adapter cannot be used\n  " + "\n  ".join(problems))
    partial = raw.get("exclude_modules") or raw.get("layers_to_transform") is not None
    return _Settings(
        where=str(path),
        rank=rank,
        alpha=float(alpha),
        rslora=rslora,
        ranks=ranks,
        alphas=alphas,
        targets=tuple(names) if names and not partial else None,
    )


def _modules(config: LlamaConfig) -> Iterator[tuple[int, str, str]]:
    """(layer, projection, module name) of everything that an adapter may change."""
    for layer in range(config.num_layers):
        for target, parent in _PARENTS.items():
            yield layer, target, f"model.layers.{layer}.{parent}.{target}"


def _tensor_names(module: str) -> tuple[str, str]:
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def _check(config: LlamaConfig, settings: _Settings, source: SafetensorsSource) -> None:
    found, sizes = source.shapes, lora_shapes(config)
    known: set[str] = set()
    missing, unwanted, wrong = [], [], []
    for _, target, module in _modules(config):
        names = _tensor_names(module)
        known.update(names)
        rank, _ = settings.of(module)
        shapes = (rank, sizes[target][0]), (sizes[target][1], rank)
        ends = settings.targets
        wanted = ends is not None and any(f".{module}".endswith(f".{end}") for end in ends)
        present = any(name in found for name in names)
        if present and ends is not None and not wanted:
            unwanted.append(module)
        for name, shape in zip(names, shapes, strict=True):
            if (wanted or present) and name not in found:
                missing.append(f"{name} {shape}")
            if name in found and tuple(found[name]) != shape:
                wrong.append(f"{name} is {tuple(found[name])}, expected {shape}")
    floating = {n for n in known & found.keys() if jnp.issubdtype(source.dtypes[n], jnp.floating)}
    problems = [
        *listing("missing tensors", missing),
        *listing("unexpected tensors", (f"{n} {found[n]}" for n in found if n not in known)),
        *listing("not in target_modules", unwanted),
        *listing("wrong shapes", wrong),
        *listing(
            "not floating point",
            (f"{n} is {source.dtypes[n]}" for n in found if n in known - floating),
        ),
    ]
    if not found:
        problems.append("no tensors at all")
    if problems:
        raise WeightsError(
            f"{source.name}: the adapter fits neither its config nor this model\n  "
            + "\n  ".join(problems)
        )


def load_adapter(directory: str | Path, config: LlamaConfig) -> LoraAdapter:
    """Read a LoRA adapter of the model that `config` describes from a PEFT directory.

    Raises:
        WeightsError: nothing is there, or the adapter is broken, not supported, or of another
            model; the message lists every mismatch.
    """
    path = Path(directory).expanduser()
    if not (path / CONFIG_FILE).is_file():
        raise WeightsError(f"{path}: has no {CONFIG_FILE}: not a PEFT adapter")
    settings = _read_settings(path / CONFIG_FILE)
    if (path / f"{STEM}.bin").exists() and not (path / f"{STEM}.safetensors").exists():
        raise WeightsError(
            f"{path}: {STEM}.bin is a pickle, which may run code when it is read; save the "
            "adapter again with safe_serialization=True"
        )
    source = SafetensorsSource(path, stem=STEM)
    _check(config, settings, source)
    layers: list[dict[str, Pair]] = [{} for _ in range(config.num_layers)]
    for layer, target, module in _modules(config):
        name_a, name_b = _tensor_names(module)
        if name_a not in source.shapes:
            continue
        _, scale = settings.of(module)
        a = np.ascontiguousarray(source.read(name_a).T, np.float32)
        b = np.ascontiguousarray(source.read(name_b).T, np.float32) * np.float32(scale)
        layers[layer][target] = a, b
    return LoraAdapter(config=config, layers=tuple(layers))


def save_adapter(
    adapter: LoraAdapter, directory: str | Path, *, base_model: str | None = None
) -> None:
    """Write an adapter as PEFT does; `base_model` is what the config calls the model.

    The scale is in the factors already, so that alpha is written as the rank.

    Raises:
        ValueError: it has no factors.
    """
    from safetensors.numpy import save_file

    if not adapter.rank:
        raise ValueError("the adapter is empty: it changes no projection")
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for layer, target, module in _modules(adapter.config):
        if (pair := adapter.layers[layer].get(target)) is not None:
            for name, array in zip(_tensor_names(module), pair, strict=True):
                tensors[name] = np.ascontiguousarray(array.T, np.float32)
            if pair[0].shape[1] != adapter.rank:
                ranks[module] = pair[0].shape[1]
    targets = sorted({target for layer in adapter.layers for target in layer})
    everywhere = all(layer.keys() == set(targets) for layer in adapter.layers)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": targets if everywhere else _pattern(tensors),
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
    }
    path = Path(directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / f"{STEM}.safetensors", metadata={"format": "pt"})
    text = json.dumps(settings, indent=2, sort_keys=True)
    (path / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _pattern(tensors: Mapping[str, np.ndarray]) -> str:
    """A regular expression for the modules that have tensors, where they differ by layer."""
    modules = {name.removeprefix(_PREFIX).rsplit(".", 2)[0] for name in tensors}
    return "|".join(map(re.escape, sorted(modules)))
