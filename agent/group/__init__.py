"""Connects the agents of a group, which share one model: the part of each agent, and the data that they exchange."""
