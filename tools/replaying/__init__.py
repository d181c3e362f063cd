"""Replays flight recordings: again as they were, or with another policy; as a table, a timeline or a trace."""
