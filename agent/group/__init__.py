"""Connects the agents that share one model: an agent's part of the model, the exchange and the last tokens."""
