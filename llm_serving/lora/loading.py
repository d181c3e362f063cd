"""Reads adapters into the shared memory from which the agents load them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm_serving.config import Config
from llm_serving.errors import AdapterError, ConfigError
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.lora.peft import read_adapter
from llm_serving.lora.targets import largest_adapter, lora_targets

_BYTES_PER_MODULE = 1024
"""Upper bound, in bytes, of the index entry and the padding of one module in an adapter's shared memory."""


@dataclass(frozen=True, slots=True)
class ConfiguredAdapter:
    """An adapter of ``lora_config.adapters``, which is loaded at the start."""

    name: str
    path: str
    digest: bytes
    memory: AdapterMemory


def read_into_memory(folder: Path, config: Config) -> tuple[bytes, AdapterMemory]:
    """Returns the digest of an adapter and the shared memory with its matrices, which the caller must close.

    Raises AdapterError if the adapter cannot be used, or if the shared memory is too small.
    """
    lora, dtype = config.lora_config, config.model_config.model_dtype
    adapter = read_adapter(folder, config.shape, max_rank=lora.max_rank, dtype=dtype)
    try:
        memory = AdapterMemory.create([(each.name, each.scale, each.a, each.b) for each in adapter.modules])
    except OSError as reason:
        raise AdapterError(f"The adapter does not fit into /dev/shm: {reason.strerror}.") from None
    if config.parallel_config.is_remote:
        memory.digest()  # computed in this thread, so that the engine thread does not wait when it sends the adapter
    return adapter.digest, memory


def largest_memory_bytes(config: Config) -> int:
    """Returns an upper bound for the bytes of the shared memory with one adapter."""
    values = largest_adapter(config.shape, config.lora_config.max_rank)
    return values * config.dtype_bytes + _BYTES_PER_MODULE * (1 + len(lora_targets(config.shape)))


def configured_names(config: Config) -> list[str]:
    """Returns the names of the adapters in ``lora_config.adapters``."""
    return [entry.partition("=")[0].strip() for entry in config.lora_config.adapters or ()]


def read_configured(config: Config) -> list[ConfiguredAdapter]:
    """Reads the adapters of ``lora_config.adapters`` into shared memory, which the caller must close.

    Raises ConfigError if an adapter is wrong, or if two have the same name.
    """
    found: dict[str, ConfiguredAdapter] = {}
    try:
        for number, entry in enumerate(config.lora_config.adapters or ()):
            name, _, folder = (part.strip() for part in entry.partition("="))
            if name in found or name == config.model_name:
                raise ConfigError(f"lora_config.adapters[{number}] = {entry!r}: the name {name!r} is already in use")
            path = Path(folder).expanduser().absolute()
            try:
                digest, memory = read_into_memory(path, config)
            except AdapterError as error:
                raise ConfigError(f"lora_config.adapters[{number}] = {entry!r}: {error}") from None
            found[name] = ConfiguredAdapter(name, str(path), digest, memory)
    except ConfigError:
        for adapter in found.values():
            adapter.memory.close()
        raise
    return list(found.values())
