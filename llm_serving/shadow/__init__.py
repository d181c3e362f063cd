"""Shadow serving: compares the main model with another model, the candidate, on a fraction of the main model's answers.

``ShadowRunner`` is the interface to the server. ``docs/shadow.md`` describes shadow serving for operators.
"""
