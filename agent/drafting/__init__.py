"""Makes drafts: a small model with the same tokenizer, or a head of the model, guesses the next tokens of the
sequences.

``Drafter`` follows the steps of the model and makes the drafts. ``DraftNetwork`` loads and runs the draft model.
``DraftRows`` stores the tokens of every batch row, and which keys and values the draft model has computed.
``HeadDrafter`` and ``HeadNetwork`` do the same with a head, which takes hidden states of the model.
"""
