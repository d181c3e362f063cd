"""Divides the text that a model generates into reasoning, content and tool calls.

``formats`` describes the formats in which models write tool calls and reasoning. ``parser`` reads the text piece by
piece. The result does not depend on the sizes of the pieces.
"""
