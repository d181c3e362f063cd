"""Makes drafts: guesses of the next tokens of a sequence, which the model verifies (speculative decoding).

A draft model is a small model with the same tokenizer. A head (an MTP layer or an EAGLE-3 head) is a small network that
takes hidden states of the model.

``Drafter`` follows the steps of the model and makes the drafts. ``DraftNetwork`` loads and runs the draft model.
``DraftRows`` stores the tokens of every batch row, and which keys and values the draft model has computed.
``HeadDrafter`` and ``HeadNetwork`` make drafts with a head instead of a draft model.
"""
