"""Turns the text of a model into an answer: reasoning, content and tool calls.

``formats`` has one entry for each way in which models write tool calls. ``parser`` reads the text piece by piece. The
result does not depend on how the text is split into pieces.
"""
