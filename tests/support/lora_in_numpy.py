"""A Llama with a LoRA adapter in NumPy, with the arithmetic of the library PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from support.llama_in_numpy import Floats, NumpyLlama


class NumpyLora(NumpyLlama):
    """The float32 model of a folder, with an adapter or without one (None). The adapter's config must have no patterns.
    """

    def __init__(self, folder: Path, adapter: Path | None) -> None:
        super().__init__(folder, "float", "float32")
        self._tensors: dict[str, Floats] = {}
        self._scale = 0.0
        if adapter is not None:
            config = json.loads((adapter / "adapter_config.json").read_text())
            self._scale = config["lora_alpha"] / config["r"]
            self._tensors = load_file(adapter / "adapter_model.safetensors")

    def _linear(self, x: Floats, name: str) -> Floats:
        out = super()._linear(x, name)
        a = self._tensors.get(f"base_model.model.{name}.lora_A.weight")
        if a is None:
            return out
        return out + (x @ a.T) @ self._tensors[f"base_model.model.{name}.lora_B.weight"].T * np.float32(self._scale)

    def continuation(self, prompt: list[int], count: int) -> tuple[list[int], npt.NDArray[np.float64]]:
        """Returns the greedy tokens after a prompt, and their log-probabilities."""
        tokens, found = list(prompt), []
        for _ in range(count):
            logits = self.logits(tokens)[-1].astype(np.float64)
            tokens.append(int(logits.argmax()))
            found.append(logits.max() - np.logaddexp.reduce(logits))
        return tokens[len(prompt) :], np.array(found)
