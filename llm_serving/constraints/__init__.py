"""Structured output: constraints on the next token of a sequence.

``grammar`` describes the texts that a client allows: JSON that fits a schema, a regular expression, one of several
strings, or a grammar. ``calls`` builds the grammar of an answer with tool calls. ``compiler`` compiles grammars with
the library llguidance, and ``work_limits`` refuses those that would take too long. ``step_masks`` sends the agents the
allowed tokens of each step. ``token_rules`` restricts tokens without a grammar, ``thinking`` limits the length of the
reasoning, and ``forced`` lets the model score given tokens.
"""
