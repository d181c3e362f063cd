"""LoRA adapters in an agent: finds the agent's part of an adapter, and stores an adapter in each adapter slot."""
