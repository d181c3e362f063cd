"""LoRA adapters on an agent: packs them for the kernels, and keeps one in each adapter slot."""
