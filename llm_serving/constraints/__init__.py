"""Structured output: constraints on the next token of a sequence.

``grammar`` describes what a client wants: JSON that fits a schema, a regular expression, one of several strings, or a
grammar. ``compiler`` compiles it with the library llguidance. ``step_masks`` gives the agents the allowed tokens of
each step. ``token_rules`` restricts tokens without a grammar, and ``forced`` lets the model score given tokens.
"""
