"""Connects the agents of a group, which share one model. Describes each agent's part of the model and exchanges data
between agents.
"""
