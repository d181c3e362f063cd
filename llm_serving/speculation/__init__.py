"""Speculative decoding: proposes drafts, which are guesses of the next tokens that a step then verifies."""
