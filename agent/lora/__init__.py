"""LoRA adapters on an agent: finds the agent's part of an adapter, and keeps one adapter in each adapter slot."""
