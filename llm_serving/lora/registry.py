"""Manages the loaded adapters of a server: their names, their slots and their open requests.

The agents have a fixed number of adapter slots. A new adapter gets a free slot, or replaces the least recently used
adapter without open requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from llm_serving.errors import AdapterError, ModelNotFoundError, ModelStateError, RequestError


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. Each load creates a new object, even if the name was used before."""

    name: str
    path: str
    """The folder from which the adapter was loaded."""
    digest: bytes
    """Digest of the adapter's files."""
    slot: int
    """Number of the adapter slot in the agents that contains the adapter, from 0."""


class AdaptersInUseError(RequestError):
    """No adapter can be loaded now, because the adapters in all slots have open requests."""

    status = 409
    code = "adapters_in_use"


def adapted_salt(digest: bytes, salt: bytes) -> bytes:
    """Returns the salt of the prefix cache for a request with an adapter.

    So requests share cached blocks only if their ``salt`` and the content of their adapters are equal. Names are
    ignored.
    """
    return blake2b(digest + salt, digest_size=16, person=b"llm-adapter-salt").digest()


@dataclass(slots=True)
class _Use:
    adapter: Adapter
    num_requests: int = 0
    is_removed: bool = False


@dataclass(slots=True)
class AdapterRegistry:
    """The adapters that requests may name, the least recently used first. Only the event loop's thread may use it."""

    max_adapters: int
    on_free: Callable[[int], None] = lambda slot: None
    """Called with the number of a slot when its adapter was removed and the last request of this adapter has ended."""
    _named: dict[str, Adapter] = field(default_factory=dict)
    _uses: dict[int, _Use] = field(default_factory=dict)
    """The adapter in each occupied slot. A removed adapter stays here until its last request has ended."""
    _reserved: set[int] = field(default_factory=set)
    """The slots from ``take_slot`` whose adapter is being loaded."""
    _is_frozen: bool = False

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters in alphabetical order of their names."""
        return [self._named[name] for name in sorted(self._named)]

    @property
    def open_requests(self) -> dict[str, int]:
        """The number of open requests of each adapter, by its name."""
        return {adapter.name: self._uses[adapter.slot].num_requests for adapter in self.adapters}

    def find(self, name: str) -> Adapter | None:
        """Returns the adapter with a name, or None."""
        return self._named.get(name)

    def check_new(self, name: str) -> None:
        """Raises AdapterError if an adapter with this name is loaded."""
        if name in self._named:
            raise AdapterError(
                f"An adapter with the name {name!r} is loaded; POST /v1/unload_lora_adapter unloads it.",
                param="lora_name",
                code="adapter_loaded",
            )

    def freeze(self) -> list[Adapter]:
        """Returns the adapters, and forbids adding and removing adapters until ``thaw``.

        A reload gives these adapters to the new version of the model. Raises ModelStateError if an adapter is being
        loaded.
        """
        if self._reserved:
            raise ModelStateError("A LoRA adapter of the model is being loaded; send the command again later.")
        self._is_frozen = True
        return self.adapters

    def thaw(self) -> None:
        """Ends ``freeze``. Called if the reload has failed, so that this version of the model stays in use."""
        self._is_frozen = False

    def _check_not_frozen(self) -> None:
        if self._is_frozen:
            raise ModelStateError(
                "The model is being reloaded, so its LoRA adapters cannot change; send the command again later."
            )

    def take_slot(self) -> int:
        """Reserves a slot for a new adapter: a free slot, or that of the least recently used adapter without open
        requests.

        The caller must call ``add`` or ``give_back`` next. Raises AdaptersInUseError if all adapters have open
        requests, and ModelStateError while the adapters are frozen.
        """
        self._check_not_frozen()
        free = next((slot for slot in range(self.max_adapters) if slot not in self._uses), None)
        if free is not None:
            return self._reserve(free)
        idle = next((each for each in self._named.values() if not self._uses[each.slot].num_requests), None)
        if idle is None:
            raise AdaptersInUseError(
                f"All {self.max_adapters} adapter slots have open requests; try again later, or start the server with "
                "a larger lora_config.max_adapters.",
                param="lora_name",
            )
        del self._named[idle.name]
        return self._reserve(idle.slot)

    def _reserve(self, slot: int) -> int:
        self._uses[slot] = _Use(Adapter("", "", b"", slot))
        self._reserved.add(slot)
        return slot

    def add(self, adapter: Adapter) -> None:
        """Makes an adapter available for requests. The agents must have loaded it into a slot from ``take_slot``."""
        self._reserved.remove(adapter.slot)
        self._uses[adapter.slot] = _Use(adapter)
        self._named[adapter.name] = adapter

    def give_back(self, slot: int) -> None:
        """Frees a slot from ``take_slot``, because its adapter could not be loaded."""
        self._reserved.remove(slot)
        del self._uses[slot]

    def remove(self, name: str) -> Adapter:
        """Removes an adapter and refuses new requests for it. Its slot becomes free when its open requests have ended.

        Raises ModelNotFoundError if no adapter has this name, and ModelStateError while the adapters are frozen.
        """
        self._check_not_frozen()
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise ModelNotFoundError(f"No adapter with the name {name!r} is loaded.", param="lora_name")
        self._uses[adapter.slot].is_removed = True
        self._free_if_unused(adapter.slot)
        return adapter

    def acquire(self, adapter: Adapter) -> None:
        """Counts a request that begins to use an adapter. Raises ModelNotFoundError if the adapter was removed."""
        if self._named.get(adapter.name) is not adapter:
            raise ModelNotFoundError(f"The adapter {adapter.name!r} was unloaded.", param="model")
        self._named[adapter.name] = self._named.pop(adapter.name)  # makes it the most recently used adapter
        self._uses[adapter.slot].num_requests += 1

    def release(self, adapter: Adapter) -> None:
        """Counts the end of a request that used an adapter."""
        self._uses[adapter.slot].num_requests -= 1
        self._free_if_unused(adapter.slot)

    def _free_if_unused(self, slot: int) -> None:
        use = self._uses[slot]
        if use.is_removed and not use.num_requests:
            del self._uses[slot]
            self.on_free(slot)
