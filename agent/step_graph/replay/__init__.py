"""Replays of recorded kernel launches, which run a step without MindSpore on a CPU."""
