"""Shadow serving: another model, the candidate, computes a share of the main model's answers again and is compared.

``ShadowRunner`` is the interface to the server. ``docs/shadow.md`` describes shadow serving for operators.
"""
