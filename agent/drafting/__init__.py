"""Drafts: a small model with the same tokenizer, or a head of the model, guesses the next tokens of the sequences.

``Drafter`` follows the steps of the model and makes the drafts. ``DraftNetwork`` loads and runs the draft model.
``DraftRows`` knows the tokens of every batch row, and the keys and values that the draft model has computed.
``HeadDrafter`` and ``HeadNetwork`` do the same with a head, which takes hidden states of the model.
"""
