"""Speculative decoding: proposes drafts, which are guesses of the next tokens. A decode step then verifies the drafts.
"""
