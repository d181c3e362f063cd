"""Replays flight recordings as they were or with other settings, and draws them as a table, a timeline or a trace."""
