"""From the fields of a request to generated sequences: prompts, choices, rules about tokens, limits of work."""
